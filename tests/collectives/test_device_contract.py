"""Devices keep the contract.

The double traps callers that break its rules, and each rule makes a test fail if it is off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support import device_contract, fake_cuda
from support.device_contract import CHECKS, Bench, N, driver_bench
from support.ranks import Ranks, ranks_fixture, start_ranks

from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS, operation
from unisono.testing.device_double import DeviceTrapError, GpuDouble
from unisono.testing.device_gpu import LENIENCIES
from unisono.transports.cuda.device import DeviceCopy
from unisono.transports.cuda.kernels.catalogue import COPY_EXTENTS, dequantise, quantise, reduction, scaling

DTYPE = DTYPES["float32"]


@pytest.fixture(params=["double", pytest.param("driver", marks=pytest.mark.gpu)])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Bench]:
    if request.param == "double":
        return Bench.of_double
    pytest.importorskip("cuda.bindings.driver", reason="the binding of CUDA is not installed: make cuda")
    kernels = [reduction(DTYPES[dtype], OPERATIONS[op], k) for dtype, op, k in device_contract.REDUCTIONS]
    kernels += [scaling(DTYPES[dtype]) for dtype, _ in device_contract.FACTORS]
    forms = [(DTYPES[dtype], DTYPES[form]) for dtype, form in device_contract.QUANTISATIONS]
    by_warps = [make_kernel(*form) for form in forms for make_kernel in (quantise, dequantise)]
    fake_cuda.use(monkeypatch, [*kernels, COPY_EXTENTS], by_warps)
    return driver_bench


two = ranks_fixture((2, "shm"))


@pytest.mark.parametrize("check", CHECKS)
def test_device_passes_contract_check(make: Callable[[], Bench], check: str) -> None:
    bench = make()
    CHECKS[check](bench)
    bench.close()


def test_memory_and_events_are_shared_by_processes(make: Callable[[], Bench]) -> None:
    with start_ranks(2, "shm") as ranks:
        assert ranks.run_calls(device_contract.share_memory_and_an_event, make) == ["", ""]


# Checks that need the double. Each fails if the rule of its name is off.


def work_is_late(lenient: tuple[str, ...]) -> None:
    gpu, device, (a, b, _), stream = scene(lenient)
    gpu.view(a, N)[:] = 1
    device.copy(b, a, N, stream)
    assert not (gpu.view(b, N) == 1).any()
    gpu.synchronize()
    assert (gpu.view(b, N) == 1).all()


def streams_have_no_order(lenient: tuple[str, ...]) -> None:
    overtakes = 0
    for seed in range(20):
        gpu = GpuDouble(seed, lenient, background=False)
        device = gpu.device()
        events = [device.new_event(), device.new_event()]
        for event in events:
            device.record(event, device.new_stream())
        while not any(happened := [device.done(event) for event in reversed(events)]):
            pass
        overtakes += happened == [True, False]
        gpu.close()
    assert overtakes


def a_wait_is_for_what_was_recorded(lenient: tuple[str, ...]) -> None:
    gpu, device, (a, b, c), stream = scene(lenient)
    other, event, after = device.new_stream(), device.new_event(), device.new_event()
    device.wait(other, event)
    device.record(after, other)
    gpu.synchronize()
    assert device.done(after)
    device.copy(b, a, N, stream)
    device.record(event, stream)
    with pytest.raises(DeviceTrapError, match="ordered behind"):
        device.copy(c, b, N, other)


def memory_of_the_pool_is_not_used_by_an_unordered_stream(lenient: tuple[str, ...]) -> None:
    _, device, (a, _, _), stream = scene(lenient)
    taken = device.take(N, stream)
    with pytest.raises(DeviceTrapError, match="ordered behind"):
        device.copy(taken.pointer, a, N, device.new_stream())


def memory_in_use_is_not_given(lenient: tuple[str, ...]) -> None:
    _, device, (a, _, _), stream = scene(lenient)
    other, event, taken = device.new_stream(), device.new_event(), device.take(N, stream)
    device.record(event, stream)
    device.wait(other, event)
    device.copy(a, taken.pointer, N, other)
    with pytest.raises(DeviceTrapError, match="ordered behind"):
        device.give(taken, [event])


def given_memory_is_not_used(lenient: tuple[str, ...]) -> None:
    _, device, (a, _, _), stream = scene(lenient)
    taken = device.take(N, stream)
    device.give(taken, None)
    with pytest.raises(DeviceTrapError, match="freed or closed"):
        device.copy(a, taken.pointer, N, stream)


def own_handles_do_not_open(lenient: tuple[str, ...]) -> None:
    bench = Bench.of_double(lenient=lenient)
    CHECKS["handles_do_not_open_in_their_own_process"](bench)


def freed_memory_is_not_used(lenient: tuple[str, ...]) -> None:
    _, device, (a, _, _), stream = scene(lenient)
    freed = device.allocate(N)
    device.free(freed)
    with pytest.raises(DeviceTrapError, match="freed or closed"):
        device.copy(a, freed.pointer, N, stream)


def memory_in_use_is_not_freed(lenient: tuple[str, ...]) -> None:
    _, device, (a, _, _), stream = scene(lenient)
    used = device.allocate(N)
    device.copy(a, used.pointer, N, stream)
    for give_back in (lambda: device.free(used), lambda: device.end_stream(stream)):
        with pytest.raises(DeviceTrapError, match="under way"):
            give_back()


def operands_do_not_overlap(lenient: tuple[str, ...]) -> None:
    _, device, (a, b, _), stream = scene(lenient)
    with pytest.raises(DeviceTrapError, match="overlap"):
        device.copy(a, a + 8, 64, stream)
    with pytest.raises(DeviceTrapError, match="overlap"):
        device.reduce(a, [a, a + 8], 16, DTYPE, operation("sum"), 1, stream)
    with pytest.raises(DeviceTrapError, match="another copy"):
        device.copy_extents([DeviceCopy(a, b, 64), DeviceCopy(b + 32, a + 128, 64)], stream)


def elements_are_aligned(lenient: tuple[str, ...]) -> None:
    _, device, (a, b, _), stream = scene(lenient)
    with pytest.raises(DeviceTrapError, match="not aligned"):
        device.reduce(a, [b + 2], 16, DTYPE, operation("sum"), 1, stream)


def accesses_are_ordered(lenient: tuple[str, ...]) -> None:
    _, device, (a, b, c), stream = scene(lenient)
    other, event = device.new_stream(), device.new_event()
    device.copy(b, a, N, stream)
    device.copy(c, a, N, other)  # two readers need no order between them
    with pytest.raises(DeviceTrapError, match="ordered behind"):
        device.copy(a, b, N, other)
    device.record(event, stream)
    device.wait(other, event)
    device.copy(a, b, N, other)
    device.record(event, other)
    while not device.done(event):
        pass
    device.copy(a, c, N, stream)  # the host has waited for all earlier work


def captured_streams_are_left_alone(lenient: tuple[str, ...]) -> None:
    gpu, device, (a, b, _), stream = scene(lenient)
    gpu.capture(stream)
    assert device.is_capturing(stream)
    with pytest.raises(DeviceTrapError, match="graph"):
        device.copy(a, b, N, stream)
    gpu.capture(stream, False)
    device.copy(a, b, N, stream)


def flags_only_rise(lenient: tuple[str, ...]) -> None:
    gpu, device, _, stream = scene(lenient)
    flags = device.new_flags(1)
    for number in (2, 1):
        device.raise_flag(flags, 0, number, stream)
    with pytest.raises(DeviceTrapError, match="set from 2 to 1"):
        gpu.synchronize()


def nothing_is_issued_after_an_abort(lenient: tuple[str, ...]) -> None:
    CHECKS["an_aborted_device_takes_no_new_work"](Bench.of_double(lenient=lenient))


def only_dedicated_memory_is_exported(lenient: tuple[str, ...]) -> None:
    gpu, device, _, _ = scene(lenient)
    with pytest.raises(DeviceTrapError, match="pooled memory"):
        device.export(gpu.memory(N, "pooled"))


def only_shared_events_are_exported(lenient: tuple[str, ...]) -> None:
    _, device, _, _ = scene(lenient)
    device.export_event(device.new_event(shared=True))
    with pytest.raises(DeviceTrapError, match="not made to be shared"):
        device.export_event(device.new_event())


RULES: dict[str, Callable[[tuple[str, ...]], None]] = {
    "eager": work_is_late,
    "in_order": streams_have_no_order,
    "waits_for_future": a_wait_is_for_what_was_recorded,
    "opens_own": own_handles_do_not_open,
    "uses_freed": freed_memory_is_not_used,
    "frees_pending": memory_in_use_is_not_freed,
    "overlaps": operands_do_not_overlap,
    "misaligned": elements_are_aligned,
    "races": accesses_are_ordered,
    "captures": captured_streams_are_left_alone,
    "flags_fall": flags_only_rise,
    "aborted": nothing_is_issued_after_an_abort,
    "exports_any": only_dedicated_memory_is_exported,
    "exports_unshared": only_shared_events_are_exported,
}
BETWEEN_PROCESSES = {
    "opens_twice": (1, "open already"),
    "frees_opened": (0, "have it open"),
    "releases_at_once": (0, "have it open"),
    "uses_ended": (1, "given back by the process that made it"),
}


def scene(lenient: tuple[str, ...]) -> tuple[GpuDouble, Any, list[int], Any]:
    """Return a double that works only on request, its device, three pieces of memory, and a stream."""
    gpu = GpuDouble(1, lenient, background=False)
    device = gpu.device()
    return gpu, device, [device.allocate(N).pointer for _ in range(3)], device.new_stream()


def test_every_rule_of_the_device_double_has_a_check() -> None:
    assert {*RULES, *BETWEEN_PROCESSES} == set(LENIENCIES)


@pytest.mark.parametrize("rule", RULES)
def test_device_double_enforces_rule(rule: str) -> None:
    RULES[rule](())


@pytest.mark.parametrize("rule", RULES)
def test_check_fails_when_the_device_double_is_lenient(rule: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        RULES[rule]((rule,))


@pytest.mark.parametrize(
    ("check", "rule"),
    [
        (memory_of_the_pool_is_not_used_by_an_unordered_stream, "races"),
        (memory_in_use_is_not_given, "races"),
        (given_memory_is_not_used, "uses_freed"),
    ],
)
def test_device_double_traps_misuse_of_its_pool(check: Callable[[tuple[str, ...]], None], rule: str) -> None:
    check(())
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check((rule,))


@pytest.mark.parametrize("rule", BETWEEN_PROCESSES)
def test_device_double_enforces_rule_between_processes(two: Ranks, rule: str) -> None:
    rank, expected = BETWEEN_PROCESSES[rule]
    run = device_contract.break_a_rule_between_processes
    assert expected in two.run_calls(run, (), rule)[rank]
    assert two.run_calls(run, (rule,), rule)[rank] == ""


@pytest.mark.parametrize("waits", [True, False])
def test_device_events_order_accesses_of_two_processes(two: Ranks, waits: bool) -> None:
    said = two.run_calls(device_contract.order_of_processes, Bench.of_double, waits)
    assert ("ordered behind" in said[1]) is not waits


@pytest.mark.parametrize("waits", [True, False])
def test_device_flags_order_accesses_of_two_processes(two: Ranks, waits: bool) -> None:
    said = two.run_calls(device_contract.order_by_a_flag, Bench.of_double, waits)
    assert any("ordered behind" in text for text in said) is not waits


@pytest.mark.gpu
def test_flags_order_processes_on_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="the binding of CUDA is not installed: make cuda")
    fake_cuda.use(monkeypatch)
    with start_ranks(2, "shm") as ranks:
        assert ranks.run_calls(device_contract.order_by_a_flag, driver_bench, True) == ["", ""]


def test_device_traps_a_wait_for_a_flag_of_another_process() -> None:
    _, device, _, stream = scene(())
    flags = device.new_flags(1)
    with pytest.raises(DeviceTrapError, match="which nobody could release"):
        device.await_flag(device.open_flags(device.export_flags(flags)), 0, 1, stream)
