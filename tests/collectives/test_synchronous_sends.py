"""Synchronous sends by the public calls: their forms, and how they fail."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.outcomes import error_of
from support.ranks import Job, Ranks, ranks_fixture

import unisono as un
from unisono.dtypes import DTYPES

WAIT_S = 60.0
BYTE = DTYPES["uint8"]


two = ranks_fixture((2, "shm"), (2, "tcp"))
executors = ranks_fixture((2, "generic"), (2, "shm"), (2, "tcp"))


# --- every executor ------------------------------------------------------------------------------------------------

# The messages of a rank to the other one or to itself: (whether to itself, tag, length, whether it is synchronous).
messages = st.lists(
    st.tuples(st.booleans(), st.integers(0, 2), st.sampled_from((0, 3, 70_000, 2_000_000)), st.booleans()), max_size=8
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(sent=st.tuples(messages, messages), order=st.randoms(use_true_random=False), takes=st.booleans())
def test_mixed_sends_end_when_all_messages_are_received(executors: Any, sent: Any, order: Any, takes: bool) -> None:
    tags = [0, 1, 2]
    order.shuffle(tags)
    executors.run(exchange, sent, tags, takes)


def exchange(executor: Any, sent: tuple[list[Any], list[Any]], tags: list[int], takes: bool) -> None:
    """Receive the messages of each tag after those of the tags before, from both ranks."""
    me, peer = executor.rank, 1 - executor.rank
    started, expected = [], []
    for rank in (me, peer):
        for number, (is_own, tag, length, synchronous) in enumerate(sent[rank]):
            dest = rank if is_own else 1 - rank
            if rank == me:
                array = np.full(length, number, np.uint8)
                started.append(executor.send(array, BYTE, dest, tag, synchronous=synchronous))
            if dest == me:
                expected.append((rank, tag, length, number))
    for operation in started:
        operation.run_in_background(WAIT_S)
    held = []
    for tag in tags:
        for rank, _, length, number in [message for message in expected if message[1] == tag]:
            if takes:
                taken = executor.probe(rank, tag, once=False, takes=True)
                taken.wait(WAIT_S)
                assert (taken.host_copy() or b"") == bytes([number]) * length
                held.append(taken)
                continue
            out = np.full(length, 255, np.uint8)
            executor.recv(out, BYTE, rank, tag).wait(WAIT_S)
            assert (out == number).all()
    for taken in reversed(held):
        taken.acknowledge(WAIT_S)
    for operation in started:
        operation.wait(WAIT_S)
    # No rank leaves before the other one has ended its sends.
    last = executor.recv(np.zeros(1, np.uint8), BYTE, peer, 3)
    executor.send(np.zeros(1, np.uint8), BYTE, peer, 3, synchronous=True).wait(WAIT_S)
    last.wait(WAIT_S)


# --- the public calls ----------------------------------------------------------------------------------------------


def in_every_form(world: un.Communicator) -> None:
    """Rank 1 receives only after a token, by which rank 0 says that its send has not ended."""
    x, out, token = np.arange(6.0).reshape(2, 3), np.zeros((2, 3)), np.zeros(1)

    def pending(work: Any) -> None:
        """Receive a token of rank 1, which has probed the message; let it go on, and wait for the send."""
        world.recv(token, 1, 9)
        assert not work.done()
        world.send(token, 1, 9)
        work.wait()

    def received(source: Any, tag: Any) -> None:
        assert world.probe(0, 4).count == 6
        world.send(token, 0, 9)
        world.recv(token, 0, 9)
        np.testing.assert_array_equal(world.recv(out, source, tag), x)

    persistent = world.plan("send", x, dest=1 - world.rank, tag=4, synchronous=True)
    if world.rank == 0:
        pending(world.send(x, 1, 4, synchronous=True, wait=False))
        pending(world.send(np.asfortranarray(x), 1, 4, synchronous=True, wait=False))
        pending(persistent(wait=False))
        for _ in range(3):
            persistent()
        with world.group():
            sending = world.send(x, 1, 4, synchronous=True)
            world.recv(token, 1, 9)
        sending.wait()
        assert world.send(x, un.NOBODY, synchronous=True) is None
    else:
        for source, tag in ((0, 4), (un.ANY_SOURCE, 4), (un.ANY_SOURCE, un.ANY_TAG)):
            received(source, tag)
        for _ in range(3):
            world.recv(out, un.ANY_SOURCE, un.ANY_TAG)
        with world.group():
            world.send(token, 0, 9)
            world.recv(out, 0, 4)
    world.barrier()


def test_synchronous_send_waits_for_its_receive_in_every_form(two: Ranks) -> None:
    two.run_calls(in_every_form)


def with_taken_message(world: un.Communicator) -> None:
    x, token = np.arange(3), np.zeros(1)
    if world.rank == 0:
        sending = world.send(x, 1, synchronous=True, wait=False)
        world.recv(token, 1, 1)
        assert not sending.done()
        world.send(token, 1, 1)
        sending.wait()
    else:
        message = world.probe(0, take=True)
        assert error_of(lambda: message.recv(np.zeros(4, int)))[0] == "UsageError"
        world.send(token, 0, 1)
        world.recv(token, 0, 1)
        assert message.recv(np.zeros(3, int)).tolist() == [0, 1, 2]
    world.barrier()


def test_taken_message_ends_its_send_when_it_is_received(two: Ranks) -> None:
    two.run_calls(with_taken_message)


def to_itself(world: un.Communicator) -> str:
    me, x = world.rank, np.arange(3.0)
    refusal = error_of(lambda: world.send(x, me, synchronous=True))
    sending = world.send(x, me, 1, synchronous=True, wait=False)
    # A receive of another tag has the message stored, which does not end its send.
    world.send(x, me, 2)
    assert world.recv(np.zeros(3), me, 2).tolist() == x.tolist()
    assert not sending.done()
    assert world.recv(np.zeros(3), un.ANY_SOURCE, un.ANY_TAG).tolist() == x.tolist()
    sending.wait()
    receiving = world.recv(np.zeros(3), me, 3, wait=False)
    world.send(x, me, 3, synchronous=True)
    assert receiving.wait().tolist() == x.tolist()
    out = np.zeros(3)
    receiver = threading.Thread(target=lambda: world.recv(out, me, 4))
    receiver.start()
    world.send(x, me, 4, synchronous=True)
    receiver.join()
    assert world.iprobe() is None
    return ": ".join(refusal)


def test_synchronous_send_to_the_rank_itself_needs_a_receive(two: Ranks) -> None:
    for text in two.run_calls(to_itself):
        assert text.startswith("UsageError")
        assert "the send is synchronous" in text


def with_cancelled_receive(world: un.Communicator) -> None:
    """A receive that was cancelled before does not end the send."""
    token = np.zeros(1, np.uint8)
    if world.rank == 1:
        receive = world._executor.recv(np.zeros(3, np.uint8), BYTE, 0, 1)
        receive.run_in_background(WAIT_S)
        receive.cancel()  # type: ignore[attr-defined]
        receive.wait(WAIT_S)
        assert receive.message() is None
        world.send(token, 0)
        assert world.recv(np.zeros(3, np.uint8), 0, 1).tolist() == [0, 1, 2]
    else:
        world.recv(token, 1)
        world.send(np.arange(3, dtype=np.uint8), 1, 1, synchronous=True)
    world.barrier()


def test_cancelled_receive_does_not_end_a_synchronous_send(two: Ranks) -> None:
    two.run_calls(with_cancelled_receive)


def refused(world: un.Communicator) -> list[tuple[str, str]]:
    calls: list[Callable[[], Any]] = [
        lambda: world.send(np.zeros(1), 1 - world.rank, synchronous=1),  # type: ignore[call-overload]
        lambda: world.send(np.zeros(1), 1 - world.rank, synchronous=None, wait=False),  # type: ignore[call-overload]
        lambda: world.plan("send", np.zeros(1), dest=0, synchronous="yes"),
        lambda: world.plan("recv", out=np.zeros(1), source=0, synchronous=True),
    ]
    errors = [error_of(call) for call in calls]
    world.barrier()
    assert world.iprobe() is None
    return errors


def test_wrong_value_of_synchronous_is_refused_before_anything_is_sent(two: Ranks) -> None:
    for errors in two.run_calls(refused):
        assert [kind for kind, _ in errors] == ["UsageError"] * 4
        for (_, text), part in zip(errors, ("not 1", "not None", "not 'yes'", "takes no synchronous"), strict=True):
            assert part in text


# --- failures ------------------------------------------------------------------------------------------------------


def fail_to_send(world: un.Communicator, say: Any, how: str, nbytes: int, timeout_s: float) -> None:
    """Rank 1 does not receive the message of rank 0, and ends in some way."""
    if world.rank == 0:
        sending = world.send(np.zeros(nbytes, np.uint8), 1, 3, synchronous=True, timeout_s=timeout_s, wait=False)
        world.send(np.zeros(1), 1)
        say(None)
        say(error_of(sending.wait))
        return
    world.recv(np.zeros(1), 0)  # the message before it has been stored
    if how == "abort":
        world.abort("no receive")
    elif how != "leave":
        say(None)
        signal.pause()


@pytest.mark.parametrize("nbytes", [8, 3_000_000])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("leave", "PeerLostError"),
        ("abort", "AbortedError"),
        ("kill", "PeerLostError"),
        ("wait", "CollectiveTimeoutError"),
    ],
)
def test_synchronous_send_without_a_receive_fails(
    tmp_path: Path, how: str, kind: str, transport: str, nbytes: int
) -> None:
    timeout_s = 1.0 if how == "wait" else WAIT_S
    with Job(fail_to_send, 2, tmp_path, how, nbytes, timeout_s, transports=transport) as job:
        job.hear(0)
        if how in ("kill", "wait"):
            job.hear(1)
        if how == "kill":
            job.signal(1, signal.SIGKILL)
        error = job.hear(0)
        assert error[0] == kind, error
        if how == "wait":
            assert "rank 1" in error[1]
            assert "synchronous" in error[1]
            job.signal(1, signal.SIGKILL)
