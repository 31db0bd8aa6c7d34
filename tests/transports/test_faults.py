"""Ranks that make different calls, die, stop, stay away, depart or are interrupted.

Every other rank gets an error in time, which names the rank.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.covering import pairwise
from support.deadlines import DEADLINE_S, await_marks, leave_mark
from support.outcomes import error_of
from support.programs import by_variables
from support.ranks import Job, Ranks, start_ranks

import unisono as un
from unisono.bench.programs.churn import cut_connections
from unisono.transports.links.channels import Channels
from unisono.transports.tcp import resumption

SHORT_S = 0.5
# The time in which a rank gets from the line before a call to being blocked in it. No other process can observe that.
BLOCKED_S = 1.0
# The delay with which a rank accepts a link that another rank has opened.
LATE_S = 0.1
# The same where the other rank has departed meanwhile. A rank knows of a departure within milliseconds.
VERY_LATE_S = 0.7
X = np.ones(8, np.float32)
Say = Callable[[Any], None]


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ranks(transport: str) -> Iterator[Ranks]:
    with start_ranks(3, transport) as started:
        yield started


def until_an_error(call: Callable[[], Any]) -> tuple[str, str]:
    """Make a call again and again; return the class and the text of its first error."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        error = error_of(call)
        if error[0]:
            return error
    return "", "no error"


def reduce_until_an_error(world: un.Communicator, algorithm: str | None = None) -> tuple[str, str]:
    return until_an_error(lambda: world.allreduce(np.ones(1000), algorithm=algorithm))


# --- disagreement --------------------------------------------------------------------------------------------------

COMMON = {
    "allreduce": lambda world: world.allreduce(X),
    "broadcast": lambda world: world.broadcast(X, 0),
    "barrier": lambda world: world.barrier(),
    "matrix": lambda world: world.allreduce(np.ones((2, 3))),
}
DIVERGENT = {
    "dtype": ("allreduce", lambda world: world.allreduce(X.astype("int32")), "allreduce(int32[8], op=sum)"),
    "count": ("allreduce", lambda world: world.allreduce(X[:7]), "allreduce(float32[7], op=sum)"),
    "nothing": ("allreduce", lambda world: world.allreduce(X[:0]), "allreduce(float32[0], op=sum)"),
    "shape": ("allreduce", lambda world: world.allreduce(X.reshape(2, 4)), "allreduce(float32[2,4], op=sum)"),
    "op": ("allreduce", lambda world: world.allreduce(X, "max"), "allreduce(float32[8], op=max)"),
    "root": ("broadcast", lambda world: world.broadcast(X, 1), "broadcast(float32[8], root=1)"),
    "barrier": ("allreduce", lambda world: world.barrier(), "barrier()"),
    "broadcast": ("allreduce", lambda world: world.broadcast(X, 0), "broadcast(float32[8], root=0)"),
    "no barrier": ("barrier", lambda world: world.allreduce(X), "allreduce(float32[8], op=sum)"),
    "order": (
        "matrix",
        lambda world: world.allreduce(np.ones((2, 3), order="F")),
        "allreduce(float64[2,3], order=F, op=sum)",
    ),
}


def disagree(world: un.Communicator, what: str, erring: int) -> tuple[str, str]:
    """The rank `erring` makes another call. If a rank has ended its call before, its next call raises the error."""
    name, divergent, _ = DIVERGENT[what]
    mine = divergent if world.rank == erring else COMMON[name]
    error = error_of(lambda: mine(world))
    return error if error[0] else error_of(lambda: world.barrier(timeout_s=DEADLINE_S))


@pytest.mark.parametrize(
    ("what", "erring"), [*((what, 2) for what in DIVERGENT), ("dtype", 0), ("nothing", 0), ("barrier", 0)]
)
def test_mismatch_error_on_every_rank_shows_both_calls_and_their_lines(ranks: Ranks, what: str, erring: int) -> None:
    for kind, text in ranks.run_calls(disagree, what, erring):
        assert kind == "MismatchError", text
        assert f"rank {erring} called {DIVERGENT[what][2]} at " in text
        assert text.partition(" [rank")[0].count(f"{Path(__file__).name}:") == 2


def join_late(world: un.Communicator) -> tuple[str, str]:
    """Rank 0 makes another call. Rank 2, which makes the right one, calls last."""
    world.barrier()
    if world.rank == 2:
        time.sleep(LATE_S)
    error = error_of(lambda: world.allreduce(X.astype("int32") if world.rank == 0 else X))
    return error if error[0] else error_of(world.barrier)


def test_mismatch_error_counts_ranks_that_call_a_little_later(ranks: Ranks) -> None:
    for kind, text in ranks.run_calls(join_late):
        assert kind == "MismatchError", text
        assert "rank 0 called allreduce(int32[8]" in text
        assert "where ranks 1 and 2 called allreduce(float32[8]" in text


def skip_a_call(world: un.Communicator) -> tuple[str, str]:
    """Rank 1 omits one allreduce in a series, and calls the barrier too early."""
    for call in range(5):
        if (world.rank, call) != (1, 3):
            error = error_of(lambda: world.allreduce(X))
            if error[0]:
                return error
    return error_of(world.barrier)


def test_skipped_call_is_a_mismatch(ranks: Ranks) -> None:
    for kind, text in ranks.run_calls(skip_a_call):
        assert kind == "MismatchError", text
        assert "rank 1 called barrier()" in text


def broadcast_from_another_root(world: un.Communicator, calls: int) -> tuple[str, str]:
    """Rank 2 passes another root, and then waits. Ranks 0 and 1 make many more broadcasts, which end without rank 2."""
    world.broadcast(X, 0)
    error = error_of(lambda: world.broadcast(X, 1 if world.rank == 2 else 0))
    for _ in range(calls):
        error = error if error[0] else error_of(lambda: world.broadcast(X, 0))
    return error if error[0] else error_of(world.barrier)


def test_different_root_is_a_mismatch_however_far_other_ranks_are_ahead() -> None:
    with start_ranks(3, "tcp") as ranks:  # its sockets hold tens of thousands of small messages
        for kind, text in ranks.run_calls(broadcast_from_another_root, 50_000):
            assert kind == "MismatchError", text
            assert "rank 2 called broadcast(float32[8], root=1) at " in text


def close_after(world: un.Communicator, say: Say, divergent: bool) -> None:
    """Make a last call in which no rank waits, with different roots if `divergent`, and close."""
    error = error_of(lambda: world.broadcast(X, world.rank % 2 if divergent else 0))
    say(error if error[0] else error_of(world.close))


@pytest.mark.parametrize(("size", "divergent"), [(2, True), (3, True), (3, False)])
def test_close_raises_a_mismatch_of_the_last_call(tmp_path: Path, transport: str, size: int, divergent: bool) -> None:
    with Job(close_after, size, tmp_path, divergent, transports=transport) as job:
        for kind, text in job.hear_all():
            assert kind == ("MismatchError" if divergent else ""), text
            assert not divergent or "rank 1 called broadcast(float32[8], root=1) at " in text


def send_something_else(world: un.Communicator, count: int, dtype: str) -> tuple[str, str]:
    error = ("", "")
    if world.rank == 0:
        error = error_of(lambda: world.send(X, 1, 3))
    if world.rank == 1:
        error = error_of(lambda: world.recv(np.zeros(count, dtype), 0, 3))
    return error if error[0] else reduce_until_an_error(world)


@pytest.mark.parametrize(("count", "dtype"), [(8, "float64"), (9, "float32"), (0, "float32")])
def test_message_of_another_dtype_or_length_is_a_mismatch(ranks: Ranks, count: int, dtype: str) -> None:
    for kind, text in ranks.run_calls(send_something_else, count, dtype):
        assert kind == "MismatchError", text
        assert "rank 0 sent float32[8] with tag 3" in text
        assert f"{dtype}[{count}]" in text


# --- ranks that end ------------------------------------------------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def reduce_till_the_end(world: un.Communicator, say: Say, algorithm: str | None) -> None:
    world.allreduce(X, algorithm=algorithm)
    say(os.getpid())
    say(reduce_until_an_error(world, algorithm))
    say(error_of(world.barrier))
    world.close()


@pytest.mark.parametrize(
    ("size", "killed", "algorithm"), [(2, 1, "direct"), (3, 0, "ring"), (3, 1, "direct"), (4, 3, "ring")]
)
def test_a_killed_rank_is_lost_to_all_others(
    tmp_path: Path, transport: str, size: int, killed: int, algorithm: str
) -> None:
    with Job(reduce_till_the_end, size, tmp_path, algorithm, transports=transport) as job:
        job.hear_all()
        job.signal(killed, signal.SIGKILL)
        for kind, text in job.hear_all(but=killed):
            assert kind == "PeerLostError", text
            assert f"rank {killed}" in text
        assert [kind for kind, _ in job.hear_all(but=killed)] == ["AbortedError"] * (size - 1)


def leave_early(world: un.Communicator, say: Say, leaver: int, how: str) -> None:
    world.allreduce(X)
    if world.rank == leaver:
        if how == "raises":
            raise ValueError("out of luck")
        if how == "closes":
            world.close()
        return
    say(error_of(lambda: world.allreduce(X)))


@pytest.mark.parametrize(
    ("size", "leaver", "how"),
    [(2, 1, "raises"), (3, 0, "raises"), (4, 3, "raises"), (3, 2, "closes"), (3, 0, "closes"), (3, 2, "returns")],
)
def test_rank_that_departs_before_a_call_is_lost_to_all_others(
    tmp_path: Path, transport: str, size: int, leaver: int, how: str
) -> None:
    with Job(leave_early, size, tmp_path, leaver, how, transports=transport) as job:
        for kind, text in job.hear_all(but=leaver):
            assert kind == "PeerLostError", text
            reason = "has left: ValueError: out of luck" if how == "raises" else "has left the communicator"
            assert f"rank {leaver} {reason}" in text
        assert job.exit_code(leaver) == (1 if how == "raises" else 0)


def lose_the_first_rank_well(world: un.Communicator, say: Say) -> None:
    """Rank 0 closes its communicator after its last call. The others use a subgroup of their own."""
    if world.rank == 0:
        world.close()
        say("closed")
        return
    others = world.subgroup([1, 2, 3])
    others.allreduce(X)
    say(os.getpid())
    if world.rank == 3:
        time.sleep(DEADLINE_S)
    # rank 2 of the subgroup is rank 3 of the job, and has sent no message yet
    say(error_of(lambda: others.recv(X.copy(), 2)))


def test_death_of_a_rank_is_reported_after_rank_0_has_departed(tmp_path: Path, transport: str) -> None:
    with Job(lose_the_first_rank_well, 4, tmp_path, transports=transport) as job:
        _, _, _, victim = job.hear_all()
        assert job.exit_code(0) == 0
        time.sleep(BLOCKED_S)
        job.signal(3, signal.SIGKILL)
        for rank in (1, 2):
            kind, text = job.hear(rank)
            assert kind == "PeerLostError", text
            assert f"rank 3 died [rank {rank}; " in text
            assert f"rank 3 was process {victim} on {os.uname().nodename}]" in text


def receive_from_the_dead(world: un.Communicator, say: Say) -> None:
    world.barrier()
    say("ready")
    if world.rank == 1:
        say(error_of(lambda: world.recv(np.zeros(4), 2)))
    elif world.rank == 2:
        time.sleep(DEADLINE_S)
    else:
        say(reduce_until_an_error(world))


def test_receive_from_a_killed_rank_raises_peer_lost_error(tmp_path: Path, transport: str) -> None:
    with Job(receive_from_the_dead, 3, tmp_path, transports=transport) as job:
        job.hear_all()
        job.signal(2, signal.SIGKILL)
        for kind, text in job.hear_all(but=2):
            assert kind == "PeerLostError"
            assert "rank 2" in text


def lose_bytes(world: un.Communicator, say: Say) -> None:
    """Rank 1 loses bytes of rank 0. It needs rank 0, which needs rank 2, which needs rank 1."""
    x = np.zeros(1)
    if world.rank == 0:
        world.send(x, 1)
    elif world.rank == 1:
        world.recv(x, 0)
        state = resumption._STATE
        with mock.patch.object(resumption, "_STATE", mock.Mock(wraps=state, size=state.size)) as forgetful:
            forgetful.pack = lambda resumptions, _: state.pack(resumptions, 0)
            cut_connections()
            say(error_of(lambda: world.recv(x, 0)))
        return
    say(error_of(lambda: world.recv(x, (world.rank + 2) % 3)))


def test_a_rank_that_cannot_send_lost_bytes_again_fails_though_it_needs_the_peer_no_more(tmp_path: Path) -> None:
    with Job(lose_bytes, 3, tmp_path, transports="tcp") as job:
        errors = job.hear_all()
    assert [kind for kind, _ in errors] == ["PeerLostError"] * 3
    assert all("broke, and bytes that were sent are lost" in text for _, text in errors), errors


# --- ranks that stay away ------------------------------------------------------------------------------------------


def stay_away(world: un.Communicator, say: Say, absent: int, folder: Path) -> None:
    def reduce() -> None:
        world.allreduce(X, timeout_s=SHORT_S)

    world.allreduce(X)
    if world.rank == absent:
        await_marks(folder, *({0, 1, 2} - {absent}))
        # The other ranks' messages have arrived already. So a call may succeed before their error arrives.
        say(until_an_error(reduce))
    else:
        say(error_of(reduce))
    leave_mark(folder, world.rank)
    say(error_of(world.barrier))


@pytest.mark.parametrize("absent", [0, 2])
def test_timeout_names_a_missing_rank_which_is_aborted_when_it_calls(
    tmp_path: Path, transport: str, absent: int
) -> None:
    with Job(stay_away, 3, tmp_path, absent, tmp_path, transports=transport) as job:
        first, second = job.hear_all(), job.hear_all()
        for kind, text in first:
            assert kind == "CollectiveTimeoutError", text
            assert f"rank {absent} has not called it" in text
            assert f"waited {SHORT_S} s" in text
        assert [kind for kind, _ in second] == ["AbortedError"] * 3


def be_stopped(world: un.Communicator, say: Say, folder: Path, victim: int, channels: str) -> None:
    if channels == "open":
        world.allreduce(X)
    say("ready")
    if world.rank == victim:
        time.sleep(DEADLINE_S)
    else:
        await_marks(folder, "stopped")
        say(error_of(lambda: world.allreduce(X, timeout_s=SHORT_S)))


@pytest.mark.parametrize(("victim", "channels"), [(0, "open"), (0, "closed"), (1, "closed"), (2, "open")])
def test_timeout_names_a_stopped_rank(tmp_path: Path, transport: str, victim: int, channels: str) -> None:
    with Job(be_stopped, 3, tmp_path, tmp_path, victim, channels, transports=transport) as job:
        job.hear_all()
        job.signal(victim, signal.SIGSTOP)
        leave_mark(tmp_path, "stopped")
        outcomes = job.hear_all(but=victim)
        job.signal(victim, signal.SIGKILL)
        for kind, text in outcomes:
            assert kind == "CollectiveTimeoutError", text
            assert f"waited {SHORT_S} s in call #{1 if channels == 'open' else 0} allreduce(" in text
            assert f": rank {victim} does not answer" in text


WAITS: dict[str, Callable[[un.Communicator], Any]] = {
    "collective": lambda world: world.allreduce(X),
    "barrier": lambda world: world.barrier(),
    "receive": lambda world: world.recv(X.copy(), 1),
    "work": lambda world: world.allreduce(X, wait=False).wait(),
    "persistent": lambda world: world.plan("allreduce", X)(),
}
# In seconds: the time limit less the time after which a rank warns. A rank begins to ask for its error 1 s before the
# limit, and for its warning at most 0.5 s before it.
DISTANCES_S = (-1.0, 0.0, 0.1, 0.5, 0.9, 1.1, 1.9)
CULPRITS = {"stopped": "rank 1 does not answer", "elsewhere": "rank 1 "}
LIMIT_S = 2.0


def wait_for_rank_1(world: un.Communicator, say: Say, folder: Path, wait: str) -> None:
    say("ready")
    if world.rank == 1:
        await_marks(folder, "over")
        return
    await_marks(folder, "begin")
    try:
        WAITS[wait](world)
    except un.CollectiveTimeoutError as error:
        say((error.peer, str(error)))


@pytest.mark.night
def test_a_timeout_names_the_culprit_however_near_its_warning_is(tmp_path: Path) -> None:
    cells = pairwise(DISTANCES_S, ("shm", "tcp"), tuple(WAITS), tuple(CULPRITS))
    with contextlib.ExitStack() as stack:
        jobs = []
        for number, (distance_s, transport, wait, _) in enumerate(cells):
            folder = tmp_path / str(number)
            folder.mkdir()
            limits = {"timeout_s": LIMIT_S, "warn_after_s": LIMIT_S - distance_s}
            jobs.append(
                stack.enter_context(Job(wait_for_rank_1, 3, folder, tmp_path, wait, transports=transport, **limits))
            )
        for job, (*_, culprit) in zip(jobs, cells, strict=True):
            job.hear_all()
            if culprit == "stopped":
                job.signal(1, signal.SIGSTOP)
        leave_mark(tmp_path, "begin")
        heard = [job.hear_all(but=1) for job in jobs]
        for job in jobs:
            job.signal(1, signal.SIGKILL)
    for cell, outcomes in zip(cells, heard, strict=True):
        for peer, text in outcomes:
            assert peer == 1, (cell, text)
            assert CULPRITS[cell[-1]] in text, (cell, text)


def start_calls_with_the_stopped(world: un.Communicator, say: Say, folder: Path) -> None:
    """Start calls with the stopped rank 0, to which no channel is open. No start may wait for rank 0."""
    say("ready")
    if world.rank == 0:
        await_marks(folder, "stopped")
    works = []
    if world.rank == 1:
        await_marks(folder, "stopped")
        works = [world.send(X, 0, wait=False), world.allreduce(X, wait=False)]
        say("started")
    else:
        received = X.copy()
        works = [world.recv(received, 1, wait=False)] if world.rank == 0 else []
        works.append(world.allreduce(X, wait=False))
    un.wait_all(works)
    say(error_of(world.barrier))


def test_calls_can_start_while_a_peer_is_stopped(tmp_path: Path, transport: str) -> None:
    with Job(start_calls_with_the_stopped, 2, tmp_path, tmp_path, transports=transport) as job:
        job.hear_all()
        job.signal(0, signal.SIGSTOP)
        leave_mark(tmp_path, "stopped")
        assert job.hear(1) == "started"
        job.signal(0, signal.SIGCONT)
        assert job.hear_all() == [("", "")] * 2


def pass_round(world: un.Communicator, say: Say, folder: Path) -> None:
    """Receive from the previous rank, and then send to the next one. All ranks wait for rank 1, which is stopped."""
    world.barrier()
    say("ready")
    if world.rank == 1:
        time.sleep(DEADLINE_S)
    await_marks(folder, "stopped")
    say(error_of(lambda: world.recv(X.copy(), (world.rank - 1) % world.size, timeout_s=SHORT_S)))


def test_a_timeout_of_a_message_names_the_rank_that_all_wait_for(tmp_path: Path, transport: str) -> None:
    with Job(pass_round, 4, tmp_path, tmp_path, transports=transport) as job:
        job.hear_all()
        job.signal(1, signal.SIGSTOP)
        leave_mark(tmp_path, "stopped")
        outcomes = job.hear_all(but=1)
        job.signal(1, signal.SIGKILL)
        for kind, text in outcomes:
            assert kind == "CollectiveTimeoutError", text
            assert "rank 1 does not answer (is it stopped, or the link to it slow?)" in text


def send_to_each_other(world: un.Communicator) -> tuple[str, str]:
    """Both ranks send a large message first, a common mistake: each waits until the other one receives."""
    return error_of(lambda: world.send(np.zeros(32 << 20, np.uint8), 1 - world.rank, timeout_s=SHORT_S))


def test_timeout_says_when_ranks_wait_for_each_other(transport: str) -> None:
    with start_ranks(2, transport) as ranks:
        for kind, text in ranks.run_calls(send_to_each_other):
            assert kind == "CollectiveTimeoutError", text
            assert "test_faults.py:" in text
            assert text.partition(" [rank")[0].endswith(": these ranks wait for each other")


def receive_another_tag(world: un.Communicator) -> tuple[str, str]:
    if world.rank == 0:
        return error_of(lambda: world.recv(np.zeros(8, np.float32), 1, 5, timeout_s=SHORT_S))
    world.send(X, 0, 6)
    return until_an_error(lambda: world.iprobe(0))


def test_timeout_of_a_message_lists_the_tags_that_have_come(transport: str) -> None:
    with start_ranks(2, transport) as ranks:
        kind, text = ranks.run_calls(receive_another_tag)[0]
    assert kind == "CollectiveTimeoutError"
    assert "waited 0.5 s for a message from rank 1 (1 with other tags have come: 6): rank 1 is in " in text


def wait_for_a_message(world: un.Communicator) -> tuple[str, str]:
    if world.rank == 0:
        return error_of(lambda: world.recv(np.zeros(4), 1, timeout_s=SHORT_S))
    return reduce_until_an_error(world)


def test_receive_times_out_when_nobody_sends(ranks: Ranks) -> None:
    for kind, text in ranks.run_calls(wait_for_a_message):
        assert kind == "CollectiveTimeoutError"
        assert "rank 0 waited 0.5 s for a message from rank 1" in text


def send_to_nobody(world: un.Communicator) -> tuple[str, str]:
    if world.rank == 0:
        return error_of(lambda: world.send(np.zeros(32 << 20, np.uint8), 1, timeout_s=SHORT_S))
    return reduce_until_an_error(world)


def test_large_send_times_out_when_nobody_receives(ranks: Ranks) -> None:
    for kind, text in ranks.run_calls(send_to_nobody):
        assert kind == "CollectiveTimeoutError"
        assert "rank 0 waited 0.5 s for rank 1 to receive its message: rank 1 is in allreduce(" in text


LAST_CALLS: dict[str, Callable[[un.Communicator, np.ndarray, int], Any]] = {
    "message": lambda world, x, leaver: world.send(x, 1 - leaver) if world.rank == leaver else world.recv(x, leaver),
    "broadcast": lambda world, x, leaver: world.broadcast(x, leaver, out=x),
}


def leave_after_its_last_call(world: un.Communicator, call: str, leaver: int) -> float:
    """A rank makes its part of a call and departs before the other rank has added the channel of the call."""
    x = np.full(1000, 7.0 if world.rank == leaver else 0.0)

    def late(method: str) -> Any:
        original = getattr(Channels, method)

        def later(*args: Any) -> None:
            time.sleep(VERY_LATE_S)
            original(*args)

        return mock.patch.object(Channels, method, later)

    if world.rank == leaver:
        LAST_CALLS[call](world, x, leaver)
        world.close()
    else:
        with late("admit"), late("_on_dialled"):
            LAST_CALLS[call](world, x, leaver)
    return float(x.min())


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("call", LAST_CALLS)
@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_last_message_of_a_departed_rank_arrives_over_a_channel_that_is_added_late(
    transports: str, call: str, leaver: int
) -> None:
    options = un.Options(transports=transports)
    results = un.launch(leave_after_its_last_call, 2, call, leaver, options=options, timeout_s=DEADLINE_S)
    assert results == [7.0, 7.0]


def leave_while_a_channel_opens(world: un.Communicator) -> list[str]:
    """Rank 1 closes a communicator while it dials its channel to rank 0. Return the warnings of this rank."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unisono").addHandler(handler)
    refused = threading.Event()

    def refuse(*args: Any) -> None:
        original(*args)
        refused.set()

    original = Channels.refuse
    pair = world.subgroup([0, 1])
    if world.rank == 1:
        with mock.patch.object(Channels, "endpoint", return_value=None):  # as after the communicator was closed
            error_of(lambda: pair.allreduce(X, timeout_s=SHORT_S))
    else:
        with mock.patch.object(Channels, "refuse", refuse):
            error_of(lambda: pair.allreduce(X, timeout_s=SHORT_S))
            assert refused.wait(DEADLINE_S)
    return warnings


def test_rank_does_not_warn_of_a_channel_of_a_rank_that_has_left() -> None:
    options = un.Options(transports="shm")
    assert un.launch(leave_while_a_channel_opens, 2, options=options, timeout_s=DEADLINE_S) == [[], []]


# Rank 2 reads the last message of a handshake long after the other rank has added its end of the link. It leaves in the
# meantime.
LEAVE_HALF_LINKED = """
import os, time
import numpy as np, unisono as un
from unisono.transports.links.dialer import Connection
from unisono.transports.links.handshake import _READY

advance, began = Connection.advance, {}

def late(self):
    is_last = self._handshake is not None and self._handshake.needed == len(_READY)
    if is_last and time.monotonic() < began.setdefault(self, time.monotonic()) + 0.6:
        return None
    return advance(self)

if os.environ["RANK"] == "2":
    Connection.advance = late
world = un.init()
if world.rank != 2:
    try:
        world.recv(np.zeros(1), 2)
    except un.PeerLostError as error:
        print(error.message)
else:
    time.sleep(0.3)
world.close()
"""


def test_rank_that_leaves_while_it_is_linked_to_a_judge_has_not_died(tmp_path: Path) -> None:
    ended = by_variables(LEAVE_HALF_LINKED, ranks=3, folder=tmp_path)
    assert [rank.returncode for rank in ended] == [0] * 3, ended
    assert all("rank 2 has left the communicator" in rank.stdout for rank in ended[:2]), ended


def close_in_a_call(world: un.Communicator) -> float:
    """Both ranks close a communicator in its first call, and go on with another one."""
    part = world.dup()
    world.barrier()
    if world.rank == 0:
        part.allreduce(X, wait=False)
        part.close()
    world.barrier()
    if world.rank == 1:
        part.allreduce(X, wait=False)
        time.sleep(LATE_S)  # its thread sees that rank 0 has gone
        part.close()
    time.sleep(VERY_LATE_S)
    return float(world.allreduce(X)[0])


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_job_goes_on_after_all_ranks_have_closed_a_communicator_in_a_call(transports: str) -> None:
    options = un.Options(transports=transports)
    assert un.launch(close_in_a_call, 2, options=options, timeout_s=DEADLINE_S) == [2.0, 2.0]


# --- aborts and interrupts -----------------------------------------------------------------------------------------


def be_interrupted(world: un.Communicator, say: Say, call: str, folder: Path) -> None:
    world.barrier()
    say("ready")
    if world.rank != 1:
        await_marks(folder, "interrupted")
        say(until_an_error(world.barrier))  # a barrier may still end if it needs no more messages of rank 1
        return
    blocked = world.barrier if call == "barrier" else lambda: world.recv(np.zeros(4), 0)
    say(error_of(blocked))
    say(error_of(world.barrier))


@pytest.mark.parametrize("call", ["barrier", "recv"])
def test_interrupt_ends_a_blocked_call_and_aborts_the_other_ranks(tmp_path: Path, transport: str, call: str) -> None:
    with Job(be_interrupted, 3, tmp_path, call, tmp_path, transports=transport) as job:
        job.hear_all()
        time.sleep(BLOCKED_S)
        job.signal(1, signal.SIGINT)
        kind, _ = job.hear(1)
        leave_mark(tmp_path, "interrupted")
        assert kind == "KeyboardInterrupt"
        for other in (0, 2):
            kind, text = job.hear(other)
            assert kind == "AbortedError"
            assert "rank 1 was interrupted" in text
        assert job.hear(1)[0] == "AbortedError"


def abort_and_close(world: un.Communicator, say: Say) -> None:
    with contextlib.suppress(un.AbortedError):  # rank 1 may abort while other ranks are still in the barrier
        world.barrier()
    if world.rank == 1:
        world.abort("the loss is not a number")
    say([error_of(world.barrier), error_of(world.barrier), error_of(lambda: world.allreduce(X))])
    world.close()
    world.close()
    say(error_of(world.barrier))


def test_calls_after_an_abort_raise_and_close_works(tmp_path: Path, transport: str) -> None:
    with Job(abort_and_close, 3, tmp_path, transports=transport) as job:
        for outcomes in job.hear_all():
            assert [kind for kind, _ in outcomes] == ["AbortedError"] * 3
            assert "the loss is not a number" in outcomes[0][1]
        assert [kind for kind, _ in job.hear_all()] == ["UsageError"] * 3


# --- leaks ---------------------------------------------------------------------------------------------------------


def count_descriptors(world: un.Communicator, say: Say, store: str) -> None:
    """Report the number of open descriptors before and after a job that ends with the loss of a rank."""
    world.close()
    before = descriptors()
    second = un.init(un.Options(transports=os.environ["TEST_TRANSPORT"]), store=store, rank=world.rank, size=world.size)
    for peer in range(world.size):
        if second.rank == peer:
            second.send(X, (peer + 1) % world.size)
        elif second.rank == (peer + 1) % world.size:
            second.recv(X.copy(), peer)
    second.allreduce(X)
    say("ready")
    error = reduce_until_an_error(second)
    second.close()
    del second
    gc.collect()
    say((error[0], descriptors() - before))


def test_survivors_of_a_killed_rank_keep_no_file_descriptors(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_TRANSPORT", transport)
    with Job(count_descriptors, 3, tmp_path, f"file://{tmp_path}/second", transports=transport) as job:
        job.hear_all()
        job.signal(2, signal.SIGKILL)
        assert job.hear_all(but=2) == [("PeerLostError", 0)] * 2


def test_killed_ranks_leave_nothing_in_dev_shm(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    with Job(reduce_till_the_end, 2, tmp_path, None, transports="shm") as job:
        job.hear_all()
        for rank in range(2):
            job.signal(rank, signal.SIGKILL)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "unisono" in name]
