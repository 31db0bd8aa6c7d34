"""The device that uses the CUDA driver, on a GPU if the machine has one, and otherwise on the driver's double."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import fake_cuda
from support.bit_patterns import assert_same_values, random_bits
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.cli.machine.gpu_checks import gpu_findings
from unisono.dtypes import DTYPES
from unisono.errors import AbortedError, InternalError, TransportUnavailableError, UsageError
from unisono.operations import OPERATIONS, Lower, Op
from unisono.transports.cuda.device import (
    ALLOCATION_NBYTES,
    LEGACY_STREAM,
    THREAD_STREAM,
    Allocation,
    DeviceGraph,
    Event,
    Stream,
    is_over,
)
from unisono.transports.cuda.devices import current_ordinal, device_of
from unisono.transports.cuda.kernels import launcher
from unisono.transports.cuda.kernels.cache import built
from unisono.transports.cuda.kernels.catalogue import MOST_SOURCES, reduction, scaling
from unisono.transports.cuda.kernels.compiler import version
from unisono.transports.cuda.kernels.launcher import require_suitable
from unisono.transports.cuda.memory.host import HostMemory
from unisono.transports.cuda.peers.probe import try_sharing
from unisono.transports.reductions.definition import lift, reduce_into

driver = pytest.importorskip("unisono.transports.cuda.driver_api.cuda_device")
pytest.importorskip("cuda.bindings.driver", reason="the binding of CUDA is not installed: make cuda")

pytestmark = pytest.mark.gpu

MANY = MOST_SOURCES + 1
REDUCTIONS = [
    *(("float32", "sum", 2), ("bfloat16", "avg", 3), ("complex64", "prod", 2), ("int16", "max", MOST_SOURCES)),
    *(("float32", "sum", MANY), ("float32", "sum", MANY + 600)),
]
UNLOWERED_AVERAGE = replace(OPERATIONS["avg"], lower=Lower.IDENTITY)
FACTORS = [("float32", 0.5), ("bfloat16", -3.0), ("int64", 7), ("complex64", 1 - 2j)]
KERNELS = (
    *{reduction(DTYPES[dtype], OPERATIONS[op], min(k, MANY)) for dtype, op, k in REDUCTIONS},
    reduction(DTYPES["bfloat16"], UNLOWERED_AVERAGE, 3),
    *(scaling(DTYPES[dtype]) for dtype, _ in FACTORS),
)
only_double = pytest.mark.skipif(fake_cuda.has_gpu(), reason="a GPU does not do that on demand")


@pytest.fixture(autouse=True)
def found_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.use(monkeypatch, sorted(KERNELS, key=lambda kernel: kernel.name))


@pytest.fixture
def device() -> Any:
    return driver.CudaDevice()


@pytest.fixture
def stream(device: Any) -> Iterator[Stream]:
    made = device.new_stream()
    yield made
    device.end_stream(made)


def finish(device: Any, stream: Stream) -> None:
    with device._context:
        device._driver("cuStreamSynchronize", stream)


def uploaded(device: Any, array: Any, stream: Stream) -> Allocation:
    """Return device memory with the values of `array`."""
    made, pinned = device.allocate(array.nbytes), device.pin(array.nbytes)
    pinned[:] = array.reshape(-1).view(np.uint8)
    device.copy(made.pointer, pinned.ctypes.data, array.nbytes, stream)
    finish(device, stream)
    device.unpin(pinned)
    return made


def downloaded(device: Any, pointer: int, like: Any, stream: Stream) -> Any:
    pinned = device.pin(like.nbytes)
    device.copy(pinned.ctypes.data, pointer, like.nbytes, stream)
    finish(device, stream)
    result = pinned.copy().view(like.dtype)
    device.unpin(pinned)
    return result


def test_device_knows_its_name_uuid_and_reachable_devices(device: Any) -> None:
    assert device.ordinal == 0
    assert device.name
    assert len(bytes.fromhex(device.uuid)) == 16
    assert device.can_reach(device.uuid)
    assert not device.can_reach("00" * 15 + "ff")


@pytest.mark.parametrize("nbytes", [0, 1, ALLOCATION_NBYTES, ALLOCATION_NBYTES + 1])
def test_device_allocations_are_separate_and_in_whole_pages(device: Any, nbytes: int) -> None:
    made, other = device.allocate(nbytes), device.allocate(nbytes)
    assert made.nbytes == max(1, -(-nbytes // ALLOCATION_NBYTES)) * ALLOCATION_NBYTES
    assert abs(made.pointer - other.pointer) >= made.nbytes
    facts = device.facts(made.pointer + 5)
    assert (facts.kind, facts.ordinal, facts.allocation) == ("device", 0, made)
    for memory in (made, other):
        device.free(memory)


@pytest.mark.parametrize("stream", [LEGACY_STREAM, THREAD_STREAM, None])
def test_device_copies_bytes_to_it_on_it_and_back(device: Any, stream: Stream | None) -> None:
    used = stream or device.new_stream()
    row = np.arange(1000, dtype=np.int32)
    first, second = uploaded(device, row, used), device.allocate(row.nbytes)
    device.copy(second.pointer + 16, first.pointer, row.nbytes, used)
    device.copy(second.pointer, first.pointer, 0, used)
    assert downloaded(device, second.pointer + 16, row, used).tolist() == row.tolist()
    device.free(first)
    device.free(second)


@pytest.mark.parametrize(("dtype", "op", "k"), REDUCTIONS)
def test_device_reduction_follows_the_definition(device: Any, stream: Stream, dtype: str, op: str, k: int) -> None:
    rows = random_bits(np.random.default_rng(k), k, 1003, dtype)
    sources = [uploaded(device, row, stream) for row in rows[: MANY + 1]]
    pointers = [sources[i % len(sources)].pointer for i in range(k)]
    target = device.allocate(rows[0].nbytes)
    device.reduce(target.pointer, pointers, 1003, DTYPES[dtype], OPERATIONS[op], 3, stream)
    expected = np.empty_like(rows[0])
    reduce_into(expected, [rows[i % len(sources)] for i in range(k)], OPERATIONS[op], 3, lower=True)
    assert_same_values(downloaded(device, target.pointer, expected, stream), expected)
    for memory in (*sources, target):
        device.free(memory)


def test_device_averages_with_and_without_division_by_kernels_of_their_own(device: Any, stream: Stream) -> None:
    rows = np.array([[1, 2], [3, 4], [5, 6]], "bfloat16")
    sources, target = [uploaded(device, row, stream).pointer for row in rows], device.allocate(4).pointer
    results = []
    for op in (UNLOWERED_AVERAGE, OPERATIONS["avg"], UNLOWERED_AVERAGE):
        device.reduce(target, sources, 2, DTYPES["bfloat16"], op, 3, stream)
        results.append(downloaded(device, target, rows[0], stream).tolist())
    assert results == [[9, 12], [3, 4], [9, 12]]


def test_device_reduction_of_no_elements_does_nothing(device: Any, stream: Stream) -> None:
    device.reduce(1, [1, 1], 0, DTYPES["float32"], OPERATIONS["sum"], 1, stream)


def test_device_reuses_its_tables_of_addresses(device: Any, stream: Stream) -> None:
    row = np.ones(8, np.float32)
    source, target = uploaded(device, row, stream), device.allocate(row.nbytes)
    for _ in range(5):
        device.reduce(target.pointer, [source.pointer] * MANY, 8, DTYPES["float32"], OPERATIONS["sum"], 1, stream)
        finish(device, stream)
    assert len(device._tables._waiting) == 1
    assert downloaded(device, target.pointer, row, stream).tolist() == [MANY] * 8


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("dtype", "factor"), FACTORS)
def test_device_premul_sum_follows_the_definition(
    device: Any, stream: Stream, dtype: str, factor: complex, shift: int
) -> None:
    op = Op.premul_sum(factor)
    row = random_bits(np.random.default_rng(0), 1, 5001, dtype)[0]
    memory = uploaded(device, row, stream)
    target = device.allocate(row.nbytes + 64) if shift else memory
    dst = target.pointer + shift * row.itemsize
    device.lift(dst, memory.pointer, row.size, DTYPES[dtype], op, stream)
    assert_same_values(downloaded(device, dst, row, stream), lift(op, row))
    device.free(memory)


def test_device_refuses_a_premul_sum_factor_outside_the_dtype(device: Any) -> None:
    with pytest.raises(UsageError, match="not in the range of int64"):
        device.lift(1, 1, 1, DTYPES["int64"], Op.premul_sum(0.5), LEGACY_STREAM)


def test_device_needs_no_deprecated_conversion_of_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    device = driver.CudaDevice()
    stream = SimpleNamespace(number=17)  # has no __int__
    monkeypatch.setattr(device._driver, "number_of", lambda handle: handle.number)
    for method in ("_issue", "_call"):
        monkeypatch.setattr(device, method, lambda *_: stream)
    assert (device.new_stream(), device.new_event(), device.open_event(bytes(88))) == (17, Event(17), Event(17))
    assert device.capture([], Stream(17)) == DeviceGraph(17)


def made_by(device: Any, call: str, *arguments: Any) -> int:
    with device._context:
        return int(device._driver(call, *arguments))


def test_device_recognises_pinned_host_managed_and_pooled_memory(device: Any, stream: Stream) -> None:
    pinned = device.pin(100)
    assert device.facts(pinned.ctypes.data).kind == "pinned"
    assert device.facts(pinned.ctypes.data).ordinal == -1
    assert device.facts(np.zeros(8).ctypes.data).kind == "host"
    attach = int(device._driver.api.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)
    managed = made_by(device, "cuMemAllocManaged", 4096, attach)
    assert device.facts(managed).kind == "managed"
    pooled = made_by(device, "cuMemAllocAsync", 4096, stream)
    assert device.facts(pooled).kind == "pooled"
    device.unpin(pinned)
    for call, *arguments in (("cuMemFree", managed), ("cuMemFreeAsync", pooled, stream)):
        with device._context:
            device._driver(call, *arguments)


def test_event_is_done_after_the_work_recorded_before_it(device: Any, stream: Stream) -> None:
    event = device.new_event()
    assert device.done(event)
    device.record(event, stream)
    device.wait(LEGACY_STREAM, event)
    finish(device, stream)
    assert device.done(event)
    device.end_event(event)


def test_device_detects_a_stream_that_captures_a_graph(device: Any) -> None:
    stream = device.new_stream()
    assert not device.is_capturing(stream)
    modes = device._driver.api.CUstreamCaptureMode
    with device._context:
        device._driver("cuStreamBeginCapture", stream, modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        seen = device.is_capturing(stream)
        device._driver("cuStreamEndCapture", stream)
    assert seen
    device.end_stream(stream)


def test_device_calls_restore_the_current_context(device: Any) -> None:
    before = device._driver("cuCtxGetCurrent")
    device.free(device.allocate(1))
    with pytest.raises(InternalError):
        device.copy(12345, 12345, 1, LEGACY_STREAM)
    assert int(device._driver("cuCtxGetCurrent")) == int(before)


@only_double
def test_contexts_are_current_in_nested_bodies_of_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (device_of(ordinal) for ordinal in range(2))
    pushes = []
    for device in (first, second):
        push = device._context._push
        monkeypatch.setattr(
            device._context, "_push", lambda handle, push=push: (pushes.append(handle), push(handle))[1]
        )
    with first.current():
        with first.current():
            assert current_ordinal() == 0
        with second.current():
            assert current_ordinal() == 1
            with first.current():
                assert current_ordinal() == 0
            assert current_ordinal() == 1
        first.end_event(first.new_event())
        assert current_ordinal() == 0
    assert len(pushes) == 3
    assert not first._driver.number_of(first._driver("cuCtxGetCurrent"))


@only_double
def test_empty_arrays_are_on_the_current_device() -> None:
    devices = [device_of(ordinal) for ordinal in range(2)]
    for current, expected in ((None, 0), (devices[0], 0), (devices[1], 1)):
        with nullcontext() if current is None else current.current():
            assert un.empty(3, "float8_e5m2", device="cuda").__dlpack_device__() == (2, expected)
            assert un.empty(3, "float8_e5m2", device="cuda:0").__dlpack_device__() == (2, 0)
    for device in devices:
        wait_until_released(device)


@only_double
@pytest.mark.parametrize(("calls", "has_graphs"), [((), True), (("cuGraphLaunch",), False)])
def test_device_has_graphs_if_one_of_them_works(
    monkeypatch: pytest.MonkeyPatch, device: Any, calls: Sequence[str], *, has_graphs: bool
) -> None:
    monkeypatch.setenv(fake_cuda.FAIL, ",".join(f"{call}=801" for call in calls))
    assert device.has_graphs() is has_graphs
    wait_until_released(device)


def test_device_whose_graphs_end_without_their_work_has_none(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    monkeypatch.setattr(device, "launch", lambda graph, stream: None)
    assert not device.has_graphs()
    wait_until_released(device)


def test_ipc_handles_do_not_open_in_the_exporting_process(device: Any) -> None:
    memory, event = device.allocate(1), device.new_event(shared=True)
    with pytest.raises(TransportUnavailableError, match="the process that exported a handle cannot open it"):
        device.open(device.export(memory))
    with pytest.raises(TransportUnavailableError, match="the process that exported a handle cannot open it"):
        device.open_event(device.export_event(event))
    with pytest.raises(InternalError, match="has 88 bytes, and this one has 3"):
        device.open(b"abc")


def ring_of_processes(world: Any) -> list[int]:
    """Write into the next rank's memory; return the values that the previous rank has written into this rank's."""
    from unisono.transports.cuda.driver_api.cuda_device import CudaDevice

    device, next_rank = CudaDevice(), (world.rank + 1) % world.size
    stream, memory, event = device.new_stream(), device.allocate(64), device.new_event(shared=True)
    handles = world.allgather_object((device.export(memory), device.export_event(event), device.uuid))
    theirs, _, uuid = handles[next_rank]
    assert device.can_reach(uuid)
    opened, pinned = device.open(theirs), device.pin(64)
    pinned[:] = world.rank + 1
    device.copy(opened.pointer, pinned.ctypes.data, 64, stream)
    device.record(event, stream)
    world.barrier()
    waited = device.open_event(handles[world.rank - 1][1])
    device.wait(stream, waited)
    device.copy(pinned.ctypes.data, memory.pointer, 64, stream)
    device.record(event, stream)
    while not device.done(event):
        pass
    results = [int(byte) for byte in set(pinned)]
    world.barrier()
    device.end_event(waited)
    device.close(opened)
    world.barrier()
    device.free(memory)
    return results


def test_processes_use_memory_and_events_of_each_other() -> None:
    assert un.launch(ring_of_processes, 3) == [[3], [1], [2]]


def test_aborted_device_only_frees_resources(device: Any) -> None:
    stream, event, memory, pinned = device.new_stream(), device.new_event(), device.allocate(1), device.pin(8)
    device.abort()
    for refused in (
        *(lambda: device.allocate(1), lambda: device.record(event, stream), lambda: device.wait(stream, event)),
        *(lambda: device.copy(memory.pointer, memory.pointer, 0, stream), lambda: device.pin(1), device.new_stream),
        *(lambda: device.export(memory), lambda: device.facts(memory.pointer), lambda: device.can_reach("")),
        lambda: device.reduce(memory.pointer, [memory.pointer], 1, DTYPES["int8"], OPERATIONS["sum"], 1, stream),
        lambda: device.lift(memory.pointer, memory.pointer, 1, DTYPES["int8"], Op.premul_sum(1), stream),
    ):
        with pytest.raises(AbortedError, match="the device 0 was aborted"):
            refused()
    assert device.done(event)
    device.end_event(event)
    device.end_stream(stream)
    device.unpin(pinned)
    device.free(memory)


def test_memory_sharing_check_passes(device: Any) -> None:
    assert try_sharing(device) == ("flags" if device.has_flags() else "events")


@only_double
def test_memory_sharing_check_passes_by_events_without_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fake_cuda.FLAGS, "0")
    device = driver.CudaDevice()
    assert not device.has_flags()
    assert try_sharing(device) == "events"


@only_double
def test_doctor_reports_gpus() -> None:
    findings = gpu_findings()
    assert all(finding.usable for finding in findings)
    details = {finding.subject: finding.detail for finding in findings}
    assert details["GPU driver"] == "of CUDA 13.0, which sees 2 GPUs"
    assert details["GPU 0"].startswith("GPU of the tests, ")
    assert "GPUs" in details["GPU topology"]
    assert details["GPU memory"].startswith("results come from a pool")
    assert details["CUDA IPC"] == "another process opened the memory, and read the written data in the order of flags"


@only_double
def test_doctor_reports_gpus_without_peer_access_as_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [driver.CudaDevice(ordinal) for ordinal in range(2)]
    details = {finding.subject: finding.detail for finding in gpu_findings()}
    assert devices[0].can_reach(devices[1].uuid)
    assert details["GPU topology"] == "all 2 GPUs read each other's memory"
    monkeypatch.setenv(fake_cuda.PEERS, "0")
    details = {finding.subject: finding.detail for finding in gpu_findings()}
    assert not devices[0].can_reach(devices[1].uuid)
    assert details["GPU topology"].startswith("staged through the host between GPUs 0 and 1")


@only_double
def test_doctor_says_that_a_driver_has_no_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fake_cuda.POOLS, "0")
    assert not driver.CudaDevice().has_pool()
    details = {finding.subject: finding.detail for finding in gpu_findings()}
    assert details["GPU memory"].startswith("results are allocated and freed by a thread")


class HeldCopy:
    """Work of a stream that copies between two pieces of memory when a flag is raised."""

    def __init__(self, device: Any, stream: Stream, *, pooled: bool) -> None:
        self.device = device
        self.memory = device.take(4096, stream) if pooled else device.allocate(4096)
        self.flags, self.event = device.new_flags(1), device.new_event()
        device.await_flag(self.flags, 0, 1, stream)
        device.copy(self.memory.pointer, self.memory.pointer + 2048, 64, stream)
        device.record(self.event, stream)

    def is_kept(self) -> bool:
        """Return whether the memory has not been released, after a while in which it could have been."""
        time.sleep(0.03)
        return self.device.facts(self.memory.pointer).kind != "host" and not self.device.has_released()

    def end(self) -> None:
        """Let the work go on, and wait until the memory has been released."""
        self.device.release_flags(self.flags)
        wait_until_released(self.device)
        if not fake_cuda.has_gpu():  # the memory of a real pool stays mapped
            assert self.device.facts(self.memory.pointer).kind == "host"
        self.device.end_flags(self.flags)
        wait_until_released(self.device)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("ends_stream", [True, False])
def test_memory_is_given_behind_events_although_the_stream_may_have_ended(
    device: Any, pooled: bool, ends_stream: bool
) -> None:
    stream = device.new_stream()
    held, more = HeldCopy(device, stream, pooled=pooled), device.new_event()
    device.record(more, LEGACY_STREAM)
    if ends_stream:
        device.end_stream(stream)
        device.new_stream()  # which may have the same handle
    device.give(held.memory, [more, held.event])
    assert held.is_kept()
    held.end()


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("version", [(13, 0), (12, 4)])
def test_memory_of_unknown_users_is_given_behind_all_work(
    monkeypatch: pytest.MonkeyPatch, device: Any, stream: Stream, pooled: bool, version: tuple[int, int]
) -> None:
    held = HeldCopy(device, stream, pooled=pooled)
    monkeypatch.setattr(device._driver, "version", version)
    device.give(held.memory, None)
    assert held.is_kept()
    held.end()


def test_memory_of_unknown_users_does_not_wait_for_later_work(device: Any, stream: Stream) -> None:
    held = HeldCopy(device, stream, pooled=False)
    device.give(held.memory, None)
    assert held.is_kept()
    later = HeldCopy(device, device.new_stream(), pooled=False)
    held.end()
    device.give(later.memory, [later.event])
    later.end()


@only_double
@pytest.mark.parametrize("version", [(13, 0), (12, 4)])
def test_memory_of_unknown_users_is_kept_while_a_graph_is_recorded(
    monkeypatch: pytest.MonkeyPatch, device: Any, stream: Stream, version: tuple[int, int]
) -> None:
    monkeypatch.setattr(device._driver, "version", version)
    with monkeypatch.context() as patch:
        patch.setenv(fake_cuda.FAIL, "cuStreamIsCapturing=906")  # as a stream that blocks the legacy one lets it fail
        made = device.allocate(1)
        device.give(made, None)
        time.sleep(0.03)
        assert not device.has_released()
    wait_until_released(device)
    assert device.facts(made.pointer).kind == "host"


@only_double
def test_memory_of_unknown_users_is_kept_while_the_library_records_a_graph(device: Any, stream: Stream) -> None:
    made = device.allocate(1)
    fence = threading.Event()

    class Slow(tuple[Any, ...]):
        def issue(self, device: Any) -> None:
            device.give(made, None)
            fence.wait(0.05)

    device.end_graph(device.capture([Slow()], stream))  # raises if the capture was lost
    wait_until_released(device)
    assert device.facts(made.pointer).kind == "host"


@only_double
@pytest.mark.parametrize(
    ("misuse", "said"), [("free", "work under way still uses"), ("stream", "a stream is used that has been destroyed")]
)
def test_driver_double_ends_a_process_that_misuses_memory_or_streams(misuse: str, said: str) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", MISUSE, misuse], capture_output=True, text=True, timeout=60, check=False
    )
    assert completed.returncode == -signal.SIGABRT
    assert said in completed.stderr


MISUSE = """
import sys, time
from unisono.transports.cuda.driver_api.cuda_device import CudaDevice
device = CudaDevice()
stream, memory, flags = device.new_stream(), device.allocate(4096), device.new_flags(1)
device.await_flag(flags, 0, 1, stream)
device.copy(memory.pointer, memory.pointer + 2048, 64, stream)
if sys.argv[1] == "free":
    device.free(memory)
else:
    device.end_stream(stream)
    device.is_capturing(stream)
time.sleep(60)
"""


@only_double
def test_a_full_device_gets_the_memory_that_the_pool_keeps(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[bool] = []
    monkeypatch.setattr(device._pool, "trim", lambda: trimmed.append(True))
    monkeypatch.setenv(fake_cuda.FAIL, "cuMemAlloc=2")
    with pytest.raises(TransportUnavailableError, match="too little memory"):
        device.allocate(1)
    assert trimmed


@only_double
def test_doctor_says_what_the_gpu_driver_lacks_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fake_cuda.FAIL, "cuInit=803")
    driver, nvrtc, gpu, memory, topology, sharing = gpu_findings()
    assert (driver.usable, driver.remedy) == (
        False,
        "its library and its kernel module are of different versions, so restart the machine",
    )
    assert nvrtc.usable
    assert gpu.detail == "not tried: it needs the driver"
    assert {memory.detail, topology.detail, sharing.detail} == {"not tried: it needs the device"}


@only_double
@pytest.mark.parametrize(("code", "name"), [(801, "NOT_SUPPORTED"), (1, "INVALID_VALUE"), (201, "INVALID_CONTEXT")])
def test_memory_sharing_check_fails_when_another_process_cannot_open(
    monkeypatch: pytest.MonkeyPatch, device: Any, code: int, name: str
) -> None:
    allocated: list[Allocation] = []
    allocate = device.allocate
    monkeypatch.setattr(device, "allocate", lambda nbytes: (allocated.append(allocate(nbytes)), allocated[-1])[1])
    monkeypatch.setenv(fake_cuda.FAIL, f"cuIpcOpenMemHandle={code}")
    with pytest.raises(
        TransportUnavailableError, match=rf"another process cannot open .*TransportUnavailableError.*\({name}\)"
    ):
        try_sharing(device)
    wait_until_released(device)
    assert [device.facts(memory.pointer).kind for memory in allocated] == ["host"]


@only_double
@pytest.mark.parametrize(
    ("call", "code", "said"),
    [
        ("cuInit", 100, r"refused cuInit \(NO_DEVICE\): it sees no GPU; .* CUDA_VISIBLE_DEVICES"),
        ("cuInit", 803, r"refused cuInit \(SYSTEM_DRIVER_MISMATCH\): .* so restart the machine"),
        ("cuInit", 34, r"\(STUB_LIBRARY\): .* put the driver's first"),
        ("cuDevicePrimaryCtxRetain", 46, r"\(DEVICE_UNAVAILABLE\): another process has the GPU for itself"),
        ("cuDevicePrimaryCtxRetain", 2, r"\(OUT_OF_MEMORY\): the GPU has too little memory left"),
    ],
)
def test_unusable_device_raises_an_error_that_says_why(
    monkeypatch: pytest.MonkeyPatch, call: str, code: int, said: str
) -> None:
    monkeypatch.setenv(fake_cuda.FAIL, f"{call}={code}")
    with pytest.raises(TransportUnavailableError, match=said):
        driver.CudaDevice()


@only_double
@pytest.mark.parametrize(
    ("call", "code", "error"),
    [
        *(("cuIpcGetMemHandle", 801, TransportUnavailableError), ("cuMemAlloc", 2, TransportUnavailableError)),
        *(("cuIpcGetMemHandle", 1, TransportUnavailableError), ("cuIpcGetEventHandle", 400, TransportUnavailableError)),
        *(("cuModuleLoadData", 222, TransportUnavailableError), ("cuMemcpyAsync", 900, UsageError)),
        *(("cuEventQuery", 1, InternalError), ("cuMemcpyAsync", 12345, InternalError)),
        *(("cuMemAlloc", 700, TransportUnavailableError), ("cuLaunchKernel", 719, TransportUnavailableError)),
    ],
)
def test_driver_errors_become_the_matching_exceptions(
    monkeypatch: pytest.MonkeyPatch, device: Any, stream: Stream, call: str, code: int, error: type[Exception]
) -> None:
    memory, event = device.allocate(64), device.new_event(shared=True)
    actions = {
        "cuIpcGetMemHandle": lambda: device.export(memory),
        "cuIpcGetEventHandle": lambda: device.export_event(event),
        "cuMemAlloc": lambda: device.allocate(1),
        "cuMemcpyAsync": lambda: device.copy(memory.pointer, memory.pointer + 32, 8, stream),
        "cuEventQuery": lambda: device.done(event),
    }
    reduce = (memory.pointer, [memory.pointer] * 2, 4, DTYPES["float32"], OPERATIONS["sum"], 1, stream)
    with monkeypatch.context() as patch:
        patch.setenv(fake_cuda.FAIL, f"{call}={code}")
        with pytest.raises(error, match=call):
            actions.get(call, lambda: device.reduce(*reduce))()
    assert device.done(event), "the device can be used further"


@pytest.mark.parametrize("unknown", [KeyError(12345), ValueError("12345 is not a valid CUresult")])
def test_unknown_driver_result_is_an_internal_error(
    monkeypatch: pytest.MonkeyPatch, device: Any, unknown: Exception
) -> None:
    def wait(stream: int, event: int, flags: int) -> None:
        raise unknown  # as the binding does, depending on its version, for results that only newer drivers have

    monkeypatch.setattr(device._driver, "api", SimpleNamespace(cuStreamWaitEvent=wait))
    with pytest.raises(InternalError, match=r"cuStreamWaitEvent with an unknown code: .*12345"):
        device._driver("cuStreamWaitEvent", 1, 1, 0)


def test_table_of_addresses_is_reused_after_a_failed_launch(device: Any, stream: Stream) -> None:
    with pytest.raises(ZeroDivisionError), device._tables.holding([1, 2, 3], stream):
        raise ZeroDivisionError
    finish(device, stream)
    (table,) = device._tables._waiting
    with device._tables.holding([4], stream) as address:
        assert address == table.allocation.pointer


@only_double
def test_lost_context_is_an_error_that_says_why_and_needs_no_release(
    monkeypatch: pytest.MonkeyPatch, device: Any, caplog: pytest.LogCaptureFixture
) -> None:
    memory, event, pinned, stream = device.allocate(1), device.new_event(), device.pin(8), device.new_stream()
    flags, closed = device.new_flags(2), list[int]()
    descriptor = device._flags[flags.address].memory.descriptor
    monkeypatch.setattr(HostMemory, "close", lambda memory: closed.append(memory.descriptor))
    monkeypatch.setenv(fake_cuda.LOST, "700")
    with pytest.raises(TransportUnavailableError, match=r"cuEventQuery .*ILLEGAL_ADDRESS.*: a kernel issued earlier"):
        device.done(event)
    assert is_over(device, event)
    device.end_event(event)
    device.end_stream(stream)
    device.unpin(pinned)
    device.free(memory)
    device.end_flags(flags)
    wait_until_released(device)
    assert closed == [descriptor]
    os.close(descriptor)
    assert caplog.records == []
    monkeypatch.delenv(fake_cuda.LOST)
    with device._context:  # else the double would refuse other memory at this address
        device._driver("cuMemHostUnregister", flags.address)


@only_double
def test_memory_is_released_without_waiting_for_the_work_of_others(
    monkeypatch: pytest.MonkeyPatch, device: Any
) -> None:
    memory, pinned, more = device.allocate(1), device.pin(8), device.allocate(1)
    with monkeypatch.context() as patch:
        patch.setenv(fake_cuda.STUCK, "1")
        device.free(memory)
        device.unpin(pinned)
        assert not device.has_released()
        device.free(device.allocate(1))  # other calls go on
    wait_until_released(device)
    assert device.facts(memory.pointer).kind == "host"
    monkeypatch.setenv(fake_cuda.STUCK, "1")
    device.free(more)
    completed = subprocess.run([sys.executable, "-c", ENDS_WHILE_STUCK], timeout=60, check=False)
    assert completed.returncode == 0
    monkeypatch.delenv(fake_cuda.STUCK)
    wait_until_released(device)


@only_double
def test_allocation_waits_for_memory_that_is_being_released(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    memory = device.allocate(1)
    monkeypatch.setenv(fake_cuda.FAIL, "cuMemAlloc=2")
    with pytest.raises(TransportUnavailableError, match="too little memory left"):
        device.allocate(1)
    is_idle, has_failed = device._reaper.is_idle, threading.Event()
    monkeypatch.setattr(device._reaper, "is_idle", lambda: (has_failed.set(), is_idle())[1])
    device._reaper.put(lambda: has_failed.wait(DEADLINE_S) and monkeypatch.delenv(fake_cuda.FAIL))
    device.free(memory)
    device.free(device.allocate(1))


@only_double
@pytest.mark.parametrize("thread_captures", [True, False])
def test_device_calls_leave_captures_of_graphs_alone(device: Any, thread_captures: bool) -> None:
    stream, other, event = device.new_stream(), device.new_stream(), device.new_event()
    modes = device._driver.api.CUstreamCaptureMode

    def capture(name: str, *arguments: Any) -> None:
        with device._context:
            device._driver(name, *arguments)

    def call() -> None:
        device.record(event, other)
        assert device.done(event)
        memory, pinned = device.allocate(1), device.pin(8)
        device.reduce(memory.pointer, [memory.pointer] * 2, 4, DTYPES["float32"], OPERATIONS["sum"], 1, other)
        device.free(memory)
        device.unpin(pinned)
        wait_until_released(device)

    capture("cuStreamBeginCapture", stream, modes.CU_STREAM_CAPTURE_MODE_GLOBAL)
    thread = threading.Thread(target=call)
    if thread_captures:
        call()
    else:
        thread.start()
        thread.join()
    capture("cuStreamEndCapture", stream)  # raises if a call has ended the capture
    device.end_stream(stream)
    device.end_stream(other)


@only_double
def test_processes_forked_before_any_use_of_the_gpu_have_identities_of_their_own() -> None:
    first, second = output_of(FORKED_BEFORE).split()
    assert first != second


@only_double
def test_process_forked_after_a_use_of_the_gpu_is_told_that_it_cannot_use_it() -> None:
    lines = output_of(FORKED_AFTER).splitlines()
    assert len(lines) == 3
    assert all("start processes that use GPUs by the method 'spawn'" in line for line in lines), lines


def output_of(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60, check=True
    ).stdout


FORKED_BEFORE = """
import os
from unisono.transports.cuda.driver_api.cuda_device import CudaDevice
for _ in range(2):
    if not os.fork():
        device = CudaDevice()
        os.write(1, device.export(device.allocate(1))[:16].hex().encode() + b"\\n")
        os._exit(0)
    os.wait()
"""

FORKED_AFTER = """
import os
from unisono.errors import TransportUnavailableError
from unisono.transports.cuda.devices import device_of
device = device_of(0)
memory = device.allocate(1)
if not os.fork():
    for call in (device.new_stream, lambda: device.open(b"0" * 88), lambda: device_of(0)):
        try:
            call()
        except TransportUnavailableError as error:
            os.write(1, f"{error}\\n".encode())
    device.free(memory)
    os._exit(0)
os.wait()
"""

ENDS_WHILE_STUCK = """
from unisono.transports.cuda.driver_api.cuda_device import CudaDevice
device = CudaDevice()
device.free(device.allocate(1))
"""


def wait_until_released(device: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not device.has_released():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@only_double
def test_legacy_stream_counts_as_capturing_while_another_captures(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    monkeypatch.setenv(fake_cuda.FAIL, "cuStreamIsCapturing=906")
    assert device.is_capturing(LEGACY_STREAM)


@only_double
def test_device_refuses_a_driver_older_than_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    major, _ = version()
    monkeypatch.setenv(fake_cuda.VERSION, f"{major - 1}080")
    older = rf"is of CUDA {major - 1}\.8, which is too old for code of NVRTC {major}\.\d"
    with pytest.raises(TransportUnavailableError, match=older):
        driver.CudaDevice()


@only_double
def test_device_refuses_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fake_cuda.CAPABILITY, "75")
    with pytest.raises(TransportUnavailableError, match=r"7\.5 are too old"):
        driver.CudaDevice()


@pytest.mark.parametrize(
    ("has", "compiler", "target", "fits"),
    [
        *(((12, 4), (12, 9), "sm_90", True), ((12, 4), (12, 9), "compute_100", False)),
        *(((13, 0), (13, 0), "sm_90", True), ((13, 0), (13, 2), "sm_90", True), ((12, 9), (13, 0), "sm_90", False)),
        *(((13, 0), (13, 0), "compute_100", True), ((13, 0), (13, 2), "compute_100", False)),
        ((14, 0), (13, 2), "compute_100", True),
    ],
)
def test_driver_loads_code_of_its_major_version_and_no_newer_ptx(
    has: tuple[int, int], compiler: tuple[int, int], target: str, *, fits: bool
) -> None:
    if fits:
        require_suitable(has, compiler, target)
    else:
        with pytest.raises(TransportUnavailableError, match="install NVIDIA's driver"):
            require_suitable(has, compiler, target)


def test_device_loads_and_launches_kernels_of_nvrtc(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: Any, stream: Stream
) -> None:
    monkeypatch.setattr(launcher, "built", lambda kernel, target, _: built(kernel, target, tmp_path))
    memory = uploaded(device, np.full(64, 1.5, np.float32), stream)
    device.reduce(memory.pointer, [memory.pointer] * 2, 64, DTYPES["float32"], OPERATIONS["sum"], 1, stream)
    assert downloaded(device, memory.pointer, np.empty(64, np.float32), stream).tolist() == [3.0] * 64
    assert [path.suffix for path in tmp_path.iterdir()] == [".cubin"]


ATTEMPT = """
from unisono.errors import TransportUnavailableError
from unisono.transports.cuda.driver_api.cuda_device import CudaDevice
try:
    CudaDevice()
except TransportUnavailableError as error:
    print(error)
"""


@only_double
def test_error_without_a_cuda_driver_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH")
    completed = subprocess.run([sys.executable, "-c", ATTEMPT], capture_output=True, text=True, timeout=60, check=True)
    assert completed.stdout.startswith("NVIDIA's driver, or its cuDriverGetVersion, was not found")
    assert "install NVIDIA's driver, of CUDA 13" in completed.stdout


def test_error_without_the_cuda_binding_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(TransportUnavailableError, match=r"cuda.bindings is not installed .*: pip install .*\[cuda\]"):
        driver.CudaDevice()
