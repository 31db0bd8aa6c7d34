"""Groups of hosts that are near each other, from distances between all pairs of hosts."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from unisono.tuning.measure.host_groups import (
    least,
    levels_of_hosts,
    levels_of_visits,
    pairs_between_parts,
    sizes_and_places,
    turns,
)

bounded = settings(max_examples=60, deadline=None, derandomize=True)
EQUAL = [[1.0] * 6 for _ in range(6)]


def distances(place_of: list[int], factors: list[float], widths: list[int], noise: Random) -> list[list[float]]:
    """Return distances of hosts at places, by the innermost of levels with these widths that has both of a pair."""

    def between(one: int, other: int) -> float:
        level = next((at for at, width in enumerate(widths) if one // width == other // width), len(widths))
        return factors[level] * noise.uniform(1.0, 1.4)

    size = len(place_of)
    result = [[0.0] * size for _ in range(size)]
    for i, j in combinations(range(size), 2):
        result[i][j] = result[j][i] = between(place_of[i], place_of[j])
    return result


@bounded
@given(noise=st.randoms(use_true_random=False), rated=st.booleans())
def test_levels_are_found_whatever_the_order_and_the_noise(noise: Random, rated: bool) -> None:
    place_of = list(range(12))
    noise.shuffle(place_of)
    apart = distances(place_of, [1e-6, 4e-6, 3e-5], [2, 6], noise)
    equal = [[1.0] * 12 for _ in range(12)]
    levels = levels_of_hosts(equal, apart) if rated else levels_of_hosts(apart, equal)
    sizes, places = sizes_and_places(levels)
    assert sizes == (2, 3, 2)
    assert sorted(places) == list(range(12))
    for width in (2, 6):
        parts = {(place_of[host] // width, places[host] // width) for host in range(12)}
        assert len(parts) == 12 // width


def test_bandwidths_do_not_hide_the_levels_that_latencies_show() -> None:
    latency_s = distances([0, 1, 2, 3], [1e-3, 1e-2], [2], Random(1))
    per_byte_s = [[0.0, 6.0, 1.0, 9.0], [6.0, 0.0, 9.0, 1.0], [1.0, 9.0, 0.0, 3.0], [9.0, 1.0, 3.0, 0.0]]
    assert levels_of_hosts(latency_s, per_byte_s) == (((0, 1), (2, 3)), ((0, 1, 2, 3),))


@bounded
@given(seed=st.integers(0, 1000), disturbed=st.floats(0, 0.5))
def test_groups_by_disturbed_visits_are_right_or_not_given(seed: int, disturbed: float) -> None:
    noise = Random(seed)
    quiet = distances([0, 1, 2, 3, 4, 5], [1e-3, 1e-2], [3], Random(1))
    visits = []
    for _ in range(24):
        visit = [[d * (noise.uniform(2, 30) if noise.random() < disturbed else 1) for d in row] for row in quiet]
        visits.append([[min(visit[i][j], visit[j][i]) for j in range(6)] for i in range(6)])
    assert least(visits) == quiet
    equal = [EQUAL] * 24
    assert levels_of_visits(visits, equal) in (None, levels_of_hosts(quiet, EQUAL))


def test_halves_of_visits_that_show_other_groups_are_no_groups() -> None:
    near = [[0.0, 1.0, 9.0], [1.0, 0.0, 9.0], [9.0, 9.0, 0.0]]
    disturbed = [[0.0, 9.0, 9.0], [9.0, 0.0, 9.0], [9.0, 9.0, 0.0]]
    equal = [[1.0] * 3 for _ in range(3)]
    assert levels_of_visits([near, disturbed], [equal] * 2) is None
    assert levels_of_visits([near, disturbed, near, disturbed], [equal] * 4) is None
    assert levels_of_visits([near, disturbed, disturbed, near], [equal] * 4) == levels_of_hosts(near, equal)


def test_hosts_at_equal_distances_have_one_level() -> None:
    assert levels_of_hosts(EQUAL, EQUAL) == ((tuple(range(6)),),)
    assert levels_of_hosts([[0.0, 1.0], [1.0, 0.0]], [[0.0, 1.0], [1.0, 0.0]]) == (((0, 1),),)
    assert sizes_and_places((((0, 1, 2),),)) == ((3,), (0, 1, 2))


def test_groups_of_unequal_size_leave_places_free() -> None:
    assert sizes_and_places((((0, 1, 4), (2,), (3, 5)), ((0, 1, 2, 3, 4, 5),))) == ((3, 3), (0, 1, 3, 6, 2, 7))


def test_level_is_measured_between_the_parts_with_the_most_hosts() -> None:
    singles = tuple((host,) for host in range(6))
    groups = ((0, 1, 4), (2,), (3, 5))
    assert pairs_between_parts(groups, singles) == [(0, 1)]
    assert pairs_between_parts(((0, 1, 2, 3, 4, 5),), groups) == [(0, 3), (1, 5)]


@pytest.mark.parametrize("hosts", range(2, 10))
def test_each_pair_of_hosts_has_one_turn(hosts: int) -> None:
    schedule = turns(hosts)
    assert Counter(pair for turn in schedule for pair in turn) == Counter(combinations(range(hosts), 2))
    assert all(max(Counter(host for pair in turn for host in pair).values()) == 1 for turn in schedule)
    assert len(schedule) == hosts - 1 + hosts % 2
