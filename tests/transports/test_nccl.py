"""The algorithm `nccl.native`, through NCCL's real binding for Python, on doubles of NCCL and of the driver.

On a machine with a GPU and NCCL of at least version 2.30, the calls run there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np
import pytest
from support import fake_cuda, fake_nccl
from support.deadlines import DEADLINE_S, eventually
from support.device_contract import Bench
from support.gpu_ranks import cuda_bench
from support.outcomes import error_of
from support.ranks import Job

import unisono as un
from unisono.bench.adapters import unisono_cuda_nccl
from unisono.bench.gpu_stages import nccl
from unisono.bench.gpu_stages.speeds.hosts import on_hosts
from unisono.collectives.arrays.dlpack import typestr
from unisono.collectives.device import across_hosts
from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS, operation
from unisono.transports.cuda.kernels.catalogue import COPY_EXTENTS, reduction
from unisono.transports.nccl import library
from unisono.transports.nccl.collectives import SHARED_GPU_VARIABLE, refusal_of_all
from unisono.transports.nccl.refusals import COLLECTIVES, refusal
from unisono.tuning.decide.device_routes import LINK
from unisono.tuning.decide.table import compiled, dumped, to_json
from unisono.tuning.machine.fingerprint import fingerprint
from unisono.tuning.measure.measurement_log import Context, Measurement

pytest.importorskip("cuda.bindings.driver", reason="the binding of CUDA is not installed: make cuda")
# Not `importorskip`, by which a named test would be an error and a file without tests a failure.
has_binding = importlib.util.find_spec("nccl") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_binding, reason="the binding of NCCL is not installed: make cuda"),
]

BY_NCCL: dict[str, Any] = {"algorithm": "nccl.native", "timeout_s": DEADLINE_S}
COUNT = 1000


@pytest.fixture(autouse=True)
def shares_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if fake_cuda.has_gpu() and (refusal := nccl.refusal()) is not None:
        pytest.skip(refusal)
    fake_cuda.use(monkeypatch)
    fake_nccl.library()
    monkeypatch.setenv(SHARED_GPU_VARIABLE, "1")


@contextlib.contextmanager
def gpu() -> Iterator[Bench]:
    """Yield a bench over a `CudaDevice`, in a rank with NCCL or its double."""
    if not fake_cuda.has_gpu():
        fake_nccl.use()
    with cuda_bench() as bench:
        yield bench


def array(bench: Bench, values: Any) -> Any:
    """Return an array of no library with these values, in the memory of the device."""
    values = np.asarray(values)
    interface = {
        "data": (bench.memory(values), False),
        "shape": values.shape,
        "typestr": typestr(values.dtype),
        "stream": int(bench.stream),
        "version": 3,
    }
    return SimpleNamespace(__cuda_array_interface__=interface, shape=values.shape, dtype=values.dtype)


def values_of(bench: Bench, x: Any) -> Any:
    """Return the values of an array on the device, once its stream has written them."""
    interface = x.__cuda_array_interface__
    return bench.values(interface["data"][0], np.empty(interface["shape"], x.dtype)).reshape(interface["shape"])


# --- results ---------------------------------------------------------------------------------------------------------


def compare_with_host(world: un.Communicator, binding: str) -> None:
    """Make each call by NCCL, through a binding, and on the host by Unisono; compare the results."""
    library._BINDINGS = {binding: library._BINDINGS[binding]}
    rng = np.random.default_rng(world.rank)
    with gpu() as bench, world.dup() as other:
        for collective, dtype, op in cases():
            shape = (COUNT, world.size) if collective in ("scatter", "alltoall", "reduce_scatter") else (COUNT,)
            x = rng.integers(0, 5, shape[::-1]).astype(dtype)
            arguments: dict[str, Any] = {} if op is None else {"op": op}
            out = np.empty((1, COUNT), dtype) if collective == "scatter" else None
            expected = getattr(other, collective)(x, out=out, **arguments)
            on_gpu = None if out is None else array(bench, np.empty_like(out))
            result = getattr(world, collective)(array(bench, x), out=on_gpu, **arguments, **BY_NCCL)
            if expected is None:
                assert result is None
            else:
                np.testing.assert_array_equal(values_of(bench, result), expected, f"{collective} {dtype} {op}")
        world.close()


def cases() -> list[tuple[str, str, str | None]]:
    """Return calls of each collective with some dtypes, and with each operation that NCCL has."""
    moved = [(name, dtype, None) for name in sorted(COLLECTIVES) for dtype in ("bfloat16", "bool", "float64")]
    reduced = [
        (name, dtype, op)
        for name in ("allreduce", "reduce", "reduce_scatter")
        for dtype in ("int8", "int32", "uint64", "float32", "float64")
        for op in ("sum", "prod", "min", "max", "avg")
        if refusal(name, [(DTYPES[dtype], operation(op))]) is None
    ]
    return [case for case in moved if case[0] not in ("allreduce", "reduce", "reduce_scatter")] + reduced


@pytest.mark.parametrize("binding", library._BINDINGS)
def test_nccl_gives_the_results_of_the_host_for_every_collective(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, binding: str
) -> None:
    pytest.importorskip(binding.partition(".")[0])
    monkeypatch.setenv(fake_nccl.LOG, str(tmp_path / "log"))
    assert {case[0] for case in cases()} == COLLECTIVES
    un.launch(compare_with_host, 2, binding, timeout_s=DEADLINE_S)
    if not fake_cuda.has_gpu():
        blocks = int(binding != "nccl.bindings.nccl")
        joined = {f"ncclCommInitRankConfig 2 {rank} {blocks}" for rank in range(2)}
        assert joined <= set((tmp_path / "log").read_text().splitlines())


def call_with_options(world: un.Communicator) -> None:
    """Call in place, with a root, on no elements, without waiting, on lists, and on a part of the ranks."""
    with gpu() as bench:
        x = array(bench, np.full(COUNT, world.rank + 1.0, np.float32))
        assert world.allreduce(x, out=x, **BY_NCCL) is x
        assert (values_of(bench, x) == 6).all()
        assert world.reduce(x, root=1, **BY_NCCL) is None or world.rank == 1
        work = world.allreduce(x, wait=False, **BY_NCCL)
        assert (values_of(bench, work.wait()) == 18).all()
        assert world.allreduce(array(bench, np.empty(0, np.float32)), **BY_NCCL).shape == (0,)
        several = world.allreduce([x, array(bench, np.full(3, world.rank, np.int32))], **BY_NCCL)
        assert [values_of(bench, pointer)[0] for pointer in several] == [18, 3]
        if world.rank != 1:
            with world.subgroup([0, 2]) as pair:
                assert (values_of(bench, pair.broadcast(x, root=1, **BY_NCCL)) == 6).all()
        world.close()


def test_nccl_takes_the_arguments_of_other_algorithms() -> None:
    un.launch(call_with_options, 3, timeout_s=DEADLINE_S)


def call_across_hosts(world: un.Communicator) -> None:
    """Reduce among ranks that count as those of two hosts, by NCCL within hosts, in several segments."""
    arguments = {**BY_NCCL, "algorithm": "nccl.within_hosts"}
    across_hosts.SEGMENT_NBYTES = 4 * COUNT
    with gpu() as bench, on_hosts(world, ((0, 1), (2, 3))) as comm:
        for collective, count, dtype, options in (
            ("allreduce", 3 * COUNT + 1, np.int32, {}),
            ("allreduce", 2 * COUNT, np.float32, {"op": "avg"}),
            ("allreduce", 1, np.int32, {"op": "max"}),
            ("reduce_scatter", 4 * COUNT, np.int32, {}),
            ("broadcast", 2 * COUNT, np.float32, {"root": 3}),
            ("allgather", COUNT, np.int32, {}),
            ("alltoall", COUNT, np.float32, {}),
            ("reduce", COUNT, np.int32, {"root": 1}),
            ("gather", COUNT, np.int32, {"root": 2}),
        ):
            x = np.arange(count).astype(dtype) * (world.rank + 1)
            result = getattr(comm, collective)(array(bench, x), **options, **arguments)
            expected = getattr(world, collective)(x, **options)
            assert (result is None) == (expected is None)
            if expected is not None:
                np.testing.assert_array_equal(values_of(bench, result), expected, f"{collective} {options}")
        assert comm.stats().on_device.to_host_nbytes > 0
        with on_hosts(world, ((0, 1, 2), (3,))) as unequal:
            x = array(bench, np.full(2 * COUNT, world.rank + 1, np.int32))
            assert (values_of(bench, unequal.allreduce(x, **arguments)) == 10).all()
            assert (values_of(bench, unequal.broadcast(x, root=1, **arguments)) == 2).all()
            kind, text = error_of(lambda: unequal.allgather(x, **arguments))
            assert (kind, "different numbers of ranks: 3, 1" in text) == ("NoAlgorithmError", True)
        kind, text = error_of(lambda: world.allreduce(x, **arguments))
        assert (kind, "all ranks are on one host" in text) == ("NoAlgorithmError", True)


def test_nccl_reduces_within_hosts_and_unisono_between_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels = [reduction(DTYPES["float32"], OPERATIONS["avg"], 1), COPY_EXTENTS]
    fake_cuda.use(monkeypatch, kernels)
    monkeypatch.setenv(fake_nccl.LOG, str(tmp_path / "log"))
    un.launch(call_across_hosts, 4, timeout_s=DEADLINE_S)
    if not fake_cuda.has_gpu():
        calls = (tmp_path / "log").read_text()
        # On each rank, by segments: allreduces, reduce_scatter or broadcast and allgather, reduce, and unequal hosts.
        assert calls.count("ncclReduceScatter") == 4 * (3 + 2 + 4 + 1 + 2)
        assert calls.count("ncclAllGather") == 4 * (3 + 2 + 2 + 4 + 2 + 2)


def call_by_options(world: un.Communicator) -> None:
    """Call without naming an algorithm: plans, groups and calls in flight beside calls on the host."""
    with gpu() as bench:
        x, out = array(bench, np.full(COUNT, world.rank + 1.0)), array(bench, np.zeros(COUNT))
        plan = world.plan("allreduce", x, out=out)
        for _ in range(3):
            plan()
        assert (values_of(bench, out) == 3).all()
        with world.group():
            works = [world.allreduce(x), world.broadcast(x, root=1)]
        assert [values_of(bench, work.wait())[0] for work in works] == [3, 2]
        on_gpu, on_host = world.allreduce(x, wait=False), world.allreduce(np.ones(3), wait=False)
        assert (values_of(bench, on_gpu.wait())[0], on_host.wait()[0]) == (3, 2)
        world.barrier()
        world.close()


@pytest.mark.parametrize("rules", ["nccl.native", "allreduce:0-=nccl.native;broadcast:1-=nccl.native"])
def test_options_let_nccl_carry_out_calls_on_gpu_arrays_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rules: str
) -> None:
    monkeypatch.setenv(fake_nccl.LOG, str(tmp_path / "log"))
    un.launch(call_by_options, 2, options=un.Options(algorithm=rules), timeout_s=DEADLINE_S)
    if not fake_cuda.has_gpu():
        calls = (tmp_path / "log").read_text()
        assert (calls.count("ncclAllReduce"), calls.count("ncclBroadcast")) == (2 * 5, 2)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("collective", "dtype", "op", "version", "reason"),
    [
        ("scan", "float32", "sum", None, "has no scan"),
        ("allreduce", "int16", "sum", None, "does not reduce int16"),
        ("allreduce", "complex64", "sum", None, "does not reduce complex64"),
        ("allreduce", "float32", "max", None, "has no 'max' of float32"),
        ("allreduce", "int32", "bor", None, "has no operation 'bor'"),
        ("allreduce", "float8_e4m3fn", "sum", 22304, "from version 2.24 on"),
        ("allreduce", "float8_e4m3fn", "sum", 23004, None),
        ("allreduce", "float32", "avg", None, None),
    ],
)
def test_calls_without_unisonos_meaning_are_refused(
    collective: str, dtype: str, op: str, version: int | None, reason: str | None
) -> None:
    text = refusal(collective, [(DTYPES[dtype], OPERATIONS[op])], version)
    assert text is None if reason is None else reason in str(text)


def make_refused_calls(world: un.Communicator) -> list[tuple[str, str]]:
    """Make calls that NCCL lacks, each on this rank only; then use the communicator."""
    with gpu() as bench:
        x, wrong = array(bench, np.ones(4, np.float32)), array(bench, np.ones(4, np.int16))
        calls = (
            lambda: world.scan(x, **BY_NCCL),
            lambda: world.allreduce(wrong, **BY_NCCL),
            lambda: world.allreduce(x, reproducible=True, **BY_NCCL),
            lambda: world.alltoall(x, out=x, **BY_NCCL),
            lambda: world.allgatherv(x, [4, 4], **BY_NCCL),
            lambda: world.allreduce(np.ones(4), **BY_NCCL),
        )
        outcomes = [error_of(call) for call in calls] if world.rank == 0 else []
        assert (values_of(bench, world.allreduce(x, **BY_NCCL)) == 2).all()
        world.close()
        return outcomes


def test_refused_calls_raise_on_the_rank_that_makes_them() -> None:
    outcomes, _ = un.launch(make_refused_calls, 2, timeout_s=DEADLINE_S)
    expected = ["has no scan", "int16", "neither an order", "in place", "vector", "needs arrays on a GPU"]
    assert [kind for kind, _ in outcomes] == [*["NoAlgorithmError"] * 3, "UsageError", *["NoAlgorithmError"] * 2]
    for (_, text), words in zip(outcomes, expected, strict=True):
        assert words in text


def meet_in_vain(world: un.Communicator, variables: dict[int, dict[str, str]]) -> tuple[str, str]:
    """Let ranks have these variables; return the error, and check that the communicator works without NCCL."""
    os.environ.update(variables.get(world.rank, {}))
    with gpu() as bench:
        x = array(bench, np.ones(4, np.float32))
        outcome = error_of(lambda: world.allreduce(x, **BY_NCCL))
        assert error_of(lambda: world.allreduce(x, **BY_NCCL)) == outcome
        assert (values_of(bench, world.allreduce(x)) == 2).all()
        world.close()
    return outcome


@pytest.mark.skipif(fake_cuda.has_gpu(), reason="needs the doubles")
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({1: {fake_nccl.VERSION: "22809"}}, "different versions of NCCL: 2.30.4 on rank 0, 2.28.9 on rank 1"),
        ({rank: {fake_nccl.VERSION: "22809"} for rank in (0, 1)}, "are on one GPU"),
        ({1: {SHARED_GPU_VARIABLE: "0"}}, f"only if {SHARED_GPU_VARIABLE}=1 is set on every rank"),
    ],
)
def test_ranks_that_cannot_meet_in_nccl_all_say_why(variables: dict[int, dict[str, str]], words: str) -> None:
    options = un.Options(transports="shm")
    for kind, text in un.launch(meet_in_vain, 2, variables, options=options, timeout_s=DEADLINE_S):
        assert kind == "TransportUnavailableError"
        assert words in text


def test_a_rank_without_nccl_is_named() -> None:
    assert refusal_of_all([{"version": 23004, "gpu": "a"}, {"refusal": "no module"}]) == "rank 1: no module"


def test_missing_bindings_are_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_BINDINGS", {"no.such.binding": library._Nccl4py})
    with pytest.raises(un.TransportUnavailableError, match=r"no.such.binding.*pip install .*\[nccl\]"):
        library.loaded()


# --- the tuner's choice ----------------------------------------------------------------------------------------------


def table_for_nccl(path: Path) -> Path:
    """Write a decision table by which NCCL is the fastest for an allreduce of two ranks."""
    context = Context(fingerprint(), "allreduce", LINK, "plain", 2, 2, "device")
    times_s = {"nccl.native": 1e-5, "two_shot": 2e-5}
    measurements = [
        Measurement(context, name, nbytes, *[seconds] * 5, rounds=3)
        for name, seconds in times_s.items()
        for nbytes in (1 << 10, 1 << 20)
    ]
    path.write_text(dumped(to_json(compiled(measurements))))
    return path


def call_by_table(world: un.Communicator, variables: dict[int, dict[str, str]]) -> str:
    """Make two calls without an algorithm, of which NCCL lacks the second; return the route of the first."""
    os.environ.update(variables.get(world.rank, {}))
    with gpu() as bench:
        x = array(bench, np.full(COUNT, world.rank + 1, np.int32))
        assert (values_of(bench, world.allreduce(x, timeout_s=DEADLINE_S)) == 3).all()
        assert (values_of(bench, world.allreduce(x, "bxor", timeout_s=DEADLINE_S)) == 3).all()
        route = world.explain("allreduce", 4 * COUNT, dtype="int32").on_device
        world.close()
    return route


@pytest.mark.skipif(fake_cuda.has_gpu(), reason="needs the doubles")
@pytest.mark.parametrize(("variables", "by_nccl"), [({}, True), ({1: {SHARED_GPU_VARIABLE: "0"}}, False)])
def test_table_chooses_nccl_where_it_can_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[int, dict[str, str]], by_nccl: bool
) -> None:
    fake_cuda.use(monkeypatch, [reduction(DTYPES["int32"], OPERATIONS[op], 2) for op in ("sum", "bxor")])
    monkeypatch.setenv(fake_nccl.LOG, str(tmp_path / "log"))
    options = un.Options(table=str(table_for_nccl(tmp_path / "table.json")))
    for route in un.launch(call_by_table, 2, variables, options=options, timeout_s=DEADLINE_S):
        assert route.startswith("NCCL" if by_nccl else "cuda_ipc by two_shot")
    log = tmp_path / "log"
    calls = log.read_text().splitlines() if log.exists() else []
    assert sum(call.startswith("ncclAllReduce") for call in calls) == 2 * by_nccl


# --- failures --------------------------------------------------------------------------------------------------------


def call_until_lost(world: un.Communicator, say: Any, when: str) -> None:
    """Let rank 1 stop before a call or before the meeting; report the error of rank 0, and the calls of NCCL."""
    with gpu() as bench:
        x = array(bench, np.ones(COUNT, np.float32))
        if when == "later":
            world.allreduce(x, **BY_NCCL)
        say("ready")
        if world.rank == 1:
            time.sleep(DEADLINE_S)
        say(error_of(lambda: world.allreduce(x, **BY_NCCL))[0])
        with contextlib.suppress(un.UnisonoError):
            world.close()
        say(
            eventually(
                lambda: not any("nccl" in thread.name or "watch" in thread.name for thread in threading.enumerate())
            )
        )


@pytest.mark.parametrize("when", ["first", "later"])
def test_a_rank_that_dies_is_a_lost_peer(when: str, tmp_path: Path) -> None:
    with Job(call_until_lost, 2, tmp_path, when) as job:
        assert job.hear_all() == ["ready"] * 2
        job.signal(1, signal.SIGKILL)
        assert job.hear(0) == "PeerLostError"
        assert job.hear(0), "a thread of NCCL stays"


def shrink_and_go_on(world: un.Communicator, say: Any) -> None:
    """Lose rank 2 after a call; the survivors shrink, and call by NCCL again."""
    with gpu() as bench:
        x = array(bench, np.ones(COUNT, np.float32))
        world.allreduce(x, **BY_NCCL)
        say("ready")
        if world.rank == 2:
            time.sleep(DEADLINE_S)
        kind, _ = error_of(lambda: world.allreduce(x, **BY_NCCL))
        smaller = world.shrink()
        say((kind, values_of(bench, smaller.allreduce(x, **BY_NCCL))[0]))
        smaller.close()


def test_survivors_go_on_with_nccl_after_shrink(tmp_path: Path) -> None:
    with Job(shrink_and_go_on, 3, tmp_path) as job:
        assert job.hear_all() == ["ready"] * 3
        job.signal(2, signal.SIGKILL)
        assert job.hear_all(but=2) == [("PeerLostError", 2.0)] * 2


def hang_inside(world: un.Communicator, log: str, binding: str) -> tuple[str, list[str]]:
    """Let rank 1 agree on a call, and never make it in NCCL; return the error and the calls of NCCL."""
    os.environ[fake_nccl.LOG] = f"{log}.{world.rank}"
    library._BINDINGS = {binding: library._BINDINGS[binding]}
    with gpu() as bench:
        x = array(bench, np.ones(COUNT, np.float32))
        world.allreduce(x, **BY_NCCL)
        leave_out_next_call(world)
        outcome = error_of(lambda: world.allreduce(x, algorithm="nccl.native", timeout_s=1.0))
        with contextlib.suppress(un.UnisonoError):
            world.close()
    return outcome[0], Path(f"{log}.{world.rank}").read_text().split()


def leave_out_next_call(world: un.Communicator) -> None:
    """Let rank 1 make no more allreduces in NCCL, although it says so to the others."""
    if world.rank == 1:
        nccl = world._devices.calls._by_nccl._collectives  # type: ignore[union-attr]
        nccl._comm.all_reduce = lambda *_: None  # type: ignore[union-attr]


@pytest.mark.skipif(fake_cuda.has_gpu(), reason="needs the doubles")
@pytest.mark.parametrize("binding", library._BINDINGS)
def test_time_limit_of_a_call_aborts_nccl(tmp_path: Path, binding: str) -> None:
    pytest.importorskip(binding.partition(".")[0])
    (kind, calls), _ = un.launch(hang_inside, 2, str(tmp_path / "log"), binding, timeout_s=DEADLINE_S)
    assert kind == "CollectiveTimeoutError"
    assert "ncclCommAbort" in calls


def lose_in_call(world: un.Communicator, say: Any, binding: str) -> None:
    """Lose rank 1 while the others are in a call of NCCL, which blocks with CuPy's binding; report rank 0's error."""
    library._BINDINGS = {binding: library._BINDINGS[binding]}
    with gpu() as bench:
        x = array(bench, np.ones(COUNT, np.float32))
        world.allreduce(x, **BY_NCCL)
        leave_out_next_call(world)
        if world.rank == 1:
            world.allreduce(x, wait=False, **BY_NCCL)
            say("has agreed")
            time.sleep(DEADLINE_S)
        say(error_of(lambda: world.allreduce(x, wait=False, **BY_NCCL).synchronize())[0])
        with contextlib.suppress(un.UnisonoError):
            world.close()


@pytest.mark.skipif(fake_cuda.has_gpu(), reason="needs the doubles")
@pytest.mark.parametrize("binding", library._BINDINGS)
def test_rank_that_dies_while_another_is_in_a_call_of_nccl_is_a_lost_peer(tmp_path: Path, binding: str) -> None:
    pytest.importorskip(binding.partition(".")[0])
    with Job(lose_in_call, 2, tmp_path, binding) as job:
        assert job.hear(1) == "has agreed"
        job.signal(1, signal.SIGKILL)
        assert job.hear(0) == "PeerLostError"


@pytest.mark.skipif(fake_cuda.has_gpu(), reason="needs the doubles")
def test_an_error_of_nccl_ends_the_communicator_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(world: un.Communicator) -> tuple[str, str]:
        with gpu() as bench:
            x = array(bench, np.ones(COUNT, np.float32))
            world.allreduce(x, **BY_NCCL)
            os.environ[fake_nccl.FAIL] = "ncclAllReduce=3" if world.rank == 0 else ""
            return error_of(lambda: world.allreduce(x, **BY_NCCL))

    outcomes = un.launch(fail, 2, timeout_s=DEADLINE_S)
    assert outcomes[0][0] == "InternalError"
    assert "NCCL failed in all_reduce" in outcomes[0][1]
    assert outcomes[1][0] in ("AbortedError", "InternalError")


# --- measurements ----------------------------------------------------------------------------------------------------


def measured_call(world: un.Communicator, log: str) -> tuple[bool, bool]:
    """Make a call as the benchmark does; return whether its result is right, and whether NCCL has made it."""
    os.environ[fake_nccl.LOG] = f"{log}.{world.rank}"
    with gpu(), mock.patch.object(un, "init", return_value=world):
        adapter = unisono_cuda_nccl.connect()
        x = adapter.memory.place(np.full(COUNT, world.rank + 1, np.float32))
        out = adapter.memory.empty(COUNT, np.dtype(np.float32))
        adapter.call("allreduce", x, out)()
        is_right = bool((adapter.memory.fetch(out, slice(0, COUNT)) == 3).all())
        world.close()
    return is_right, "AllReduce" in Path(f"{log}.{world.rank}").read_text()


@pytest.mark.skipif(fake_cuda.has_gpu(), reason="needs the doubles")
def test_benchmark_measures_calls_that_nccl_carries_out(tmp_path: Path) -> None:
    assert un.launch(measured_call, 2, str(tmp_path / "log"), timeout_s=DEADLINE_S) == [(True, True)] * 2
