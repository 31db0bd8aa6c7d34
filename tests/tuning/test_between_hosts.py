"""The model between hosts: senders that share the line of a host, and paths that fill segment by segment."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from unisono.algorithms.catalogue.algorithm import Algorithm, Cost
from unisono.algorithms.catalogue.flat import FLAT
from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.tuning.decide.choice import NO_STATE, Choice, Question, TunerState, choose, explain
from unisono.tuning.decide.model import filling_s, usual_path_segments
from unisono.tuning.decide.senders import senders
from unisono.tuning.machine.network_map import NetworkMap
from unisono.tuning.machine.parameters import LINKS, NETWORK, PRIORS, Link, Parameters, at_level
from unisono.tuning.machine.topology import flat
from unisono.tuning.simulator.simulate import simulate

LARGE = [1 << 20, 4 << 20, 16 << 20, 64 << 20]
WITH_PATH = [each for rows in FLAT.values() for each in rows.values() if each.cost and each.cost(8).path is not None]


def chosen(collective: str, nbytes: int, hosts: int = 4) -> Choice:
    ranks = tuple((rank,) for rank in range(hosts))
    return choose(Question(collective, nbytes, hosts, "tcp", hosts=ranks))


def cost_of(collective: str, choice: Choice, hosts: int = 4) -> Cost:
    cost = find(collective, choice.algorithm).cost_of(hosts, dict(choice.params))
    assert cost is not None
    return cost


@pytest.mark.parametrize("hosts", [3, 4])
@pytest.mark.parametrize("nbytes", LARGE)
@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter", "allreduce", "broadcast"])
def test_one_host_at_a_time_sends_to_a_host_if_vectors_are_large(collective: str, nbytes: int, hosts: int) -> None:
    choice = chosen(collective, nbytes, hosts)
    assert senders(collective, choice.algorithm, hosts) == 1
    least = min(each.cost(hosts).sent for each in FLAT[collective].values() if not each.mapped and each.cost)
    assert cost_of(collective, choice, hosts).sent == pytest.approx(least)


@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter", "alltoall", "allreduce", "broadcast"])
def test_small_vectors_take_the_fewest_rounds(collective: str) -> None:
    fewest = min(
        each.cost(4).rounds
        for each in FLAT[collective].values()
        if not (each.mapped or each.by_name_only) and each.cost is not None
    )
    assert cost_of(collective, chosen(collective, 64)).rounds == fewest


@pytest.mark.parametrize("nbytes", LARGE[1:])
def test_large_alltoall_changes_its_partner_in_each_round(nbytes: int) -> None:
    assert senders("alltoall", chosen("alltoall", nbytes).algorithm, 4) < senders("alltoall", "direct", 4)


@pytest.mark.parametrize("nbytes", LARGE)
def test_path_of_a_large_broadcast_is_filled_within_a_fifteenth(nbytes: int) -> None:
    choice = chosen("broadcast", nbytes)
    cost = cost_of("broadcast", choice)
    assert cost.path is not None
    assert (cost.path - cost.sent) / choice.segments < 1 / 15
    assert nbytes / choice.segments >= 16 << 10


@pytest.mark.parametrize("link", ["shm", "tcp"])
@pytest.mark.parametrize("collective", list(ALGORITHMS))
def test_lines_of_hosts_do_not_matter_on_one_host(collective: str, link: str) -> None:
    on_one_host = TunerState(parameters=Parameters(LINKS))
    for size in (2, 4, 7, 16):
        for power in range(3, 28, 4):
            for hosts in ((), (tuple(range(size)),)):
                question = Question(collective, 1 << power, size, link, hosts=hosts)
                assert choose(question) == choose(question, on_one_host)


def test_senders_of_a_host_are_counted_in_the_plans() -> None:
    counts = {
        name: senders("allgather", name, 8) for name in ("ring", "recursive_doubling", "neighbour_exchange", "direct")
    }
    assert counts == {"ring": 1.0, "recursive_doubling": 1.5, "neighbour_exchange": 1.5, "direct": 7.0}
    assert senders("broadcast", "chain", 8) == senders("broadcast", "binomial", 8) == 1.0
    assert senders("allreduce", "bidirectional_ring", 8) == 2.0


@pytest.mark.parametrize("hosts", [2, 3, 5, 8, 40])
def test_all_other_hosts_are_the_most_senders(hosts: int) -> None:
    for collective, rows in FLAT.items():
        assert all(1 <= senders(collective, name, hosts) <= max(1, hosts - 1) for name in rows)


@pytest.mark.parametrize("algorithm", WITH_PATH, ids=lambda each: f"{each.collective}-{each.name}")
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15, 16, 17, 23, 31, 32, 33])
def test_path_is_as_long_as_the_simulator_says(algorithm: Algorithm, size: int) -> None:
    cost = algorithm.cost_of(size, {})
    assert cost is not None
    bytes_alone = Link("bytes alone", latency_s=0.0, overhead_s=0.0, per_byte_s=1.0, reduce_per_byte_s=0.0)
    seconds = simulate(algorithm, 1e6, flat(size, bytes_alone), engine="events").seconds
    assert seconds / 1e6 == pytest.approx(cost.path)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(nbytes=st.integers(16 << 10, 64 << 20), size=st.integers(3, 40))
def test_usual_segments_of_a_path_take_the_least_time(nbytes: int, size: int) -> None:
    cost, link = FLAT["broadcast"]["chain"].cost_of(size, {}), PRIORS.link("tcp", NETWORK)
    assert cost is not None
    usual = usual_path_segments(cost, nbytes, link)
    others = (each for each in (usual - 1, usual + 1) if 1 <= each <= nbytes // (16 << 10))
    assert all(filling_s(cost, nbytes, link, usual) <= filling_s(cost, nbytes, link, each) for each in others)


def test_caller_may_set_the_segments_of_a_path() -> None:
    asked = Question("broadcast", 1 << 20, 4, "tcp", hosts=((0,), (1,), (2,), (3,)), algorithm="chain")
    assert choose(asked).segments > 8
    assert choose(replace(asked, algorithm="chain(segment_nbytes=524288)")).segments < 8


def test_far_hosts_pass_long_vectors_around_a_ring() -> None:
    ranks = range(4)
    delays = tuple(tuple(0.05 * (i != j) for j in ranks) for i in ranks)
    rates = tuple(tuple(8e-6 / 200 * (i != j) for j in ranks) for i in ranks)
    state = NO_STATE.over(NetworkMap(delays, rates), at_level("tcp", NETWORK))
    question = Question("allreduce", 64 << 20, 4, "tcp", hosts=tuple((rank,) for rank in ranks))
    explanation = explain(question, state)
    assert senders("allreduce", explanation.choice.algorithm, 4) == 1
    assert cost_of("allreduce", explanation.choice).sent == pytest.approx(1.5)
