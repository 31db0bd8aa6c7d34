"""Arrays of `un.empty` on a GPU double: plans read them where they lie, in any mixture with other arrays."""

from __future__ import annotations

import gc
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.deadlines import DEADLINE_S
from support.outcomes import error_of
from support.ranks import Job, Ranks, ranks_fixture, start_ranks

import unisono as un
from unisono.collectives.device import registered_arrays
from unisono.collectives.device.result_array import DeviceArray
from unisono.testing.device_arrays import DoubleArray, device_double, read
from unisono.testing.device_double import DeviceDouble, GpuDouble
from unisono.transports.cuda import devices
from unisono.transports.cuda.device import LEGACY_STREAM, Stream
from unisono.transports.cuda.memory.registered import RegisteredBlock, Registry

pytestmark = pytest.mark.timeout(120)

N = 5000


@pytest.fixture(scope="module", params=["flags", "events"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


two = ranks_fixture((2, "cuda_ipc,shm"))


class CountedCopies:
    """Counts the copies that a double is asked for in a with-block, in bytes."""

    def __init__(self) -> None:
        self.nbytes = 0
        copy = DeviceDouble.copy

        def counted(device: DeviceDouble, dst: int, src: int, nbytes: int, stream: Stream) -> None:
            self.nbytes += nbytes
            copy(device, dst, src, nbytes, stream)

        self._patch = mock.patch.object(DeviceDouble, "copy", counted)

    def __enter__(self) -> CountedCopies:
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def filled(gpu: GpuDouble, array: Any, values: Any) -> Any:
    """Write `values` to an array of `un.empty`, on its stream."""
    source = DoubleArray(gpu, np.ascontiguousarray(values), LEGACY_STREAM)
    pointer = source.__cuda_array_interface__["data"][0]
    gpu.device().copy(pointer_of(array), pointer, values.nbytes, LEGACY_STREAM)
    return array


def pointer_of(array: Any) -> int:
    return int(array.data.ptr) if hasattr(array, "data") else array.__cuda_array_interface__["data"][0]


def elements(gpu: GpuDouble, array: Any) -> Any:
    """Return the elements of an array, as the legacy stream sees them now."""
    interface = {
        **{"data": (pointer_of(array), False), "shape": array.shape, "strides": None, "stream": int(LEGACY_STREAM)}
    }
    return read(gpu, SimpleNamespace(dtype=array.dtype, __cuda_array_interface__=interface))


def array_of(gpu: GpuDouble, values: Any, registered: bool) -> Any:
    if not registered:
        return DoubleArray(gpu, values, LEGACY_STREAM)
    with mock.patch.object(registered_arrays, "_cupy", return_value=None):
        array = un.empty(values.shape, values.dtype, device="cuda")
    assert type(array) is DeviceArray
    return filled(gpu, array, values)


def planned(
    world: un.Communicator,
    way: str,
    registered: tuple[tuple[bool, bool], ...],
    name: str,
    algorithm: str | None = None,
) -> Any:
    """Use a plan three times, with new elements each time; return the bytes copied each time, and what was wrong."""
    rng = np.random.default_rng(3)
    copied, wrong = [], []
    with device_double(world.rank + 5, flags=way == "flags") as gpu:
        with world.dup() as comm:
            for turn in range(3):
                values = rng.integers(0, 100, (world.size, world.size, N // world.size)).astype(np.float32)
                expected = getattr(world, name)(values[world.rank])
                if turn == 0:
                    of_input, of_output = registered[world.rank]
                    x = array_of(gpu, values[world.rank], of_input)
                    out = array_of(gpu, np.zeros_like(expected), of_output)
                    plan = comm.plan(name, x, out=out, algorithm=algorithm)
                else:
                    filled(gpu, x, values[world.rank])
                with CountedCopies() as copies:
                    plan()
                copied.append(copies.nbytes)
                wrong += [] if (elements(gpu, out) == expected).all() else [f"turn {turn}"]
            del plan
        del x, out
        gc.collect()
    return copied, wrong


MIXTURES = [
    ((True, True), (True, True)),
    ((True, False), (False, True)),
    ((False, False), (True, True)),
    ((True, True), (False, False)),
]


@pytest.mark.parametrize("name", ["allreduce", "reduce_scatter", "alltoall"])
@pytest.mark.parametrize("registered", MIXTURES)
def test_plans_are_right_for_any_mixture_of_registered_arrays(
    two: Ranks, way: str, registered: tuple[tuple[bool, bool], ...], name: str
) -> None:
    assert [wrong for _, wrong in two.run_calls(planned, way, registered, name)] == [[], []]


@pytest.mark.parametrize(
    ("name", "algorithm", "saved"),
    [
        ("allreduce", "one_shot", 1),
        ("allreduce", "two_shot", 1),
        ("reduce_scatter", None, 0.5),
        ("alltoall", None, 0.5),
    ],
)
def test_plans_on_registered_arrays_need_no_images(
    two: Ranks, way: str, name: str, algorithm: str | None, saved: float
) -> None:
    direct, by_images = (
        two.run_calls(planned, way, ((registered,) * 2,) * 2, name, algorithm)[0][0][-1] for registered in (True, False)
    )
    assert by_images - direct == saved * 4 * N


def of_several_arrays(world: un.Communicator) -> list[Any]:
    """Use a plan on a list of arrays, of which one is registered on one rank, without waiting for the calls."""
    with device_double(world.rank) as gpu:
        with world.dup() as comm:
            arrays = [
                array_of(gpu, np.full(N, value, np.float32), comm.rank == index) for index, value in ((0, 1), (1, 2))
            ]
            plan = comm.plan("allreduce", arrays, out=arrays)
            for _ in range(3):
                plan(wait=False).wait()
            results = [np.unique(elements(gpu, array)).tolist() for array in arrays]
            del plan
        del arrays
        gc.collect()
    return results


def test_plans_on_several_arrays_agree_on_each(two: Ranks) -> None:
    assert two.run_calls(of_several_arrays) == [[[8.0], [16.0]]] * 2


# --- agreement -------------------------------------------------------------------------------------------------------


def disagreeing(world: un.Communicator, say: Any, how: str) -> None:
    """Let ranks make different calls: a plan and a method, or two plans; report the error."""
    with device_double(world.rank) as gpu:
        stream = LEGACY_STREAM
        x, y = (DoubleArray(gpu, np.ones(N), stream) for _ in range(2))
        plans = [world.plan("allreduce", array, out=array) for array in (x, y)]
        for plan in plans:
            plan()
        if how == "another plan":
            say(error_of(plans[world.rank]))
        else:
            say(error_of(plans[0]) if world.rank else error_of(lambda: world.allreduce(x, out=x)))
        world.close()
        del plans, plan


@pytest.mark.parametrize(("how", "words"), [("a method", "as plan 1"), ("another plan", "as plan 2")])
def test_ranks_that_use_different_plans_on_devices_get_a_mismatch(tmp_path: Path, how: str, words: str) -> None:
    with Job(disagreeing, 2, tmp_path, how, transports="cuda_ipc,shm") as job:
        errors = job.hear_all()
    assert {kind for kind, _ in errors} == {"MismatchError"}
    assert any(words in text for _, text in errors)


# --- lifetime --------------------------------------------------------------------------------------------------------


def dropped(world: un.Communicator) -> list[int]:
    """Use an array by plans of two communicators, and drop it; return whether its memory remains after each close."""
    with device_double(world.rank) as gpu:
        first, second = world.dup(), world.dup()
        x = array_of(gpu, np.ones(N, np.float32), True)
        pointer = pointer_of(x)
        for comm in (first, second):
            plan = comm.plan("allreduce", x, out=x)
            plan()
            plan()
        assert (elements(gpu, x) == 16).all()
        del x, plan
        remains = []
        for comm in (first, second):
            comm.close()
            gc.collect()
            remains.append(int(not gpu._regions[pointer].is_gone))
    return remains


def test_registered_memory_lives_until_no_communicator_shows_it(two: Ranks) -> None:
    assert two.run_calls(dropped) == [[1, 0]] * 2


def freed_too_early(world: un.Communicator) -> list[str]:
    """Let an array free its memory although a communicator shows it; return the traps."""
    gpu = GpuDouble(world.rank, background=False)
    with devices.replaced(gpu.device), mock.patch.object(Registry, "hold", without_holding):
        comm = world.dup()
        x = array_of(gpu, np.ones(N, np.float32), True)
        plan = comm.plan("allreduce", x, out=x)
        plan(wait=False).synchronize()
        world.barrier()
        with mock.patch.object(sys, "unraisablehook") as hook:
            if world.rank == 0:
                del x, plan
                comm.allreduce(np.ones(1))
                comm._devices.calls._arriving.clear()
                gc.collect()
            else:
                comm.allreduce(np.ones(1))
        world.barrier()
        return [str(call.args[0].exc_value) for call in hook.call_args_list]


def without_holding(registry: Registry, block: RegisteredBlock) -> bytes:
    return registry._device.export(block.allocation)


def test_double_traps_registered_memory_that_is_freed_while_it_is_shown() -> None:
    with start_ranks(2, "cuda_ipc,shm") as ranks:
        assert "have it open" in str(ranks.run_calls(freed_too_early)[0])


def lost(world: un.Communicator, say: Any) -> None:
    """Use a plan until rank 1 is killed; report the error, and whether memory that rank 1 may have open was kept."""
    gpu = GpuDouble(world.rank)
    with devices.replaced(gpu.device):
        x = array_of(gpu, np.ones(N, np.float32), True)
        plan = world.plan("allreduce", x, out=x)
        plan()
        say("planned")
        if world.rank == 1:
            time.sleep(DEADLINE_S)
        work = plan(wait=False)
        error = error_of(partial(work.synchronize, DEADLINE_S))
        pointer = pointer_of(x)
        world.close()
        del x, plan, work
        gc.collect()
        say((error[0], gpu._regions[pointer].is_gone))


def test_loss_of_a_rank_ends_a_plan_and_keeps_the_memory_that_it_has_open(tmp_path: Path) -> None:
    with Job(lost, 2, tmp_path, transports="cuda_ipc,shm") as job:
        job.hear_all()
        job.signal(1, signal.SIGKILL)
        assert job.hear(0) == ("PeerLostError", False)
        job.exit_code(1)


# --- new arrays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda:", "cuda:x", "cuda:-1", "", 0])
def test_empty_refuses_what_is_no_device(device: Any) -> None:
    with device_double(), pytest.raises(un.UsageError, match="device must be 'cuda' or 'cuda:N'"):
        un.empty(3, "float32", device=device)


def test_empty_without_a_driver_says_so() -> None:
    def no_driver(ordinal: int) -> Any:
        raise un.TransportUnavailableError("there is no driver")

    with devices.replaced(no_driver), pytest.raises(un.TransportUnavailableError, match="no driver"):
        un.empty(3, "float32", device="cuda")


@pytest.mark.parametrize(("shape", "dtype"), [((2, 3), "bfloat16"), ((), "float64"), ((0, 4), "int8")])
def test_empty_gives_an_array_of_the_device(shape: tuple[int, ...], dtype: str) -> None:
    with device_double() as gpu, mock.patch.object(registered_arrays, "_cupy", return_value=None):
        array = un.empty(shape, dtype, device="cuda:0")
        assert (array.shape, array.dtype.name) == (shape, dtype)
        assert array.__dlpack_device__() == (2, 0)
        assert gpu.device().facts(pointer_of(array)).kind == "device"
        assert array.T.shape == shape[::-1]
        del array


def test_empty_gives_a_cupy_array_where_cupy_is_installed() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed: make cuda")
    with device_double() as gpu:
        array = un.empty((3, 5), "float32", device="cuda")
        assert type(array) is cupy.ndarray
        assert (array.shape, array.dtype, array.strides) == ((3, 5), np.float32, (20, 4))
        assert gpu.device().facts(array.data.ptr).allocation.pointer == array.data.ptr
        part = array[1:, 2:]
        assert part.data.ptr == array.data.ptr + 28
        del array
        assert gpu.leaks()  # the view keeps the memory
        del part
        assert type(un.empty(3, "float8_e5m2", device="cuda")) is DeviceArray  # CuPy has no such dtype
