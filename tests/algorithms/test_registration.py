"""Registration of users' algorithms: right ones become candidates, and wrong ones are refused and leave no trace."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib.metadata import EntryPoint
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S
from support.harness import make_call
from support.ranks import LocalRanks

import unisono as un
from unisono.algorithms.builders.arguments import needs_power_of_two
from unisono.algorithms.catalogue import flat
from unisono.algorithms.catalogue.algorithm import Algorithm, Cost
from unisono.algorithms.catalogue.registration import PROVED_SIZES, algorithm, registered
from unisono.algorithms.catalogue.registry import ALGORITHMS, algorithms_of, find
from unisono.algorithms.ir.plan import Group, Plan
from unisono.errors import NoAlgorithmError, PlanError, UsageError
from unisono.transports.executors.generic import GenericExecutor
from unisono.tuning.decide.choice import Question, choose, explain

RING = find("allreduce", "ring")
BALANCED = find("allreduce", "balanced_tree")
ASKED = Question("allreduce", nbytes=1 << 20, size=4, link="shm")


def my_ring(size: int, rank: int, root: int = 0) -> Plan:
    return replace(RING.build(size, rank, root), algorithm="my_ring")


def two_exchanges(size: int, rank: int, root: int = 0) -> Plan:
    return replace(BALANCED.build(size, rank, root), algorithm="two_exchanges")


def forgetful_ring(size: int, rank: int, root: int = 0) -> Plan:
    """The ring, in which the last rank of four does nothing in its first round."""
    plan = my_ring(size, rank, root)
    if (size, rank) != (4, 3):
        return plan
    groups = list(plan.groups(0))
    return replace(plan, lanes=((Group(()), *groups[1:]),))


def free_cost(size: int) -> Cost:
    return Cost(rounds=0, sent=0, reduced=0)


# Right algorithms become candidates.


def test_registration_returns_the_builder_and_find_knows_its_name() -> None:
    assert un.algorithm("allreduce", "my_ring", cost=RING.cost)(my_ring) is my_ring
    result = find("allreduce", "my_ring")
    assert (result.build, result.cost, result.reference) == (my_ring, RING.cost, f"{__name__}.my_ring")
    assert registered() == [result]
    assert list(algorithms_of("allreduce")) == [*ALGORITHMS["allreduce"], "my_ring"]
    assert "my_ring" not in algorithms_of("broadcast")


def test_tuner_compares_user_algorithm_by_its_declared_cost() -> None:
    cheap = {name: replace(row, supports=lambda size: "not today") for name, row in ALGORITHMS["allreduce"].items()}
    algorithm("allreduce", "my_ring", cost=RING.cost)(my_ring)
    candidates = {candidate.algorithm: candidate for candidate in explain(ASKED).candidates}
    assert candidates["my_ring"].predicted_s == candidates["ring"].predicted_s
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALGORITHMS, "allreduce", cheap)
        assert choose(ASKED).algorithm == "my_ring"


def test_algorithm_without_cost_runs_by_name_only() -> None:
    algorithm("allreduce", "my_ring")(my_ring)
    explanation = explain(ASKED)
    candidate = next(ranked for ranked in explanation.candidates if ranked.algorithm == "my_ring")
    assert (candidate.predicted_s, candidate.refusal) == (None, "declares no cost, so it runs only if it is named")
    forced = explain(replace(ASKED, algorithm="my_ring"))
    assert (forced.choice.algorithm, forced.choice.tier, forced.choice.segments) == ("my_ring", "forced", 1)
    assert "my_ring              not predicted" in str(forced)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_forced_user_algorithm_runs_on_the_generic_executor(size: int) -> None:
    algorithm("allreduce", "my_ring")(my_ring)
    assert sums_of(size, "my_ring", segments=2) == [expected_sums(size)] * size


@pytest.mark.parametrize("size", [3, 4, 7])
def test_user_algorithm_chosen_by_tuner_runs_on_the_generic_executor(size: int) -> None:
    algorithm("allreduce", "two_exchanges", cost=BALANCED.cost, segmentable=False, order="canonical")(two_exchanges)
    choice = choose(Question("allreduce", nbytes=1 << 20, size=size, link="local"))
    assert (choice.algorithm, choice.tier, choice.segments) == ("two_exchanges", "model", 1)
    assert sums_of(size, choice.algorithm, choice.segments) == [expected_sums(size)] * size


def sums_of(size: int, name: str, segments: int) -> list[list[int]]:
    """Return the result of each rank of an allreduce, in place, of 5 numbers that differ by rank."""

    def reduce(executor: GenericExecutor) -> list[int]:
        facts = {"dtype": "int64", "count": 5, "op": "sum", "segments": segments}
        target = np.arange(5) + 10**executor.rank
        executor.run(make_call("allreduce", name, size, executor.rank, **facts), target, target, timeout_s=DEADLINE_S)
        return list(target)

    return LocalRanks(size).run(reduce)


def expected_sums(size: int) -> list[int]:
    return [int(total) for total in sum(np.arange(5) + 10**rank for rank in range(size))]


def test_algorithm_supports_only_its_declared_sizes() -> None:
    algorithm("allreduce", "my_ring", sizes=(2, 4, 100))(my_ring)
    supports = find("allreduce", "my_ring").supports
    assert [supports(size) for size in (2, 4, 100)] == [None] * 3
    with pytest.raises(NoAlgorithmError, match="my_ring does not run on 3 ranks: it supports only 2, 4, 100 ranks"):
        choose(replace(ASKED, size=3, algorithm="my_ring"))


def test_registration_proves_only_supported_sizes() -> None:
    built = []

    @algorithm("allreduce", "my_ring", supports=needs_power_of_two)
    def watched(size: int, rank: int, root: int = 0) -> Plan:
        built.append(size)
        return my_ring(size, rank, root)

    assert set(built) == {1, 2, 4, 8, 16, 32}
    assert set(built) < set(PROVED_SIZES)


def test_registration_detects_builder_that_takes_varying() -> None:
    @algorithm("allgather", "mine")
    def mine(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
        return replace(find("allgather", "ring").build(size, rank, root, varying=varying), algorithm="mine")

    assert find("allgather", "mine").varying


def test_algorithm_in_blocks_needs_a_builder_that_takes_them() -> None:
    with pytest.raises(UsageError, match="its builder takes no 'blocks'"):
        algorithm("allreduce", "my_ring", in_blocks=True)(my_ring)


def test_decorator_has_an_option_for_every_field_of_algorithm() -> None:
    options = set(signature(algorithm).parameters) - {"sizes"}
    assert options - {"replace"} == {field.name for field in fields(Algorithm)} - {
        "build",
        "varying",
        "vendor",
        "chosen_far",
        "short_ways",
    }


def test_inexact_cost_must_be_an_upper_bound() -> None:
    def bound(size: int) -> Cost:
        return replace(RING.cost(size), rounds=2 * size)

    with pytest.raises(PlanError, match="my_ring on 1 ranks: rounds is 0, declared 2"):
        algorithm("allreduce", "my_ring", cost=bound)(my_ring)
    with pytest.raises(PlanError, match="my_ring on 2 ranks: rounds is 2, declared 0"):
        algorithm("allreduce", "my_ring", cost=free_cost, is_cost_exact=False)(my_ring)
    algorithm("allreduce", "my_ring", cost=bound, is_cost_exact=False)(my_ring)
    assert not find("allreduce", "my_ring").is_cost_exact


def test_tuner_does_not_choose_algorithm_declared_by_name_only() -> None:
    algorithm("allreduce", "two_exchanges", cost=BALANCED.cost, by_name_only=True)(two_exchanges)
    candidates = {candidate.algorithm: candidate for candidate in explain(ASKED).candidates}
    assert candidates["two_exchanges"].refusal == "runs only if it is named"
    assert candidates["two_exchanges"].predicted_s is not None
    assert choose(replace(ASKED, algorithm="two_exchanges")).algorithm == "two_exchanges"


def test_registered_algorithm_has_fixed_order_unless_declared() -> None:
    algorithm("allreduce", "my_ring")(my_ring)
    algorithm("broadcast", "my_chain")(my_chain)
    algorithm("allreduce", "two_exchanges", order="canonical")(two_exchanges)
    orders = [find(*names).order for names in (("allreduce", "my_ring"), ("broadcast", "my_chain"))]
    assert orders == ["fixed", "none"]
    assert find("allreduce", "two_exchanges").order == "canonical"


def my_chain(size: int, rank: int, root: int = 0) -> Plan:
    return replace(find("broadcast", "chain").build(size, rank, root), algorithm="my_chain")


# Wrong algorithms are refused.


def test_wrong_builder_is_refused_with_place_and_picture_of_the_mistake() -> None:
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

    with pytest.raises(PlanError, match=r"lacks the contribution of rank 2(?s:.*)rank 1  \+\+\?"):
        algorithm("allreduce", "stingy")(stingy)
    assert registered() == []


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"cost": free_cost}, "allreduce my_ring on 2 ranks: rounds is 2, declared 0"),
        ({"commutative_only": False}, "rank"),
        (
            {"order": "rank"},
            "allreduce my_ring on 2 ranks: rank 0: block 1 of OUTPUT is 1∘0, but the declared order 'rank'",
        ),
        (
            {"order": "canonical"},
            "my_ring on 2 ranks: rank 0: block 1 of OUTPUT is 1∘0, but .* 'canonical' demands 0∘1",
        ),
    ],
)
def test_a_wrong_declaration_is_refused(declared: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        algorithm("allreduce", "my_ring", **declared)(my_ring)  # type: ignore[arg-type]
    assert registered() == []


def test_a_builder_of_plans_with_another_name_is_refused() -> None:
    with pytest.raises(
        PlanError,
        match=r"registered as \('allreduce', 'other'\), .* returns Plan\('allreduce', 'my_ring', …\)",
    ):
        algorithm("allreduce", "other")(my_ring)


def gives_up(size: int, rank: int, root: int = 0) -> Plan:
    if rank == 2:
        raise UsageError("I am for two ranks")
    return my_ring(size, rank, root)


def returns_nothing(size: int, rank: int, root: int = 0) -> Plan:
    if rank < 2:
        return my_ring(size, rank, root)
    return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (gives_up, "allreduce my_ring on 3 ranks: rank 2: the builder raises UsageError: I am for two ranks"),
        (returns_nothing, "allreduce my_ring on 3 ranks: rank 2: the builder returns None, which is not a Plan"),
    ],
)
def test_builder_that_raises_or_returns_no_plan_is_refused_with_the_rank(build: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        algorithm("allreduce", "my_ring")(build)
    assert str(caught.value) == message
    assert (caught.value.__cause__ is not None) == (build is gives_up)
    assert registered() == []


def without_root(size: int, rank: int) -> Plan:
    return my_ring(size, rank)


def with_a_demand(size: int, rank: int, root: int = 0, *, radix: int) -> Plan:
    return my_ring(size, rank, root)


@pytest.mark.parametrize(
    ("build", "argument"), [(without_root, "argument 'root'"), (with_a_demand, "argument: 'radix'")]
)
def test_builder_with_wrong_signature_is_refused(build: Any, argument: str) -> None:
    with pytest.raises(UsageError, match=f"{build.__name__}.* cannot be called as build.*{argument}"):
        algorithm("allreduce", "my_ring")(build)


@pytest.mark.parametrize(
    ("collective", "declared", "message"),
    [
        ("allreduce", {"order": "ranks"}, "an order is one of none, rank, .*, not 'ranks'; did you mean 'rank'?"),
        ("allreduce", {"order": "none"}, "allreduce combines contributions, so its order cannot be 'none'"),
        ("broadcast", {"order": "rank"}, "broadcast combines nothing, so its order cannot be 'rank'"),
        ("allreduce", {"is_cost_exact": False}, "is_cost_exact says something about the cost, but no cost is declared"),
        ("allreduce", {"by_name_only": True}, "by_name_only says something about the cost, but no cost is declared"),
        ("allreduce", {"sizes": 8}, r"sizes must be numbers of ranks such as \[2, 4, 8\], not 8"),
        ("allreduce", {"sizes": [0, 2]}, r"sizes must be numbers of ranks .*, not \[0, 2\]"),
        ("allreduce", {"sizes": ["2"]}, r"sizes must be numbers of ranks .*, not \['2'\]"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(collective: str, declared: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        algorithm(collective, "mine", **declared)


def test_supports_function_must_return_none_or_text() -> None:
    with pytest.raises(UsageError, match=r"supports\(1\) returns False: it must return None, or a str with the reason"):
        algorithm("allreduce", "my_ring", supports=lambda size: size % 2 == 0)(my_ring)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "My_Ring", "my ring", "2nd", "mpi.native", "auto"])
def test_invalid_algorithm_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a valid name for an algorithm"):
        algorithm("allreduce", name)


def test_algorithm_name_in_use_is_refused() -> None:
    with pytest.raises(UsageError, match="allreduce has an algorithm 'ring' already; it has direct, "):
        algorithm("allreduce", "ring")
    algorithm("allreduce", "my_ring")(my_ring)
    with pytest.raises(UsageError, match="allreduce has an algorithm 'my_ring' already"):
        algorithm("allreduce", "my_ring")


def test_registration_with_replace_replaces_user_algorithms_only() -> None:
    algorithm("allreduce", "my_ring", reference="first")(my_ring)
    algorithm("allreduce", "my_ring", reference="second", replace=True)(my_ring)
    assert [entry.reference for entry in registered()] == ["second"]
    with pytest.raises(UsageError, match="allreduce has an algorithm 'ring' already; it has direct, "):
        algorithm("allreduce", "ring", replace=True)


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (lambda size: 5, r"cost\(1\) returns 5: pass a function of the number of ranks that returns a Cost"),
        (lambda size: None, r"cost\(1\) returns None: pass a function"),
        (5, "cost is 5, which cannot be called: pass a function"),
    ],
)
def test_cost_of_another_type_is_refused(cost: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        algorithm("allreduce", "my_ring", cost=cost)(my_ring)
    assert registered() == []


def test_an_unknown_collective_is_refused() -> None:
    message = "no algorithm carries out 'allreduse': there are allreduce, .*; did you mean 'allreduce'?"
    with pytest.raises(NoAlgorithmError, match=message):
        algorithm("allreduse", "mine")


def test_algorithm_that_supports_no_size_is_refused() -> None:
    with pytest.raises(UsageError, match="supports none of these numbers of ranks"):
        algorithm("allreduce", "my_ring", supports=lambda size: "never")(my_ring)
    with pytest.raises(UsageError, match="supports none of these numbers of ranks"):
        algorithm("allreduce", "my_ring", sizes=())(my_ring)


# Installed packages.

PACKAGE = """
from dataclasses import replace
import unisono as un
from unisono.algorithms.catalogue.registry import find

@un.algorithm("allreduce", "packaged", sizes=range(1, 5))
def packaged(size, rank, root=0):
    return replace(find("allreduce", "ring").build(size, rank, root), algorithm="packaged")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Replace all entry points by those of the package `packaged_algorithms`.

    Yield the list of groups that are looked up.
    """
    asked: list[str] = []

    def entry_points(*, group: str) -> list[EntryPoint]:
        asked.append(group)
        return [EntryPoint("mine", "packaged_algorithms", group)]

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flat, "entry_points", entry_points)
    monkeypatch.setattr(flat, "_groups_to_load", ["unisono.algorithms"])
    yield asked
    sys.modules.pop("packaged_algorithms", None)


def test_algorithms_of_installed_packages_are_loaded_once_on_first_use(install: list[str], tmp_path: Path) -> None:
    (tmp_path / "packaged_algorithms.py").write_text(PACKAGE)
    assert install == []
    assert [find("allreduce", "packaged").name for _ in range(2)] == ["packaged"] * 2
    assert install == ["unisono.algorithms"]


def test_a_package_that_cannot_be_loaded_is_an_error_every_time(install: list[str], tmp_path: Path) -> None:
    (tmp_path / "packaged_algorithms.py").write_text(PACKAGE.replace('"packaged")', '"ring")'))
    for _ in range(2):
        with pytest.raises(PlanError, match=r"returns Plan\('allreduce', 'ring', …\): use one name"):
            algorithms_of("broadcast")
