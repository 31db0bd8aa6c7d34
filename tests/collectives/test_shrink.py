"""Jobs that go on after losses: the survivors agree, whichever ranks die and whenever, and no rank waits for ever."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S, await_marks, eventually, leave_mark
from support.outcomes import fail, summed
from support.ranks import Job

import unisono as un

Say = Callable[[Any], None]


def meet(world: un.Communicator, folder: Path, me: int, dying: Sequence[int], round_: int = 0) -> None:
    """Meet in a barrier. The ranks in `dying` kill themselves as soon as all other ranks have left the barrier.

    Args:
        world: the communicator.
        folder: where the ranks leave marks for each other.
        me: the number of this rank in the first communicator, by which `dying` names ranks.
        dying: the ranks that die.
        round_: the number of this barrier, which makes its marks unique.
    """
    world.barrier()
    if me not in dying:
        leave_mark(folder, f"{round_} {me}")
        return
    living = world.size - len(dying)
    assert eventually(lambda: len(list(folder.glob(f"mark {round_} *"))) == living)
    os.kill(os.getpid(), signal.SIGKILL)


def lose_and_go_on(world: un.Communicator, say: Say, folder: Path, rounds: list[list[int]]) -> None:
    """Run rounds. In each one, the ranks that it names die, and the others shrink the communicator."""
    me = world.rank
    for round_, dying in enumerate(rounds):
        meet(world, folder, me, dying, round_)
        kind = fail(world)
        smaller = world.shrink()
        say((kind, smaller.epoch, smaller.rank, smaller.size, summed(smaller, me + 1)))
        world.close()
        world = smaller
    world.barrier()
    world.close()


def expected(size: int, rounds: list[list[int]]) -> list[tuple[list[int], int]]:
    """Return the surviving ranks after each round, and the sum of their numbers from 1."""
    results = []
    left = list(range(size))
    for dying in rounds:
        left = [rank for rank in left if rank not in dying]
        results.append((left, sum(left) + len(left)))
    return results


LOSSES: list[tuple[str, int, list[list[int]]]] = [
    ("shm", 3, [[1]]),
    ("tcp", 3, [[0]]),
    ("shm", 2, [[0]]),
    ("tcp", 2, [[1]]),
    ("shm", 5, [[0, 1, 3]]),
    ("shm", 5, [[2], [0], [4, 1]]),
    ("tcp", 5, [[2], [0], [4, 1]]),
]


@pytest.mark.parametrize(("transport", "size", "rounds"), LOSSES)
def test_survivors_shrink_to_dense_ranks_and_a_later_epoch(
    tmp_path: Path, transport: str, size: int, rounds: list[list[int]]
) -> None:
    with Job(lose_and_go_on, size, tmp_path, tmp_path, rounds, transports=transport) as job:
        last_epoch = 0
        for left, total in expected(size, rounds):
            epochs = set()
            for place, rank in enumerate(left):
                kind, epoch, *rest = job.hear(rank)
                assert kind in ("PeerLostError", "AbortedError")
                assert rest == [place, len(left), total]
                epochs.add(epoch)
            assert len(epochs) == 1
            assert min(epochs) > last_epoch
            last_epoch = min(epochs)


# The place in `shrink` where a second rank dies: the function that is called there, and whether the leader calls it.
MOMENTS = {
    "before it looks": ("unisono.collectives.bootstrap.shrink", "_Attempt", "agree"),
    "when it has an answer": ("unisono.collectives.bootstrap.shrink", "_Attempt", "meet"),
    "when it meets": ("unisono.collectives.bootstrap.rendezvous", "StoreRendezvous", "join"),
    "when it opens its links": ("unisono.transports.links.session", "Session", "meet"),
    "when it leads": ("unisono.transports.links.survivors", "Search", "_send_all"),
}


def die_again(world: un.Communicator, say: Say, folder: Path, first: int, second: int, moment: str) -> None:
    import importlib

    me = world.rank
    meet(world, folder, me, [first])
    fail(world)
    if me == second:
        module, owner, name = MOMENTS[moment]
        setattr(getattr(importlib.import_module(module), owner), name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    smaller = world.shrink(timeout_s=DEADLINE_S)
    if smaller.size == 3:  # the second rank died after the agreement, so the new communicator fails as after any loss
        fail(smaller)
        smaller = smaller.shrink(timeout_s=DEADLINE_S)
    say((smaller.rank, smaller.size, summed(smaller, me + 1)))
    smaller.barrier()
    smaller.close()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 3)])
def test_second_rank_may_die_during_shrink(tmp_path: Path, first: int, second: int, moment: str) -> None:
    if moment == "when it leads" and second != 1:
        pytest.skip("that rank does not lead")
    left = [rank for rank in range(4) if rank not in (first, second)]
    with Job(die_again, 4, tmp_path, tmp_path, first, second, moment) as job:
        heard = [job.hear(rank) for rank in left]
        assert heard == [(place, 2, sum(left) + 2) for place in range(2)]


def shrink_a_part(world: un.Communicator, say: Say, folder: Path) -> None:
    me = world.rank
    halves = world.subgroup([2, 0, 4] if me % 2 == 0 else [5, 3, 1])
    halves.barrier()
    meet(world, folder, me, [2, 3])
    fail(halves)
    smaller = halves.shrink()
    say((smaller.rank, smaller.size, summed(smaller, me)))
    smaller.barrier()
    smaller.close()


def test_parts_of_a_job_shrink_at_the_same_time(tmp_path: Path) -> None:
    with Job(shrink_a_part, 6, tmp_path, tmp_path) as job:
        assert [job.hear(rank) for rank in (0, 4, 5, 1)] == [(0, 2, 4), (1, 2, 4), (0, 2, 6), (1, 2, 6)]


def shrink_for_nothing(world: un.Communicator, say: Say) -> None:
    for call in (world.shrink, lambda: (world.close(), world.shrink())):
        try:
            call()
        except un.UsageError as error:
            say(error.message)


def test_shrink_without_a_failure_is_refused_with_advice(tmp_path: Path) -> None:
    with Job(shrink_for_nothing, 2, tmp_path) as job:
        for text in job.hear_all():
            assert text == "nothing has failed: dup() makes another communicator of the same ranks, and split() of some"
        for text in job.hear_all():
            assert "is closed" in text


def abort_and_go_on(world: un.Communicator, say: Say) -> None:
    if world.rank == 1:
        world.abort("enough")
    fail(world)
    with world.shrink() as again:
        say((again.rank, again.size, summed(again, 1)))


def test_shrink_after_an_abort_keeps_all_ranks(tmp_path: Path) -> None:
    with Job(abort_and_go_on, 3, tmp_path) as job:
        assert job.hear_all() == [(rank, 3, 3) for rank in range(3)]


def stay_away(world: un.Communicator, say: Say, folder: Path, absent: int) -> None:
    meet(world, folder, world.rank, [3])
    fail(world)
    if world.rank == absent:
        await_marks(folder, "given up")
        return
    try:
        world.shrink(timeout_s=1)
    except un.RendezvousError as error:
        say(error.message)


@pytest.mark.parametrize("absent", [0, 2])
def test_shrink_names_live_rank_that_does_not_call_it(tmp_path: Path, absent: int) -> None:
    with Job(stay_away, 4, tmp_path, tmp_path, absent) as job:
        for rank in {0, 1, 2} - {absent}:
            text = job.hear(rank)
            assert str(absent) in text
            assert "call shrink() in time" in text
        leave_mark(tmp_path, "given up")


def be_stopped(world: un.Communicator, say: Say, folder: Path) -> None:
    world.barrier()
    say("ready")
    await_marks(folder, "stopped")
    with contextlib.suppress(un.UnisonoError):
        while True:  # a first call may succeed, because the others have sent their messages before their errors
            world.allreduce(np.ones(10), timeout_s=1.0)
    try:
        smaller = world.shrink(timeout_s=DEADLINE_S)
    except un.RendezvousError as error:
        return say(error.message)
    say((smaller.rank, smaller.size, summed(smaller, 1)))
    say("going on")
    smaller.barrier()
    await_marks(folder, "told")  # the old communicator still exists, and tells the late rank of the failure
    smaller.close()
    return None


def test_stopped_rank_is_excluded_by_shrink_and_gets_an_error_later(tmp_path: Path) -> None:
    with Job(be_stopped, 3, tmp_path, tmp_path) as job:
        job.hear_all()
        job.signal(1, signal.SIGSTOP)
        leave_mark(tmp_path, "stopped")
        assert [job.hear(rank) for rank in (0, 2)] == [(0, 2, 2), (1, 2, 2)]
        job.signal(1, signal.SIGCONT)
        assert "have gone on without this rank" in job.hear(1)
        leave_mark(tmp_path, "told")
