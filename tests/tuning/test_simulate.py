from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from unisono.algorithms.catalogue.algorithm import Algorithm, Builder
from unisono.algorithms.catalogue.registry import ALGORITHMS
from unisono.algorithms.composition.phases import Composition
from unisono.algorithms.ir.plan import Group, Plan, Recv, Send, even, input_block, output_block
from unisono.errors import NoAlgorithmError, UsageError
from unisono.tuning.decide.model import predicted_s
from unisono.tuning.machine.parameters import Curve, Link
from unisono.tuning.machine.topology import Level, Topology, flat
from unisono.tuning.simulator.simulate import least_s, simulate
from unisono.tuning.simulator.step_table import schedule

ALL = [algorithm for by_name in ALGORITHMS.values() for algorithm in by_name.values()]
# In these algorithms, all ranks do equal work in every round, for each supported number of ranks.
EVEN = [
    ALGORITHMS[collective][name]
    for collective, names in {
        "allreduce": ("direct", "ring", "circulant", "balanced_tree", "all_pairs", "one_shot", "two_shot"),
        "reduce_scatter": ("ring", "pairwise", "circulant", "direct", "balanced_tree"),
        "allgather": ("ring", "recursive_doubling", "bruck", "neighbour_exchange", "direct", "circulant", "read"),
        "alltoall": ("pairwise", "direct", "bruck"),
        "barrier": ("dissemination", "direct"),
    }.items()
    for name in names
]
LINK = Link("wire", 3e-6, 0.0, 1e-9, 1e-10)
sizes = st.one_of(st.integers(1, 24), st.sampled_from([32, 49, 64, 66]))
bounded = settings(max_examples=25, deadline=None, derandomize=True)


def seconds(algorithm: Algorithm, size: int, link: Link, nbytes: float = 1e6, **how: Any) -> float:
    return simulate(algorithm, nbytes, flat(size, link), **how).seconds


# If ranks share no resource, the simulator and the closed forms agree.


@bounded
@given(algorithm=st.sampled_from(EVEN), size=sizes, nbytes=st.integers(1, 1 << 40))
def test_simulation_equals_closed_form_for_symmetric_algorithms(algorithm: Algorithm, size: int, nbytes: int) -> None:
    assume(algorithm.supports(size) is None)
    cost = algorithm.cost_of(size, {})
    assert cost is not None
    # The model also counts stores to SCRATCH that leave the nearest cache. The simulator does not model caches.
    expected_s = predicted_s(replace(cost, stored=None), nbytes, LINK)
    assert seconds(algorithm, size, LINK, nbytes) == pytest.approx(expected_s, rel=1e-9)


@pytest.mark.parametrize("name", ["recursive_doubling", "rabenseifner"])
@pytest.mark.parametrize("size", [2, 4, 64, 512])
def test_simulation_equals_closed_form_when_no_rank_is_folded(name: str, size: int) -> None:
    algorithm = ALGORITHMS["allreduce"][name]
    assert seconds(algorithm, size, LINK) == pytest.approx(predicted_s(algorithm.cost(size), 1_000_000, LINK))


@bounded
@given(algorithm=st.sampled_from(ALL), size=sizes)
def test_simulated_latencies_do_not_exceed_the_declared_rounds(algorithm: Algorithm, size: int) -> None:
    assume(algorithm.supports(size) is None)
    cost = algorithm.cost_of(size, {})
    latencies = seconds(algorithm, size, Link("", 1.0, 0.0, 0.0, 0.0))
    assert latencies <= cost.rounds
    # A rank that only sends does not wait until its message has arrived. So trees whose root comes first take fewer
    # latencies.
    tree = algorithm.collective in {"broadcast", "scatter", "scan", "exscan"} or "tree" in algorithm.name
    assert latencies == cost.rounds or tree or isinstance(algorithm, Composition)


@bounded
@given(algorithm=st.sampled_from([candidate for candidate in ALL if candidate.is_cost_exact]), size=sizes)
def test_simulated_time_covers_sends_and_reductions_of_the_busiest_rank(algorithm: Algorithm, size: int) -> None:
    assume(algorithm.supports(size) is None)
    cost = algorithm.cost_of(size, {})
    is_rooted = algorithm.collective in {"reduce", "broadcast", "gather", "scatter"}
    assume(size < 9 or not is_rooted)
    for link, least in ((Link("", 0, 0, 1.0, 0.0), cost.sent), (Link("", 0, 0, 0.0, 1.0), cost.reduced)):
        times = [seconds(algorithm, size, link, 1.0, root=root) for root in range(size if is_rooted else 1)]
        assert max(times) >= least * (1 - 1e-9)


@bounded
@given(algorithm=st.sampled_from(ALL), size=sizes, nbytes=st.integers(0, 1 << 30), more=st.integers(0, 1 << 30))
def test_simulated_time_grows_with_bytes_and_respects_the_lower_bound(
    algorithm: Algorithm, size: int, nbytes: int, more: int
) -> None:
    assume(algorithm.supports(size) is None)
    less, longer = (seconds(algorithm, size, LINK, length) for length in (nbytes, nbytes + more))
    assert less <= longer * (1 + 1e-12)
    assert less >= least_s(algorithm.collective, nbytes, flat(size, LINK)) * (1 - 1e-9)


# Times from textbooks for algorithms whose ranks do unequal work.


@pytest.mark.parametrize("size", [2, 3, 8, 13])
@pytest.mark.parametrize("segments", [1, 4, 10])
def test_a_chain_is_a_pipeline(size: int, segments: int) -> None:
    link = Link("", 2e-6, 0.0, 1e-9)
    expected = (size - 2 + segments) * (2e-6 + 1e6 / segments * 1e-9)
    assert seconds(ALGORITHMS["broadcast"]["chain"], size, link, segments=segments) == pytest.approx(expected)


def test_a_binomial_tree_sends_all_bytes_in_each_round() -> None:
    assert seconds(ALGORITHMS["broadcast"]["binomial"], 8, LINK) == pytest.approx(3 * (3e-6 + 1e-3))
    combined = 3 * (3e-6 + 1e-3 + 1e-4)
    assert seconds(ALGORITHMS["reduce"]["binomial"], 8, LINK) == pytest.approx(combined)


def test_simulated_gather_root_receives_one_share_at_a_time() -> None:
    assert seconds(ALGORITHMS["gather"]["linear"], 10, LINK) == pytest.approx(3e-6 + 0.9e-3)


# The two engines of the simulator.


@bounded
@given(algorithm=st.sampled_from(EVEN), size=st.integers(1, 24), overhead_s=st.sampled_from([0.0, 1e-6]))
def test_both_engines_agree_when_ranks_send_one_message_at_a_time(
    algorithm: Algorithm, size: int, overhead_s: float
) -> None:
    assume(algorithm.supports(size) is None and algorithm.name not in {"balanced_tree", "all_pairs"})
    link = LINK._replace(overhead_s=overhead_s)
    by_rounds, by_events = (seconds(algorithm, size, link, engine=engine) for engine in ("rounds", "events"))
    assert by_rounds == pytest.approx(by_events)


@bounded
@given(algorithm=st.sampled_from(ALL), size=st.integers(1, 20), segments=st.sampled_from([1, 1, 3]))
def test_both_engines_count_equal_bytes_and_similar_times(algorithm: Algorithm, size: int, segments: int) -> None:
    assume(algorithm.supports(size) is None and "chain" not in algorithm.name)
    by_rounds, by_events = (
        simulate(algorithm, 1e6, two_hosts(size), segments=segments, engine=engine) for engine in ("rounds", "events")
    )
    for one, other in zip(by_rounds.levels, by_events.levels, strict=True):
        assert (one.name, one.messages) == (other.name, other.messages)
        assert one.nbytes == pytest.approx(other.nbytes, abs=1e-3)
    alone = [seconds(algorithm, size, LINK, segments=segments, engine=engine) for engine in ("rounds", "events")]
    assert alone[0] >= alone[1] * 0.9


def two_hosts(size: int, pairs: float = 1.0) -> Topology:
    near, far = Link("near", 1e-6, 0, 1e-10), Link("far", 5e-6, 0, 1e-9, pairs=pairs)
    return Topology(size, [Level("host", near, 10), Level("network", far, 2)])


def test_symmetric_schedule_equals_the_schedule_built_from_all_ranks() -> None:
    for algorithm in ALL:
        for size in (8, 12, 66):
            if algorithm.supports(size) is None:
                result = schedule(algorithm, size, 0, {})
                of_all = schedule(with_untrusted_builder(algorithm), size, 0, {})
                assert not of_all.is_symmetric
                assert rows_of(result) == rows_of(of_all), (algorithm, size)


def with_untrusted_builder(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with a builder that the simulator does not trust to be symmetric."""
    build: Callable[..., Plan] = algorithm.build
    assert isinstance(build, Builder)
    from dataclasses import replace

    return replace(algorithm, build=build.__wrapped__)


def rows_of(result: Any) -> list[tuple[Any, ...]]:
    names = ("rank", "lane", "first", "kind", "peer", "stride", "times", "advance", "share")
    return sorted(zip(*(getattr(result, name).tolist() for name in names), strict=True))


def test_ten_thousand_ranks_are_simulated() -> None:
    ring = simulate(ALGORITHMS["allreduce"]["ring"], 1e8, flat(10_240, LINK))
    assert ring.seconds == pytest.approx(predicted_s(ALGORITHMS["allreduce"]["ring"].cost(10_240), 100_000_000, LINK))
    doubling = simulate(ALGORITHMS["allreduce"]["recursive_doubling"], 1e6, flat(16_384, LINK))
    assert doubling.seconds == pytest.approx(14 * (3e-6 + 1e-3 + 1e-4))
    assert doubling.levels[0].messages == 14 * 16_384


# Contention.


def test_simulated_ranks_of_a_host_share_its_outgoing_link() -> None:
    direct = ALGORITHMS["allgather"]["recursive_doubling"]
    alone, shared = (
        simulate(direct, 20e6, Topology(16, [Level("host", LINK, 8), Level("network", LINK._replace(pairs=pairs), 2)]))
        for pairs in (8, 1)
    )
    # In the last round, all 8 ranks of a host send half of the vector to the other host.
    assert shared.seconds - alone.seconds == pytest.approx(7 * 10e6 * 1e-9)
    assert shared.busiest[0].startswith(("out of host", "into host"))
    assert [(level.name, level.messages) for level in shared.levels] == [("host", 48), ("network", 16)]


def test_simulated_senders_to_one_rank_share_its_ports() -> None:
    gather = ALGORITHMS["gather"]["linear"]
    one, four = (seconds(gather, 9, LINK._replace(ports=ports), 9e6) for ports in (1, 4))
    assert one - 3e-6 == pytest.approx(8e-3)
    assert four - 3e-6 == pytest.approx(2e-3)


def test_simulated_round_takes_the_measured_step() -> None:
    link = LINK._replace(
        latency_s=1e-6, overhead_s=1e-6, step=Curve((1000, 100_000), (5e-6, 50e-6)), reduce_per_byte_s=0
    )
    for nbytes, step_s in ((8000, 5e-6), (800_000, 50e-6), (8_000_000, 500e-6)):
        assert seconds(ALGORITHMS["allreduce"]["ring"], 8, link, nbytes) == pytest.approx(14 * step_s)


@pytest.mark.parametrize("engine", ["rounds", "events"])
def test_message_to_another_rank_than_the_one_before_takes_longer(engine: str) -> None:
    usual = Link("wire", 1e-6, 0.0, 1e-9, 0.0)
    slower = usual._replace(other_peer_s=1e-3)
    for collective, name, size, changes in (
        ("allgather", "ring", 6, 1),
        ("alltoall", "pairwise", 6, 5),
        ("scatter", "linear", 6, 5),
        ("broadcast", "binomial", 8, 3),
        ("allreduce", "rabenseifner", 8, 5),  # the last partner of halving is the first one of doubling
    ):
        times = [
            simulate(ALGORITHMS[collective][name], 600, flat(size, link), engine=engine).seconds
            for link in (usual, slower)
        ]
        assert times[1] - times[0] == pytest.approx(changes * 1e-3, rel=1e-3), name


def test_simulation_adds_measured_reductions_and_copies() -> None:
    free = Link("", 0, 0, 0)
    topology = Topology(
        4, [Level("x", free)], reduce=Curve((100, 1000), (1.0, 10.0)), copy=Curve((100, 1000), (2.0, 20.0))
    )
    assert simulate(ALGORITHMS["allreduce"]["ring"], 4000, topology).seconds == pytest.approx(3 * 10.0)
    assert simulate(ALGORITHMS["allgather"]["ring"], 4000, topology).seconds == pytest.approx(20.0)


# Refused requests.


def test_simulate_refuses_wrong_arguments() -> None:
    ring = ALGORITHMS["allreduce"]["ring"]
    with pytest.raises(UsageError, match="-1 bytes"):
        simulate(ring, -1, flat(2, LINK))
    with pytest.raises(UsageError, match="0 segments"):
        simulate(ring, 1, flat(2, LINK), segments=0)
    with pytest.raises(
        UsageError, match="there is no engine 'waves' of the simulator: pass one of auto, rounds, events"
    ):
        simulate(ring, 1, flat(2, LINK), engine="waves")
    with pytest.raises(UsageError, match="no parameter 'radix'"):
        simulate(ring, 1, flat(2, LINK), params={"radix": 2})
    with pytest.raises(NoAlgorithmError, match="cannot run on 6 ranks"):
        simulate(ALGORITHMS["allgather"]["recursive_doubling"], 1, flat(6, LINK))
    with pytest.raises(UsageError, match="cannot simulate ranks with different numbers"):
        simulate(ALGORITHMS["allgather"]["ring"], 1, flat(6, LINK), params={"varying": True})


def test_simulation_builds_a_user_algorithm_for_every_rank() -> None:
    def line(size: int, rank: int, root: int = 0) -> Plan:
        groups = [Group(()) for _ in range(size - 1)]
        if rank:
            groups[rank - 1] = Group((Recv(rank - 1, output_block()),))
        if rank < size - 1:
            groups[rank] = Group((Send(rank + 1, output_block() if rank else input_block()),))
        return Plan("broadcast", "line", size, rank, root, even(int(rank == root)), even(1), lanes=(tuple(groups),))

    own = Algorithm("broadcast", "line", line, None, "")
    result = simulate(own, 1e6, flat(20, LINK))
    assert result.seconds == pytest.approx(19 * (3e-6 + 1e-3))
    assert np.all(np.diff(result.finish_s[1:-1]) > 0)
