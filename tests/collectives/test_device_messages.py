"""Messages of GPU arrays over a UCX with CUDA support, which gets device memory, in the order of the device's work."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support import cuda_ucx, fake_cuda
from support.deadlines import DEADLINE_S
from support.ranks import Job, Ranks, require, start_ranks

import unisono as un
from unisono.collectives.device import point_to_point
from unisono.foundation.deadlines import Deadline
from unisono.testing.device_arrays import DoubleArray, read
from unisono.testing.device_double import GpuDouble
from unisono.transports.cuda import devices
from unisono.transports.cuda.device import LEGACY_STREAM, Device, Stream
from unisono.transports.cuda.executors.staging import await_event
from unisono.transports.ucx import library

pytestmark = pytest.mark.timeout(120)

# The longest payload that lies in an envelope, into which the host's processor copies it, and a length that UCX moves
# in several pieces.
MOST_SMALL_NBYTES = 3992
SEVERAL_PIECES_NBYTES = 40 << 20


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    require("ucx")
    with start_ranks(2, "shm") as started:
        yield started


@pytest.fixture
def run(ranks: Ranks, tmp_path: Path) -> Callable[..., list[Any]]:
    return lambda *args, **options: ranks.run_calls(on_double, str(tmp_path / "store"), args, options)


def on_double(world: un.Communicator, store: str, args: Any, options: Any) -> Any:
    return cuda_ucx.on_double(world, store, *args, **options)


def staged(comm: un.Communicator) -> tuple[int, int]:
    stats = comm.stats().on_device
    return stats.to_host_nbytes, stats.to_device_nbytes


def direct_since(before: tuple[int, int]) -> tuple[int, int]:
    now = cuda_ucx.device_traffic()
    return now[0] - before[0], now[1] - before[1]


def of_rank(comm: un.Communicator, rank: int, count: int) -> Any:
    return np.arange(count, dtype=np.int32) * (rank + 2)


# --- the transport of a message ------------------------------------------------------------------------------------


def exchange(
    comm: un.Communicator, gpu: GpuDouble, stream: Stream, nbytes: int, kind: str
) -> tuple[bool, Any, Any, str]:
    peer, count, before = 1 - comm.rank, nbytes // 4, cuda_ucx.device_traffic()
    x = DoubleArray(gpu, of_rank(comm, comm.rank, count), stream, kind)
    out = DoubleArray(gpu, np.zeros(count, np.int32), stream, kind)
    assert comm.sendrecv(x, peer, out, peer) is out
    is_right = (read(gpu, out) == of_rank(comm, peer, count)).all()
    return bool(is_right), direct_since(before), staged(comm), comm.explain("allreduce", 8).links[peer]


@pytest.mark.parametrize("kind", ["device", "pooled", "managed"])
@pytest.mark.parametrize("nbytes", [MOST_SMALL_NBYTES + 4, 1 << 20, SEVERAL_PIECES_NBYTES])
def test_large_device_arrays_are_sent_directly_by_ucx(run: Callable[..., list[Any]], nbytes: int, kind: str) -> None:
    for is_right, direct, by_host, link in run(exchange, nbytes, kind, background=False):
        assert is_right
        assert (direct, by_host) == ((nbytes, nbytes), (0, 0))
        assert link.startswith("ucx with cuda (")


@pytest.mark.parametrize("nbytes", [0, 4, MOST_SMALL_NBYTES])
def test_small_device_arrays_are_staged(run: Callable[..., list[Any]], nbytes: int) -> None:
    for is_right, direct, by_host, _ in run(exchange, nbytes, "device"):
        assert is_right
        assert (direct, by_host) == ((0, 0), (nbytes, nbytes))


def test_device_arrays_are_staged_when_ucx_lacks_cuda(run: Callable[..., list[Any]]) -> None:
    def without(*args: Any) -> Any:
        return exchange(*args, 1 << 20, "device")

    for is_right, direct, by_host, link in run(without, transports="tcp"):
        assert is_right
        assert (direct, by_host) == ((0, 0), (1 << 20, 1 << 20))
        assert link == "tcp (asked for)"


def one_side(comm: un.Communicator, gpu: GpuDouble, stream: Stream, on_device: int) -> tuple[bool, Any]:
    """Exchange messages in both directions between host arrays of one rank and device arrays of the other."""
    count, peer, before = 300_000, 1 - comm.rank, cuda_ucx.device_traffic()
    x, out = of_rank(comm, comm.rank, count), np.zeros(count, np.int32)
    if comm.rank != on_device:
        comm.sendrecv(x, peer, out, peer)
        return bool((out == of_rank(comm, peer, count)).all()), direct_since(before)
    there = DoubleArray(gpu, out, stream)
    comm.sendrecv(DoubleArray(gpu, x, stream), peer, there, peer)
    return bool((read(gpu, there) == of_rank(comm, peer, count)).all()), direct_since(before)


@pytest.mark.parametrize("on_device", [0, 1])
def test_host_array_on_one_side_matches_device_array_on_the_other(
    run: Callable[..., list[Any]], on_device: int
) -> None:
    results = run(one_side, on_device)
    assert [is_right for is_right, _ in results] == [True, True]
    assert results[on_device][1] == (1_200_000, 1_200_000)
    assert results[1 - on_device][1] == (0, 0)


def late_receive(comm: un.Communicator, gpu: GpuDouble, stream: Stream, wildcards: bool) -> tuple[bool, Any, Any]:
    """Receive messages after later ones, so that the rank has to buffer the earlier ones."""
    count, before = 100_000, cuda_ucx.device_traffic()
    if comm.rank == 1:
        works = [comm.send(DoubleArray(gpu, of_rank(comm, tag, count), stream), 0, tag, wait=False) for tag in (1, 2)]
        comm.send(np.zeros(1), 0, 3)
        un.wait_all(works)
        return True, direct_since(before), staged(comm)
    comm.recv(np.zeros(1), 1, 3)
    source = un.ANY_SOURCE if wildcards else 1
    outs = [DoubleArray(gpu, np.zeros(count, np.int32), stream) for _ in range(2)]
    for tag, out in zip((1, 2), outs, strict=True):
        assert comm.recv(out, source, un.ANY_TAG if wildcards else tag) is out
    is_right = all((read(gpu, out) == of_rank(comm, tag, count)).all() for tag, out in zip((1, 2), outs, strict=True))
    return is_right, direct_since(before), staged(comm)


@pytest.mark.parametrize("wildcards", [False, True])
def test_unexpected_message_is_copied_to_the_device(run: Callable[..., list[Any]], wildcards: bool) -> None:
    assert run(late_receive, wildcards) == [(True, (0, 0), (0, 800_000)), (True, (800_000, 0), (0, 0))]


def without_ucx(world: un.Communicator, store: str) -> tuple[bool, Any, Any]:
    """Send from a rank without UCX to a rank that prefers UCX."""

    def none(_: str) -> Any:
        raise un.TransportUnavailableError("there is none")

    missing = mock.patch.object(library, "open_messenger", none) if world.rank == 1 else nullcontext()
    with missing:
        return cuda_ucx.on_double(world, store, one_way, transports="ucx,tcp")  # type: ignore[no-any-return]


def one_way(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> tuple[bool, Any, Any]:
    count, before = 300_000, cuda_ucx.device_traffic()
    array = DoubleArray(gpu, of_rank(comm, comm.rank, count), stream)
    if comm.rank == 1:
        comm.send(array, 0)
        return True, direct_since(before), staged(comm)
    comm.recv(array, 1)
    return bool((read(gpu, array) == of_rank(comm, 1, count)).all()), direct_since(before), staged(comm)


def test_message_by_another_transport_is_copied_to_the_device(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run_calls(without_ucx, str(tmp_path / "store"))
    assert results == [(True, (0, 0), (0, 1_200_000)), (True, (0, 0), (1_200_000, 0))]


# --- order ---------------------------------------------------------------------------------------------------------


def unordered(comm: un.Communicator, gpu: GpuDouble, stream: Stream, rank: int) -> bool:
    """Send from rank 0 to rank 1, where one of the two does not wait for its device."""
    skipped = mock.patch.object(point_to_point, "_await_streams")
    with skipped if comm.rank == rank else nullcontext():
        array = DoubleArray(gpu, of_rank(comm, comm.rank, 50_000), stream)
        comm.send(array, 1) if comm.rank == 0 else comm.recv(array, 0)
        comm.barrier()
    return bool((read(gpu, array) == of_rank(comm, 0, 50_000)).all())


@pytest.mark.parametrize("rank", [0, 1, None])
def test_device_message_is_wrong_when_either_side_skips_its_stream(
    run: Callable[..., list[Any]], rank: int | None
) -> None:
    assert run(unordered, rank, background=False) == [True, rank is None]


def going_on(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> list[bool]:
    peer, count = 1 - comm.rank, 500_000
    outs = [DoubleArray(gpu, np.zeros(count, np.int32), stream) for _ in range(3)]
    receiving = [comm.recv(out, peer, tag, wait=False) for tag, out in enumerate(outs)]
    assert not any(work.done() for work in receiving)
    comm.barrier()
    sending = [
        comm.send(DoubleArray(gpu, of_rank(comm, tag, count), stream), peer, tag, wait=False) for tag in range(3)
    ]
    assert receiving[1].synchronize() is outs[1]
    assert receiving[1].done()
    assert receiving[0].wait() is outs[0]
    until = time.monotonic() + DEADLINE_S
    while not receiving[2].done() and time.monotonic() < until:
        time.sleep(0.001)
    assert receiving[2].result() is outs[2]
    message = receiving[2].message()
    assert message is not None
    assert (message.source, message.tag, message.count) == (peer, 2, count)
    for work in sending:
        work.wait()
    assert staged(comm) == (0, 0)
    return [bool((read(gpu, out) == of_rank(comm, tag, count)).all()) for tag, out in enumerate(outs)]


def test_device_messages_progress_without_waiting(run: Callable[..., list[Any]]) -> None:
    assert run(going_on) == [[True] * 3] * 2


def synchronized(comm: un.Communicator, gpu: GpuDouble, stream: Stream, tag: int) -> tuple[int, int]:
    """Receive into device memory, call `synchronize`, and read the memory on the host without any device work.

    With tag 1, the message has been buffered before, because the rank receives the later one first.
    """
    count = 100_000
    if comm.rank == 0:
        for number in (1, 2):
            comm.send(np.full(count, number, np.int32), 1, number)
        return 0, 0
    out = DoubleArray(gpu, np.zeros(count, np.int32), stream)
    if tag == 1:
        comm.recv(np.zeros(count, np.int32), 0, 2)
    assert comm.recv(out, 0, tag, wait=False).synchronize() is out
    result = gpu.view(out.__cuda_array_interface__["data"][0], 4 * count).view(np.int32)
    if tag == 2:
        comm.recv(np.zeros(count, np.int32), 0, 1)
    return int(result.min()), int(result.max())


@pytest.mark.parametrize("transports", ["ucx", "tcp"])
@pytest.mark.parametrize("tag", [1, 2])
def test_host_sees_received_data_after_synchronize(run: Callable[..., list[Any]], tag: int, transports: str) -> None:
    assert run(synchronized, tag, transports=transports, background=False)[1] == (tag, tag)


def grouped(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> tuple[bool, Any]:
    peer, count = 1 - comm.rank, 100_000
    x = DoubleArray(gpu, of_rank(comm, comm.rank, count), stream)
    out = DoubleArray(gpu, np.zeros(count, np.int32), stream)
    with comm.group():
        comm.send(x, peer)
        work = comm.recv(out, peer)
    assert work.wait() is out
    return bool((read(gpu, out) == of_rank(comm, peer, count)).all()), staged(comm)


def test_device_messages_work_in_a_group(run: Callable[..., list[Any]]) -> None:
    assert run(grouped) == [(True, (0, 0))] * 2


def dropped(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> tuple[int, int]:
    """Drop all arrays while messages are in flight. The double traps a use of memory that has been freed."""
    peer = 1 - comm.rank
    for _ in range(5):
        comm.recv(DoubleArray(gpu, np.zeros(500_000), stream), peer, wait=False)
        comm.send(DoubleArray(gpu, np.ones(500_000), stream), peer, wait=False)
    comm.sendrecv(np.zeros(1), peer, np.zeros(1), peer, 1)
    return staged(comm)


def test_device_arrays_live_until_their_messages_end(run: Callable[..., list[Any]]) -> None:
    assert run(dropped) == [(0, 0)] * 2


class Allocated:
    """An array in memory of the driver, not of the double's own allocator."""

    def __init__(self, device: Device, values: Any) -> None:
        self._pinned = device.pin(values.nbytes)
        self._pinned[:] = values.view(np.uint8)
        self.memory = device.allocate(values.nbytes)
        self.dtype, self.shape = values.dtype, values.shape
        device.copy(self.memory.pointer, self._pinned.ctypes.data, values.nbytes, LEGACY_STREAM)
        self.__cuda_array_interface__ = {
            "data": (self.memory.pointer, False),
            "shape": self.shape,
            "strides": None,
            "typestr": self.dtype.str,
            "stream": int(LEGACY_STREAM),
            "version": 3,
        }

    def values(self, device: Device) -> Any:
        copied = device.pin(self._pinned.nbytes)
        event = device.new_event()
        device.copy(copied.ctypes.data, self.memory.pointer, copied.nbytes, LEGACY_STREAM)
        device.record(event, LEGACY_STREAM)
        await_event(device, event, Deadline(DEADLINE_S))
        return copied.view(self.dtype)


def by_the_driver(world: un.Communicator, store: str) -> tuple[bool, tuple[int, int]]:
    peer, count, device = 1 - world.rank, 500_000, devices.device_of(0)
    with cuda_ucx.cuda_support(), cuda_ucx.joined(world, store) as comm:
        x, out = Allocated(device, of_rank(comm, comm.rank, count)), Allocated(device, np.zeros(count, np.int32))
        for _ in range(3):
            receiving = comm.recv(out, peer, wait=False)
            comm.send(x, peer, wait=False).wait()
            receiving.wait()
        assert cuda_ucx.device_traffic() == (12 * count, 12 * count)
        return bool((out.values(device) == of_rank(comm, peer, count)).all()), cuda_ucx.calls_after_device_memory()


def test_every_thread_that_enters_ucx_has_a_cuda_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("ucx")
    fake_cuda.use(monkeypatch)
    with start_ranks(2, "shm") as ranks:
        for is_right, (entries, without_context) in ranks.run_calls(by_the_driver, str(tmp_path / "store")):
            assert is_right
            assert entries > 6
            assert without_context == 0


# --- failures ------------------------------------------------------------------------------------------------------


def late_device(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> list[str]:
    """Make calls while the device does no work."""
    results = []
    array = DoubleArray(gpu, np.zeros(100_000), stream)
    for call in (comm.send, comm.recv):
        with mock.patch.object(type(gpu.device()), "done", return_value=False):
            try:
                call(array, 1 - comm.rank, timeout_s=0.1)
            except un.CollectiveTimeoutError as error:
                results.append(error.message)
    comm.sendrecv(array, 1 - comm.rank, DoubleArray(gpu, np.ones(100_000), stream), 1 - comm.rank)
    return results


def test_late_device_times_out_before_its_message_is_sent(run: Callable[..., list[Any]]) -> None:
    for send, receive in run(late_device):
        assert "has not finished its earlier work in time" in send
        assert "has not finished its earlier work in time" in receive


def failing(
    world: un.Communicator, say: Callable[[Any], None], store: str, body: Callable[..., None], *args: Any
) -> None:
    """Report "ready", then the error of `body`. The memory of a failed message may never be freed."""
    gpu = GpuDouble(world.rank, background=False)
    with cuda_ucx.cuda_support(), devices.replaced(gpu.device), cuda_ucx.joined(world, store) as comm:
        try:
            body(comm, gpu, gpu.device().new_stream(), lambda: say("ready"), *args)
        except un.UnisonoError as error:
            say((type(error).__name__, str(error), staged(comm)))


def unlike(
    comm: un.Communicator, gpu: GpuDouble, stream: Stream, ready: Callable[[], None], dtype: str, count: int
) -> None:
    array = np.zeros(count, dtype) if comm.rank else np.zeros(100_000, np.float32)
    on_device = DoubleArray(gpu, array, stream)
    ready()
    comm.recv(on_device, 0) if comm.rank else comm.send(on_device, 1)
    comm.barrier()


@pytest.mark.parametrize(("dtype", "count"), [("float32", 99_999), ("int32", 100_000), ("float32", 10)])
def test_device_message_of_wrong_dtype_or_count_is_a_mismatch(tmp_path: Path, dtype: str, count: int) -> None:
    require("ucx")
    with Job(failing, 2, tmp_path, str(tmp_path / "inner"), unlike, dtype, count, transports="tcp") as job:
        job.hear_all()
        for kind, text, _ in job.hear_all():
            assert kind == "MismatchError"
            assert f"{dtype}[{count}] is to be received" in text


def until_the_end(
    comm: un.Communicator, gpu: GpuDouble, stream: Stream, ready: Callable[[], None], sends: bool
) -> None:
    array, first = (DoubleArray(gpu, np.zeros(count), stream) for count in (8 << 20, 100_000))
    if sends:  # this opens the channel, because without it the array would be copied to the host
        comm.recv(first, 0) if comm.rank else comm.send(first, 1)
    comm.barrier()
    ready()
    if comm.rank == 1:
        time.sleep(DEADLINE_S)
    comm.send(array, 1) if sends else comm.recv(array, 1)


@pytest.mark.parametrize("sends", [True, False])
def test_killed_peer_of_a_device_message_is_lost(tmp_path: Path, sends: bool) -> None:
    require("ucx")
    with Job(failing, 2, tmp_path, str(tmp_path / "inner"), until_the_end, sends, transports="tcp") as job:
        job.hear_all()
        time.sleep(0.2)
        job.signal(1, signal.SIGKILL)
        kind, text, by_host = job.hear(0)
    assert (kind, by_host) == ("PeerLostError", (0, 0))
    assert "rank 1" in text
