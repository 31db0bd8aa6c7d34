"""Faults that the tests must catch, and a command that plants the faults one by one and runs their tests.

    export PYTHONPATH=tests
    python -m support.planted_faults                      # all of them, in about half an hour
    python -m support.planted_faults --only ring_order    # one of them
    python -m support.planted_faults --baseline           # the same tests without a fault: all must pass

Each fault replaces a text that occurs exactly once in its file; `tests/support/test_planted_faults.py` checks that. The
command works on a copy of the repository under build/faults, with an environment of its own, and never touches the
original. It exits with 1 if a fault survives. Each line names the group of tests that has caught the fault. On a busy
machine a test may reach its deadline, and so seem to catch a fault: --baseline shows whether it passes there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from support.groups import TESTS, group_of

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "build" / "faults"
# A fault may make ranks wait for each other; the tests' own deadlines are 100 s.
LIMIT_S = 400
NATIVE = "transports/native/core/"
BINDINGS = "transports/native/bindings/"
# Environments of `make mpi`, `make keras` and `make tensorflow`.
ENVIRONMENTS = (".mpi/openmpi", ".mpi/mpich", ".keras", ".tensorflow")


@dataclass(frozen=True)
class Fault:
    """A fault: `replacement` replaces `text` in `file`, and at least one of `tests` must then fail.

    `tests` are arguments of pytest. ``native:NAME`` stands for the program NAME of tests/native. ``keras:TEST`` and
    ``tensorflow:TEST`` run with the libraries that `make keras` and `make tensorflow` have installed.
    """

    name: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]

    @property
    def runner(self) -> str:
        """What runs the tests: "native", or the environment "keras" or "tensorflow"; empty for the usual one."""
        first = self.tests[0].partition(":")[0]
        return first if first in ("native", "keras", "tensorflow") else ""

    @property
    def arguments(self) -> list[str]:
        """The tests without the name of the runner."""
        return [test.removeprefix(f"{self.runner}:") for test in self.tests]


FAULTS = (
    # --- the native core -------------------------------------------------------------------------------------------
    Fault(
        "native_block_split",
        NATIVE + "plan/layout.cpp",
        "part * quotient + std::min(part, remainder)",
        "part * quotient",
        ("tests/transports/test_native_executor.py",),
    ),
    Fault(
        "native_plan_bounds",
        NATIVE + "plan/plan.cpp",
        "first <= limit && count <= limit - first;",
        "first <= limit && count <= limit;",
        ("native:test_plans",),
    ),
    Fault(
        "native_frame_length",
        NATIVE + "control/frame.cpp",
        "if (bytes.size() < nbytes) return false;",
        "",
        ("native:test_frames",),
    ),
    Fault(
        "native_ring_place",
        NATIVE + "shm/shm_channel.cpp",
        "(end + cache_line - 1) / cache_line * cache_line",
        "place / cache_line * cache_line",
        ("tests/transports/test_native_executor.py",),
    ),
    Fault(
        "native_single_copy_offset",
        NATIVE + "shm/shm_channel.cpp",
        "reinterpret_cast<void*>(*peer_address_ + slot_used_)",
        "reinterpret_cast<void*>(*peer_address_)",
        ("tests/transports/test_single_copy.py",),
    ),
    Fault(
        "native_tcp_checksum",
        NATIVE + "tcp/tcp_channel.cpp",
        "if (crc32c(0, stream.staged().data(), nbytes) != expected)",
        "if (false)",
        ("native:test_tcp",),
    ),
    Fault(
        "native_bfloat16_rounding",
        NATIVE + "kernels/narrow_floats.h",
        "bits + 0x7fffu + ((bits >> 16) & 1u)",
        "bits + 0x8000u",
        ("tests/transports/test_kernels.py",),
    ),
    Fault(
        "native_min_of_nan",
        NATIVE + "kernels/kernel_operations.h",
        "(a < b || a != a) ? a : b",
        "a < b ? a : b",
        ("tests/transports/test_kernels.py",),
    ),
    Fault(
        "native_order_of_operands",
        NATIVE + "plan/collective.cpp",
        "if (message.action->received_first) std::swap(sources[0], sources[1]);",
        "",
        ("tests/transports/test_native_executor.py", "tests/transports/test_native_builders.py"),
    ),
    Fault(
        "native_lane_dependencies",
        NATIVE + "plan/collective.cpp",
        ".groups_ended[segment] <= needed.group) return false;",
        ".groups_ended[segment] < needed.group) return false;",
        ("tests/transports/test_native_executor.py",),
    ),
    Fault(
        "native_tags",
        NATIVE + "endpoint/point_to_point.cpp",
        "header.group == buffer_.header.group",
        "true",
        ("tests/transports/test_native_executor.py",),
    ),
    Fault(
        "native_judge_of_mismatch",
        NATIVE + "control/diagnosis.cpp",
        "a.second.size() < b.second.size()",
        "a.second.size() > b.second.size()",
        ("tests/transports/test_native_executor.py", "tests/transports/test_faults.py"),
    ),
    Fault(
        "cache_ignores_the_operation",
        BINDINGS + "call_cache.cpp",
        "key.ops[0] != op.ptr()",
        "false",
        ("tests/collectives/test_call_cache.py",),
    ),
    Fault(
        "cache_writes_read_only_arrays",
        BINDINGS + "call_cache.cpp",
        "if (written && (flags & NPY_ARRAY_WRITEABLE) == 0) return false;",
        "",
        ("tests/collectives/test_call_cache.py",),
    ),
    # --- plans, their proofs and the executor that defines them ----------------------------------------------------
    Fault(
        "binding_split",
        "algorithms/ir/binding.py",
        "quotient + (part < remainder)",
        "quotient",
        ("tests/algorithms/test_reducing_builders.py",),
    ),
    Fault(
        "verifier_hazards",
        "algorithms/verifier/hazards.py",
        "if home[cell] in written:",
        "if home[cell] in ():",
        ("tests/algorithms/test_verifier_contracts.py", "tests/algorithms/test_verifier.py"),
    ),
    Fault(
        "verifier_segments",
        "algorithms/verifier/progress.py",
        "if source[2:] != target[2:]:",
        "if source[3:] != target[3:]:",
        ("tests/algorithms/test_verifier.py",),
    ),
    Fault(
        "verifier_contributions",
        "algorithms/verifier/symbolic.py",
        "ranks & of_operand",
        "ranks & of_operand & 1",
        ("tests/algorithms/test_verifier.py", "tests/algorithms/test_verifier_mutants.py"),
    ),
    Fault(
        "verifier_order_of_combination",
        "algorithms/verifier/combine_order.py",
        "isinstance(step, RecvReduce) and not step.received_first",
        "isinstance(step, RecvReduce)",
        ("tests/algorithms/test_combine_order.py",),
    ),
    Fault(
        "ring_order",
        "algorithms/builders/ring.py",
        "received_first=True",
        "received_first=False",
        ("tests/algorithms/test_combine_order.py",),
    ),
    Fault(
        "cost_of_rabenseifner",
        "algorithms/catalogue/costs.py",
        "return Cost(rounds=2 * (rounds + fold), sent=2 * moved + fold, reduced=moved + fold)",
        "return Cost(rounds=2 * rounds + fold, sent=2 * moved + fold, reduced=moved + fold)",
        ("tests/algorithms/test_verifier_sizes.py",),
    ),
    Fault(
        "generic_lane_dependencies",
        "transports/executors/lane.py",
        "ended[segment] > other for",
        "ended[segment] >= other for",
        ("tests/transports/test_generic_executor.py",),
    ),
    Fault(
        "average_of_negative_integers",
        "transports/reductions/definition.py",
        "np.fmod(wide, divisor)",
        "np.mod(wide, divisor)",
        ("tests/transports/test_reductions.py", "tests/transports/test_kernels.py"),
    ),
    # --- links and starting -----------------------------------------------------------------------------------------
    Fault(
        "handshake_admits_strangers",
        "transports/links/handshake.py",
        "if not hmac.compare_digest(message, self._expected_proof):",
        "if not message:",
        ("tests/transports/test_handshake.py",),
    ),
    Fault(
        "store_overwrites",
        "transports/rendezvous/tcp_store.py",
        'self._reply(client, _Status.ALREADY_SET, b"")',
        'self._reply(client, _Status.OK, b"")',
        ("tests/transports/test_stores.py",),
    ),
    # --- the communicator -------------------------------------------------------------------------------------------
    Fault(
        "vector_call_in_place",
        "collectives/calls/shapes.py",
        "-sum(counts[:rank]) * row",
        "0",
        ("tests/collectives/test_collectives.py", "tests/collectives/test_communicator.py"),
    ),
    Fault(
        "staged_segments",
        "collectives/device/routes.py",
        "address + first * itemsize",
        "address + first",
        ("tests/collectives/test_device_calls.py",),
    ),
    # --- choosing algorithms, gradients, launchers ------------------------------------------------------------------
    Fault(
        "tuner_table_weights",
        "tuning/decide/table.py",
        "math.log(each.median_s) * each.rounds for",
        "math.log(each.median_s) for",
        ("tests/tuning/test_tuning_table.py",),
    ),
    Fault(
        "compressed_gradients_average",
        "frameworks/gradients/blocks.py",
        "total[...] /= weight",
        "pass",
        ("tests/frameworks/test_gradients.py",),
    ),
    Fault(
        "cause_of_a_failed_job",
        "unisono/launchers/root_cause.py",
        "not ended.stopped and not _is_consequence(errors.get(ended.rank))",
        "not ended.stopped",
        ("tests/launchers/test_rank_output.py",),
    ),
    # --- transports and what they stand on ---------------------------------------------------------------------------
    Fault(
        "tls_of_exposed_connections",
        "transports/tcp/tls.py",
        'if self._mode == "on" or _is_exposed(sock):',
        'if self._mode == "on":',
        ("tests/transports/test_tls.py::test_an_exposed_connection_has_tls_by_default",),
    ),
    Fault(
        "resumption_by_the_wrong_end",
        "transports/tcp/resumption.py",
        "if must_dial(self._rank, lane, stream.peer) != asks:",
        "if must_dial(self._rank, lane, stream.peer) == asks:",
        ("tests/transports/test_hosts.py::test_calls_go_on_when_connections_between_hosts_are_reset",),
    ),
    Fault(
        "slurm_ranges_lose_their_last_node",
        "collectives/bootstrap/launcher_variables.py",
        "for number in range(int(first), int(last) + 1):",
        "for number in range(int(first), int(last)):",
        ("tests/collectives/test_launcher_variables.py::test_slurm_node_list_expands_to_node_names",),
    ),
    Fault(
        "file_store_leaves_its_values",
        "transports/rendezvous/file_store.py",
        "        self._names.add(name)\n",
        "",
        ("tests/transports/test_stores.py",),
    ),
    Fault(
        "joiners_of_another_version_are_admitted",
        "transports/links/joiners.py",
        "if request.release != release():",
        "if False:",
        ("tests/collectives/test_grow.py::test_processes_of_another_version_or_key_are_refused_with_the_reason",),
    ),
    Fault(
        "late_survivors_hear_nothing",
        "transports/links/survivors.py",
        "            self._over.add(communicator)\n",
        "",
        ("tests/collectives/test_shrink.py::test_stopped_rank_is_excluded_by_shrink_and_gets_an_error_later",),
    ),
    Fault(
        "ucx_overrides_the_user",
        "transports/ucx/library.py",
        '    if "UCX_TLS" in os.environ:\n        return {}\n',
        "",
        ("tests/transports/test_ucx.py",),
    ),
    Fault(
        "mpi_shares_begin_at_zero",
        "transports/mpi/collectives.py",
        "list(accumulate(counts, initial=0))[:-1]",
        "[0] * len(counts)",
        ("tests/transports/test_mpi_native.py::test_mpi_native_gives_the_same_results_for_every_collective",),
    ),
    Fault(
        "nccl_gathers_in_one_place",
        "transports/nccl/collectives.py",
        "            comm.recv(call.target + peer * call.nbytes, call.elements, call.dtype, peer, call.stream)\n\n\n"
        "def _scatter",
        "            comm.recv(call.target, call.elements, call.dtype, peer, call.stream)\n\n\ndef _scatter",
        ("tests/transports/test_nccl.py::test_nccl_gives_the_results_of_the_host_for_every_collective",),
    ),
    Fault(
        "images_of_device_arrays_are_too_short",
        "transports/cuda/executors/layout.py",
        "split(length, segments, 0)[1] * itemsize + _PACK",
        "itemsize",
        ("tests/transports/test_cuda_ipc.py",),
    ),
    Fault(
        "recorder_of_another_version_is_read",
        "transports/recorder/memory.py",
        "    if version != VERSION:",
        "    if False:",
        ("tests/transports/test_recorder.py",),
    ),
    Fault(
        "frames_of_an_ended_rank_are_lost",
        "transports/message/framed.py",
        "message = channel.waiting.pop(identity, None)",
        "message = None",
        ("tests/collectives/test_plugin_transport.py",),
    ),
    # --- the communicator, custom operations and arrays --------------------------------------------------------------
    Fault(
        "fortran_arrays_are_read_in_c_order",
        "collectives/arrays/operands.py",
        'return Operand(array.T.reshape(-1), dtype_of(array, name), array.shape, "F")',
        'return Operand(array.reshape(-1), dtype_of(array, name), array.shape, "F")',
        ("tests/collectives/test_operands.py",),
    ),
    Fault(
        "custom_scan_includes_a_rank_too_few",
        "collectives/custom_ops/exchanges.py",
        '{"scan": rank + 1, "exscan": rank,',
        '{"scan": max(rank, 1), "exscan": rank,',
        ("tests/collectives/test_custom_ops.py::test_custom_op_gives_the_result_of_a_loop_over_ranks",),
    ),
    Fault(
        "levels_of_hosts_are_too_narrow",
        "algorithms/composition/host_levels.py",
        "innermost = max(map(len, nodes[-2]))",
        "innermost = min(map(len, nodes[-2]))",
        ("tests/algorithms/test_hierarchical_builders.py", "tests/tuning/test_choice.py"),
    ),
    # --- the tuner, its measurements and its simulator ---------------------------------------------------------------
    Fault(
        "choice_prefers_predicted_times",
        "tuning/decide/choice.py",
        "return each.refusal is not None, each.measured_s is None,",
        "return each.refusal is not None, each.measured_s is not None,",
        ("tests/tuning/test_tuning_table.py", "tests/tuning/test_choice.py"),
    ),
    Fault(
        "segments_do_not_overlap",
        "tuning/decide/model.py",
        "shorter_s(nbytes // segments)",
        "shorter_s(nbytes)",
        ("tests/tuning/test_choice.py",),
    ),
    Fault(
        "calibrated_bandwidth_of_small_messages",
        "tuning/measure/calibrate.py",
        "per_byte_s=(large_s - small_s) / _LARGE,",
        "per_byte_s=small_s / _LARGE,",
        ("tests/tuning/test_calibration.py",),
    ),
    Fault(
        "torus_takes_the_long_way",
        "tuning/machine/topology.py",
        "backwards = ahead * 2 > length",
        "backwards = ahead * 2 < length",
        ("tests/tuning/test_topology.py",),
    ),
    Fault(
        "simulator_posts_messages_at_once",
        "tuning/simulator/event_model.py",
        "            posted_s += move.work_s + (move.other_peer_s if move.peer != self._last_peer[rank] else 0.0)\n",
        "",
        ("tests/tuning/test_simulate.py",),
    ),
    # --- training ----------------------------------------------------------------------------------------------------
    Fault(
        "lag_begins_a_step_late",
        "frameworks/gradients/lag.py",
        "rising = max(0, step + 1 - self.warmup)",
        "rising = max(0, step - self.warmup)",
        ("tests/frameworks/test_gradients.py",),
    ),
    Fault(
        "epochs_have_the_same_order",
        "frameworks/data_parallel/sampling.py",
        "np.random.default_rng((self._seed, self.epoch))",
        "np.random.default_rng((self._seed, 0))",
        ("tests/frameworks/test_data_parallel.py",),
    ),
    Fault(
        "torch_adds_booleans",
        "frameworks/torch/calls/operations.py",
        'hash(_Kind.SUM): "lor", hash(_Kind.PRODUCT): "land"',
        'hash(_Kind.SUM): "lor", hash(_Kind.PRODUCT): "lor"',
        ("tests/frameworks/test_torch.py::test_torch_backend_makes_the_calls_of_gloo_and_more",),
    ),
    Fault(
        "torch_forgets_sparse_rows",
        "frameworks/torch/calls/sparse.py",
        "indices, coordinates[axis] = np.divmod(indices, shape[axis])",
        "indices, coordinates[axis] = np.divmod(indices, shape[0])",
        ("tests/frameworks/test_torch.py::test_torch_backend_makes_the_calls_of_gloo_and_more",),
    ),
    Fault(
        "deferred_updates_of_unowned_parameters",
        "frameworks/torch/training/deferred_updates.py",
        "self._settings = [_settings(group) for group in groups]",
        "self._settings = self._settings or [_settings(group) for group in groups]",
        ("tests/frameworks/test_priorities_torch.py", "tests/frameworks/test_torch_optimizer.py"),
    ),
    Fault(
        "jax_groups_are_not_transposed",
        "frameworks/jax/replica_groups.py",
        ".reshape(dimensions).transpose(order or None), shape[-1])",
        ".reshape(dimensions), shape[-1])",
        ("tests/frameworks/test_jax_replica_groups.py",),
    ),
    Fault(
        "jax_derivative_of_averages",
        "frameworks/jax/primitives.py",
        "return bind(call._replace(op=SUM), tangent) / call.comm.size",
        "return bind(call._replace(op=SUM), tangent)",
        ("tests/frameworks/test_jax.py::test_calls_in_programs_equal_direct_calls_and_have_derivatives",),
    ),
    Fault(
        "tensorflow_gradient_of_a_broadcast",
        "frameworks/tensorflow/collectives.py",
        'return reduce(of_result, "sum", root, comm=world)',
        'return reduce(of_result, "avg", root, comm=world)',
        ("tensorflow:tests/frameworks/test_tensorflow.py::test_gradients_are_those_of_the_sum_of_all_results",),
    ),
    Fault(
        "keras_copies_no_values",
        "frameworks/keras/callbacks.py",
        "variables = [*model.weights, *model.optimizer.variables]",
        "variables = list(model.optimizer.variables)",
        ("keras:tests/frameworks/test_keras.py::test_training_by_keras_equals_that_of_one_process[torch-unisono]",),
    ),
    Fault(
        "unchanged_programs_read_the_share_of_rank_0",
        "frameworks/transparent/torch_loaders.py",
        "itertools.islice(itertools.cycle(order), self._world.rank, length, size)",
        "itertools.islice(itertools.cycle(order), 0, length, size)",
        ("tests/frameworks/test_transparent.py::test_ranks_read_each_sample_of_an_epoch_once",),
    ),
    Fault(
        "horovod_ranks_that_have_joined",
        "unisono/compat/horovod/execution.py",
        "return [np.zeros(shape, np.dtype(dtype))",
        "return [np.ones(shape, np.dtype(dtype))",
        ("tests/frameworks/test_horovod.py::test_ranks_that_have_joined_answer_with_zeros",),
    ),
    Fault(
        "horovod_torch_gradient_of_a_broadcast",
        "unisono/compat/horovod/torch/gradients.py",
        "return average if job.rank() == ctx.root_rank else torch.zeros_like(average), None, None, None",
        "return average, None, None, None",
        ("tests/frameworks/test_horovod.py::test_gradients_flow_as_horovod_defines",),
    ),
    Fault(
        "horovod_keras_reports_the_metrics_of_a_rank",
        "unisono/compat/horovod/keras/callbacks.py",
        "logs.update(zip(names, means.tolist(), strict=True))",
        "pass",
        ("keras:tests/frameworks/test_keras.py::test_training_by_keras_equals_that_of_one_process[torch-horovod]",),
    ),
    Fault(
        "horovod_tensorflow_copies_nothing",
        "unisono/compat/horovod/tensorflow/functions.py",
        "assigned = [variable.assign(copy) for variable, copy in zip(listed, copies, strict=True)]",
        "assigned = listed",
        ("tensorflow:tests/frameworks/test_horovod_tensorflow.py",),
    ),
    # --- the command line, launchers and reports ---------------------------------------------------------------------
    Fault(
        "output_of_a_traceback_is_torn",
        "unisono/launchers/output.py",
        "(rank in self._held or starts_traceback(line))",
        "starts_traceback(line)",
        ("tests/launchers/test_rank_output.py",),
    ),
    Fault(
        "straggler_that_waits_itself",
        "unisono/cli/output/job_statistics.py",
        "net = {rank: seconds - own.get(rank, 0.0) for rank, seconds in waited_for.items()}",
        "net = dict(waited_for)",
        ("tests/cli/test_run_stats.py",),
    ),
    Fault(
        "postmortem_blames_ranks_that_ran_ahead",
        "unisono/postmortem/culprits.py",
        "if call is None and rank not in self.passed)",
        "if call is None)",
        ("tests/cli/test_postmortem.py::test_ranks_that_run_ahead_of_what_another_rank_has_kept_are_no_culprits",),
    ),
    Fault(
        "benchmark_takes_the_fastest_rank",
        "bench/statistics.py",
        "np.max(np.asarray(times_of_ranks, dtype=np.float64), axis=0)",
        "np.min(np.asarray(times_of_ranks, dtype=np.float64), axis=0)",
        ("tests/bench/test_bench.py::test_time_of_a_call_is_that_of_its_slowest_rank",),
    ),
)


# --- the copy with the planted fault -------------------------------------------------------------------------------


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=COPY, text=True, capture_output=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


def prepare() -> None:
    """Bring the copy up to date. Its environment uses the packages of this environment, but has its own Unisono."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = {
        name
        for name in os.fsdecode(listed.stdout).split("\0")
        if name and (ROOT / name).is_symlink() | (ROOT / name).is_file()
    }
    for name in sorted(names):
        source, target = ROOT / name, COPY / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.unlink(missing_ok=True)
            target.symlink_to(source.readlink())
        elif not target.is_file() or target.read_bytes() != source.read_bytes():
            shutil.copy(source, target)
    for old in (path for path in COPY.glob("tests/**/*.py") if str(path.relative_to(COPY)) not in names):
        old.unlink()
    python = COPY / ".venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", COPY / ".venv"], check=True)
        here = [path for path in sys.path if path.endswith("site-packages")]
        (packages_of(COPY / ".venv") / "borrowed.pth").write_text("".join(f"{path}\n" for path in here))
    for name in ENVIRONMENTS:
        borrow(name)
    install()


def packages_of(environment: Path) -> Path:
    return next((environment / "lib").glob("python*/site-packages"))


def borrow(name: str) -> None:
    """Bring an environment that sees the repository into the copy, so that it sees the copy; its files are hard links.

    Without the environment, the tests that need it are skipped, or fail to start.
    """
    if (ROOT / name).exists() and not (COPY / name).exists():
        shutil.copytree(ROOT / name, COPY / name, symlinks=True, copy_function=os.link)
        seen = packages_of(COPY / name) / "seen.pth"
        seen.unlink()
        seen.write_text(f"import site; site.addsitedir({str(packages_of(COPY / '.venv'))!r})\n")


def install() -> None:
    """Install the copy in editable mode. That compiles the changed files of the native core."""
    bin_ = Path(sys.executable).parent
    command = [str(COPY / ".venv/bin/python"), "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-deps"]
    command += ["--no-build-isolation", "--ignore-installed", "--editable", "."]
    # This build type has no link-time optimisation, which takes longer than all other steps.
    command += ["-Ccmake.build-type=RelWithDebInfo", "-Ccmake.define.CMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1"]
    done = run(command, env={**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}"})
    if done.returncode:
        raise SystemExit(f"the copy cannot be installed:\n{done.stdout}{done.stderr}")


def tests_fail(fault: Fault, jobs: int) -> tuple[bool, str]:
    """Return whether the tests of a fault fail in the copy, and the name of the first test that fails."""
    python = COPY / (f".{fault.runner}" if fault.runner else ".venv") / "bin/python"
    command = [str(python), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=200"]
    # The night is too late: the gate and the sections of the changed paths must catch each fault.
    command += ["-n", str(jobs if jobs > 1 else 0), "-m", "not packaging and not slow and not night", *fault.arguments]
    try:
        done = run(command, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return True, f"no end within {LIMIT_S} s"
    if done.returncode == 0:
        return False, ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (1, 2) or not failed:  # with several jobs, pytest reports a failure as an interruption
        raise SystemExit(f"{fault.name}: pytest has not run:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    test = failed[0].split(" ")[1].removeprefix("tests/")
    return True, f"{fault.runner or group_of(TESTS / test.partition('::')[0])}: {test[:90]}"


def program_fails(name: str) -> tuple[bool, str]:
    """Build a program of tests/native and return whether it fails."""
    cmake = str(Path(sys.executable).parent / "cmake")
    ninja = str(Path(sys.executable).parent / "ninja")
    folder = "build/programs"
    configure = [cmake, "-S", ".", "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    configure += ["-DUNISONO_MODULE=OFF", "-DUNISONO_TESTS=ON", "-DCMAKE_CXX_FLAGS=-O1", "--log-level=WARNING"]
    for command in (configure, [cmake, "--build", folder, "--target", name]):
        done = run(command)
        if done.returncode:
            raise SystemExit(f"{name} cannot be built:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    try:
        done = run([f"{folder}/tests/native/{name}"], timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return True, f"sanitizers: no end within {LIMIT_S} s"
    return done.returncode != 0, f"sanitizers: {name}"


class Copy:
    """The copy of the repository. It compiles its native module only if a fault has changed the source."""

    def __init__(self) -> None:
        self._is_stale = False

    def try_out(self, fault: Fault, jobs: int, *, planted: bool) -> tuple[bool, str]:
        """Plant a fault, run its tests, and restore the file; return whether they fail, and the first that fails.

        If not `planted`, the tests run without the fault.
        """
        path = COPY / fault.file
        text = path.read_text()
        is_module = fault.file.startswith("transports/native/")
        try:
            if planted:
                path.write_text(text.replace(fault.text, fault.replacement))
                self._is_stale |= is_module
            if fault.runner == "native":
                return program_fails(fault.arguments[0])
            if self._is_stale:
                install()
            self._is_stale = planted and is_module
            return tests_fail(fault, jobs)
        finally:
            path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="only this fault; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time (2)")
    parser.add_argument("--baseline", action="store_true", help="plant nothing: all tests must pass")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    if unknown := set(options.only or ()) - {fault.name for fault in chosen}:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}")
    prepare()
    copy, wrong = Copy(), 0
    for fault in chosen:
        began = time.monotonic()
        caught, test = copy.try_out(fault, options.jobs, planted=not options.baseline)
        wrong += caught == options.baseline
        state = "caught" if caught else "passed" if options.baseline else "SURVIVED"
        print(f"{fault.name:32} {state:9} {time.monotonic() - began:5.0f} s  {test}", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} as they should be")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
