"""Users' algorithms on real ranks: forced by name, chosen by the tuner, and registered after the first calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.ir.plan import Plan

# On three ranks, and in shared memory on four, two direct exchanges cost less than every algorithm that the tuner
# compares otherwise.
BALANCED = find("allreduce", "balanced_tree")
COUNT = 50_000
NBYTES = 4 * COUNT


def two_exchanges(size: int, rank: int, root: int = 0) -> Plan:
    return replace(BALANCED.build(size, rank, root), algorithm="two_exchanges")


def register() -> None:
    declare = un.algorithm(
        "allreduce", "two_exchanges", cost=BALANCED.cost, sizes=range(2, 6), order="canonical", segmentable=False
    )
    declare(two_exchanges)


def contribution(rank: int, count: int = COUNT) -> Any:
    return np.random.default_rng(rank).standard_normal(count).astype(np.float32)


def balanced_sum(size: int, count: int = COUNT) -> Any:
    """Return the sum of all contributions in the canonical order, by numpy."""
    level = [contribution(rank, count) for rank in range(size)]
    while len(level) > 1:
        level = [sum(level[first + 1 : first + 2], level[first]) for first in range(0, len(level), 2)]
    return level[0]


def allreduce(world: un.Communicator, name: str | None = None, count: int = COUNT) -> tuple[Any, dict[int, int]]:
    """Return the result of an allreduce, and the number of messages that it sent to each peer."""
    before = {peer: traffic.sent_messages for peer, traffic in world.stats().items()}
    result = world.allreduce(contribution(world.rank, count), algorithm=name, timeout_s=DEADLINE_S)
    after = {peer: traffic.sent_messages for peer, traffic in world.stats().items()}
    return result, {peer: sent - before.get(peer, 0) for peer, sent in after.items() if sent > before.get(peer, 0)}


def by_two_exchanges(world: un.Communicator) -> dict[int, int]:
    """Return the number of messages that two direct exchanges send to each peer."""
    return {peer: 2 for peer in range(world.size) if peer != world.rank}


def forced(world: un.Communicator) -> tuple[Any, bool]:
    register()
    result, sent = allreduce(world, "two_exchanges")
    return result, sent == by_two_exchanges(world)


def chosen(world: un.Communicator) -> tuple[Any, bool, str, str]:
    register()
    choice = world.explain("allreduce", NBYTES).choice
    result, sent = allreduce(world)
    return result, sent == by_two_exchanges(world), choice.algorithm, choice.tier


def late(world: un.Communicator) -> list[Any]:
    """Register the algorithm after the first of five calls.

    Return the results, and which calls were direct exchanges.
    """
    first, sent_before = allreduce(world)
    register()
    same_kind, sent_after = allreduce(world)
    other_kind, sent_for_other = allreduce(world, count=COUNT - 1)
    named, sent_for_named = allreduce(world, "two_exchanges")
    again, sent_again = allreduce(world)
    direct = by_two_exchanges(world)
    facts = [sent_before != direct, sent_after == sent_again == sent_before, sent_for_other == sent_for_named == direct]
    return [facts, first, same_kind, again, named, other_kind]


def apart(world: un.Communicator) -> str:
    """Register the algorithm on rank 0 alone, and return the error of a call."""
    if world.rank == 0:
        register()
    try:
        allreduce(world)
        allreduce(world)
    except un.UnisonoError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("size", [2, 3, 4])
def test_forced_user_algorithm_gives_the_bits_of_its_order(size: int) -> None:
    for result, is_direct in un.launch(forced, size, timeout_s=DEADLINE_S):
        assert is_direct
        assert result.tobytes() == balanced_sum(size).tobytes()


@pytest.mark.parametrize(("size", "transport"), [(3, "shm"), (4, "shm"), (3, "tcp")])
def test_user_algorithm_runs_when_the_tuner_finds_it_cheapest(size: int, transport: str) -> None:
    options = un.Options(transports=transport)
    for result, is_direct, *choice in un.launch(chosen, size, timeout_s=DEADLINE_S, options=options):
        assert is_direct
        assert choice == ["two_exchanges", "model"]
        assert result.tobytes() == balanced_sum(size).tobytes()


def test_late_registration_affects_only_new_call_specs_and_forced_calls() -> None:
    everything = un.launch(late, 4, timeout_s=DEADLINE_S)
    for facts, first, same_kind, again, named, other_kind in everything:
        assert facts == [True, True, True]
        assert first.tobytes() == same_kind.tobytes() == again.tobytes() == everything[0][1].tobytes()
        assert np.allclose(first, balanced_sum(4), atol=1e-5)
        assert named.tobytes() == balanced_sum(4).tobytes()
        assert other_kind.tobytes() == balanced_sum(4, COUNT - 1).tobytes()


def test_different_registrations_are_a_mismatch_error_on_every_rank() -> None:
    for error in un.launch(apart, 3, timeout_s=DEADLINE_S):
        assert error.startswith(
            "MismatchError: ranks disagree on call #0: rank 0 called allreduce(float32[50000], op=sum)"
        )
