"""Users' algorithms: what is right is registered and chosen, what is wrong is refused and leaves nothing behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from harness import LocalRanks, make_call

import unisono as un
from unisono.algorithms import registry
from unisono.algorithms.algorithm import Cost
from unisono.algorithms.checks import needs_power_of_two
from unisono.algorithms.plan import Group, Plan
from unisono.algorithms.registration import PROVED_SIZES, algorithm, registered
from unisono.algorithms.registry import ALGORITHMS, algorithms_of, find
from unisono.errors import NoAlgorithmError, PlanError, UsageError
from unisono.transports.generic import GenericExecutor
from unisono.tuning.choice import Question, choose, explain

RING = find("allreduce", "ring")
ASKED = Question("allreduce", nbytes=1 << 20, size=4, link="shm")


def my_ring(size: int, rank: int, root: int = 0) -> Plan:
    return replace(RING.build(size, rank, root), algorithm="my_ring")


def forgetful_ring(size: int, rank: int, root: int = 0) -> Plan:
    """The ring, in which the last rank of four does nothing in its first round."""
    plan = my_ring(size, rank, root)
    if (size, rank) != (4, 3):
        return plan
    groups = list(plan.groups(0))
    return replace(plan, lanes=((Group(()), *groups[1:]),))


def free_cost(size: int) -> Cost:
    return Cost(rounds=0, sent=0, reduced=0)


# What is right is a candidate.


def test_a_registered_builder_is_returned_as_it_is_and_found_by_its_name() -> None:
    assert un.algorithm("allreduce", "my_ring", cost=RING.cost)(my_ring) is my_ring
    found = find("allreduce", "my_ring")
    assert (found.build, found.cost, found.reference) == (my_ring, RING.cost, f"{__name__}.my_ring")
    assert registered() == [found]
    assert list(algorithms_of("allreduce")) == [*ALGORITHMS["allreduce"], "my_ring"]
    assert "my_ring" not in algorithms_of("broadcast")


def test_the_tuner_weighs_it_against_the_others_by_its_cost() -> None:
    cheap = {name: replace(each, supports=lambda size: "not today") for name, each in ALGORITHMS["allreduce"].items()}
    algorithm("allreduce", "my_ring", cost=RING.cost)(my_ring)
    candidates = {candidate.algorithm: candidate for candidate in explain(ASKED).candidates}
    assert candidates["my_ring"].predicted_s == candidates["ring"].predicted_s
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALGORITHMS, "allreduce", cheap)
        assert choose(ASKED).algorithm == "my_ring"


def test_without_a_cost_it_runs_where_it_is_named_only() -> None:
    algorithm("allreduce", "my_ring")(my_ring)
    explanation = explain(ASKED)
    candidate = next(each for each in explanation.candidates if each.algorithm == "my_ring")
    assert (candidate.predicted_s, candidate.refusal) == (None, "declares no cost, so it runs where it is named only")
    forced = explain(replace(ASKED, algorithm="my_ring"))
    assert (forced.choice.algorithm, forced.choice.tier, forced.choice.segments) == ("my_ring", "forced", 1)
    assert "my_ring              not predicted" in str(forced)


def test_it_runs_on_ranks() -> None:
    algorithm("allreduce", "my_ring")(my_ring)

    def reduce(executor: GenericExecutor) -> list[int]:
        call = make_call("allreduce", "my_ring", 3, executor.rank, dtype="int64", count=5, op="sum")
        target = np.arange(5) + executor.rank
        executor.run(call, target, target, timeout_s=20.0)
        return list(target)

    assert LocalRanks(3).run(reduce) == [[3, 6, 9, 12, 15]] * 3


def test_sizes_are_the_only_numbers_of_ranks_that_it_is_for() -> None:
    algorithm("allreduce", "my_ring", sizes=(2, 4, 100))(my_ring)
    supports = find("allreduce", "my_ring").supports
    assert [supports(size) for size in (2, 4, 100)] == [None] * 3
    with pytest.raises(NoAlgorithmError, match="my_ring does not run on 3 ranks: it is for 2, 4, 100 ranks only"):
        choose(replace(ASKED, size=3, algorithm="my_ring"))


def test_what_it_does_not_support_is_not_proved() -> None:
    built = []

    @algorithm("allreduce", "my_ring", supports=needs_power_of_two)
    def watched(size: int, rank: int, root: int = 0) -> Plan:
        built.append(size)
        return my_ring(size, rank, root)

    assert set(built) == {1, 2, 4, 8, 16, 32}
    assert set(built) < set(PROVED_SIZES)


def test_a_builder_with_counts_per_rank_is_noticed() -> None:
    @algorithm("allgather", "mine")
    def mine(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
        return replace(find("allgather", "ring").build(size, rank, root, varying=varying), algorithm="mine")

    assert find("allgather", "mine").varying


# What is wrong is refused.


def test_a_wrong_builder_is_refused_with_the_place_and_the_picture() -> None:
    with pytest.raises(PlanError, match="allreduce my_ring on 4 ranks: rank"):
        algorithm("allreduce", "my_ring")(forgetful_ring)
    direct = find("allreduce", "direct")

    def stingy(size: int, rank: int, root: int = 0) -> Plan:
        plan = replace(direct.build(size, rank, root), algorithm="stingy")
        if (size, rank) != (3, 1):
            return plan
        exchange, finish = plan.groups(0)
        short = replace(finish.steps[0], sources=finish.steps[0].sources[:2])
        return replace(plan, lanes=((exchange, Group((short,))),))

    with pytest.raises(PlanError, match=r"without the contribution of rank 2(?s:.*)rank 1  \+\+\?"):
        algorithm("allreduce", "stingy")(stingy)
    assert registered() == []


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"cost": free_cost}, "allreduce my_ring on 2 ranks: rounds is 2, declared 0"),
        ({"commutative_only": False}, "rank"),
    ],
)
def test_a_wrong_declaration_is_refused(declared: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        algorithm("allreduce", "my_ring", **declared)(my_ring)  # type: ignore[arg-type]
    assert registered() == []


def test_a_builder_of_plans_with_another_name_is_refused() -> None:
    with pytest.raises(PlanError, match="allreduce other builds plans of allreduce my_ring"):
        algorithm("allreduce", "other")(my_ring)


@pytest.mark.parametrize("name", ["", "My_Ring", "my ring", "2nd", "mpi.native", "auto"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="an algorithm cannot be called"):
        algorithm("allreduce", name)


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(UsageError, match="allreduce has an algorithm 'ring' already; it has direct, "):
        algorithm("allreduce", "ring")
    algorithm("allreduce", "my_ring")(my_ring)
    with pytest.raises(UsageError, match="allreduce has an algorithm 'my_ring' already"):
        algorithm("allreduce", "my_ring")


def test_an_unknown_collective_is_refused() -> None:
    with pytest.raises(NoAlgorithmError, match="no algorithm carries out 'allreduse': there are allreduce, "):
        algorithm("allreduse", "mine")


def test_an_algorithm_that_supports_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="supports no number of ranks that it could be proved for"):
        algorithm("allreduce", "my_ring", supports=lambda size: "never")(my_ring)
    with pytest.raises(UsageError, match="supports no number of ranks"):
        algorithm("allreduce", "my_ring", sizes=())(my_ring)


# Installed packages.

PACKAGE = """
from dataclasses import replace
import unisono as un
from unisono.algorithms.registry import find

@un.algorithm("allreduce", "packaged", sizes=range(1, 5))
def packaged(size, rank, root=0):
    return replace(find("allreduce", "ring").build(size, rank, root), algorithm="packaged")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let the entry points be those of one package, `packaged_algorithms`; yield the groups that are asked for."""
    asked: list[str] = []

    def entry_points(*, group: str) -> list[EntryPoint]:
        asked.append(group)
        return [EntryPoint("mine", "packaged_algorithms", group)]

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "entry_points", entry_points)
    monkeypatch.setattr(registry, "_groups_to_load", ["unisono.algorithms"])
    yield asked
    sys.modules.pop("packaged_algorithms", None)


def test_algorithms_of_installed_packages_are_loaded_once_when_first_asked_for(
    install: list[str], tmp_path: Path
) -> None:
    (tmp_path / "packaged_algorithms.py").write_text(PACKAGE)
    assert install == []
    assert [find("allreduce", "packaged").name for _ in range(2)] == ["packaged"] * 2
    assert install == ["unisono.algorithms"]


def test_a_package_that_cannot_be_loaded_is_an_error_every_time(install: list[str], tmp_path: Path) -> None:
    (tmp_path / "packaged_algorithms.py").write_text(PACKAGE.replace('"packaged")', '"ring")'))
    for _ in range(2):
        with pytest.raises(PlanError, match="builds plans of allreduce ring"):
            algorithms_of("broadcast")
