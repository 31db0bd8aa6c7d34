"""Races of the protocol, replayed: one thread plays all ranks over the local transport, in virtual time.

Theory of operation
-------------------
A `GenericExecutor` never blocks in `start` and `poll`. So one thread can play all ranks: at each turn it picks a rank,
and lets it start its next call or poll the current one. A seed decides which rank has a turn and how much time passes
between turns, and no clock is read. Equal seeds therefore give equal histories, to the turn. Hypothesis looks for the
seed of a broken promise, and shrinks the program to the shortest one that still breaks it.

One rank, the victim, has a fault at one of its turns. For example, with "stop" it gets no more turns, and virtual time
goes on until the calls of the other ranks reach their time limit::

    turn 17  0.42 s  rank 2 starts allreduce(int64[5], op=sum)
    turn 18  0.45 s  rank 1 stops
    turn 19  0.47 s  rank 0 polls
    …
    turn 60  1.46 s  rank 2: CollectiveTimeoutError: rank 2 waited 1 s for rank 1 …
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.harness import call_of

from unisono.algorithms.catalogue.registry import find
from unisono.errors import UnisonoError
from unisono.transports.executors.generic import GenericExecutor
from unisono.transports.message.local import LocalNetwork

LIMIT_S = 1.0
MOST_TURNS = 20_000
# Algorithms of allreduce and allgather that run among any number of ranks.
CALLS = (("allreduce", "ring"), ("allreduce", "recursive_doubling"), ("allreduce", "direct"), ("allgather", "ring"))


class Event(NamedTuple):
    """The action of a rank at a turn."""

    turn: int
    now_s: float
    rank: int
    what: str


@dataclass(frozen=True)
class Scene:
    """A program of calls, its fault, and the seed of its schedule.

    Attributes:
        ranks, capacity: the number of ranks, and the buffered messages of each lane.
        calls: the index in `CALLS` and the number of elements of each call.
        fault, victim, at: the fault, the rank that has it, and its turn of that rank.
        seed: the seed of the schedule.
    """

    ranks: int
    capacity: int
    calls: Sequence[tuple[int, int]]
    fault: str
    victim: int
    at: int
    seed: int


class Player:
    """One rank, whose turns are taken by the thread of the test."""

    def __init__(self, scene: Scene, executor: GenericExecutor) -> None:
        self.rank = executor.rank
        self.outcome = ""
        self.error: UnisonoError | None = None
        self.turns = 0
        self.is_stopped = False
        self.executor = executor
        self._scene = scene
        self._at = 0
        self._operation: Any = None
        self._started_s = 0.0
        self._result: Any = None
        self._wanted: Any = None

    def take_turn(self, now_s: float) -> str:
        """Start the next call, or poll the current one; return what has happened."""
        self.turns += 1
        try:
            if self._operation is None:
                return self._start(now_s)
            if not self._operation.poll():
                if now_s - self._started_s >= LIMIT_S:
                    self._operation._timeout_s = LIMIT_S
                    self.executor.fail(self._operation.timeout())
                return "polls"
            return self._finish()
        except UnisonoError as error:
            self.error, self.outcome = error, type(error).__name__
            return f"{self.outcome}: {error}"

    def fail(self, fault: str) -> None:
        """Have the fault."""
        if fault == "stop":
            self.is_stopped, self.outcome = True, "stopped"
        elif fault == "abort":
            self.executor.abort("planted")
            self.outcome = "aborted"
        elif fault == "leave":
            self.executor.close()
            self.outcome = "left"
        elif fault == "disagree":
            self._scene = other_calls(self._scene)

    def _start(self, now_s: float) -> str:
        index, count = self._scene.calls[self._at]
        collective, algorithm = CALLS[index]
        op = "sum" if collective == "allreduce" else None
        size = self._scene.ranks
        results = count * size if collective == "allgather" else count
        call = call_of(find(collective, algorithm).build(size, self.rank, 0), "int64", (count, results), op=op)
        self._result = np.zeros(results, np.int64)
        shares = np.stack([np.arange(count) + rank for rank in range(size)])
        self._wanted = shares.sum(0) if collective == "allreduce" else shares.reshape(-1)
        self._operation = self.executor.start(call, [np.arange(count) + self.rank], [self._result])
        self._started_s = now_s
        return f"starts {call.signature}"

    def _finish(self) -> str:
        assert (self._result == self._wanted).all(), f"rank {self.rank} has a wrong result of call {self._at}"
        self._operation = None
        self._at += 1
        if self._at == len(self._scene.calls):
            self.outcome = "done"
        return "has its result"


def other_calls(scene: Scene) -> Scene:
    return Scene(scene.ranks, scene.capacity, [(i, count + 1) for i, count in scene.calls], "", 0, 0, scene.seed)


def play(scene: Scene) -> tuple[list[Player], list[Event]]:
    """Play a scene to its end; return the ranks and what they did. Takes no time but that of computing."""
    network = LocalNetwork(scene.ranks, scene.capacity)
    players = [Player(scene, GenericExecutor(transport)) for transport in network.transports]
    dice, now_s, history = random.Random(scene.seed), 0.0, list[Event]()
    for turn in range(MOST_TURNS):
        awake = [player for player in players if not player.outcome]
        if not awake:
            return players, history
        player = dice.choice(awake)
        now_s += dice.random() * 0.02
        if (player.rank, player.turns) == (scene.victim, scene.at) and scene.fault:
            player.turns += 1
            player.fail(scene.fault)
            what = scene.fault
        else:
            what = player.take_turn(now_s)
        history.append(Event(turn, now_s, player.rank, what))
    raise AssertionError(f"ranks hang: {[player.rank for player in players if not player.outcome]}")


def scenes(faults: Sequence[str]) -> st.SearchStrategy[Scene]:
    def of_size(ranks: int) -> st.SearchStrategy[Scene]:
        calls = st.tuples(st.integers(0, len(CALLS) - 1), st.sampled_from([1, 2, 5, 40]))
        return st.builds(
            Scene,
            ranks=st.just(ranks),
            capacity=st.integers(0, 2),
            calls=st.lists(calls, min_size=1, max_size=4),
            fault=st.sampled_from(faults),
            victim=st.integers(0, ranks - 1),
            at=st.integers(0, 40),
            seed=st.integers(0, 1 << 32),
        )

    return st.integers(2, 4).flatmap(of_size)


# For each fault: the outcomes that a rank may have. "done" is one of them, if the rank no longer needs the victim.
PROMISES: dict[str, tuple[str, ...]] = {
    "": ("done",),
    "stop": ("done", "stopped", "CollectiveTimeoutError"),
    "abort": ("done", "aborted", "AbortedError"),
    "leave": ("done", "left", "PeerLostError"),
    "disagree": ("done", "MismatchError"),
}


@settings(deadline=None, max_examples=60)
@given(scene=scenes(tuple(PROMISES)))
def test_every_schedule_ends_as_promised(scene: Scene) -> None:
    players, history = play(scene)
    story = "\n".join(f"turn {turn} {now_s:.2f} s rank {rank} {what}" for turn, now_s, rank, what in history[-30:])
    for player in players:
        assert player.outcome in PROMISES[scene.fault], f"{scene}\n{story}"
    if scene.fault == "stop":
        for player in players:
            if player.error is not None:
                assert f"rank {scene.victim}" in str(player.error) or scene.ranks > 2, story


@settings(deadline=None, max_examples=15)
@given(scene=scenes(tuple(PROMISES)))
def test_equal_seeds_give_equal_histories(scene: Scene) -> None:
    assert play(scene)[1] == play(scene)[1]


def lose_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the executor end a call although it still waits for a message."""
    from unisono.transports.executors import generic

    monkeypatch.setattr(generic._Collective, "advance", lambda self: True)


def forget_a_departure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks leave without a word."""
    from unisono.transports.message import local

    monkeypatch.setattr(local.LocalTransport, "close", lambda self: None)


@pytest.mark.parametrize(
    ("plant", "scene"),
    [
        (lose_a_message, Scene(3, 1, [(0, 5)], "", 0, 0, 7)),
        (forget_a_departure, Scene(2, 0, [(0, 5)], "leave", 1, 1, 7)),
    ],
)
def test_planted_defects_break_promises(
    plant: Callable[[pytest.MonkeyPatch], None], scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_every_schedule_ends_as_promised.hypothesis.inner_test(scene)
