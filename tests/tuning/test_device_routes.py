"""The tuner's choice for arrays on a GPU: tables with device memory, the rule without them, and refusals."""

from __future__ import annotations

import pytest

from unisono.algorithms.catalogue.on_devices import ROUTES
from unisono.errors import NoAlgorithmError
from unisono.tuning.decide.choice import Question, TunerState, choose
from unisono.tuning.decide.device_routes import LINK, explain_route, routes_of
from unisono.tuning.decide.table import compiled, dumped, from_text, to_json
from unisono.tuning.measure.measurement_log import Context, Measurement

ABLE = dict.fromkeys(routes_of("allreduce"))
TIMES_US = {"one_shot": {1 << 10: 10, 1 << 20: 300}, "two_shot": {1 << 10: 20, 1 << 20: 90}, "staged": {1 << 20: 50}}


def measured(memory: str = "device", link: str = LINK) -> TunerState:
    context = Context("here", "allreduce", link, "plain", 4, 4, memory)
    measurements = [
        Measurement(context, name, nbytes, *[us / 1e6] * 5, rounds=3)
        for name, times in TIMES_US.items()
        for nbytes, us in times.items()
        if memory == "device" or name not in ROUTES
    ]
    text = dumped(to_json(compiled(measurements)))
    return TunerState(from_text(text, "written"), machine="here")


def chosen(nbytes: int, state: TunerState, algorithm: str = "auto", **refusals: str) -> tuple[str, str]:
    asked = Question("allreduce", nbytes, 4, LINK, algorithm=algorithm, memory="device")
    choice = explain_route(asked, {**ABLE, **refusals}, state).choice
    return choice.algorithm, choice.tier


def test_measured_times_choose_the_route_on_a_gpu() -> None:
    state = measured()
    assert chosen(1 << 10, state) == ("one_shot", "table")
    assert chosen(1 << 20, state) == ("staged", "table")
    assert chosen(1 << 20, state, staged="is refused") == ("two_shot", "table")


def test_usual_route_is_taken_where_nothing_was_measured_on_a_device() -> None:
    for state in (TunerState(), measured("host")):
        assert chosen(1 << 10, state) == ("one_shot", "rule")
        assert chosen(1 << 19, state) == ("two_shot", "rule")
        assert chosen(1 << 19, state, two_shot="is refused") == ("one_shot", "rule")


def test_times_on_a_device_do_not_decide_about_arrays_on_the_host() -> None:
    asked = Question("allreduce", 1 << 20, 4, "shm")
    assert choose(asked, measured(link="shm")) == choose(asked)


def test_forced_route_is_taken_or_refused_with_the_reason() -> None:
    assert chosen(8, measured(), "staged") == ("staged", "forced")
    with pytest.raises(NoAlgorithmError, match=r"one_shot is refused; able: .*two_shot"):
        chosen(8, measured(), "one_shot", one_shot="is refused")
    with pytest.raises(NoAlgorithmError, match="ring is no route"):
        chosen(8, measured(), "ring")
