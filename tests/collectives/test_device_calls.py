"""Calls on arrays of a GPU double: the order of streams, the lifetime of arrays, failures and refusals."""

from __future__ import annotations

import gc
import itertools
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np
import pytest
from support.array_kinds import WithCudaInterface
from support.deadlines import DEADLINE_S
from support.outcomes import error_of
from support.ranks import Job, Ranks, ranks_fixture

import unisono as un
from unisono.collectives.arrays.dlpack import from_dlpack
from unisono.collectives.device import adapters, point_to_point, work
from unisono.collectives.device.result_array import DeviceArray
from unisono.testing.device_arrays import DoubleArray, device_double, read
from unisono.testing.device_double import DeviceDouble, DeviceTrapError, GpuDouble
from unisono.transports.cuda import devices
from unisono.transports.cuda.device import LEGACY_STREAM, THREAD_STREAM, Stream
from unisono.transports.executors.native import NativeExecutor

pytestmark = pytest.mark.timeout(120)

WAYS = {"staged": "shm", "by IPC": "cuda_ipc,shm"}


ranks = ranks_fixture(*[(2, WAYS[kind]) for kind in WAYS])


by_ipc = ranks_fixture((2, WAYS["by IPC"]))


def on_double(world: un.Communicator, body: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
    """Return ``body(comm, gpu, stream, *args)`` on a new double.

    `arguments` go to the double, which frees all arrays at the end.
    """
    with device_double(**arguments) as gpu:
        stream = gpu.device().new_stream()
        with world.dup() as comm:
            result = body(comm, gpu, stream, *args)
        gc.collect()
        gpu.device().end_stream(stream)
    return result


# --- a device that fails ---------------------------------------------------------------------------------------------


def lost_context(world: un.Communicator) -> tuple[str, list[str]]:
    """Let a kernel of the program end the context, close the communicator, and return the error and its threads."""
    gpu = GpuDouble()
    with devices.replaced(gpu.device):
        stream = gpu.device().new_stream()
        x = DoubleArray(gpu, np.ones(100), stream)
        if world.rank == 0:
            world.send(x, 1)
        else:
            world.recv(x, 0)
        world.allreduce(x)
        work = world.allreduce(x, wait=False)
        work.wait()
        world.barrier()
        gpu.lose()
        kind, _ = error_of(work.synchronize)
        assert work.done()
        world.close()
    gpu.close()
    return kind, [thread.name for thread in threading.enumerate() if "listener" in thread.name]


@pytest.mark.parametrize("way", WAYS.values())
def test_communicator_closes_when_a_kernel_of_the_program_has_ended_the_context(way: str) -> None:
    results = un.launch(lost_context, 2, options=un.Options(transports=way), timeout_s=DEADLINE_S)
    assert results == [("TransportUnavailableError", [])] * 2


# --- streams -------------------------------------------------------------------------------------------------------


@pytest.fixture
def launched_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def outcome_without(method: str, index: int) -> str:
    """Make a call on a device that omits the `index`-th call of `method`.

    Return "right", "wrong", or the class of the error.
    """
    gc.collect()  # the end of arrays of earlier tests would be counted
    left, whole = [index], getattr(DeviceDouble, method)

    def leaves_one_out(self: DeviceDouble, *args: Any) -> Any:
        left[0] -= 1
        return None if left[0] == -1 else whole(self, *args)

    gpu = GpuDouble(3, background=False)
    try:
        with devices.replaced(gpu.device), un.init(un.Options(transports="shm")) as world:
            stream = gpu.device().new_stream()
            x, out = (DoubleArray(gpu, np.full(1000, value), stream) for value in (5.0, 6.0))
            with mock.patch.object(DeviceDouble, method, leaves_one_out):
                world.allreduce(x, out=out)
            return "right" if (read(gpu, out) == 5.0).all() else "wrong"
    except (DeviceTrapError, un.UnisonoError) as error:
        return type(error).__name__
    finally:
        with suppress(DeviceTrapError):
            gpu.close()


# The waits and records of the copies before the caller's stream and after it, and the record of the first copy.
@pytest.mark.parametrize(("method", "index"), [("wait", 0), ("wait", 1), ("record", 0), ("record", 1), ("record", 3)])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_device_call_goes_wrong_without_any_stream_wait_or_record(
    launched_alone: None, method: str, index: int
) -> None:
    assert outcome_without(method, 99) == "right"
    assert outcome_without(method, index) in ("wrong", "DeviceTrapError", "AbortedError")


def later_work(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> list[Any]:
    x = DoubleArray(gpu, np.arange(3000.0), stream)
    works = [comm.allreduce(x, op, wait=False) for op in ("sum", "max")]
    results = [read(gpu, work.wait()).sum() for work in works]
    late = comm.broadcast(x, root=1, wait=False)
    late.synchronize()
    assert late.done()
    results.append(read(gpu, late.result()).sum())
    return results


def test_device_works_order_the_stream_and_synchronize_the_host(ranks: Ranks) -> None:
    total = np.arange(3000.0).sum()
    assert ranks.run_calls(on_double, later_work) == [[2 * total, total, total]] * 2


def compiled_by_calls(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> list[int]:
    """Return how many calls on the host were compiled by each of some calls on device arrays."""
    x, y = (DoubleArray(gpu, np.ones(count, np.float32), stream) for count in (3, 4))
    compile_anew, counts = NativeExecutor._compile_anew, []
    with mock.patch.object(NativeExecutor, "_compile_anew", autospec=True, side_effect=compile_anew) as compiled:
        for array in (x, x, y, x, y):
            before = compiled.call_count
            comm.allreduce(array)
            counts.append(compiled.call_count - before)
    return counts


def test_repeated_device_calls_are_announced_without_compiling_again(by_ipc: Ranks) -> None:
    for first, *others in by_ipc.run_calls(on_double, compiled_by_calls):
        assert first >= 1
        assert others == [0, 1, 0, 0]


def overtaken(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> list[Any]:
    """Start calls on a device, and make a call on the host before they end. The order is the same on all ranks."""
    x = DoubleArray(gpu, np.full(5, 1.0 + comm.rank), stream)
    work = comm.allreduce(x, wait=False)
    between = comm.allreduce(np.ones(2))
    again = comm.allreduce(x, "max")
    return [between.tolist(), read(gpu, again).tolist(), read(gpu, work.wait()).tolist()]


def test_host_calls_may_be_made_between_device_calls(ranks: Ranks) -> None:
    assert ranks.run_calls(on_double, overtaken) == [[[2.0] * 2, [2.0] * 5, [3.0] * 5]] * 2


def by_several_streams(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> list[Any]:
    x = DoubleArray(gpu, np.ones(100), LEGACY_STREAM)
    out = DoubleArray(gpu, np.zeros(100), stream)
    mine = DoubleArray(gpu, np.ones(100), THREAD_STREAM)
    comm.allreduce(x, out=out)
    return [read(gpu, out).sum(), read(gpu, comm.allreduce(mine)).sum()]


def test_device_arrays_of_one_call_may_be_used_on_several_streams(ranks: Ranks) -> None:
    assert ranks.run_calls(on_double, by_several_streams) == [[200.0, 200.0]] * 2


# --- lifetime of arrays --------------------------------------------------------------------------------------------


def dropped(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> None:
    """Drop all arrays while the device uses them. The double traps a use of memory that has been freed."""
    for _ in range(5):
        comm.allreduce(DoubleArray(gpu, np.ones(5000), stream))
        comm.allreduce(DoubleArray(gpu, np.ones(5000), stream), wait=False)
    # this call ends after the calls for which no thread has waited
    comm.allreduce(DoubleArray(gpu, np.ones(1), stream))
    gc.collect()


def test_device_arrays_live_until_the_device_has_used_them(ranks: Ranks) -> None:
    ranks.run_calls(on_double, dropped)


def results_of(comm: un.Communicator, gpu: GpuDouble, stream: Stream, use: str) -> list[str]:
    """Drop results that were used in some way; return by which methods of the device their memory was given back."""
    x, other = DoubleArray(gpu, np.ones(1000), stream), gpu.device().new_stream()
    released = []
    with mock.patch.object(
        GpuDouble,
        "give",
        lambda *args: (released.append("all work" if args[2] is None else len(args[2])), give(*args))[1],
    ):
        for _ in range(3):
            y = comm.allreduce(x)
            if use == "by a call":
                comm.allreduce(y, out=x)
            elif use == "on the legacy stream":
                y.__dlpack__()
            elif use == "on another stream":
                y.__dlpack__(stream=int(other))
                gpu.device().copy(x.__cuda_array_interface__["data"][0], y.memory().pointer, 8, other)
                wait_for(gpu.device(), stream, other)
            elif use == "on a stream that is not known":
                y.__cuda_array_interface__  # noqa: B018
            del y
            gpu.synchronize()
            comm.barrier()
            comm.allreduce(x, out=x)  # drops the arrays of calls that are over
        gc.collect()
    read(gpu, x)  # waits for both streams
    gpu.device().end_stream(other)
    return released


give = GpuDouble.give


def wait_for(device: Any, later: Stream, earlier: Stream) -> None:
    event = device.new_event()
    device.record(event, earlier)
    device.wait(later, event)
    device.end_event(event)


@pytest.mark.parametrize(("use", "events"), [("", 1), ("by a call", 1), ("on the legacy stream", 2)])
def test_device_results_are_freed_behind_events(by_ipc: Ranks, use: str, events: int) -> None:
    for released in by_ipc.run_calls(on_double, results_of, use):
        assert set(released) == {events}


@pytest.mark.parametrize("use", ["on another stream", "on a stream that is not known"])
def test_device_results_with_unknown_users_wait_for_the_whole_device(by_ipc: Ranks, use: str) -> None:
    for released in by_ipc.run_calls(on_double, results_of, use):
        assert set(released) == {"all work"}


def outliving_its_stream(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> Any:
    device = gpu.device()
    own = device.new_stream()
    x = DoubleArray(gpu, np.arange(6.0), own)
    y = comm.allreduce(x)
    read(gpu, x)
    del x
    gc.collect()
    comm.allreduce(DoubleArray(gpu, np.ones(1), stream))  # drops the arrays of calls that are over
    gc.collect()
    device.end_stream(own)  # any later use of it is a trap
    return read(gpu, comm.allreduce(y)).tolist(), y.stream == device.lasting_stream()


def test_device_results_may_outlive_the_stream_of_the_call(by_ipc: Ranks) -> None:
    for values, is_lasting in by_ipc.run_calls(on_double, outliving_its_stream):
        assert values == [4 * number for number in range(6)]
        assert is_lasting


@pytest.mark.parametrize(
    ("arguments", "exports"),
    [
        *(({"copy": True}, False), ({"dl_device": (1, 0)}, False), ({"dl_device": (2, 1)}, False)),
        *(({"copy": False, "dl_device": (2, 0)}, True), ({"copy": None, "max_version": (1, 0)}, True)),
    ],
)
def test_device_results_refuse_to_copy_themselves_or_to_other_places(
    arguments: dict[str, Any], *, exports: bool
) -> None:
    with device_double() as gpu:
        y = DeviceArray.empty((3,), np.dtype("f4"), None, gpu.device(), LEGACY_STREAM)
        if exports:
            y.__dlpack__(**arguments)
        else:
            with pytest.raises(BufferError, match="without a copy and on its device"):
                y.__dlpack__(**arguments)
        del y
        gc.collect()


def on_a_double_without_a_pool(world: un.Communicator) -> Any:
    return on_double(world, of_kind, "device", pool=False)


def test_devices_without_a_pool_give_results(by_ipc: Ranks) -> None:
    assert by_ipc.run_calls(on_a_double_without_a_pool) == [200.0] * 2


def passed_by_dlpack(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> Any:
    y = comm.allreduce(DoubleArray(gpu, np.arange(6.0).reshape(2, 3), stream))
    assert isinstance(y, DeviceArray)
    z = comm.allreduce(OnlyDlpack(y))
    capsule = y.__dlpack__(stream=-1)  # no consumer takes the capsule
    memory = from_dlpack(y, "y", stream=int(stream))
    assert (memory.pointer, memory.shape) == (y.__cuda_array_interface__["data"][0], (2, 3))
    del capsule, memory
    return read(gpu, z).tolist()


class OnlyDlpack:
    """An array whose only interface is DLPack."""

    def __init__(self, inner: Any) -> None:
        self.__dlpack__ = inner.__dlpack__
        self.__dlpack_device__ = inner.__dlpack_device__


def test_device_arrays_are_accepted_by_dlpack(ranks: Ranks) -> None:
    assert ranks.run_calls(on_double, passed_by_dlpack) == [(4 * np.arange(6.0).reshape(2, 3)).tolist()] * 2


def of_kind(comm: un.Communicator, gpu: GpuDouble, stream: Stream, kind: str) -> float:
    return float(read(gpu, comm.allreduce(DoubleArray(gpu, np.ones(100), stream, kind))).sum())


@pytest.mark.parametrize("kind", ["pooled", "managed"])
def test_pooled_and_managed_device_memory_is_accepted(ranks: Ranks, kind: str) -> None:
    assert ranks.run_calls(on_double, of_kind, kind) == [200.0] * 2


def rests(gpu: GpuDouble) -> None:
    """Let a device do no further work, not even when the host queries an event."""
    gpu._schedule.run_some = lambda: None  # type: ignore[method-assign]


class FreedWhenUnreferenced:
    """An array whose memory is freed as soon as no object holds it, even if a stream still uses it."""

    def __init__(self, gpu: GpuDouble, count: int, stream: Stream) -> None:
        self._device, self._memory = gpu.device(), gpu.memory(8 * count)
        data = (self._memory.pointer, False)
        self.__cuda_array_interface__ = {
            **{"data": data, "shape": (count,), "typestr": "<f8", "stream": int(stream), "version": 3}
        }

    def __del__(self) -> None:
        self._device.free(self._memory)


def test_device_arrays_in_use_outlive_an_unclosed_communicator(launched_alone: None) -> None:
    gpu, trapped = GpuDouble(1, background=False), list[str]()
    hear = mock.patch.object(sys, "unraisablehook", lambda unraised: trapped.append(repr(unraised.exc_value)))
    with devices.replaced(gpu.device), hear:
        stream, world = gpu.device().new_stream(), un.init(un.Options(transports="shm"))
        x = FreedWhenUnreferenced(gpu, 300_000, stream)
        array, communicator = weakref.ref(x), weakref.ref(world)
        world.allreduce(x, out=x)
        rests(gpu)
        del x, world
        gc.collect()
        assert communicator() is None
        assert array() is not None
        gpu.synchronize()
        work.keep_late([])
        assert array() is None
        assert trapped == []
    gpu.close()


def given_up(world: un.Communicator) -> list[str]:
    """Let a send time out before the device has copied any data; return the traps of the double."""
    gpu, trapped = GpuDouble(1, background=False), list[str]()
    hear = mock.patch.object(sys, "unraisablehook", lambda unraised: trapped.append(repr(unraised.exc_value)))

    def is_late(*_: Any) -> None:
        raise un.CollectiveTimeoutError("it is late")

    late = mock.patch.object(point_to_point, "await_event", is_late)
    with devices.replaced(gpu.device), hear, world.dup() as comm:
        stream = gpu.device().new_stream()
        with late, pytest.raises(un.CollectiveTimeoutError):
            comm.send(FreedWhenUnreferenced(gpu, 300_000, stream), 1 - comm.rank)
        gc.collect()
    return trapped


def test_abandoned_device_send_frees_no_memory_in_use(by_ipc: Ranks) -> None:
    assert by_ipc.run_calls(given_up) == [[], []]


def lost_at_work(world: un.Communicator, say: Callable[[Any], None], gives_up: bool) -> None:
    """Call until a rank is killed, then free all arrays. Report the error of the call and the traps of the double."""
    gpu, trapped = GpuDouble(world.rank, gives_up=gives_up), list[str]()
    sys.unraisablehook = lambda unraised: trapped.append(repr(unraised.exc_value))
    error = ""
    with devices.replaced(gpu.device):
        stream, comm = gpu.device().new_stream(), world.dup()
        try:
            for number in itertools.count():
                comm.allreduce(
                    FreedWhenUnreferenced(gpu, 300_000, stream),
                    out=FreedWhenUnreferenced(gpu, 300_000, stream),
                    timeout_s=DEADLINE_S,
                )
                if number == 1:
                    say("ready")
        except un.UnisonoError as caught:
            error = f"{type(caught).__name__}: {caught}"
        comm.close()
        del comm
        gc.collect()
        say((error, trapped))


@pytest.mark.parametrize("gives_up", [True, False], ids=["given up", "never done"])
@pytest.mark.parametrize("transports", WAYS.values(), ids=WAYS)
def test_death_of_a_rank_frees_no_device_array_in_use(tmp_path: Path, transports: str, *, gives_up: bool) -> None:
    with Job(lost_at_work, 3, tmp_path, gives_up, transports=transports) as job:
        job.hear_all()
        job.signal(1, signal.SIGKILL)
        for error, trapped in job.hear_all(but=1):
            assert error.startswith("PeerLostError"), error
            assert "rank 1" in error
            assert trapped == []
        job.exit_code(1)


def wait_for_work_that_is_never_done(world: un.Communicator, say: Callable[[Any], None]) -> None:
    """Start a call whose work the device of rank 1 never does; report the error of the wait."""
    gpu = GpuDouble(world.rank, background=world.rank == 0, gives_up=False)
    if world.rank == 1:
        rests(gpu)
    with devices.replaced(gpu.device):
        stream = gpu.device().new_stream()
        work = world.allreduce(FreedWhenUnreferenced(gpu, 1000, stream), wait=False)
        work.wait()
        say("issued")
        try:
            work.synchronize(DEADLINE_S)
        except un.UnisonoError as error:
            say(type(error).__name__)
        world.close()


def test_device_work_of_a_killed_rank_is_not_waited_for(tmp_path: Path) -> None:
    with Job(wait_for_work_that_is_never_done, 2, tmp_path, transports=WAYS["by IPC"]) as job:
        job.hear_all()
        job.signal(1, signal.SIGKILL)
        assert job.hear(0) == "PeerLostError"
        job.exit_code(1)


# --- messages, plans and groups ------------------------------------------------------------------------------------


def messages(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> list[Any]:
    peer = 1 - comm.rank
    x, out = DoubleArray(gpu, np.full(9, comm.rank), stream), DoubleArray(gpu, np.zeros(9, int), stream)
    assert comm.sendrecv(x, peer, out, peer) is out
    results = [read(gpu, out)[0]]
    receiving = comm.recv(out, un.ANY_SOURCE, 5, wait=False)
    sent = comm.send(x, peer, 5, wait=False)
    results.append(read(gpu, receiving.wait())[8])
    sent.wait()
    with comm.group():
        comm.send(np.full(9, 7), peer)
        comm.recv(out, peer)
    return [*results, read(gpu, out)[4]]


def test_messages_go_between_devices_and_from_host_to_device(by_ipc: Ranks) -> None:
    assert by_ipc.run_calls(on_double, messages) == [[1, 1, 7], [0, 0, 7]]


def planned(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> list[Any]:
    x = DoubleArray(gpu, np.ones(4), stream)
    double = comm.plan("allreduce", x, out=x)
    results = []
    for wait in (True, False, True):
        result = double(wait=wait)
        results.append(read(gpu, result if wait else result.wait()).tolist()[0])
    del double, result
    return results


def test_persistent_call_on_device_arrays_runs_repeatedly(ranks: Ranks) -> None:
    assert ranks.run_calls(on_double, planned) == [[2.0, 4.0, 8.0]] * 2


def several(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> list[Any]:
    x, y = DoubleArray(gpu, np.ones(4), stream), DoubleArray(gpu, np.full(3, comm.rank), stream)
    total, most = comm.allreduce([x, y])
    with comm.group():
        both = [comm.allreduce(x), comm.allreduce(y, "max"), comm.allgather(y)]
    results = [total, most, *(work.wait() for work in both)]
    del both
    return [read(gpu, result).tolist() for result in results]


def test_device_arrays_work_in_lists_and_groups(ranks: Ranks) -> None:
    assert ranks.run_calls(on_double, several) == [[[2.0] * 4, [1] * 3, [2.0] * 4, [1] * 3, [0] * 3 + [1] * 3]] * 2


def function_and_factor(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> list[Any]:
    x = DoubleArray(gpu, np.full(3, 2.0 + comm.rank), stream)
    product = comm.allreduce(x, un.Op.from_function(np.multiply, commutative=True))
    scaled = comm.allreduce(x, un.Op.premul_sum(0.5))
    return [read(gpu, product).tolist(), read(gpu, scaled).tolist()]


def test_device_calls_accept_custom_ops_and_factors(ranks: Ranks) -> None:
    assert ranks.run_calls(on_double, function_and_factor) == [[[6.0] * 3, [2.5] * 3]] * 2


# --- cuda_ipc or staging -------------------------------------------------------------------------------------------


def route_of_a_call(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> tuple[str, bool, bool]:
    y = comm.allreduce(DoubleArray(gpu, np.ones(100), stream))
    assert read(gpu, y).sum() == 200
    stats = comm.stats().on_device
    nbytes = sum(traffic.sent_nbytes + traffic.received_nbytes for traffic in stats.by_ipc.values())
    assert stats.to_host_nbytes == stats.to_device_nbytes
    return comm.explain("allreduce", 800).on_device, nbytes > 0, stats.to_host_nbytes == 800


def elsewhere(world: un.Communicator) -> tuple[str, bool, bool]:
    return on_double(world, route_of_a_call, uuid=f"double-{world.rank}")


def without_handles(world: un.Communicator) -> tuple[str, bool, bool]:
    return on_double(world, route_of_a_call, exports=False)


def test_explain_says_what_carries_device_arrays(ranks: Ranks) -> None:
    way, by_ipc, by_host = ranks.run_calls(on_double, route_of_a_call)[0]
    assert (way == "cuda_ipc by one_shot, chosen by tier 'rule'", "not among the transports" in way) == (
        by_ipc,
        by_host,
    )
    assert by_ipc != by_host


@pytest.mark.parametrize(("fn", "why"), [(elsewhere, "cannot be reached"), (without_handles, "cannot export")])
def test_devices_that_cannot_share_memory_are_staged(by_ipc: Ranks, fn: Callable[..., Any], why: str) -> None:
    for way, went_by_ipc, went_by_host in by_ipc.run_calls(fn):
        assert why in way
        assert (went_by_ipc, went_by_host) == (False, True)


# --- refusals and failures -----------------------------------------------------------------------------------------


def wrong(comm: un.Communicator, gpu: GpuDouble, stream: Stream, what: str) -> str:
    x = DoubleArray(gpu, np.ones((2, 3)), stream)
    if what == "captured":
        gpu.capture(stream)
    arguments = {
        "captured": {"x": x},
        "host": {"x": x, "out": np.zeros((2, 3))},
        "strided": {"x": x, "out": Changed(x, strides=(48, 8))},
        "packed": {"x": Changed(x, strides=(48, 8))},
        "mask": {"x": Changed(x, mask=np.zeros(6, bool))},
        "read-only": {"x": x, "out": Changed(x, data=(x.__cuda_array_interface__["data"][0], True))},
        "misaligned": {"x": x, "out": Changed(x, data=(x.__cuda_array_interface__["data"][0] + 4, False))},
        "no address of a device": {"x": Changed(x, data=(np.zeros(6).ctypes.data, False))},
    }[what]
    try:
        comm.allreduce(**arguments)
    except un.UsageError as error:
        return str(error)
    finally:
        if what == "captured":
            gpu.capture(stream, is_capturing=False)
        comm.allreduce(x)
    return "nothing"


class Changed:
    """An array whose CUDA array interface has changed entries."""

    def __init__(self, inner: Any, **changes: Any) -> None:
        self.inner = inner
        self.__cuda_array_interface__ = {**inner.__cuda_array_interface__, **changes}


WRONG = {
    "captured": "captured into a graph",
    "host": "out is on another device than the other arrays of this call",
    "strided": "out is not contiguous",
    "packed": "x is not contiguous, and only its library could pack it",
    "mask": "masks are not reduced",
    "read-only": "out is read-only",
    "misaligned": "out is not aligned: its elements do not begin at multiples of 8 bytes",
    "no address of a device": "its address is one of the host",
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_device_call_is_refused_and_later_calls_work(by_ipc: Ranks, what: str) -> None:
    for error in by_ipc.run_calls(on_double, wrong, what):
        assert WRONG[what] in error


def on_different_memory(world: un.Communicator, say: Callable[[Any], None]) -> None:
    gpu = GpuDouble()
    with devices.replaced(gpu.device):
        stream = gpu.device().new_stream()
        x = np.ones(5) if world.rank == 0 else DoubleArray(gpu, np.ones(5), stream)
        try:
            world.allreduce(x, timeout_s=20.0)
        except un.UnisonoError as error:
            say((type(error).__name__, str(error)))
        world.close()


def test_host_array_on_one_rank_and_device_array_on_another_is_a_mismatch(tmp_path: Any) -> None:
    with Job(on_different_memory, 2, tmp_path) as job:
        results = job.hear_all()
    assert {kind for kind, _ in results} == {"MismatchError"}
    assert "allreduce(float64[5], op=sum, on a device)" in results[0][1]


def two_devices(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> list[str]:
    x, y = DoubleArray(gpu, np.ones(4), stream), DoubleArray(gpu, np.ones(4), stream)
    comm.allreduce(x)
    there = y.__cuda_array_interface__["data"][0]
    facts_of, errors = adapters.facts_of, []
    with mock.patch.object(
        adapters, "facts_of", lambda at, _: replace(facts_of(at, 0), ordinal=1 if at == there else 0)
    ):
        for arguments in ({"x": y, "out": y}, {"x": x, "out": y}):
            try:
                comm.allreduce(**arguments)
            except un.UsageError as error:
                errors.append(error.message)
    return errors


def test_communicator_refuses_arrays_on_a_second_device(by_ipc: Ranks) -> None:
    for now, both in by_ipc.run_calls(on_double, two_devices):
        assert "the arrays are on cuda:1, but this communicator uses cuda:0" in now
        assert "out is on cuda:1, but another array is on cuda:0" in both


def test_device_call_without_a_driver_says_so(launched_alone: None) -> None:
    def no_driver(ordinal: int) -> Any:
        raise un.TransportUnavailableError("there is no driver")

    with devices.replaced(no_driver), un.init() as world:
        for call in (
            lambda: world.allreduce(WithCudaInterface(np.ones(3))),
            lambda: world.plan("allreduce", WithCudaInterface(np.ones(3))),
        ):
            with pytest.raises(
                un.TransportUnavailableError, match=r"x is on the device cuda, .*there is no driver.*copy it"
            ):
                call()


# --- libraries -----------------------------------------------------------------------------------------------------


class CupyLikeArray(DoubleArray):
    """An array that behaves as CuPy's arrays do: its stream is CuPy's current stream."""

    __cuda_array_interface__: Any

    def __init__(self, gpu: GpuDouble, values: Any, stream: Stream) -> None:
        super().__init__(gpu, values, stream)
        self._gpu = gpu
        interface = self.__cuda_array_interface__
        self.data, self.device = SimpleNamespace(ptr=interface["data"][0]), SimpleNamespace(id=0)
        self.strides = interface["strides"] or values.strides


def with_cupy(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> list[Any]:
    other = gpu.device().new_stream()
    current = [stream]
    cuda = SimpleNamespace(
        Device=lambda _: nullcontext(), get_current_stream=lambda device: SimpleNamespace(ptr=current[0])
    )

    def empty(shape: Any, dtype: Any) -> CupyLikeArray:
        return CupyLikeArray(gpu, np.zeros(shape, dtype), current[0])

    cupy = SimpleNamespace(ndarray=CupyLikeArray, cuda=cuda, empty=empty, ascontiguousarray=lambda x: x.packed)
    with mock.patch.dict("sys.modules", {"cupy": cupy}):
        x = CupyLikeArray(gpu, np.arange(4, dtype="bfloat16"), stream)
        y = comm.allreduce(x)
        apart = CupyLikeArray(gpu, np.arange(4.0), stream)
        apart.strides, apart.packed = (16,), apart
        apart.shape, apart.packed = (2,), CupyLikeArray(gpu, np.array([0.0, 2.0]), stream)
        z = comm.allreduce(apart)
        work = comm.allreduce(y, wait=False)
        current[0] = other
        late = work.wait()
        late.__cuda_array_interface__["stream"] = int(other)
        results = [type(y).__name__, *(read(gpu, result).tolist() for result in (y, z, late))]
        del late, work
    gpu.synchronize()
    gpu.device().end_stream(other)
    return results


def test_cupy_arrays_use_the_current_stream_and_come_back_as_cupy(by_ipc: Ranks) -> None:
    expected = ["CupyLikeArray", [0, 2, 4, 6], [0.0, 4.0], [0, 4, 8, 12]]
    assert by_ipc.run_calls(on_double, with_cupy) == [expected] * 2


# --- without a GPU -------------------------------------------------------------------------------------------------

WITHOUT = """
import sys
import numpy as np
import unisono as un

with un.init() as world:
    x, other = np.ones(4), 1 - world.rank
    world.allreduce(x, out=x)
    world.allreduce(x, wait=False).wait()
    world.plan("allreduce", x, out=x)()
    with world.group():
        world.broadcast(x)
        world.reduce(x, "max")
    world.send(x, 1) if world.rank == 0 else world.recv(x, 0)
    world.sendrecv(x, other, np.empty_like(x), other)
    assert world.stats().on_device == ({}, 0, 0)
    assert world.explain("allreduce", 800).on_device == ""
parts = ("adapters", "calls", "point_to_point", "routes", "segments", "work")
of_devices = ("unisono.transports.cuda", *("unisono.collectives.device." + part for part in parts))
print("imported", [name for name in sys.modules if name.startswith(of_devices)])
"""


def test_no_device_module_is_imported_before_the_first_device_array(tmp_path: Path) -> None:
    program = tmp_path / "without.py"
    program.write_text(WITHOUT)
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", "--no-label", str(program)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout.splitlines().count("imported []") == 2
