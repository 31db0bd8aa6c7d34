"""Tests the choice of the next view: whatever is lost or delayed, two members never install different ones."""

from __future__ import annotations

import random

import pytest

from unisono.swarm.agreement import Acceptor, Promise, proposal, quorum_of
from unisono.swarm.views import Ballot, Member, View, new_id

RUNS = 400


def members(count: int) -> tuple[Member, ...]:
    return tuple(Member(f"{index:016x}", f"member {index}", "127.0.0.1", 1 + index) for index in range(count))


class Proposal:
    """An attempt of one member, each of whose messages may be lost."""

    def __init__(self, chance: random.Random, number: int, proposer: Member, base: View) -> None:
        self.chance = chance
        self.ballot = Ballot(number, proposer.id)
        self.candidate = View(new_id(), base.number + 1, base.id, 1, (proposer,))
        self.accepted: set[str] = set()
        self.proposed: View | None = None

    def step(self, acceptors: dict[str, Acceptor], quorum: int) -> View | None:
        """Ask some acceptors for promises, or one to accept; return the view once it is chosen."""
        if self.proposed is None:
            asked = self.chance.sample(list(acceptors), self.chance.randint(1, len(acceptors)))
            promises = [acceptors[member].promise(self.ballot, 0) for member in asked]
            given = [promise for promise in promises if promise.is_given and self.chance.random() < 0.8]
            if len(given) >= quorum:
                self.proposed = proposal(given, self.candidate)
            return None
        member = self.chance.choice(list(acceptors))
        if acceptors[member].accept(self.ballot, self.proposed) and self.chance.random() < 0.7:
            self.accepted.add(member)
        return self.proposed if len(self.accepted) >= quorum else None


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_members_choose_one_view_whatever_messages_are_lost_and_however_proposals_interleave(size: int) -> None:
    chosen_in_runs = 0
    for seed in range(RUNS):
        chance = random.Random(seed)
        everybody = members(size)
        base = View(new_id(), 1, "", 1, everybody)
        acceptors = {member.id: Acceptor() for member in everybody}
        chosen: set[str] = set()
        numbers = iter(chance.sample(range(1, 100), 99))  # no member uses a ballot twice
        proposals = [Proposal(chance, next(numbers), member, base) for member in everybody]
        for _ in range(40):
            view = chance.choice(proposals).step(acceptors, quorum_of(size, None))
            if view is not None:
                chosen.add(view.id)
            if chance.random() < 0.1:
                proposals.append(Proposal(chance, next(numbers), chance.choice(everybody), base))
        assert len(chosen) <= 1, seed
        chosen_in_runs += len(chosen)
    assert chosen_in_runs > RUNS / 4  # the messages are not so rare that nothing is ever chosen


@pytest.mark.parametrize("size", range(1, 12))
def test_two_quorums_have_a_member_in_common(size: int) -> None:
    assert 2 * quorum_of(size, None) > size


def test_a_proposer_proposes_the_view_that_was_accepted_with_the_highest_ballot() -> None:
    everybody = members(3)
    base = View(new_id(), 1, "", 1, everybody)
    views = [View(new_id(), 2, base.id, 1, everybody[:count]) for count in (1, 2, 3)]
    ballots = [Ballot(number, everybody[0].id) for number in (1, 3, 2)]
    promises = [Promise(True, ballot, (ballot, view), 0) for ballot, view in zip(ballots, views, strict=True)]
    assert proposal(promises, base) is views[1]
    assert proposal([], base) is base
