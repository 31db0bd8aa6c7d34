"""The order of hosts on a measured network: against all orders, the same on all ranks, and in the tuner's choice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from unisono.algorithms.catalogue.registry import find
from unisono.errors import NoAlgorithmError
from unisono.tuning.decide import host_order
from unisono.tuning.decide.choice import NO_STATE, Explanation, Question, TunerState, explain
from unisono.tuning.decide.host_order import best_order, by_regions, steps_of
from unisono.tuning.machine.map_topology import MapTopology
from unisono.tuning.machine.network_map import NetworkMap
from unisono.tuning.simulator import orders
from unisono.tuning.simulator.orders import times_of
from unisono.tuning.simulator.simulate import simulate

LINK = "tcp/network"
SIZES = [1 << 10, 1 << 20, 64 << 20]


def random_map(hosts: int, seed: int) -> NetworkMap:
    """Return hosts in a square of 80 ms, with ways of 20 to 200 Mbit/s that differ from the ways back."""
    chance = random.Random(seed)
    places = [(chance.random(), chance.random()) for _ in range(hosts)]

    def delay_s(i: int, j: int) -> float:
        return 0.005 + 0.08 * float(np.hypot(*np.subtract(places[i], places[j]))) if i != j else 0.0

    return NetworkMap(
        tuple(tuple(delay_s(i, j) for j in range(hosts)) for i in range(hosts)),
        tuple(
            tuple(8 / (1e6 * chance.choice([20, 50, 100, 200])) if i != j else 0.0 for j in range(hosts))
            for i in range(hosts)
        ),
    )


def alone_s(collective: str, name: str, network: NetworkMap, nbytes: float, order: Sequence[int]) -> float:
    """Return the time of an order that is simulated alone, message by message."""
    return simulate(find(collective, name), nbytes, MapTopology(network, [order]), engine="events").seconds


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize(("collective", "name"), [("allreduce", "ring"), ("broadcast", "binomial")])
def test_order_takes_the_least_time_of_all_orders(collective: str, name: str, nbytes: int) -> None:
    network = random_map(5, nbytes)
    order = best_order(collective, name, network, nbytes)
    all_orders = (
        permutations(range(5)) if collective == "allreduce" else [(0, *rest) for rest in permutations(range(1, 5))]
    )
    least_s = min(alone_s(collective, name, network, nbytes, ranks) for ranks in all_orders)
    assert alone_s(collective, name, network, nbytes, order) <= 1.05 * least_s


def test_orders_side_by_side_take_as_long_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    network, steps = random_map(5, 1), steps_of("allreduce", "ring", 5)
    some = np.array([*permutations(range(5))][::7])
    monkeypatch.setattr(orders, "_MOST_RANKS", 20)  # so that the last chunk is a shorter one
    times = times_of(steps, partial(MapTopology, network), some, 1e6, 3)
    for order, seconds in zip(some, times.seconds, strict=True):
        alone = simulate(find("allreduce", "ring"), 1e6, MapTopology(network, [order]), segments=3, engine="rounds")
        assert seconds == pytest.approx(alone.seconds, rel=1e-12)


def test_search_without_all_orders_finds_nearly_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = []
    for seed in range(8):
        network = random_map(6, seed)
        exact = best_order("allreduce", "ring", network, 64 << 20)
        monkeypatch.setattr(host_order, "_ALL_ORDERS", 2)
        host_order._searched.cache_clear()
        best = best_order("allreduce", "ring", network, 64 << 20)
        monkeypatch.undo()
        host_order._searched.cache_clear()
        found_s, exact_s = times_of(
            steps_of("allreduce", "ring", 6), partial(MapTopology, network), np.array([best, exact]), 64 << 20
        ).seconds
        factors.append(found_s / exact_s)
    assert sum(factor <= 1.05 for factor in factors) >= 7


def test_orders_that_cannot_win_are_not_searched_unless_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    monkeypatch.setattr(
        host_order, "best_order", lambda _, name, network, *rest: searched.append(name) or by_regions(network)
    )
    hosts = tuple((rank,) for rank in range(16))
    explained(Question("allreduce", 8, 16, "tcp", hosts=hosts), random_map(16, 1))
    assert searched == []  # a ring passes on 30 times what all send to all at once
    explained(Question("allreduce", 8, 16, "tcp", hosts=hosts, algorithm="ring"), random_map(16, 1))
    assert searched == ["ring"]
    explained(Question("allreduce", 64 << 20, 16, "tcp", hosts=hosts), random_map(16, 1))
    assert searched[1:] == ["ring", "bidirectional_ring"]


@pytest.mark.parametrize("first", [0, 3])
def test_order_of_many_hosts_begins_with_the_root_and_names_each_host_once(first: int) -> None:
    network = random_map(12, 3)
    order = best_order("broadcast", "binomial", network, 1 << 20, first=first)
    assert order[0] == first
    assert sorted(order) == list(range(12))
    of_ranks = [first, *(host for host in range(12) if host != first)]
    found_s, ranks_s = times_of(
        steps_of("broadcast", "binomial", 12), partial(MapTopology, network), np.array([order, of_ranks]), 1e6
    ).seconds
    assert found_s < ranks_s


def test_order_goes_through_one_region_after_the_other() -> None:
    near, far = 0.005, 0.05
    delays = tuple(tuple(0.0 if i == j else near if (i + j) % 2 == 0 else far for j in range(6)) for i in range(6))
    rates = tuple(tuple(4e-8 * (i != j) for j in range(6)) for i in range(6))
    network = NetworkMap(delays, rates)
    assert network.regions() == ((0, 2, 4), (1, 3, 5))
    assert by_regions(network) == (0, 2, 4, 1, 3, 5)
    order = best_order("allreduce", "ring", network, 8)
    assert sum(delays[order[at - 1]][order[at]] == far for at in range(6)) == 2
    assert network.among((4, 1, 2)).regions() == ((0, 2), (1,))


def test_hosts_that_are_equally_far_are_one_region_and_keep_their_order() -> None:
    same = tuple(tuple(0.05 * (i != j) for j in range(4)) for i in range(4))
    network = NetworkMap(same, same)
    assert network.regions() == ((0, 1, 2, 3),)
    assert best_order("allreduce", "ring", network, 1 << 20) == (0, 1, 2, 3)


def explained(question: Question, network: NetworkMap) -> Explanation:
    return explain(question, NO_STATE.over(network, LINK))


def slow_neighbours(hosts: int) -> NetworkMap:
    """Return hosts whose ways between neighbours in the order of ranks carry 2 Mbit/s, and all others 200."""
    delays = tuple(tuple(0.01 * (i != j) for j in range(hosts)) for i in range(hosts))
    rates = tuple(
        tuple(0.0 if i == j else 4e-6 if (j - i) % hosts in (1, hosts - 1) else 4e-8 for j in range(hosts))
        for i in range(hosts)
    )
    return NetworkMap(delays, rates)


def test_tuner_takes_a_ring_that_avoids_slow_ways() -> None:
    question = Question("allreduce", 64 << 20, 6, "tcp", hosts=tuple((rank,) for rank in range(6)))
    network = slow_neighbours(6)
    choice = explained(question, network).choice
    order = dict(choice.params)["order"]
    assert choice.algorithm in host_order.ORDERED
    assert all(network.per_byte_s[order[at - 1]][order[at]] == 4e-8 for at in range(6))
    assert choice.variant == choice.shown == f"{choice.algorithm}(order={order!r})"


@pytest.mark.parametrize(
    "kept",
    [
        {"order": "canonical"},
        {"commutative": False},
        {"algorithm": "ring(order=(0, 1, 2, 3, 4, 5))"},
        {"collective": "scan"},
    ],
)
def test_order_of_ranks_is_kept_for_calls_that_need_it(kept: dict[str, object]) -> None:
    fields = {"collective": "allreduce", "nbytes": 64 << 20, "size": 6, "link": "tcp", **kept}
    question = Question(hosts=tuple((rank,) for rank in range(6)), **fields)  # type: ignore[arg-type]
    choice = explained(question, slow_neighbours(6)).choice
    assert dict(choice.params).get("order", tuple(range(6))) == tuple(range(6))


@pytest.mark.parametrize(
    ("algorithm", "needs"),
    [
        ("reduce binomial", {"order": "canonical"}),
        ("reduce binomial", {"commutative": False}),
        ("scan linear", {}),
        ("allreduce direct", {"order": "at_once"}),
    ],
)
def test_forced_order_is_refused_for_calls_that_need_the_order_of_ranks(
    algorithm: str, needs: dict[str, object]
) -> None:
    collective, name = algorithm.split()
    fields = {"collective": collective, "nbytes": 8, "size": 3, "link": "tcp", **needs}
    question = Question(algorithm=f"{name}(order=(2, 0, 1))", **fields)  # type: ignore[arg-type]
    with pytest.raises(NoAlgorithmError, match="takes another order than that of ranks, which this call needs"):
        explain(question)


def test_ranks_of_a_host_stay_together_in_an_order_of_hosts() -> None:
    hosts = ((0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11))
    question = Question("allreduce", 64 << 20, 12, "tcp", hosts=hosts, algorithm="ring")
    order = dict(explained(question, slow_neighbours(6)).choice.params)["order"]
    of_hosts = [hosts.index(tuple(order[at : at + 2])) for at in range(0, 12, 2)]
    assert all(abs(of_hosts[at] - of_hosts[at - 1]) in (2, 3, 4) for at in range(6))


def test_choice_for_a_very_long_vector_simulates_few_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    segments: list[int] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        segments.append(options["segments"])
        return simulate(*arguments, **options)

    monkeypatch.setattr(host_order, "simulate", noted)
    question = Question("allreduce", 4 << 30, 3, "tcp", hosts=((0,), (1,), (2,)))
    explanation = explained(question, random_map(3, 1))
    assert max(each.segments for each in explanation.candidates) > 100
    assert 1 < max(segments) <= 32


def test_state_of_a_communicator_on_some_hosts_has_their_map() -> None:
    state = NO_STATE.over(random_map(4, 1), LINK)
    assert state.network is not None
    assert state.among((2, 0)).network == state.network.among((2, 0))
    assert state.among((1,)).network is None
    assert TunerState().among((0, 1)).network is None
