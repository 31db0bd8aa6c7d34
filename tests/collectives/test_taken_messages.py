"""Messages that a probe takes, and persistent messages."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.outcomes import error_of
from support.ranks import Ranks, ranks_fixture, start_ranks

import unisono as un
from unisono.dtypes import DTYPES
from unisono.transports.contracts.executor import Message

WAIT_S = 60.0


two = ranks_fixture((2, "shm"), (2, "tcp"))


def take(world: un.Communicator) -> None:
    me, peer = world.rank, 1 - world.rank
    large, table = np.arange(300_000.0), np.arange(6).reshape(2, 3)
    assert world.iprobe(take=True) is None
    world.barrier()
    sends = [
        world.send(array, dest, tag, wait=False)
        for dest in (peer, me)
        for tag, array in enumerate((large, table, np.zeros(0), table + 1))
    ]
    for source in (peer, me):
        # The messages of a rank in another order than they were sent; a taken one is not found again.
        last = world.probe(source, 3, take=True)
        assert world.iprobe(source, 3) is None
        assert (last.source, last.tag, last.dtype, last.count) == (source, 3, "int64", 6)
        first = world.probe(source, take=True)
        assert first.tag == 0
        empty = world.probe(source, 2, take=True)
        while (second := world.iprobe(source, take=True)) is None:
            pass
        assert second.tag == 1
        out = np.zeros_like(large)
        assert first.recv(out) is out
        np.testing.assert_array_equal(out, large)
        assert second.recv(np.zeros(6, int)).tolist() == table.ravel().tolist()
        assert empty.recv(np.zeros(0)).size == 0
        # A wrong array is refused, and the message can still be received.
        for wrong in (np.zeros((3, 2), int), np.zeros(5, int), np.zeros((2, 3))):
            assert error_of(lambda wrong=wrong, last=last: last.recv(wrong))[0] == "UsageError"
        np.testing.assert_array_equal(last.recv(np.zeros((2, 3), int, order="F")), table + 1)
        assert "once" in error_of(lambda last=last: last.recv(np.zeros(6, int)))[1]
    un.wait_all(sends)
    assert world.iprobe(take=True) is None
    nobodys, kept = world.probe(un.NOBODY, take=True), np.full(2, 7)
    assert nobodys.source is un.NOBODY
    assert nobodys.recv(kept).tolist() == [7, 7]
    world.barrier()


def test_taken_message_is_received_by_its_holder_alone(two: Ranks) -> None:
    two.run_calls(take)


def take_in_threads(world: un.Communicator, count: int) -> int:
    """Four threads of rank 1 take messages of several lengths. Each message arrives once, as a whole."""
    if world.rank == 0:
        for number in range(count):
            world.send(np.full(number % 7 * 5000, number), 1, number % 3)
        return 0
    numbers, lock = [], threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if len(numbers) >= count:
                    return
                place = len(numbers)
                numbers.append(-1)
            message = world.probe(take=True)
            out = message.recv(np.zeros(message.count, message.dtype))
            assert out.size == 0 or (out == out[0]).all()
            numbers[place] = int(out[0]) if out.size else 0

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for number in numbers if number) == [number for number in range(count) if number % 7]
    return len(numbers)


def test_threads_take_each_message_once(two: Ranks) -> None:
    assert two.run_calls(take_in_threads, 60) == [0, 60]


def take_by_executor(executor: Any) -> list[Any]:
    x, results = np.arange(5, dtype=np.int64), []
    for dest in (1 - executor.rank, executor.rank):
        executor.send(x, DTYPES["int64"], dest, 4).wait(WAIT_S)
    for source in (1 - executor.rank, executor.rank):
        taking = executor.probe(source, None, once=False, takes=True)
        taking.wait(WAIT_S)
        again = executor.probe(source, 4, once=True, takes=True)
        again.wait(WAIT_S)
        assert again.message() is None
        assert taking.message() == Message(source, 4, "int64", 5)
        assert taking.fits(DTYPES["int64"], 5, (5, 1))
        assert not taking.fits(DTYPES["int64"], 4, (4,))
        assert not taking.fits(DTYPES["float64"], 5, (5,))
        results.append(np.frombuffer(taking.host_copy(), np.int64).tolist())
    # No rank leaves before the other one has looked.
    executor.send(x, DTYPES["int64"], 1 - executor.rank, 5).wait(WAIT_S)
    executor.recv(x, DTYPES["int64"], 1 - executor.rank, 5).wait(WAIT_S)
    return results


@pytest.mark.parametrize("kind", ["generic, buffered", "shm"])
def test_every_executor_takes_messages(kind: str) -> None:
    with start_ranks(2, kind) as ranks:
        assert ranks.run(take_by_executor) == [[[0, 1, 2, 3, 4]] * 2] * 2


# --- persistent messages -------------------------------------------------------------------------------------------


def start_again(world: un.Communicator) -> None:
    me, peer = world.rank, 1 - world.rank
    x, out = np.zeros(4), np.zeros(4)
    for dest, source in ((peer, peer), (me, me), (peer, un.ANY_SOURCE)):
        send, recv = world.plan("send", x, dest=dest, tag=3), world.plan("recv", out=out, source=source, tag=un.ANY_TAG)
        for number in range(20):
            x[:] = 10 * me + number
            receiving = recv(wait=False)
            if number % 2:
                send()
                assert receiving.wait() is out
            else:
                un.wait_all([send(wait=False), receiving])
            assert receiving.message().tag == 3
            assert out.tolist() == [10.0 * (me if dest == me else peer) + number] * 4
            world.barrier()
    nothing = world.plan("recv", out=out, source=un.NOBODY)
    assert nothing() is out
    assert world.plan("send", x, dest=un.NOBODY)() is None


def test_persistent_messages_are_made_again(two: Ranks) -> None:
    two.run_calls(start_again)


WRONG: dict[str, Any] = {
    "dest must": lambda world: world.plan("send", np.zeros(1), dest=7),
    "needs dest: pass": lambda world: world.plan("send", np.zeros(1)),
    "needs source: pass": lambda world: world.plan("recv", out=np.zeros(1)),
    "takes no accumulate": lambda world: world.plan("send", np.zeros(1), dest=0, accumulate="float64"),
    "takes no reproducible": lambda world: world.plan("recv", out=np.zeros(1), source=0, reproducible=True),
    "takes no op": lambda world: world.plan("send", np.zeros(1), dest=0, op="sum"),
    "tag must": lambda world: world.plan("send", np.zeros(1), dest=0, tag=un.ANY_TAG),
    "Python objects": lambda world: world.plan("send", np.array([None]), dest=0),
    "read-only": lambda world: world.plan("recv", out=np.broadcast_to(np.zeros(1), 3), source=0),
    "only a message has": lambda world: world.plan("allreduce", np.zeros(1), dest=0),
}


def refused(world: un.Communicator) -> list[str]:
    texts = [error_of(lambda call=call: call(world))[1] for call in WRONG.values()]
    with world.dup() as closed:
        send = closed.plan("send", np.zeros(1), dest=1 - world.rank)
    assert error_of(send)[0] == "UsageError"
    world.barrier()
    return texts


def test_wrong_persistent_message_is_refused(two: Ranks) -> None:
    for text, expected in zip(two.run_calls(refused)[0], WRONG, strict=True):
        assert expected in text
