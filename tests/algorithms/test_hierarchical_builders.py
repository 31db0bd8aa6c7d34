"""Compositions of phases inside and across hosts: their proofs on many hosts, their refusals and their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from support import covering
from support.deadlines import DEADLINE_S
from support.harness import call_of
from support.ranks import LocalRanks

from unisono.algorithms.builders.chain import broadcast_chain
from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.composed import COMPOSED
from unisono.algorithms.catalogue.flat import FLAT, REGISTERED
from unisono.algorithms.catalogue.registration import algorithm as register
from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.algorithms.composition.hierarchical import allreduce_full_lane, allreduce_hierarchical
from unisono.algorithms.composition.host_levels import (
    Hosts,
    equal_hosts,
    in_lanes,
    led_by,
    levels_of,
    needs_runs,
    ranks_of,
)
from unisono.algorithms.composition.phases import Composition
from unisono.algorithms.ir.encode import encode
from unisono.algorithms.ir.plan import Group, Plan, Reduce, Repeat, Send
from unisono.algorithms.verifier.verify import verify_algorithm
from unisono.collectives.calls.planning import HostLayout
from unisono.collectives.communicator import Communicator
from unisono.errors import NoAlgorithmError, UsageError
from unisono.options import Options

ALL = [row for by_name in COMPOSED.values() for row in by_name.values() if isinstance(row, Composition)]


def cases(algorithms: Sequence[Algorithm]) -> list[Any]:
    return [pytest.param(algorithm, id=f"{algorithm.collective}_{algorithm.name}") for algorithm in algorithms]


EVERY_ALGORITHM = cases(ALL)
BY_SHARES = cases([COMPOSED[collective]["hierarchical"] for collective in ("allgather", "reduce_scatter")])
LED = cases([row for row in ALL if row.name == "hierarchical" and row.needs is not needs_runs])
SCANS = cases([row for row in ALL if row.collective in {"scan", "exscan"}])
IN_LANES = cases([find("allreduce", "full_lane")])
EXACT = cases([find("allreduce", "full_lane"), find("alltoall", "two_level")])


def runs(*lengths: int) -> Hosts:
    """Return hosts with these numbers of consecutive ranks."""
    return tuple(tuple(range(*ends)) for ends in pairwise(accumulate(lengths, initial=0)))


# Hosts with equal numbers of consecutive ranks, on which every algorithm can run.
EQUAL = [((0,),), (0, 1, 2), runs(4), runs(1, 1, 1), runs(2, 2), runs(3, 3), runs(2, 2, 2), runs(4, 4, 4), runs(5, 5)]
UNEQUAL_RUNS = [runs(1, 2), runs(3, 1, 2), runs(1, 4), runs(2, 3, 4, 1, 2), runs(7, 3, 6), runs(9, 8, 8, 7)]
EQUAL_LEVELS = [
    ((0, 4, 2), (3, 1, 5)),
    (((0, 1), (2, 3)), ((4, 5), (6, 7))),
    tuple(tuple(tuple(range(first, first + 3)) for first in (rack, rack + 3)) for rack in (0, 6, 12)),
]
UNEQUAL_LEVELS = [
    ((5, 1), (0, 2, 3, 4)),
    (((0,), (1, 2)), ((3, 4, 5),), ((6, 7), (8,), (9,))),
    (0, (1, 2), ((3, 4), 5)),
]


def prove(algorithm: Algorithm, hosts: Hosts, segments: int = 1, **params: Any) -> None:
    size = len(ranks_of(hosts))
    is_rooted = algorithm.collective in {"reduce", "broadcast"}
    # Of many roots: the first rank, a rank that leads no host, a rank in the middle, and the last rank.
    roots = range(size) if size <= 6 else sorted({0, 1, size // 2, size - 1})
    for root in roots if is_rooted else (0,):
        verify_algorithm(algorithm, size, root, segments, hosts=hosts, **params)


# Proofs.


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_hierarchical_algorithms_are_proved_on_equal_hosts(algorithm: Algorithm, segments: int) -> None:
    for hosts in EQUAL:
        prove(algorithm, hosts, segments)


@pytest.mark.parametrize("algorithm", [*LED, *BY_SHARES, *SCANS])
def test_leader_algorithms_and_scans_are_proved_on_unequal_hosts(algorithm: Algorithm) -> None:
    for hosts in UNEQUAL_RUNS:
        prove(algorithm, hosts)


def layouts(size: int) -> list[Hosts]:
    """Return hosts of `size` ranks: one host, one rank apart from the others, and hosts of decreasing sizes."""
    shrinking: list[int] = []
    while left := size - sum(shrinking):
        shrinking.append(-(-left // 3))
    return [runs(size), runs(1, size - 1) if size > 1 else runs(1), runs(*shrinking)]


@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("algorithm", BY_SHARES)
def test_share_algorithms_are_proved_for_any_size_on_unequal_hosts(algorithm: Composition, varying: bool) -> None:
    for size in (*range(1, 18), 24, 31, 32, 48):
        for hosts in layouts(size):
            verify_algorithm(algorithm, size, hosts=hosts, varying=varying)


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("algorithm", BY_SHARES)
def test_share_algorithms_are_proved_on_levels_of_any_depth(algorithm: Composition, segments: int) -> None:
    for hosts in (
        (((0, 1), (2, 3)), ((4, 5), (6, 7))),
        (((0,), (1, 2)), ((3, 4, 5),), ((6, 7), (8,), (9,))),
        (0, (1, 2), ((3, 4), 5)),
        ((((0, 1), 2), (3,)), 4, ((5,), (6, (7, 8, 9)))),
    ):
        for varying in (False, True):
            verify_algorithm(algorithm, len(ranks_of(hosts)), 0, segments, hosts=hosts, varying=varying)


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("algorithm", LED)
def test_leader_algorithms_are_proved_on_any_levels_and_rank_orders(algorithm: Algorithm, segments: int) -> None:
    for hosts in (*EQUAL_LEVELS, *UNEQUAL_LEVELS):
        prove(algorithm, hosts, segments)


@pytest.mark.parametrize("algorithm", IN_LANES)
def test_full_lane_algorithms_are_proved_on_any_equal_levels(algorithm: Algorithm) -> None:
    for hosts in EQUAL_LEVELS:
        prove(algorithm, hosts)


# (collective, algorithm, parameter that names the algorithm of a phase, collective of that phase).
PHASES = [
    ("allreduce", "hierarchical", "reduce", "reduce"),
    ("allreduce", "hierarchical", "across", "allreduce"),
    ("allreduce", "hierarchical", "broadcast", "broadcast"),
    ("allreduce", "full_lane", "reduce_scatter", "reduce_scatter"),
    ("allreduce", "full_lane", "across", "allreduce"),
    ("allreduce", "full_lane", "allgather", "allgather"),
    ("reduce", "hierarchical", "reduce", "reduce"),
    ("reduce", "hierarchical", "across", "reduce"),
    ("broadcast", "hierarchical", "across", "broadcast"),
    ("broadcast", "hierarchical", "broadcast", "broadcast"),
    ("barrier", "hierarchical", "inside", "barrier"),
    ("barrier", "hierarchical", "across", "barrier"),
    ("scan", "two_level", "inside", "scan"),
    ("scan", "two_level", "across", "exscan"),
    ("scan", "two_level", "broadcast", "broadcast"),
    ("allgather", "hierarchical", "gather", "gather"),
    ("allgather", "hierarchical", "across", "allgather"),
    ("allgather", "hierarchical", "broadcast", "broadcast"),
    ("reduce_scatter", "hierarchical", "reduce", "reduce"),
    ("reduce_scatter", "hierarchical", "across", "reduce_scatter"),
    ("reduce_scatter", "hierarchical", "scatter", "scatter"),
    ("exscan", "two_level", "inside", "exscan"),
    ("exscan", "two_level", "across", "exscan"),
    ("alltoall", "two_level", "inside", "alltoall"),
    ("alltoall", "two_level", "across", "alltoall"),
]
# Algorithms that cannot be phases, because their messages have blocks that are not neighbours in the whole vector.
NO_PHASE = {
    ("allreduce", "full_lane", "across", "circulant"),
    ("allreduce", "full_lane", "reduce_scatter", "pat"),
    ("allreduce", "full_lane", "allgather", "pat"),
    ("allgather", "hierarchical", "across", "pat"),
    ("alltoall", "two_level", "inside", "bruck"),
    *(("reduce_scatter", "hierarchical", "across", part) for part in ("circulant", "pat")),
}
# These algorithms cut the vector in two, or into blocks for a power of two of ranks. Nine shares fit neither.
IN_EQUAL_BLOCKS = {
    *(("allgather", "hierarchical", "broadcast", part) for part in ("double_binary_tree", "scatter_doubling")),
    *(("reduce_scatter", "hierarchical", "reduce", part) for part in ("double_binary_tree", "rabenseifner")),
}


# Phases whose vector has a block for each rank, so that an algorithm in 8 blocks cannot cut it.
BY_RANKS = {("allgather", "hierarchical", "broadcast"), ("reduce_scatter", "hierarchical", "reduce")}


def parts_of_phases(phase: tuple[str, str, str, str]) -> list[str]:
    """Return the names of the algorithms that can be `phase`. Those that permute blocks in memory are refused."""
    return [
        algorithm.name
        for algorithm in ALGORITHMS[phase[3]].values()
        if not algorithm.mapped
        and algorithm.name not in COMPOSED.get(phase[3], {})
        and (*phase[:3], algorithm.name) not in NO_PHASE
        and not algorithm.build(4, 0).permutation
    ]


@pytest.mark.parametrize("phase", PHASES, ids="-".join)
def test_every_algorithm_of_a_collective_can_be_its_phase(phase: tuple[str, str, str, str]) -> None:
    collective, name, parameter, _ = phase
    for part in parts_of_phases(phase):
        in_one_block = find(phase[3], part).in_blocks and phase[:3] in BY_RANKS
        params = {parameter: f"{part}(blocks=1)" if in_one_block else part}
        for hosts in (runs(2, 2), runs(4, 4), runs(2, 2, 2, 2)):
            prove(COMPOSED[collective][name], hosts, segments=1, **params)
        if find(phase[3], part).supports(3) is None and (*phase[:3], part) not in IN_EQUAL_BLOCKS:
            prove(COMPOSED[collective][name], runs(3, 3, 3), segments=1, **params)


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_every_pair_of_declared_phase_algorithms_can_be_combined(algorithm: Composition) -> None:
    parameters = [phase.parameter for phase in algorithm.phases]
    for names in covering.pairwise(*(phase.algorithms for phase in algorithm.phases)):
        params = dict(zip(parameters, names, strict=True))
        for hosts in (runs(4, 4), runs(3, 3, 3), runs(3, 1, 2)):
            size = len(ranks_of(hosts))
            if algorithm.needs(levels_of(hosts, size)) is None:
                verify_algorithm(algorithm, size, 1, hosts=hosts, **params)


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_builder_default_is_first_algorithm_declared_for_the_phase(algorithm: Composition) -> None:
    defaults = {name: parameter.default for name, parameter in algorithm.parameters().items()}
    declared = {phase.parameter: phase.algorithms[0] for phase in algorithm.phases}
    fixed = {"hosts": None, **({"varying": False} if algorithm.varying else {})}
    assert defaults == {**fixed, **declared}


@pytest.mark.parametrize(
    ("collective", "name", "params"),
    [
        ("allreduce", "hierarchical", {"across": "recursive_multiplying(radix=3)", "broadcast": "knomial(radix=3)"}),
        ("allreduce", "full_lane", {"reduce_scatter": "direct(window=1)", "allgather": "bruck(radix=3)"}),
        ("allgather", "hierarchical", {"gather": "linear(window=2)", "across": "bruck(radix=4)"}),
        ("barrier", "hierarchical", {"inside": ("tree(radix=3)",), "across": "dissemination(radix=3)"}),
        ("alltoall", "two_level", {"inside": "direct(window=2)", "across": "bruck(radix=3)"}),
    ],
)
def test_phase_accepts_parameters_of_its_algorithm(collective: str, name: str, params: dict[str, Any]) -> None:
    algorithm, hosts = COMPOSED[collective][name], runs(4, 4, 4)
    prove(algorithm, hosts, **params)
    plain = {key: str(value).split("(")[0] for key, value in params.items() if isinstance(value, str)}
    plans = [algorithm.build(12, 4, hosts=hosts, **arguments) for arguments in (params, plain)]
    assert plans[0] != plans[1]


@pytest.fixture
def relay() -> Iterator[str]:
    """Register a user's broadcast and yield its name; remove it at the end."""

    @register("broadcast", "relay", commutative_only=False)
    def broadcast_relay(size: int, rank: int, root: int = 0) -> Plan:
        return replace(broadcast_chain(size, rank, root), algorithm="relay")

    yield "relay"
    del REGISTERED["broadcast"]["relay"]


def test_user_algorithm_without_cost_can_be_a_phase(relay: str) -> None:
    algorithm = find("allreduce", "hierarchical")
    prove(algorithm, runs(3, 1, 2), broadcast=relay)
    assert algorithm.cost_of(6, {"broadcast": relay}) is None


def test_each_level_can_have_its_own_algorithm() -> None:
    three = (((0, 1, 2), (3, 4, 5)), ((6, 7, 8), (9, 10, 11)))
    prove(find("allreduce", "hierarchical"), three, reduce=("chain", "binary"), broadcast=("knomial", "chain"))
    prove(find("allreduce", "full_lane"), three, reduce_scatter=("direct", "circulant"), allgather=("bruck", "ring"))


@pytest.mark.parametrize("algorithm", EXACT)
def test_declared_costs_are_exact_on_equal_hosts(algorithm: Algorithm) -> None:
    for hosts in (runs(2, 2), runs(3, 3, 3), runs(4, 4), runs(2, 2, 2, 2, 2)):
        size = len(ranks_of(hosts))
        report, cost = verify_algorithm(algorithm, size, hosts=hosts), algorithm.cost_of(size, {"hosts": hosts})
        assert cost is not None
        result = (report.rounds, float(report.sent), float(report.reduced))
        assert result == pytest.approx((cost.rounds, cost.sent, cost.reduced))


# The messages of compositions.


def pairs(plans: Sequence[Plan]) -> set[tuple[int, int]]:
    return {
        (plan.rank, step.peer)
        for plan in plans
        for lane in range(len(plan.lanes))
        for group in plan.groups(lane)
        for step in group.steps
        if isinstance(step, Send)
    }


def between(plans: Sequence[Plan], hosts: Hosts) -> set[tuple[int, int]]:
    """Return the (sender, receiver) of all messages between hosts."""
    host = {rank: number for number, part in enumerate(hosts) for rank in ranks_of(part)}
    return {(sender, receiver) for sender, receiver in pairs(plans) if host[sender] != host[receiver]}


def test_only_leaders_talk_to_other_hosts() -> None:
    hosts = runs(3, 4, 2)
    plans = [allreduce_hierarchical(9, rank, hosts=hosts) for rank in range(9)]
    assert {rank for ends in between(plans, hosts) for rank in ends} == {0, 3, 7}


def test_full_lane_ranks_talk_to_same_local_rank_on_other_hosts() -> None:
    hosts = runs(3, 3)
    plans = [allreduce_full_lane(6, rank, hosts=hosts) for rank in range(6)]
    assert between(plans, hosts) == {(0, 3), (3, 0), (1, 4), (4, 1), (2, 5), (5, 2)}


def test_two_level_alltoall_crosses_hosts_between_equal_local_ranks_only() -> None:
    hosts = runs(4, 4, 4)
    plans = [find("alltoall", "two_level").build(12, rank, hosts=hosts) for rank in range(12)]
    assert {(receiver - sender) % 4 for sender, receiver in between(plans, hosts)} == {0}


def test_two_level_exscan_does_not_combine_on_the_last_host() -> None:
    hosts = runs(2, 2, 2)
    plans = [find("exscan", "two_level").build(6, rank, hosts=hosts) for rank in range(6)]
    combining = [
        plan.rank
        for plan in plans
        for lane in range(len(plan.lanes))
        for group in plan.groups(lane)
        for step in group.steps
        if isinstance(step, Reduce) and not step.lower
    ]
    assert combining == [1, 3]


def test_leader_is_the_root_or_the_first_rank_of_its_host() -> None:
    levels = levels_of(((0, 1, 2), (3, 4, 5)), 6)
    assert [led_by(levels, rank, 4)[0] for rank in range(6)] == [(0, 4), (), (), (), (0, 4), ()]
    assert led_by(levels, 5, 4)[1] == (3, 4, 5)


def test_lanes_join_ranks_with_equal_position_at_each_level() -> None:
    levels = levels_of((((0, 1), (2, 3)), ((4, 5), (6, 7))), 8)
    assert in_lanes(levels, 5) == ((1, 5), (5, 7), (4, 5))


def test_default_hosts_are_equal_runs_near_the_square_root_of_size() -> None:
    assert equal_hosts(12) == runs(3, 3, 3, 3)
    assert equal_hosts(7) == runs(1, 1, 1, 1, 1, 1, 1)


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_plans_stay_small_at_any_number_of_ranks(algorithm: Algorithm) -> None:
    size, hosts = 16384, runs(*(8,) * 2048)
    for rank in (0, 1, size // 2, size - 1):
        assert 8 * len(encode(algorithm.build(size, rank, hosts=hosts))) < 100 * 1024


def test_full_lane_plan_across_1024_hosts_has_few_rows() -> None:
    lanes = allreduce_full_lane(4096, 2049, hosts=runs(*(4,) * 1024)).lanes
    items = [item for lane in lanes for item in lane]
    assert len(items) < 40
    assert sum(item.times if isinstance(item, Repeat) else 1 for item in items) == 3 + 2 * 1023 + 3
    assert any(isinstance(item, Group) and item.after for item in items)


# Refusals.


@pytest.mark.parametrize(
    ("collective", "name", "params", "message"),
    [
        ("allreduce", "hierarchical", {"hosts": ((0, 1), (1, 2, 3))}, "each of the ranks 0 to 3 once"),
        ("allreduce", "hierarchical", {"hosts": ((0, 1), (2,))}, "each of the ranks 0 to 3 once"),
        ("allreduce", "hierarchical", {"hosts": ((0, 1, 2, 3), ())}, "none may be empty"),
        ("allreduce", "full_lane", {"hosts": ((0, 1, 2), (3,))}, "equally many ranks on every host, not 1 and 3"),
        ("allreduce", "full_lane", {"hosts": (0, 1, (2, 3))}, "equally many ranks on every host"),
        ("alltoall", "two_level", {"hosts": ((0, 1, 2), (3,))}, "equally many ranks on every host, not 1 and 3"),
        ("alltoall", "two_level", {"hosts": ((0, 2), (1, 3))}, "hosts of consecutive ranks"),
        ("allgather", "hierarchical", {"hosts": ((0, 2), (1, 3))}, "hosts of consecutive ranks"),
        ("reduce_scatter", "hierarchical", {"hosts": ((2, 3), (0, 1))}, "hosts of consecutive ranks"),
        ("scan", "two_level", {"hosts": ((0, 2), (1, 3))}, "hosts of consecutive ranks"),
        ("exscan", "two_level", {"hosts": ((2, 3), (0, 1))}, "hosts of consecutive ranks"),
        ("allreduce", "hierarchical", {"reduce": "binomal"}, "no phase can be reduce 'binomal': it can be binomial, "),
        ("allreduce", "hierarchical", {"reduce": ("chain", "chain")}, "2 algorithms of reduce are named for 1 levels"),
        ("broadcast", "hierarchical", {"across": "scatter_doubling", "hosts": (0, 1, (2, 3))}, "not 3"),
        ("allreduce", "hierarchical", {"across": "one_shot"}, "cannot use mapped memory"),
        ("allreduce", "hierarchical", {"across": "hierarchical"}, "no phase can be allreduce 'hierarchical'"),
        ("broadcast", "hierarchical", {"across": "knomial(radix=1)"}, r"knomial\(radix=1\)': radix is 1"),
        ("broadcast", "hierarchical", {"across": "knomial(radix='2')"}, r"no phase can be broadcast .knomial\(radix="),
        ("broadcast", "hierarchical", {"across": "knomial(width=2)"}, "'knomial.width=2.': .* no parameter 'width'"),
        (
            "broadcast",
            "hierarchical",
            {"across": "knomial(rank=2)"},
            "'knomial.rank=2.': the composition itself sets rank",
        ),
        ("broadcast", "hierarchical", {"across": "knomial(2)"}, r"no phase can be 'knomial\(2\)': name an algorithm"),
        ("broadcast", "hierarchical", {"across": "knomial(radix=)"}, "no phase can be .* name an algorithm"),
        ("allgather", "hierarchical", {"broadcast": "scatter_ring", "hosts": ((0, 1, 2), (3,))}, "4 shares into 3"),
    ],
)
def test_builder_refuses_impossible_composition_with_the_reason(
    collective: str, name: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises((UsageError, NoAlgorithmError), match=message):
        COMPOSED[collective][name].build(4, 0, **params)


@pytest.mark.parametrize("refused", sorted(NO_PHASE), ids="-".join)
def test_phase_with_messages_of_nonconsecutive_blocks_is_refused(refused: tuple[str, ...]) -> None:
    collective, name, parameter, part = refused
    with pytest.raises(UsageError, match=f"{part} cannot be a phase here: .* blocks that are not consecutive"):
        [COMPOSED[collective][name].build(16, rank, hosts=runs(4, 4, 4, 4), **{parameter: part}) for rank in (12, 15)]


def test_a_phase_whose_blocks_are_permuted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = find("allreduce", "ring")

    def permuted(size: int, rank: int, root: int = 0) -> Plan:
        return replace(ring.build(size, rank), permutation=tuple(reversed(range(size))))

    monkeypatch.setitem(FLAT["allreduce"], "ring", replace(ring, build=permuted))
    with pytest.raises(UsageError, match="allreduce ring cannot be a phase, because its blocks are permuted"):
        allreduce_hierarchical(4, 0, hosts=runs(2, 2), across="ring")


# Results.


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["hierarchical", "full_lane"])
def test_the_generic_executor_reduces_over_hosts_in_segments(name: str, in_place: bool) -> None:
    hosts = (((0, 1), (2, 3)), ((4, 5), (6, 7)))
    inputs = np.arange(8 * 45, dtype=np.int64).reshape(8, 45) ** 2

    def run(executor: Any) -> Any:
        plan = find("allreduce", name).build(8, executor.rank, hosts=hosts)
        source = inputs[executor.rank].copy()
        target = source if in_place else np.zeros_like(source)
        executor.start(call_of(plan, "int64", (45, 45), op="sum", segments=4), source, target).wait(DEADLINE_S)
        return target

    for result in LocalRanks(8).run(run):
        assert result.tolist() == inputs.sum(axis=0).tolist()


# Communicators pass their hosts to compositions.


def call_on_hosts(executor: Any, hosts: Hosts, algorithm: str | None, collective: str) -> Any:
    with Communicator(executor, HostLayout(hosts, "tcp", near="shm"), Options()) as world:
        x = np.arange(5.0) + world.rank
        if collective == "broadcast":
            return world.broadcast(x, 3, algorithm=algorithm).tolist()
        return world.allreduce(x, algorithm=algorithm).tolist()


@pytest.mark.parametrize(
    ("collective", "name", "hosts"),
    [
        ("allreduce", "hierarchical", runs(3, 1, 2)),
        ("allreduce", "hierarchical", ((0, 4), (1, 2, 5), (3,))),
        ("allreduce", "full_lane", runs(3, 3)),
        ("allreduce", None, runs(3, 1, 2)),
        ("broadcast", "hierarchical", ((0, 4), (1, 2, 5), (3,))),
    ],
)
def test_communicator_runs_hierarchical_algorithms_on_its_hosts(
    collective: str, name: str | None, hosts: Hosts
) -> None:
    inputs = np.arange(5.0) + np.arange(6)[:, None]
    expected = inputs[3] if collective == "broadcast" else inputs.sum(axis=0)
    assert LocalRanks(6).run(call_on_hosts, hosts, name, collective) == [expected.tolist()] * 6


def test_only_leaders_of_a_communicator_send_across_hosts() -> None:
    hosts = runs(3, 1, 2)

    def peers_of(executor: Any) -> set[int]:
        call_on_hosts(executor, hosts, "hierarchical", "allreduce")
        return {peer for peer, traffic in executor.traffic().items() if traffic.sent_messages}

    talked = LocalRanks(6).run(peers_of)
    assert [talked[rank] for rank in (1, 2, 5)] == [{0}, {0}, {4}]


def test_communicator_refuses_forced_full_lane_on_unequal_hosts() -> None:
    with pytest.raises(NoAlgorithmError, match=r"full_lane does not run on these hosts: .* not 1 and 2 and 3"):
        LocalRanks(6).run(call_on_hosts, runs(3, 1, 2), "full_lane", "allreduce")
