"""Every mapped collective of process-ranks on one GPU: each dtype and operation, against numpy; and the loss of a rank.

Without a GPU, some of them run on the driver's double, which computes with kernels that are compiled for the host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import fake_cuda
from support.array_kinds import WithCudaInterface
from support.deadlines import DEADLINE_S
from support.device_contract import Bench
from support.device_ranks import WAIT_S, DeviceCall
from support.gpu_ranks import calls_of_all, check_calls, cuda_bench, run_call
from support.outcomes import error_of
from support.ranks import Job

import unisono as un
from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS
from unisono.transports.contracts.call import Extent, Signature
from unisono.transports.cuda.kernels.catalogue import reduction
from unisono.transports.cuda.peers.collectives import DeviceCollectives

pytest.importorskip("cuda.bindings.driver", reason="the binding of CUDA is not installed: make cuda")
pytestmark = pytest.mark.gpu

OPS = ("sum", "avg", "max")
# On the double, kernels take seconds to compile, and more dtypes show nothing new: kernels have tests of their own.
if fake_cuda.has_gpu():
    OF_DTYPES, SIZES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "complex64"), (2, 4)
    COUNTS: tuple[int, ...] = (1, 1000, 300_001)
else:
    OF_DTYPES, SIZES = ("float32", "bfloat16"), (2,)
    COUNTS = (1, 1000)


@pytest.mark.parametrize("size", SIZES)
def test_collectives_of_processes_on_one_gpu_are_right(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    kernels = {
        reduction(DTYPES[dtype], OPERATIONS[op], k)
        for dtype in OF_DTYPES
        for op in OPS
        for k in (1, size)
        if DTYPES[dtype].kind in OPERATIONS[op].kinds
    }
    fake_cuda.use(monkeypatch, sorted(kernels, key=lambda kernel: kernel.name))
    calls = calls_of_all(OF_DTYPES, OPS, COUNTS)
    assert un.launch(check_calls, size, calls, timeout_s=DEADLINE_S) == [[]] * size


def call_again(world: un.Communicator, way: str, log: Path) -> int:
    """Call an allreduce on the same arrays again and again; return the driver calls of the last one, by the double."""
    with cuda_bench(native=way == "native") as bench:
        device = bench.device
        collectives = DeviceCollectives(world._executor, device, timeout_s=WAIT_S)
        source, target = (bench.memory(np.zeros(100_000, np.float32)) for _ in range(2))
        for number in range(1, 5):
            filled = bench.memory(np.full(100_000, number + world.rank, np.float32))
            device.copy(source, filled, 400_000, bench.stream)
            bench.finish(bench.stream)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(fake_cuda.LOG, str(log.with_suffix(f".{world.rank}.{number}")))
                start(bench, collectives, source, target)
            assert (bench.values(target, np.zeros(100_000, np.float32)) == 2 * number + 1).all()
        world.barrier()
        collectives.close(WAIT_S)
    last = log.with_suffix(f".{world.rank}.{number}")
    lines = last.read_text().splitlines() if last.exists() else []
    return sum(int(line.partition(" ")[0]) == threading.get_native_id() for line in lines)


@pytest.mark.parametrize("way", ["native", "python"])
def test_calls_on_the_same_arrays_are_issued_again_by_few_driver_calls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    fake_cuda.use(monkeypatch, [reduction(DTYPES["float32"], OPERATIONS["sum"], 2)])
    counts = un.launch(call_again, 2, way, tmp_path / "log", timeout_s=DEADLINE_S)
    if not fake_cuda.has_gpu():
        # Three signals and three waits for signals; copies of the input and the result into the slab, and of the rest
        # out of the other one; one kernel; a wait before and a record behind. Python changes the context for each.
        assert counts == [2 + 12 if way == "native" else 3 * 12] * 2


def call_with_new_kernels(world: un.Communicator, log: Path) -> list[str]:
    """Call an allreduce whose kernel is not loaded, on the driver's double; return the kinds of calls in order."""
    path = log.with_suffix(f".{world.rank}")
    with cuda_bench() as bench:
        collectives = DeviceCollectives(world._executor, bench.device, timeout_s=WAIT_S)
        source, target = (bench.memory(np.ones(1000, np.float32)) for _ in range(2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(fake_cuda.LOG, str(path))
            start(bench, collectives, source, target)
        bench.finish(bench.stream)
        world.barrier()
        collectives.close(WAIT_S)
    kinds = {"cuFuncLoad": "load", "cuStreamWaitValue64": "wait", "cuLaunchKernel": "launch"}
    names = [line.split()[1] for line in path.read_text().splitlines()]
    return [kinds[name] for name in names if name in kinds]


@pytest.mark.skipif(fake_cuda.has_gpu(), reason="needs the double of the driver")
def test_kernels_are_loaded_before_streams_wait_for_other_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_cuda.use(monkeypatch, [reduction(DTYPES["float32"], OPERATIONS["sum"], 2)])
    for kinds in un.launch(call_with_new_kernels, 2, tmp_path / "log", timeout_s=DEADLINE_S):
        assert kinds[0] == "load"
        assert kinds.count("load") == kinds.count("launch") == 1
        assert "wait" in kinds


def call_with_few_blocks(world: un.Communicator, log: Path) -> list[int]:
    """Call an allreduce by two routes of issue; return the blocks of its kernels."""
    with cuda_bench() as bench:
        os.environ[fake_cuda.LOG] = str(log)
        x = WithCudaInterface(np.empty(100_000, np.float32), data=(bench.memory(np.ones(100_000, np.float32)), False))
        for _ in range(3):  # by Python, compiled, and again
            world.allreduce(x)
        world.close()
    return [int(line.split()[3]) for line in log.read_text().splitlines() if line.split()[1] == "cuLaunchKernel"]


@pytest.mark.skipif(fake_cuda.has_gpu(), reason="needs the double of the driver")
@pytest.mark.parametrize("most", [0, 2])
def test_kernels_use_at_most_the_blocks_of_the_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, most: int
) -> None:
    fake_cuda.use(monkeypatch, [reduction(DTYPES["float32"], OPERATIONS["sum"], 2)])
    options = un.Options(gpu_blocks=most)
    for used in un.launch(call_with_few_blocks, 2, tmp_path / "log", options=options, timeout_s=DEADLINE_S):
        assert len(used) >= 3
        assert set(used) == {2} if most else min(used) > 2


def lose_a_rank(world: un.Communicator, say: Any, when: str) -> None:
    """Let rank 1 be killed before it signals, while its signal is behind long work, or after the call.

    Rank 0 reports the error, and whether its stream ended and its memory was released.
    """
    with contextlib.ExitStack() as stack:
        bench = stack.enter_context(cuda_bench())
        device, event = bench.device, bench.device.new_event()
        collectives = DeviceCollectives(world._executor, device, timeout_s=WAIT_S)
        assert collectives.refusal is None
        call = DeviceCall("allreduce", "two_shot", "float32", "sum", 100_000)
        assert run_call(bench, collectives, call, world.rank, world.size) == ""
        source, target = (bench.memory(np.ones(100_000, np.float32)) for _ in range(2))
        if world.rank == 1:
            if when == "behind long work" and fake_cuda.has_gpu():
                long_work(bench)
            if when != "before the call":
                start(bench, collectives, source, target)
            if when == "after the call":
                bench.finish(bench.stream)
            say("ready")
            time.sleep(DEADLINE_S)
        start(bench, collectives, source, target)
        device.record(event, bench.stream)
        say("ready")
        kind = ""
        while not kind:
            kind, _ = error_of(lambda: collectives.check("the next call"))
            time.sleep(0.001)
        bench.finish(bench.stream)
        memory = device.allocate(1)
        device.free(memory)
        bench.wait_until(device.has_released)
        collectives.close(WAIT_S)
        say((kind, device.done(event), device.has_released()))
        stack.pop_all()  # slabs that rank 1 had open stay


def start(bench: Bench, collectives: DeviceCollectives, source: int, target: int) -> None:
    extent = Extent((100_000, 100_000), DTYPES["float32"], OPERATIONS["sum"])
    signature = Signature("allreduce", "float32", (100_000,), "C", "sum", None, "two_shot", 1)
    collectives.start(signature, extent, source, target, bench.stream, "two_shot").wait(WAIT_S)


def long_work(bench: Bench) -> None:
    """Issue about a second of copies."""
    nbytes = 256 << 20
    memory = [bench.device.allocate(nbytes).pointer for _ in range(2)]
    for _ in range(6000):
        bench.device.copy(*memory, nbytes, bench.stream)


@pytest.mark.parametrize("when", ["before the call", "behind long work", "after the call"])
def test_streams_end_and_memory_is_released_when_a_rank_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, when: str
) -> None:
    fake_cuda.use(monkeypatch, [reduction(DTYPES["float32"], OPERATIONS["sum"], 2)])
    with Job(lose_a_rank, 2, tmp_path, when) as job:
        job.hear_all()
        job.signal(1, signal.SIGKILL)
        assert job.hear(0) == ("PeerLostError", True, True)
        job.exit_code(1)


def be_held_up(world: un.Communicator, say: Any) -> None:
    """Let rank 1 be killed while the driver holds up rank 0, whose stream has no room for more work; say the error."""
    with contextlib.ExitStack() as stack:
        bench = stack.enter_context(cuda_bench())
        collectives = DeviceCollectives(world._executor, bench.device, timeout_s=WAIT_S)
        source, target = (bench.memory(np.ones(100_000, np.float32)) for _ in range(2))
        for _ in range(2):
            start(bench, collectives, source, target)
        bench.finish(bench.stream)
        say("ready")
        if world.rank == 1:
            time.sleep(DEADLINE_S)
        os.environ[fake_cuda.DEPTH] = "3"
        outcomes = [error_of(lambda: start(bench, collectives, source, target)) for _ in range(2)]
        collectives.close(WAIT_S)
        say(outcomes[1][0])
        stack.pop_all()  # slabs that rank 1 had open stay


@pytest.mark.skipif(fake_cuda.has_gpu(), reason="a GPU does not do that on demand")
def test_rank_that_the_driver_holds_up_goes_on_when_another_one_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_cuda.use(monkeypatch, [reduction(DTYPES["float32"], OPERATIONS["sum"], 2)])
    with Job(be_held_up, 2, tmp_path) as job:
        job.hear_all()
        time.sleep(0.1)  # so that rank 0 is held up before; otherwise the test shows less
        job.signal(1, signal.SIGKILL)
        assert job.hear(0) in ("PeerLostError", "AbortedError")
        job.exit_code(1)
