"""Programs of driver calls do what the same calls by Python do, also where a call fails, blocks or is interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support import fake_cuda
from support.deadlines import DEADLINE_S
from support.device_contract import Bench
from support.outcomes import error_of

from unisono.dtypes import DTYPES
from unisono.errors import AbortedError
from unisono.operations import OPERATIONS, Op
from unisono.transports import _core
from unisono.transports.cuda.issued_calls import Counters, IssuedCall, NextNumber
from unisono.transports.cuda.kernels.catalogue import MOST_SOURCES, reduction, scaling

driver = pytest.importorskip("unisono.transports.cuda.driver_api.cuda_device")
pytest.importorskip("cuda.bindings.driver", reason="the binding of CUDA is not installed: make cuda")

pytestmark = pytest.mark.gpu

N = 100
FLOAT, SUM = DTYPES["float32"], OPERATIONS["sum"]
MANY = MOST_SOURCES + 1
HALF = Op.premul_sum(0.5)
KERNELS = [*(reduction(FLOAT, SUM, k) for k in (2, MOST_SOURCES, MANY)), scaling(FLOAT)]
only_double = pytest.mark.skipif(fake_cuda.has_gpu(), reason="a GPU does not do that on demand")
WAYS = ["native", "python"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    fake_cuda.use(monkeypatch, KERNELS)
    made = Bench(driver.CudaDevice())
    yield made
    made.close()


class Calls:
    """Calls of every kind that a program can have, on memory of a bench; and their counters."""

    def __init__(self, bench: Bench) -> None:
        device, stream = bench.device, bench.stream
        self.counters, self.event = Counters(2), device.new_event()
        self.flags = device.new_flags(2)
        self.rows = [bench.memory(np.full(N, i, np.float32)) for i in range(MANY)]
        self.target = bench.zeros(N, "float32")
        self.calls = [
            IssuedCall("wait", (stream, self.event)),
            IssuedCall("copy", (self.rows[0], self.rows[1], 4 * N, stream)),
            IssuedCall("raise_flag", (self.flags, 1, NextNumber(self.counters, 0), stream)),
            IssuedCall("await_flag", (self.flags, 1, NextNumber(self.counters, 1), stream)),
            IssuedCall("reduce", (self.target, self.rows[:2], N, FLOAT, SUM, 1, stream)),
            IssuedCall("reduce", (self.target, self.rows[:MOST_SOURCES], N, FLOAT, SUM, 1, stream)),
            IssuedCall("record", (self.event, stream)),
        ]

    def numbers(self) -> list[int]:
        return list(self.counters.numbers)


@pytest.fixture
def calls(bench: Bench) -> Iterator[Calls]:
    made = Calls(bench)
    yield made
    bench.device.end_flags(made.flags)
    bench.device.end_event(made.event)


def compiled(bench: Bench, calls: list[IssuedCall], way: str) -> Callable[[], None]:
    """Return the calls as a program, or issued by Python."""
    if way == "python":
        bench.device._programs = None  # type: ignore[attr-defined]
    return bench.device.compile(calls)


def lines_of(log: Path) -> list[str]:
    """Return the calls of this thread in the double's log, which it empties."""
    lines = [line.partition(" ") for line in log.read_text().splitlines()] if log.exists() else []
    log.write_text("")
    return [call for thread, _, call in lines if int(thread) == threading.get_native_id()]


@only_double
def test_program_makes_the_driver_calls_of_python_with_one_change_of_context(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bench: Bench, calls: Calls
) -> None:
    log, seen = tmp_path / "log", {}
    for way in WAYS:
        again = compiled(bench, calls.calls, way)
        calls.counters.numbers[0] = calls.counters.numbers[1] = 7
        with monkeypatch.context() as patch:
            patch.setenv(fake_cuda.LOG, str(log))
            again()
        seen[way] = lines_of(log)
        assert calls.numbers() == [8, 8]
    changes = ("cuCtxPushCurrent", "cuCtxPopCurrent")
    native, python = ([line for line in seen[way] if line not in changes] for way in WAYS)
    assert native == python
    assert len(native) == len(calls.calls)
    assert seen["native"] == [changes[0], *native, changes[1]]
    assert len(seen["python"]) == 3 * len(calls.calls)


def in_graph(calls: Calls) -> list[IssuedCall]:
    """Return the calls that a graph can have, with constant numbers."""
    return [
        IssuedCall(
            call.method, tuple(1 if isinstance(argument, NextNumber) else argument for argument in call.arguments)
        )
        for call in calls.calls
        if call.method not in ("wait", "record")
    ]


@only_double
def test_graph_is_launched_by_one_call_of_the_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bench: Bench, calls: Calls
) -> None:
    log, graph = tmp_path / "log", bench.device.capture(in_graph(calls), bench.stream)
    with monkeypatch.context() as patch:
        patch.setenv(fake_cuda.LOG, str(log))
        bench.device.launch(graph, bench.stream)
    push, launch, pop = lines_of(log)
    assert launch.split() == ["cuGraphLaunch", str(graph.handle), str(bench.stream)]
    assert (push, pop) == ("cuCtxPushCurrent", "cuCtxPopCurrent")
    bench.device.end_graph(graph)


@only_double
@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuLaunchKernel", "cuGraphInstantiate"])
def test_failed_capture_of_a_graph_leaves_a_usable_stream(
    monkeypatch: pytest.MonkeyPatch, bench: Bench, calls: Calls, call: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_CUDA_FAIL", f"{call}=2")
        kind, text = error_of(lambda: bench.device.capture(in_graph(calls), bench.stream))
    assert (kind, call in text) == ("TransportUnavailableError", True)
    assert not bench.device.is_capturing(bench.stream)
    bench.finish(bench.stream)


@only_double
@pytest.mark.parametrize(("call", "code"), [("cuStreamWaitValue64", 900), ("cuGraphInstantiate", 801)])
def test_device_whose_driver_takes_no_flags_in_graphs_has_no_graphs(
    monkeypatch: pytest.MonkeyPatch, bench: Bench, call: str, code: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_CUDA_FAIL", f"{call}={code}")
        assert not bench.device.has_graphs()
    assert driver.CudaDevice().has_graphs()


CALLS = ("cuStreamWaitEvent", "cuMemcpyAsync", "cuStreamWriteValue64", "cuStreamWaitValue64", "cuLaunchKernel")


@only_double
@pytest.mark.parametrize("code", [2, 700, 900, 12345])
@pytest.mark.parametrize("call", ["cuCtxPushCurrent", *CALLS, "cuEventRecord"])
def test_program_ends_at_a_failed_call_as_python_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bench: Bench, calls: Calls, call: str, code: int
) -> None:
    log, seen = tmp_path / "log", []
    before = bench.device._driver("cuCtxGetCurrent")  # type: ignore[attr-defined]
    for way in WAYS:
        again = compiled(bench, calls.calls, way)
        calls.counters.numbers[0] = calls.counters.numbers[1] = 7
        bench.device._context.is_lost = False  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            patch.setenv(fake_cuda.FAIL, f"{call}={code}")
            patch.setenv(fake_cuda.LOG, str(log))
            kind, text = error_of(again)
        outcome = kind, text.partition(" is not a valid CUresult")[0]  # which some versions of the binding append
        issued = [line for line in lines_of(log) if not line.startswith("cuCtx")]
        seen.append((outcome, issued, calls.numbers(), bench.device._context.is_lost))  # type: ignore[attr-defined]
        assert int(bench.device._driver("cuCtxGetCurrent")) == int(before)  # type: ignore[attr-defined]
    assert seen[0] == seen[1]
    assert call in outcome[1]
    bench.device._context.is_lost = False  # type: ignore[attr-defined]


def test_calls_that_no_program_can_make_are_made_by_python(bench: Bench, calls: Calls) -> None:
    many = IssuedCall("reduce", (calls.target, calls.rows, N, FLOAT, SUM, 1, bench.stream))
    lifted = IssuedCall("lift", (calls.target, calls.target, N, FLOAT, HALF, bench.stream))
    again = bench.device.compile([*calls.calls, many, lifted])
    again()
    again()
    assert calls.numbers() == [2, 2]
    expected = np.full(N, (1 + sum(range(MANY))) / 2, np.float32)
    assert (bench.values(calls.target, expected) == expected).all()


def test_program_leaves_out_calls_on_no_elements(bench: Bench, calls: Calls) -> None:
    again = bench.device.compile(
        [
            IssuedCall("copy", (1, 1, 0, bench.stream)),
            IssuedCall("reduce", (1, [1, 1], 0, FLOAT, SUM, 1, bench.stream)),
            *calls.calls,
        ]
    )
    again()
    assert calls.numbers() == [1, 1]


def test_program_refuses_sizes_that_no_call_has(bench: Bench) -> None:
    counters = Counters(2)
    program = _core.CudaProgram(_core.CudaIssuer(1))
    for refused in (
        lambda: program.copy(16, 32, 0, 1),
        lambda: program.launch(1, 0, 512, [b"1"], 1),
        lambda: program.launch(1, 1, 0, [b"1"], 1),
        lambda: program.launch(1, 1, 512, [b"1", b""], 1),
        lambda: program.launch(1, 1, 512, [bytes(4000), bytes(97)], 1),
        lambda: program.raise_flag(8, counters.numbers, 2, 1),
        lambda: program.await_flag(12, counters.numbers, 0, 1),
    ):
        with pytest.raises(ValueError, match=r"no bytes|no threads|parameters|no such counter|not aligned"):
            refused()
    for refused in (lambda: program.copy(-1, 32, 1, 1), lambda: program.launch(1, 1 << 32, 512, [b"1"], 1)):
        with pytest.raises(TypeError):
            refused()


class HeldUp:
    """Calls that the driver holds up after the first ones, until `release`, because the stream has no more room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
        device, stream = bench.device, bench.stream
        self._device = device
        self.flags, self.target = device.new_flags(1), bench.zeros(N, "float32")
        self._counters, row = Counters(1), bench.memory(np.ones(N, np.float32))
        self.calls = [
            IssuedCall("await_flag", (self.flags, 0, NextNumber(self._counters, 0), stream)),
            *[IssuedCall("copy", (self.target, row, 4 * N, stream))] * 5,
        ]
        monkeypatch.setenv(fake_cuda.DEPTH, "3")

    def release(self) -> None:
        self._device.release_flags(self.flags)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> Iterator[HeldUp]:
    made = HeldUp(monkeypatch, bench)
    yield made
    bench.device.end_flags(made.flags)


@only_double
@pytest.mark.parametrize("way", WAYS)
def test_other_threads_go_on_while_the_driver_holds_up_a_program(bench: Bench, held: HeldUp, way: str) -> None:
    thread = threading.Thread(target=compiled(bench, held.calls, way))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    held.release()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert (bench.values(held.target, np.ones(N, np.float32)) == 1).all()


@only_double
def test_abort_ends_a_program_that_the_driver_holds_up(bench: Bench, held: HeldUp) -> None:
    ended = list[type[BaseException]]()
    again = bench.device.compile(held.calls)

    def run() -> None:
        with pytest.raises(AbortedError, match="the device 0 was aborted") as raised:
            again()
        ended.append(raised.type)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(0.05)
    bench.device.abort()
    held.release()
    thread.join(DEADLINE_S)
    assert ended == [AbortedError]


@only_double
def test_keyboard_interrupt_comes_when_the_whole_program_has_been_issued(bench: Bench, held: HeldUp) -> None:
    again = bench.device.compile(held.calls)

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        held.release()

    timer = threading.Timer(0.05, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        again()
    timer.join()
    assert (bench.values(held.target, np.ones(N, np.float32)) == 1).all()
