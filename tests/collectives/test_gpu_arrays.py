"""Calls on arrays of torch, CuPy and the array interface on a GPU: streams, calls in flight, and captures beside them.

Without a GPU, only arrays with the array interface are tested, on the driver's double.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from support import fake_cuda
from support.deadlines import DEADLINE_S
from support.device_contract import Bench
from support.gpu_ranks import InterfaceArray, cuda_bench

import unisono as un
from unisono.bench.gpu_stages.speeds.hosts import on_hosts
from unisono.collectives.device import across_hosts
from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS
from unisono.transports.cuda.device import LEGACY_STREAM, THREAD_STREAM
from unisono.transports.cuda.driver_api.cuda_device import CudaDevice
from unisono.transports.cuda.kernels.catalogue import COPY_EXTENTS, dequantise, quantise, reduction

pytest.importorskip("cuda.bindings.driver", reason="the binding of CUDA is not installed: make cuda")
pytestmark = pytest.mark.gpu

N = 10_000
STREAMS = ("default", "own", "thread")
KERNELS = [reduction(DTYPES["float32"], OPERATIONS["sum"], k) for k in (1, 2)]
FORMS = [(DTYPES["float32"], DTYPES[form]) for form in ("int8", "bfloat16")]
OF_GRADIENTS = [
    *(reduction(DTYPES[dtype], OPERATIONS["avg"], k) for dtype in ("float32", "bfloat16") for k in (1, 2)),
    *(reduction(DTYPES["uint8"], OPERATIONS["bxor"], 2), COPY_EXTENTS),
]
BY_WARPS = [make(*form) for form in FORMS for make in (quantise, dequantise)]


class Interface:
    """Arrays with `__cuda_array_interface__` alone."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._stream = int(LEGACY_STREAM)

    @contextlib.contextmanager
    def using(self, stream: str) -> Iterator[None]:
        """Use a stream in the body."""
        handles = {"default": LEGACY_STREAM, "own": self._bench.stream, "thread": THREAD_STREAM}
        self._stream = int(handles[stream])
        yield

    def array(self, values: Any) -> Any:
        return InterfaceArray(self._bench, values, self._stream)

    def values(self, array: Any) -> Any:
        interface = array.__cuda_array_interface__
        self._bench.finish(self._stream)  # type: ignore[arg-type]
        return self._bench.values(interface["data"][0], np.empty(interface["shape"], interface["typestr"]))


class Torch:
    """Tensors of torch."""

    def __init__(self, bench: Bench) -> None:
        self._torch = importlib.import_module("torch")
        self._side = self._torch.cuda.Stream()

    def using(self, stream: str) -> Any:
        if stream == "thread":
            return self._torch.cuda.stream(self._torch.cuda.ExternalStream(int(THREAD_STREAM)))
        return self._torch.cuda.stream(self._side if stream == "own" else self._torch.cuda.default_stream())

    def array(self, values: Any) -> Any:
        return self._torch.from_numpy(np.asarray(values)).to("cuda", non_blocking=True)

    def values(self, array: Any) -> Any:
        return array.cpu().numpy()


class Cupy:
    """Arrays of CuPy."""

    def __init__(self, bench: Bench) -> None:
        self._cupy = importlib.import_module("cupy")
        self._side = self._cupy.cuda.Stream(non_blocking=True)

    def using(self, stream: str) -> Any:
        streams = {"default": self._cupy.cuda.Stream.null, "own": self._side, "thread": self._cupy.cuda.Stream.ptds}
        return streams[stream]

    def array(self, values: Any) -> Any:
        return self._cupy.asarray(values)

    def values(self, array: Any) -> Any:
        return self._cupy.asnumpy(array)


LIBRARIES: dict[str, Callable[[Bench], Any]] = {"interface": Interface, "torch": Torch, "cupy": Cupy}


def check_streams(world: un.Communicator, library: str) -> list[str]:
    """Make calls on arrays of a library on each stream; return the wrong results."""
    wrong = []
    with cuda_bench() as bench:
        arrays = LIBRARIES[library](bench)
        for stream in STREAMS:
            with arrays.using(stream), world.dup() as comm:
                x = arrays.array(np.full(N, comm.rank + 1, np.float32))
                total = comm.allreduce(x)
                work = comm.allreduce(total, wait=False)
                again = comm.allreduce(x, out=arrays.array(np.zeros(N, np.float32)))
                results = [arrays.values(array) for array in (total, work.wait(), again)]
                work.synchronize()
                of_all = comm.size * (comm.size + 1) // 2
                expected = (of_all, of_all * comm.size, of_all)
                wrong += [
                    f"{stream}: {result[result != value][:1]} is not {value}"
                    for result, value in zip(results, expected, strict=True)
                    if (result != value).any()
                ]
                del x, total, work, again
    return wrong


def check_gradients(world: un.Communicator, library: str) -> list[str]:
    """Average gradients by a reducer, with and without compression, on each stream; return the wrong results."""
    wrong = []
    with cuda_bench() as bench:
        arrays = LIBRARIES[library](bench)
        for form, error in ((None, 0), ("bfloat16", 2.0**-7), ("int8", 2.0**-7)):
            for stream in STREAMS:
                with (
                    arrays.using(stream),
                    un.GradientReducer(world, compression=form, bucket_nbytes=1 << 14) as reducer,
                ):
                    for step in range(3):
                        values = np.linspace(0, 1 + step, N, dtype=np.float32)
                        passed = {"a": arrays.array(values * (world.rank + 1)), "b": arrays.array(values[:7])}
                        for name, array in passed.items():
                            reducer.ready(name, array)
                        reduced = reducer.finish()
                        results = [arrays.values(reduced[name]) for name in ("a", "b")]
                        expected = values * (world.size + 1) / 2, values[:7]
                        wrong += [
                            f"{form} on {stream}: off by {off}"
                            for result, mean in zip(results, expected, strict=True)
                            if (off := np.abs(result - mean).max()) > (error or 1e-6) * (3 + step)
                        ]
                        del passed, reduced
    return wrong


def check_capture(world: un.Communicator, library: str) -> list[str]:
    """Capture a graph in this thread while another thread makes calls; return what went wrong."""
    with cuda_bench() as bench, world.dup() as comm:
        arrays = LIBRARIES[library](bench)
        driver = bench.device._driver  # type: ignore[attr-defined]
        context = bench.device._context  # type: ignore[attr-defined]
        failures, stream = [], bench.device.new_stream()
        x, out = (arrays.array(np.full(N, value, np.float32)) for value in (1, 0))
        comm.allreduce(x, out=out)

        def call() -> None:
            try:
                for _ in range(20):  # into memory that is there, because allocations of a library may end the capture
                    comm.allreduce(x, out=out)
            except un.UnisonoError as error:
                failures.append(str(error))

        mode = driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        with context:
            driver("cuStreamBeginCapture", stream, mode)
        caller = threading.Thread(target=call)
        caller.start()
        caller.join(DEADLINE_S)
        with context:
            driver("cuStreamEndCapture", stream)  # raises if a call has ended the capture
        bench.device.end_stream(stream)
        if (arrays.values(out) != comm.size).any():
            failures.append("a result is wrong")
    return failures


def check_plans(world: un.Communicator, library: str) -> list[str]:
    """Use plans on arrays of `un.empty` and of a library, in all mixtures; return what went wrong."""
    wrong, turns = [], 6  # one use without a graph, and two replays of a graph
    launches, trials = (  # a device tries graphs once, before it is trusted
        patch.object(CudaDevice, name, autospec=True, side_effect=getattr(CudaDevice, name))
        for name in ("launch", "_captures_flags")
    )
    with cuda_bench() as bench, world.dup() as comm, launches as launched, trials as tried:
        device = bench.device
        pinned = device.pin(4 * N).view(np.float32)
        with patch.dict(sys.modules, {} if library == "cupy" else {"cupy": None}):
            registered = [un.empty(N, "float32", device="cuda") for _ in range(2)]
        others = [InterfaceArray(bench, np.zeros(N, np.float32), int(LEGACY_STREAM)) for _ in range(2)]
        for mixture in itertools.product((True, False), repeat=2):
            is_registered = mixture if comm.rank == 0 else mixture[::-1]
            x, out = (registered[i] if is_registered[i] else others[i] for i in range(2))
            plan = comm.plan("allreduce", x, out=out)
            for turn in range(turns):
                pinned[:] = turn + comm.rank
                device.copy(_pointer(x), pinned.ctypes.data, 4 * N, LEGACY_STREAM)
                plan()
                bench.finish(LEGACY_STREAM)
                result = bench.values(_pointer(out), pinned)
                expected = comm.size * turn + comm.size * (comm.size - 1) // 2
                wrong += (
                    [f"{mixture}, turn {turn}: {result[:1]} is not {expected}"] if (result != expected).any() else []
                )
            del plan
        replays = 4 * (turns - 1) if device.has_graphs() else 0
        made = launched.call_count - tried.call_count
        wrong += [] if made == replays else [f"{made} of {replays} uses were replays"]
        device.unpin(pinned.view(np.uint8))
        del registered, others, x, out
    return wrong


def check_hosts(world: un.Communicator, library: str) -> list[str]:
    """Make calls among ranks that count as those of two hosts, with several segments; return what went wrong."""
    wrong = []
    with cuda_bench() as bench, on_hosts(world, ((0, 1), (2, 3))) as comm:
        across_hosts.SEGMENT_NBYTES = N
        arrays = LIBRARIES[library](bench)
        for turn, op in enumerate(("sum", "avg")):
            x = arrays.array(np.full(N + turn, comm.rank + 1, np.float32))
            result = arrays.values(comm.allreduce(x, op))
            expected = 10 if op == "sum" else 2.5
            wrong += [f"{op}: {result[:1]} is not {expected}"] if (result != expected).any() else []
            del x
        whole = np.arange(2 * N, dtype=np.float32)
        for name, x, expected in (
            ("broadcast", whole * (comm.rank + 1), whole),
            ("allgather", whole[: N // 2] + comm.rank * (N // 2), whole),
            ("reduce_scatter", whole, whole.reshape(4, -1)[comm.rank] * 4),
            ("alltoall", np.repeat(np.arange(4, dtype=np.float32), 8), np.full(32, comm.rank)),
        ):
            result = arrays.values(getattr(comm, name)(arrays.array(x)))
            wrong += [f"{name}: {result[:1]} is not {expected[:1]}"] if (result != expected).any() else []
        way = comm.explain("allreduce", 4 * N).on_device
        wrong += [] if "within each host" in way else [way]
    return wrong


def _pointer(array: Any) -> int:
    return int(array.__cuda_array_interface__["data"][0])


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name != "interface":
        if not fake_cuda.has_gpu():
            pytest.skip("this machine has no GPU")
        pytest.importorskip(name)
    fake_cuda.use(monkeypatch, [*KERNELS, *OF_GRADIENTS], BY_WARPS)
    return name


@pytest.mark.parametrize("transports", ["cuda_ipc,shm", "shm"])
def test_calls_on_gpu_arrays_are_right_on_every_stream(library: str, transports: str) -> None:
    options = un.Options(transports=transports)
    assert un.launch(check_streams, 2, library, options=options, timeout_s=DEADLINE_S) == [[]] * 2


@pytest.mark.parametrize("transports", ["cuda_ipc,shm", "shm"])
def test_gradients_on_a_gpu_are_averaged_and_compressed_there(library: str, transports: str) -> None:
    options = un.Options(transports=transports)
    assert un.launch(check_gradients, 2, library, options=options, timeout_s=DEADLINE_S) == [[]] * 2


def test_collectives_across_hosts_are_right(library: str) -> None:
    options = un.Options(transports="cuda_ipc,shm")
    assert un.launch(check_hosts, 4, library, options=options, timeout_s=DEADLINE_S) == [[]] * 4


def test_plans_on_registered_arrays_are_right(library: str) -> None:
    options = un.Options(transports="cuda_ipc,shm")
    assert un.launch(check_plans, 2, library, options=options, timeout_s=DEADLINE_S) == [[]] * 2


def test_calls_on_gpu_arrays_leave_a_capture_in_another_thread_alone(library: str) -> None:
    options = un.Options(transports="cuda_ipc,shm")
    assert un.launch(check_capture, 2, library, options=options, timeout_s=DEADLINE_S) == [[]] * 2
