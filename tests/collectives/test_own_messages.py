"""Messages of a rank to itself, and messages to and from nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.ranks import Ranks, ranks_fixture

import unisono as un
from unisono.dtypes import DTYPES
from unisono.transports.contracts.executor import Message
from unisono.transports.contracts.transport import OWN_BUFFER_NBYTES, OWN_MESSAGE_NBYTES

WAIT_S = 60.0
MOST = OWN_BUFFER_NBYTES - OWN_MESSAGE_NBYTES  # the longest message that fits into an empty buffer
BYTE = DTYPES["uint8"]


two = ranks_fixture((2, "shm"), (2, "tcp"))
executors = ranks_fixture((2, "generic"), (2, "shm"))


def text_of(call: Callable[[], object]) -> str:
    with pytest.raises(un.UsageError) as caught:
        call()
    return str(caught.value)


# --- every executor ------------------------------------------------------------------------------------------------

# A message to the rank itself, or a receive: (tag, length of the message); (tag, None) or any tag (None, None).
steps = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from((0, 3, 70_000, 2_000_000)))
    | st.tuples(st.none() | st.integers(0, 2), st.none()),
    max_size=10,
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(steps=steps)
def test_own_messages_go_to_the_first_matching_receive(
    executors: Any, steps: list[tuple[int | None, int | None]]
) -> None:
    executors.run(run_own, steps)


def run_own(executor: Any, steps: list[tuple[int | None, int | None]]) -> None:
    """Make the steps without waiting, then what is missing of receives and sends; compare with a list as the model."""
    sent: list[tuple[int, int]] = []  # tag and number of the messages that no receive has got
    receives: list[tuple[int | None, int | None]] = []  # tag, and the number of the message that it gets
    lengths: list[int] = []
    started: list[Any] = []
    outs: list[Any] = []

    def send(tag: int, length: int) -> None:
        number = len(lengths)
        lengths.append(length)
        started.append(executor.send(np.full(length, number, np.uint8), BYTE, executor.rank, tag))
        for place, (wanted, got) in enumerate(receives):
            if got is None and wanted in (None, tag):
                receives[place] = (wanted, number)
                return
        sent.append((tag, number))

    # A receive must have the length of its message. So the messages come first in the model, and all of them are sent
    # before or after the receives that they match.
    for tag, length in steps:
        if length is not None and tag is not None:
            send(tag, length)
            continue
        match = next(((t, number) for t, number in sent if tag in (None, t)), None)
        if match is None:
            assert looked(executor, tag) is None
            continue
        found = looked(executor, tag)
        assert found == Message(executor.rank, match[0], "uint8", lengths[match[1]])
        sent.remove(match)
        outs.append((match[1], np.zeros(lengths[match[1]], np.uint8)))
        started.append(executor.recv(outs[-1][1], BYTE, executor.rank, tag))
    for _, number in sent:
        outs.append((number, np.zeros(lengths[number], np.uint8)))
        started.append(executor.recv(outs[-1][1], BYTE, executor.rank, None))
    for operation in started:
        operation.wait(WAIT_S)
    for number, out in outs:
        assert (out == number).all(), (number, out[:5])


def looked(executor: Any, tag: int | None) -> Message | None:
    """Return the message that an `iprobe` finds. Looking once more lets an earlier send begin."""
    message = None
    for _ in range(3):
        probe = executor.probe(executor.rank, tag, once=True)
        probe.wait(WAIT_S)
        message = probe.message()
    return message


def run_room(executor: Any) -> list[bool]:
    me, takes = executor.rank, []
    takes += [executor.takes_from_itself(1, nbytes) for nbytes in (0, MOST, MOST + 1)]
    executor.send(np.zeros(1000, np.uint8), BYTE, me, 1).wait(WAIT_S)
    rest = MOST - 1000 - OWN_MESSAGE_NBYTES
    takes += [executor.takes_from_itself(1, nbytes) for nbytes in (rest, rest + 1)]
    waiting = executor.recv(np.zeros(5, np.uint8), BYTE, me, 2)
    takes += [executor.takes_from_itself(2, MOST)]
    executor.recv(np.zeros(1000, np.uint8), BYTE, me, 1).wait(WAIT_S)
    takes += [executor.takes_from_itself(3, MOST)]
    executor.send(np.zeros(5, np.uint8), BYTE, me, 2).wait(WAIT_S)
    waiting.wait(WAIT_S)
    return takes


def test_buffer_for_own_messages_has_the_documented_size(executors: Any) -> None:
    expected = [True, True, False, True, False, True, True]
    assert executors.run(run_room) == [expected, expected]


# --- the public calls ----------------------------------------------------------------------------------------------


def to_itself(world: un.Communicator) -> None:
    me, large = world.rank, np.arange(400_000.0)
    small, out = np.arange(3.0), np.zeros(3)
    # A small message is buffered, a large one needs a receive before, in any of the forms.
    world.send(small, me, tag=4)
    assert world.probe(me, 4) == Message(me, 4, "float64", 3)
    assert world.recv(out, me, 4) is out
    np.testing.assert_array_equal(out, small)
    target = np.zeros_like(large)
    for source, tag in ((me, 5), (un.ANY_SOURCE, 5), (me, un.ANY_TAG), (un.ANY_SOURCE, un.ANY_TAG)):
        target[:] = 0
        work = world.recv(target, source, tag, wait=False)
        world.send(large, me, 5)
        assert work.wait() is target
        assert work.message() == Message(me, 5, "float64", large.size)
        np.testing.assert_array_equal(target, large)
    sending = world.send(2 * large, me, wait=False)
    np.testing.assert_array_equal(world.recv(target, me), 2 * large)
    assert sending.wait() is None
    np.testing.assert_array_equal(world.sendrecv(3 * large, me, target, me), 3 * large)
    np.testing.assert_array_equal(world.sendrecv(small, me, out, un.ANY_SOURCE), small)
    for tag, recv_tag in ((5, 5), (5, un.ANY_TAG)):
        np.testing.assert_array_equal(world.sendrecv(large, me, target, me, tag, recv_tag=recv_tag), large)
    # A message of another tag is not received by the call that sends it.
    world.send(2 * small, me, 6)
    np.testing.assert_array_equal(world.sendrecv(small, me, out, me, 5, recv_tag=6), 2 * small)
    np.testing.assert_array_equal(world.recv(out, me, 5), small)
    with world.group():
        world.send(4 * large, me)
        world.recv(target, me)
    np.testing.assert_array_equal(target, 4 * large)
    # The order of one tag holds, also if a sendrecv comes behind a message that waits.
    world.send(small, me)
    world.sendrecv(5 * small, me, out, me)
    np.testing.assert_array_equal(out, small)
    np.testing.assert_array_equal(world.recv(out, me), 5 * small)
    # A message of another tag does not hold up a later one.
    first = world.send(large, me, 1, wait=False)
    world.send(small, me, 2)
    world.recv(out, me, 2)
    world.recv(target, me, 1)
    first.wait()
    # The layout of arrays travels as between ranks.
    table = np.arange(6.0).reshape(2, 3)
    world.send(table.T, me)
    np.testing.assert_array_equal(world.recv(np.zeros((3, 2), order="F"), me), table.T)
    assert world.stats()[me].sent_nbytes > 0
    # Objects.
    world.send_object({"rank": me}, me, 7)
    world.send_object([1], me, 8)
    assert world.recv_object(me, 8) == [1]
    assert world.recv_object(un.ANY_SOURCE, 7) == {"rank": me}
    world.send_object(np.arange(20_000.0), me)  # with a part
    np.testing.assert_array_equal(world.recv_object(me), np.arange(20_000.0))


def test_rank_sends_and_receives_to_itself_in_every_form(two: Ranks) -> None:
    two.run_calls(to_itself)


def with_two_tags(world: un.Communicator) -> list[list[int]]:
    """Ranks send by the tag of their number, and receive by that of the other, by any tag, and by a wrong one."""
    me, peer, out, x = world.rank, 1 - world.rank, np.zeros(2, int), np.full(2, world.rank)
    received = [
        world.sendrecv(x, peer, out, peer, me, recv_tag=peer).tolist(),
        world.sendrecv(x, peer, out, peer, me, recv_tag=un.ANY_TAG).tolist(),
        world.sendrecv(x, peer, out, un.ANY_SOURCE, me, recv_tag=un.ANY_TAG).tolist(),
    ]
    for wrong in (-1, 1 << 31, 0.5, "any"):
        assert "recv_tag must be" in text_of(
            lambda wrong=wrong: world.sendrecv(x, peer, out, peer, recv_tag=wrong)  # type: ignore[misc]
        )
    world.barrier()
    assert world.iprobe() is None
    return received


def test_sendrecv_takes_a_tag_for_each_of_its_messages(two: Ranks) -> None:
    assert two.run_calls(with_two_tags) == [[[1, 1]] * 3, [[0, 0]] * 3]


def refused(world: un.Communicator) -> list[str]:
    me, large = world.rank, np.zeros(200_000)
    calls = [
        lambda: world.send(large, me),
        lambda: world.sendrecv(large, me, np.zeros(1), 1 - me),
        lambda: world.send_object(bytes(2_000_000), me),
        lambda: world.sendrecv(large, me, np.zeros_like(large), me, 1, recv_tag=2),
    ]
    texts = [text_of(call) for call in calls]
    with un_buffered(world):
        texts.append(text_of(lambda: world.send(np.zeros(100_000), me)))
        texts.append(text_of(lambda: world.sendrecv(large, me, np.zeros(100_000), me)))
    # Nothing has been posted: the communicator works, and no message is left.
    world.barrier()
    assert world.iprobe() is None
    return texts


class un_buffered:  # noqa: N801
    """Leaves a message of 800,000 bytes in the buffer within its block."""

    def __init__(self, world: un.Communicator) -> None:
        self.world = world

    def __enter__(self) -> None:
        self.world.send(np.zeros(100_000), self.world.rank)

    def __exit__(self, *_: object) -> None:
        self.world.recv(np.zeros(100_000), self.world.rank)


def test_own_message_that_would_wait_for_itself_is_refused(two: Ranks) -> None:
    for texts in two.run_calls(refused):
        assert [("to this rank itself" in text or "for this rank itself" in text) for text in texts] == [True] * 6
        assert "1600000 bytes" in texts[0]
        assert "recv(wait=False)" in texts[0]


def from_threads(world: un.Communicator) -> float:
    """One thread receives what another one sends to the same rank."""
    x, out = np.arange(1000.0), np.zeros(1000)
    receiver = threading.Thread(target=lambda: [world.recv(out, world.rank, 9) for _ in range(200)])
    receiver.start()
    for number in range(200):
        world.send(x + number, world.rank, 9)
    receiver.join()
    return float(out[0])


def test_threads_of_a_rank_send_to_each_other(two: Ranks) -> None:
    assert two.run_calls(from_threads) == [199.0, 199.0]


def alone(world: un.Communicator) -> Any:
    with world.subgroup([world.rank]) as mine:
        assert mine.iprobe() is None
        mine.send(np.arange(3), 0, 1)
        assert mine.probe() == Message(0, 1, "int64", 3)
        return mine.recv(np.zeros(3, int), un.ANY_SOURCE, un.ANY_TAG).tolist()


def test_only_rank_of_a_communicator_sends_to_itself(two: Ranks) -> None:
    assert two.run_calls(alone) == [[0, 1, 2]] * 2


# --- nobody --------------------------------------------------------------------------------------------------------


def with_nobody(world: un.Communicator) -> None:
    """Every form of a message with nobody ends at once and leaves the array as it is."""
    world.barrier()  # opens the channels of new ranks, whose traffic counts
    x, out, before = np.arange(3), np.full(3, 7), world.stats()
    nobodys = Message(un.NOBODY, 0, "uint8", 0)
    assert world.send(x, un.NOBODY) is None
    assert world.send(x[::2], un.NOBODY, 2, wait=False).wait() is None
    assert world.recv(out, un.NOBODY) is out
    assert world.recv(out.reshape(1, 3).T, un.NOBODY, un.ANY_TAG).shape == (3, 1)
    work = world.recv(out, un.NOBODY, un.ANY_TAG, wait=False)
    assert work.done()
    assert work.wait() is out
    assert work.message() == nobodys
    assert work.message().source is un.NOBODY
    assert world.probe(un.NOBODY) == world.iprobe(un.NOBODY, 4) == nobodys
    assert world.recv(out, nobodys.source, nobodys.tag) is out
    with world.group():
        world.send(x, un.NOBODY)
        received = world.recv(out, un.NOBODY)
    assert received.wait() is out
    assert received.message() == nobodys
    assert world.sendrecv(x, un.NOBODY, out, un.NOBODY) is out
    assert world.send_object(lambda: None, un.NOBODY) is None
    assert world.recv_object(un.NOBODY) is None
    assert out.tolist() == [7, 7, 7]
    assert world.stats() == before
    # At the border of a chain, one end of a sendrecv is nobody.
    last = world.size - 1
    up = un.NOBODY if world.rank == last else world.rank + 1
    down = un.NOBODY if world.rank == 0 else world.rank - 1
    world.sendrecv(np.full(3, world.rank), up, out, down)
    assert out.tolist() == ([7] * 3 if world.rank == 0 else [world.rank - 1] * 3)


def test_message_with_nobody_does_nothing_and_ends_at_once(two: Ranks) -> None:
    two.run_calls(with_nobody)


def wrong_with_nobody(world: un.Communicator) -> list[str]:
    read_only = np.zeros(2)
    read_only.flags.writeable = False
    calls = [
        lambda: world.send(np.zeros(1), un.NOBODY, -1),
        lambda: world.send(np.array([None]), un.NOBODY),
        lambda: world.recv(read_only, un.NOBODY),
        lambda: world.recv(3.0, un.NOBODY),  # type: ignore[call-overload]
        lambda: world.send(np.zeros(1), -1),
        lambda: world.subgroup([un.NOBODY]),
        lambda: world.broadcast(np.zeros(1), root=un.NOBODY),
    ]
    texts = [text_of(call) for call in calls]
    with world.subgroup([world.rank]) as closed:
        pass
    return [*texts, text_of(lambda: closed.send(np.zeros(1), un.NOBODY))]


def test_wrong_call_with_nobody_is_refused(two: Ranks) -> None:
    expected = [
        "tag must",
        "Python objects",
        "read-only",
        "must be an array",
        "dest must",
        "ranks[0]",
        "root must",
        "clos",
    ]
    for text, part in zip(two.run_calls(wrong_with_nobody)[0], expected, strict=True):
        assert part in text
