"""Jobs that grow: processes join at a call of all members, whichever process dies, and none waits for ever."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.deadlines import DEADLINE_S, await_marks, eventually, leave_mark
from support.outcomes import fail, summed
from support.ranks import Job, LastingJob, new_key

import unisono as un
from unisono.transports.links.dialer import DialingRank, Target, dial
from unisono.transports.links.handshake import Purpose

Say = Callable[[Any], None]


def replaced(old: un.Communicator, new: un.Communicator) -> un.Communicator:
    """Close a communicator that another one replaces, and return the new one."""
    assert new is not old
    old.close()
    return new


def report(world: un.Communicator, say: Say, me: int) -> None:
    """Say the place of this process, and a sum over all; close the communicator when all have done so."""
    say((world.rank, world.size, summed(world, me), world.epoch > 0))
    world.barrier()
    world.close()


def join_and_report(say: Say, me: int) -> None:
    report(un.join(timeout_s=DEADLINE_S), say, me)


def grow_twice(world: un.Communicator, say: Say) -> None:
    me = world.rank + 1
    say(world.grow() is world)
    world = replaced(world, world.grow(1, timeout_s=DEADLINE_S))
    say((world.rank, world.size, summed(world, me), world.epoch > 0))
    report(replaced(world, world.grow(2, timeout_s=DEADLINE_S)), say, me)


def join_and_grow(say: Say, me: int) -> None:
    world = un.join(timeout_s=DEADLINE_S)
    say((world.rank, world.size, summed(world, me), world.epoch > 0))
    report(replaced(world, world.grow(2, timeout_s=DEADLINE_S)), say, me)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_processes_join_behind_the_members_without_a_loss(tmp_path: Path, transport: str) -> None:
    with LastingJob(grow_twice, 2, tmp_path, transports=transport) as job:
        assert job.hear_all() == [True, True]
        job.start(join_and_grow, 10)
        assert [job.hear(rank) for rank in range(3)] == [(rank, 3, 13, True) for rank in range(3)]
        for _ in range(2):
            job.start(join_and_report, 100)
        heard = [job.hear(rank) for rank in range(5)]
        assert heard[:3] == [(rank, 5, 213, True) for rank in range(3)]
        assert sorted(heard[3:]) == [(rank, 5, 213, True) for rank in (3, 4)]


def lose_and_grow(world: un.Communicator, say: Say, lost: list[int]) -> None:
    """Lose the first rank of `lost`, shrink, admit another process, and go on so; processes that join do the same."""
    for rank in lost:
        with contextlib.suppress(un.PeerLostError):  # that rank may die before the others have ended the barrier
            world.barrier()
        if world.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        assert fail(world) in ("PeerLostError", "AbortedError")
        world = replaced(world, world.shrink())
        world = replaced(world, world.grow(1, timeout_s=DEADLINE_S))
        say((world.rank, world.size, summed(world, world.rank)))
    world.barrier()
    world.close()


def join_and_lose(say: Say, lost: list[int]) -> None:
    world = un.join(timeout_s=DEADLINE_S)
    say((world.rank, world.size, summed(world, world.rank)))
    lose_and_grow(world, say, lost)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_job_replaces_each_rank_that_it_loses(tmp_path: Path, transport: str) -> None:
    lost = [0, 2, 0]  # ranks 0, then the process that has just joined, then the one that has led since
    with LastingJob(lose_and_grow, 3, tmp_path, lost, transports=transport) as job:
        living = [0, 1, 2]
        for round_, rank in enumerate(lost):
            living.pop(rank)
            living.append(job.start(join_and_lose, lost[round_ + 1 :]))
            assert [job.hear(number) for number in living] == [(place, 3, 3) for place in range(3)]


# The place where a joiner dies or a member does: the module, the class and the function that is called there.
MOMENTS = {
    "when it is asked": ("unisono.transports.links.joiners", "Joiner", "invitation"),
    "when it is invited": ("unisono.transports.links.joiners", "Invitation", "of"),
    "when it meets": ("unisono.collectives.bootstrap.rendezvous", "StoreRendezvous", "join"),
    "when it opens its links": ("unisono.transports.links.session", "Session", "meet"),
    "when it waits for the others": ("unisono.transports.links.joiners", "Joiner", "tell_met"),
    "when it looks": ("unisono.transports.links.joiners", "Joiners", "look"),
    "when it has invited": ("unisono.collectives.bootstrap.grow", "_Party", "watched"),
    "when it lets them begin": ("unisono.collectives.bootstrap.grow", "_Party", "begin"),
}


def die_at(moment: str) -> None:
    """Let this process die at `moment`."""
    module, owner, name = MOMENTS[moment]
    setattr(
        getattr(importlib.import_module(module), owner), name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    )


def join_and_die(say: Say, moment: str) -> None:
    die_at(moment)
    say("waits")
    un.join(timeout_s=DEADLINE_S)


def grow_by_one(world: un.Communicator, say: Say, folder: Path) -> None:
    await_marks(folder, "waits")
    me = world.rank
    report(replaced(world, world.grow(1, timeout_s=DEADLINE_S)), say, me)


@pytest.mark.parametrize("moment", list(MOMENTS)[:5])
def test_members_go_on_when_a_process_dies_while_it_joins(tmp_path: Path, moment: str) -> None:
    with LastingJob(grow_by_one, 2, tmp_path, tmp_path) as job:
        dying = job.start(join_and_die, moment)
        assert job.hear(dying) == "waits"
        leave_mark(tmp_path, "waits")
        assert job.exit_code(dying) == -signal.SIGKILL
        joiner = job.start(join_and_report, 10)
        assert [job.hear(number) for number in (0, 1, joiner)] == [(rank, 3, 11, True) for rank in range(3)]


def die_while_growing(world: un.Communicator, say: Say, dying: int, moment: str) -> None:
    me = world.rank
    if me == dying:
        die_at(moment)
    try:
        grown = world.grow(1, timeout_s=DEADLINE_S)
        fail(grown)  # the member died after the agreement, so the new communicator fails as after any loss
    except un.PeerLostError:
        grown = world
    smaller = replaced(grown, grown.shrink(timeout_s=DEADLINE_S))
    if smaller.size == 2:
        smaller = replaced(smaller, smaller.grow(1, timeout_s=DEADLINE_S))
    world.close()
    report(smaller, say, me)


def join_again(say: Say, me: int) -> None:
    world = un.join(timeout_s=DEADLINE_S)
    if world.size == 4:  # a member died after the agreement
        fail(world)
        world = replaced(world, world.shrink(timeout_s=DEADLINE_S))
    report(world, say, me)


@pytest.mark.parametrize(
    ("dying", "moment"),
    [
        (1, "when it meets"),
        (2, "when it opens its links"),
        (0, "when it opens its links"),
        (0, "when it looks"),
        (0, "when it has invited"),
        (0, "when it lets them begin"),
    ],
)
def test_process_joins_the_survivors_when_a_member_dies_meanwhile(tmp_path: Path, dying: int, moment: str) -> None:
    left = [rank for rank in range(3) if rank != dying]
    with LastingJob(die_while_growing, 3, tmp_path, dying, moment) as job:
        joiner = job.start(join_again, 10)
        heard = [job.hear(number) for number in (*left, joiner)]
        assert heard == [(place, 3, sum(left) + 10, True) for place in range(3)]


def disagree(world: un.Communicator, say: Say) -> None:
    try:
        world.grow(2 if world.rank == 1 else None)
    except un.MismatchError as error:
        say(error.message)
    say(summed(world, 1))
    for call in (lambda: world.grow(0), lambda: world.dup().grow()):
        try:
            call()
        except un.UsageError as error:
            say(error.message)


def test_members_that_disagree_on_the_count_raise_and_go_on(tmp_path: Path) -> None:
    with LastingJob(disagree, 3, tmp_path) as job:
        text = "ranks disagree on grow: rank 1 called grow(count=2), where rank 0 called grow()"
        assert job.hear_all() == [text] * 3
        assert job.hear_all() == [3] * 3
        assert all("count" in text for text in job.hear_all())
        assert all("only the communicator of all ranks" in text for text in job.hear_all())


def wait_in_vain(world: un.Communicator, say: Say) -> None:
    me = world.rank
    try:
        world.grow(2, timeout_s=0.5)
    except un.RendezvousError as error:
        say(error.message)
    say(summed(world, 1))
    report(replaced(world, world.grow(1, timeout_s=DEADLINE_S)), say, me)


def test_grow_gives_up_when_too_few_come_and_admits_them_later(tmp_path: Path) -> None:
    with LastingJob(wait_in_vain, 2, tmp_path) as job:
        joiner = job.start(join_and_report, 10)
        assert all(text.endswith("of 2 processes came to join in time") for text in job.hear_all())
        assert job.hear_all() == [2] * 2
        assert [job.hear(number) for number in (0, 1, joiner)] == [(rank, 3, 11, True) for rank in range(3)]


def admit_fewer_than_wait(world: un.Communicator, say: Say) -> None:
    me = world.rank
    waiting = ""
    while not waiting.startswith("3 of 4"):
        try:
            world.grow(4, timeout_s=0.2)
        except un.RendezvousError as error:
            waiting = error.message
    world = replaced(world, world.grow(2, timeout_s=DEADLINE_S))
    say((world.rank, world.size))
    report(replaced(world, world.grow(1, timeout_s=DEADLINE_S)), say, me)


def join_and_admit_the_next(say: Say, me: int) -> None:
    world = un.join(timeout_s=DEADLINE_S)
    say((world.rank, world.size))
    if world.size == 4:
        world = replaced(world, world.grow(1, timeout_s=DEADLINE_S))
    report(world, say, me)


def test_grow_admits_as_many_as_its_count_when_more_wait(tmp_path: Path) -> None:
    with LastingJob(admit_fewer_than_wait, 2, tmp_path) as job:
        joiners = [job.start(join_and_admit_the_next, 10) for _ in range(3)]
        heard = sorted(job.hear(number) for number in (0, 1, *joiners))
        assert heard == [*[(rank, 4) for rank in range(4)], (4, 5)]
        heard = sorted(job.hear(number) for number in (0, 1, *joiners))
        assert heard == [(rank, 5, 31, True) for rank in range(5)]


def be_refused(say: Say, change: str, timeout_s: float) -> None:
    if change == "release":
        from unisono.transports.links import joiners

        joiners.release = lambda: "Unisono 0.0.1"  # type: ignore[assignment]
    elif change == "key":
        os.environ["UNISONO_KEY_FILE"] = str(new_key(Path(f"{os.environ['UNISONO_KEY_FILE']} of another job")))
    elif change == "address":
        from unisono.transports.links import joiners

        joiners.JoinRequest.pack = lambda own: b'{"host": "somewhere"}'  # type: ignore[method-assign]
    try:
        un.join(timeout_s=timeout_s)
    except un.RendezvousError as error:
        say(error.message)


def admit_until_marked(world: un.Communicator, say: Say, folder: Path) -> None:
    ends = False
    while not ends:
        assert world.grow() is world
        ends = bool(world.broadcast_object((folder / "mark refused").exists()))
    report(world, say, 0)


def test_processes_of_another_version_or_key_are_refused_with_the_reason(tmp_path: Path) -> None:
    with LastingJob(admit_until_marked, 2, tmp_path, tmp_path) as job:
        reasons = {"release": "this process runs Unisono 0.0.1", "key": "key of this job", "address": "cannot be used"}
        processes = {job.start(be_refused, change, DEADLINE_S): text for change, text in reasons.items()}
        for number, text in processes.items():
            assert text in job.hear(number)
        leave_mark(tmp_path, "refused")
        assert job.hear_all() == [(rank, 2, 0, False) for rank in range(2)]


def test_process_that_nobody_admits_gets_an_error(tmp_path: Path) -> None:
    with LastingJob(grow_by_one, 1, tmp_path, tmp_path) as job:
        joiner = job.start(be_refused, "", 0.3)
        assert job.hear(joiner) == (
            "the members of the job did not admit this process in time: all of them must call grow()"
        )
        leave_mark(tmp_path, "waits")
        other = job.start(join_and_report, 10)
        assert [job.hear(number) for number in (0, other)] == [(rank, 2, 10, True) for rank in range(2)]


def grow_without_the_stopped(world: un.Communicator, say: Say, folder: Path) -> None:
    await_marks(folder, "stopped")
    world = replaced(world, world.grow(1, timeout_s=DEADLINE_S))
    say((world.size, summed(world, 1)))
    await_marks(folder, "continued")
    report(replaced(world, world.grow(1, timeout_s=DEADLINE_S)), say, 1)


def test_stopped_process_is_passed_over_and_joins_later(tmp_path: Path) -> None:
    with LastingJob(grow_without_the_stopped, 1, tmp_path, tmp_path) as job:
        stopped = job.start(join_and_report, 1)
        store = tmp_path / "store" / "unisono.store"
        assert eventually(lambda: store.exists() and any(len(path.name) == 64 for path in store.iterdir()))
        job.signal(stopped, signal.SIGSTOP)
        leave_mark(tmp_path, "stopped")
        other = job.start(be_second, tmp_path)
        assert (job.hear(0), job.hear(other)) == ((2, 2), (2, 2))
        job.signal(stopped, signal.SIGCONT)
        leave_mark(tmp_path, "continued")
        assert [job.hear(number) for number in (0, other, stopped)] == [(rank, 3, 3, True) for rank in range(3)]


def stop_while_growing(world: un.Communicator, say: Say) -> None:
    """Stop rank 1 once all members have called `grow`."""
    if world.rank == 1:
        growing = importlib.import_module("unisono.collectives.bootstrap.grow")
        growing._broadcast = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[attr-defined]
    with pytest.raises((un.RendezvousError, un.CollectiveTimeoutError)):
        world.grow(1, timeout_s=1.0)
    say("went on")


def test_member_that_stops_while_others_grow_does_not_hold_them_up_beyond_their_limit(tmp_path: Path) -> None:
    with LastingJob(stop_while_growing, 3, tmp_path, timeout_s=100 * DEADLINE_S) as job:
        assert [job.hear(rank) for rank in (0, 2)] == ["went on"] * 2
        job.signal(1, signal.SIGKILL)


def be_second(say: Say, folder: Path) -> None:
    world = un.join(timeout_s=DEADLINE_S)
    say((world.size, summed(world, 1)))
    await_marks(folder, "continued")
    report(replaced(world, world.grow(1, timeout_s=DEADLINE_S)), say, 1)


def refuse_to_grow(world: un.Communicator, say: Say) -> None:
    try:
        world.grow()
    except un.UsageError as error:
        say(error.message)


def test_job_without_a_key_cannot_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(refuse_to_grow, 2, tmp_path) as job:
        assert all("it has no key or no store that outlives ranks" in text for text in job.hear_all())
    monkeypatch.setenv("UNISONO_STORE", f"file://{tmp_path}/store")
    with pytest.raises(un.UsageError, match="there is no job to join"):
        un.join()


def replace_rank_0(world: un.Communicator, say: Say, folder: Path) -> None:
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    fail(world)
    world = replaced(world, world.shrink())
    say(world.launch_ranks)
    world = replaced(world, world.grow(1, timeout_s=DEADLINE_S))
    count_by_launch_rank(world, say, folder)


def join_as_rank_0(say: Say, folder: Path) -> None:
    os.environ["UNISONO_RANK"], os.environ["UNISONO_SIZE"] = "0", "3"
    count_by_launch_rank(un.join(timeout_s=DEADLINE_S), say, folder)


def count_by_launch_rank(world: un.Communicator, say: Say, folder: Path) -> None:
    pair = world.subgroup([2, 0]) if world.rank != 1 else None
    world.barrier()
    un.metrics.write_textfile(world, folder / "metrics")
    say((world.launch_ranks, pair and pair.launch_ranks))
    world.barrier()
    world.close()


def test_metrics_and_counters_name_ranks_as_they_were_launched(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with LastingJob(replace_rank_0, 3, tmp_path, tmp_path, stats=str(tmp_path / "stats")) as job:
        assert [job.hear(rank) for rank in (1, 2)] == [(1, 2)] * 2
        joiner = job.start(join_as_rank_0, tmp_path)
        heard = [((1, 2, 0), (0, 1)), ((1, 2, 0), None), ((1, 2, 0), (0, 1))]
        assert [job.hear(number) for number in (1, 2, joiner)] == heard
    counters = {path.name: path.read_text() for path in (tmp_path / "stats").iterdir()}
    assert sorted(counters) == ["rank-1.jsonl", "rank-2.jsonl"]  # the process that has joined has other options
    last = json.loads(counters["rank-2.jsonl"].splitlines()[-1])
    assert {peer for peer, *_ in last["peers"]} <= {0, 1}
    for rank in range(3):
        text = (tmp_path / "metrics" / f"unisono-rank-{rank}.prom").read_text()
        assert set(re.findall(r'rank="(\d)"', text)) == {str(rank)}
        assert set(re.findall(r'peer="(\d)"', text)) <= {"0", "1", "2"} - {str(rank)}


def admit_one(world: un.Communicator, say: Say) -> None:
    report(replaced(world, world.grow(1, timeout_s=DEADLINE_S)), say, 1)


def dial_in_the_first_epoch(say: Say) -> None:
    world = un.join(timeout_s=DEADLINE_S)
    session = world._executor.session  # type: ignore[attr-defined]
    me = session.identity
    target = Target(0, session.members[0].addresses, False, Purpose.CONTROL)
    try:
        dial(DialingRank(me.key, me.job, 0, 1), target, DEADLINE_S)
    except un.TransportUnavailableError as error:
        say(error.message)
    report(world, say, 1)


def test_connections_of_an_earlier_epoch_are_refused(tmp_path: Path) -> None:
    with LastingJob(admit_one, 2, tmp_path) as job:
        stale = job.start(dial_in_the_first_epoch)
        assert job.hear(stale).endswith("the acceptor answers as epoch 1, expected was 0")
        assert [job.hear(number) for number in (0, 1, stale)] == [(rank, 3, 3, True) for rank in range(3)]


def grow_with_a_broken_store(world: un.Communicator, say: Say, store: Path) -> None:
    world.barrier()  # both ranks have left the store of the rendezvous, which is removed then
    if world.rank == 0:
        store.mkdir()
        store.chmod(0o777)
    try:
        world.grow()
    except un.RendezvousError as error:
        say(error.message)
    assert summed(world, 1) == 2
    if world.rank == 0:
        store.chmod(0o700)
    admit_one(world, say)


def test_all_members_raise_when_the_store_cannot_be_used_and_go_on(tmp_path: Path) -> None:
    with LastingJob(grow_with_a_broken_store, 2, tmp_path, tmp_path / "store") as job:
        assert all("can be written by other users" in text for text in job.hear_all())
        joiner = job.start(join_and_report, 10)
        assert [job.hear(number) for number in (0, 1, joiner)] == [(rank, 3, 12, True) for rank in range(3)]
