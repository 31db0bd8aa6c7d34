from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from unisono.errors import UsageError
from unisono.tuning.machine.parameters import (
    LINKS,
    PRIORS,
    Curve,
    Link,
    Parameters,
    RoundCosts,
    curve,
    from_json,
    to_json,
)

bounded = settings(max_examples=100, deadline=None, derandomize=True)
points = st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(1e-9, 1e3)), min_size=1, max_size=12)


@bounded
@given(points=points, sizes=st.tuples(st.floats(0, 1e15), st.floats(0, 1e15)))
def test_curve_never_falls_whatever_the_measurements(
    points: list[tuple[int, float]], sizes: tuple[float, float]
) -> None:
    result = curve(points)
    less, more = sorted(sizes)
    assert list(result.seconds) == sorted(result.seconds)
    assert 0 < result.at(less) <= result.at(more) * (1 + 1e-9)


@bounded
@given(points=points)
def test_curve_passes_through_rising_measurements(points: list[tuple[int, float]]) -> None:
    sizes = sorted({nbytes for nbytes, _ in points})
    times = sorted(seconds for _, seconds in points)[: len(sizes)]
    result = curve(zip(sizes, times, strict=True))
    assert [result.at(nbytes) for nbytes in sizes] == pytest.approx(times)


def test_curve_interpolates_and_extrapolates() -> None:
    result = Curve((100, 10_000), (1e-6, 4e-6))
    assert result.at(0) == result.at(100) == 1e-6
    assert result.at(1000) == pytest.approx(2e-6)
    assert result.at(20_000) == pytest.approx(8e-6)


@pytest.mark.parametrize("point", [(0, 1.0), (1, 0.0), (1, -1.0), (1, math.inf), (1, math.nan)])
def test_curve_refuses_sizes_or_times_that_are_not_positive(point: tuple[int, float]) -> None:
    with pytest.raises(UsageError, match="positive bytes and seconds"):
        curve([(8, 1.0), point])


def test_link_step_is_measured_or_computed_from_constants() -> None:
    link = LINKS["tcp"]
    assert link.step_s(1000) == link.latency_s + link.overhead_s + 1000 * link.per_byte_s
    assert link._replace(step=Curve((8,), (5e-6,))).step_s(8) == 5e-6


def test_separately_measured_level_has_its_own_link() -> None:
    near = Link("shm", 1e-7, 1e-8, 1e-11)
    result = Parameters({"shm": LINKS["shm"], "shm/l3": near})
    assert result.link("shm", "l3") is near
    assert result.link("shm", "socket") is result.link("shm") is LINKS["shm"]
    with pytest.raises(UsageError, match="'ucx': there are shm, shm/l3"):
        result.link("ucx")


def test_round_costs_are_taken_from_a_similar_number_of_ranks() -> None:
    flat = Curve((8,), (1e-6,))
    four, twelve = (RoundCosts(ranks, ranks, 0.0, 0.0, *5 * [flat]) for ranks in (4, 12))
    result = PRIORS._replace(rounds={"shm": (four, twelve)})
    assert [result.rounds_of("shm", ranks, ranks) for ranks in (1, 2, 6, 8, 24)] == [None, four, four, twelve, twelve]
    # Twice as many ranks on the same cores put twice as many on each core, so a measurement with fewer ranks does not
    # apply.
    assert [result.rounds_of("shm", ranks, ranks, 2.0) for ranks in (4, 6, 8, 12)] == [four, None, None, twelve]
    assert result.rounds_of("shm", 12, 1) is None
    assert result.rounds_of("tcp", 4, 4) is None


def test_round_costs_of_one_host_do_not_apply_to_several_hosts() -> None:
    flat = Curve((8,), (1e-6,))
    of_one, of_two = (RoundCosts(4, per_host, 0.0, 0.0, *5 * [flat]) for per_host in (4, 2))
    result = PRIORS._replace(rounds={"tcp": (of_one, of_two)})
    assert [result.rounds_of("tcp", 4, per_host) for per_host in (4, 3, 2, 1)] == [of_one, of_two, of_two, of_two]
    assert PRIORS._replace(rounds={"tcp": (of_one,)}).rounds_of("tcp", 4, 2) is None


def test_round_cost_is_interpolated_between_share_and_whole_vector() -> None:
    shared, whole = Curve((1, 64), (4e-6, 4e-6)), Curve((1, 64), (1e-6, 1e-6))
    rounds = RoundCosts(16, 16, 0.0, 0.0, shared, whole, *3 * [shared])
    assert [rounds.step_s(nbytes, 32) for nbytes in (32, 8, 2, 1)] == pytest.approx([1e-6, 2e-6, 4e-6, 4e-6])


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("call_s", None, "call_s is missing"),
        ("ranks", 0, "at least 1"),
        ("step", [], "step has no times"),
        ("calls", {"scan": []}, r"rounds.shm\[0\].calls.scan: expected fields by name"),
        ("calls", {"scan": {"linear": []}}, r"calls.scan.linear has no times"),
    ],
)
def test_invalid_round_costs_are_refused(field: str, value: Any, says: str) -> None:
    flat = Curve((8,), (1e-6,))
    whole = json.loads(json.dumps(to_json(PRIORS._replace(rounds={"shm": (RoundCosts(2, 2, 0.0, 0.0, *5 * [flat]),)}))))
    (row,) = whole["rounds"]["shm"]
    row[field] = value
    if value is None:
        del row[field]
    with pytest.raises(UsageError, match=says):
        from_json(whole)


@bounded
@given(points=points, pairs=st.one_of(st.just(math.inf), st.floats(1, 64)), ports=st.integers(1, 8))
def test_parameters_survive_json(points: list[tuple[int, float]], pairs: float, ports: int) -> None:
    measured = curve(points)
    link = LINKS["shm"]._replace(step=measured, pairs=pairs, ports=ports)
    rounds = RoundCosts(4, 2, 1e-6, 0.0, *5 * [measured], calls={"scan": {"linear": measured}})
    result = Parameters(
        {"shm": link, "tcp": LINKS["tcp"]}, {"float32": measured}, measured, {"shm": (rounds, rounds._replace(ranks=8))}
    )
    assert from_json(json.loads(json.dumps(to_json(result)))) == result


def edited(path: str, value: Any) -> Any:
    """Return the priors as JSON, with the field at `path` set to `value`; None removes the field."""
    whole = json.loads(json.dumps(to_json(PRIORS)))
    *above, last = path.split(".")
    target = whole
    for name in above:
        target = target[name]
    target[last] = value
    if value is None:
        del target[last]
    return whole


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("format", 2, "parameters of format 2; this version reads format 1"),
        ("speed", 1, "parameters has no field 'speed'"),
        ("links", [], "links: expected fields by name"),
        ("links.shm", 3, r"links\.shm: expected fields by name, not 3"),
        ("links.shm.latency_s", None, r"links\.shm\.latency_s is missing"),
        ("links.shm.latency_s", "1us", r"links\.shm\.latency_s: expected a number, at least 0, not '1us'"),
        ("links.shm.latency_s", -1, r"links\.shm\.latency_s: expected a number, at least 0"),
        ("links.shm.latency_s", math.nan, r"links\.shm\.latency_s: expected a number"),
        ("links.shm.ports", 1.5, r"links\.shm\.ports: expected a whole number, at least 1"),
        ("links.shm.pairs", 0, r"links\.shm\.pairs: expected a number, at least 1"),
        ("links.shm.name", "", r"links\.shm\.name: expected a name"),
        ("links.shm.latncy_s", 1, r"links\.shm has no field 'latncy_s': it has .*latency_s"),
        ("links.shm.step", [[8, 1.0], [4, 2.0]], r"links\.shm\.step: expected \[bytes, seconds\]"),
        ("links.shm.step", [[8, 2.0], [16, 1.0]], r"links\.shm\.step: .* do not descend"),
        ("links.shm.step", [8, 2.0], r"links\.shm\.step: expected"),
        ("reduce.float32", [["8", 2.0]], r"reduce\.float32: expected"),
        ("copy", [[0, 1.0]], "copy: expected"),
    ],
)
def test_invalid_parameters_are_refused_with_the_field(path: str, value: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        from_json(edited(path, value))


def test_parameters_that_are_no_object_are_refused() -> None:
    with pytest.raises(UsageError, match="parameters: expected fields by name, not 7"):
        from_json(7)
