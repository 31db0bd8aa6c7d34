"""Thirty faults that the tests must catch, and a command that plants the faults one by one and runs their tests.

    python tests/support/planted_faults.py                      # all of them, in about a quarter of an hour
    python tests/support/planted_faults.py --only ring_order    # one of them
    python tests/support/planted_faults.py --baseline           # the same tests without a fault: all must pass

Each fault replaces a text that occurs exactly once in its file; `tests/support/test_planted_faults.py` checks that. The
command works on a copy of the repository under build/faults, with an environment of its own, and never touches the
original. It exits with 1 if a fault survives.
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

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "build" / "faults"
# A fault may make ranks wait for each other; the tests' own deadlines are 100 s.
LIMIT_S = 400
NATIVE = "transports/native/core/"
BINDINGS = "transports/native/bindings/"


@dataclass(frozen=True)
class Fault:
    """A fault: `replacement` replaces `text` in `file`, and at least one of `tests` must then fail.

    `tests` are arguments of pytest. ``native:NAME`` stands for the program NAME of tests/native.
    """

    name: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]


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
        ("tests/algorithms/test_verifier_sizes.py", "tests/algorithms/test_reducing_builders.py"),
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
        here = next(Path(path) for path in sys.path if path.endswith("site-packages"))
        there = next((COPY / ".venv" / "lib").glob("python*/site-packages"))
        (there / "borrowed.pth").write_text(f"{here}\n")
    install()


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
    command = [str(COPY / ".venv/bin/python"), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=200"]
    command += ["-n", str(jobs if jobs > 1 else 0), "-m", "not packaging and not slow", *fault.tests]
    try:
        done = run(command, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return True, f"no end within {LIMIT_S} s"
    if done.returncode == 0:
        return False, ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (1, 2) or not failed:  # with several jobs, pytest reports a failure as an interruption
        raise SystemExit(f"{fault.name}: pytest has not run:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    return True, failed[0].split(" ")[1].rpartition("/")[2][:90]


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
        return True, f"no end within {LIMIT_S} s"
    return done.returncode != 0, name


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
            if fault.tests[0].startswith("native:"):
                return program_fails(fault.tests[0].removeprefix("native:"))
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
