"""Checks of the promises of `contracts.transport.MessageTransport`. Each tries one promise on ranks of this process."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import NamedTuple

import numpy as np

from unisono.collectives.calls.planning import HostLayout
from unisono.collectives.communicator import Communicator
from unisono.errors import AbortedError, MismatchError, PeerLostError
from unisono.options import Options
from unisono.testing.check import check_collectives
from unisono.testing.differences import CheckError
from unisono.testing.transport_ranks import (
    CALL,
    MESSAGES_LANE,
    Ranks,
    at,
    error_of,
    expect,
    message,
    receive,
    send,
)
from unisono.transports.contracts.call import Signature
from unisono.transports.contracts.transport import MessageTransport, Traffic
from unisono.transports.executors.generic import GenericExecutor

CYCLES = 1000
# The bytes that a thousand transports may leave behind, in caches and allocators.
LEAK_NBYTES = 8 << 20
LARGE_NBYTES = (1 << 31) + 4099
_LARGE_LIMIT_S = 240.0
_CALL_LIMIT_S = 20.0
_GRACE_S = 1.0
_PAUSE_S = 0.001


# --- messages ------------------------------------------------------------------------------------------------------


def _messages_arrive(ranks: Ranks) -> None:
    """Messages of every pair arrive, whichever side posts first, in any pieces, and write nothing else."""
    for source, dest in permutations(range(len(ranks.transports)), 2):
        for group, nbytes in enumerate((1, 4, 1000, 70_000)):
            data = bytes((source + 3 * dest + k) % 251 for k in range(nbytes))
            memory = bytearray(b"\xaa" * (nbytes + 2))
            halves = [memoryview(memory)[1 : 1 + nbytes // 2], memoryview(memory)[1 + nbytes // 2 : 1 + nbytes]]
            pieces = [half for half in halves if half.nbytes]
            signature = message(nbytes)
            receiving = partial(ranks[dest].post_recv, source, at(group), signature, pieces)
            early = receiving() if group % 2 else None
            thirds = [memoryview(data)[: nbytes // 3], memoryview(data)[nbytes // 3 :]]
            sent = ranks[source].post_send(dest, at(group), signature, [each for each in thirds if each.nbytes])
            name = f"a message of {nbytes} B from rank {source} to rank {dest}"
            ranks.complete([sent, early or receiving()], name)
            expect(memory[1:-1] == data, f"{name} arrived with other bytes")
            expect(memory[0] == memory[-1] == 0xAA, f"{name} wrote outside its memory")


def _identities(ranks: Ranks) -> None:
    """A receive gets only the message with its identity and source."""
    identities = [at(0), at(1), at(1 << 31), at(0, lane=1), at(0, sequence=1), at(0, segment=1)]
    sent = [send(ranks[0], 1, each, bytes([number] * 4)) for number, each in enumerate(identities)]
    sent.append(send(ranks[2], 1, at(0), b"two!"))
    from_two, of_two = receive(ranks[1], 2, at(0))
    receives = [receive(ranks[1], 0, each) for each in reversed(identities)]
    ranks.complete([*sent, from_two, *(request for request, _ in receives)], "messages of several identities")
    expect(of_two == b"two!", "a receive got a message of another rank")
    for number, (_, memory) in zip(reversed(range(len(identities))), receives, strict=True):
        expect(memory == bytes([number] * 4), f"a receive of {identities[number]} got a message of another identity")


def _nothing_comes_early(ranks: Ranks) -> None:
    """A receive is not done before its message has arrived."""
    early, memory = receive(ranks[1], 0, at(0))
    send(ranks[0], 1, at(1), b"next")
    ranks.idle()
    expect(not early.done(), "a receive was done before its message was sent")
    expect(memory == bytes(4), "a receive was written to before its message was sent")
    ranks.complete([send(ranks[0], 1, at(0), b"four"), early], "a receive that was posted early")
    expect(memory == b"four", "a receive that was posted early got other bytes")


def _unexpected(ranks: Ranks) -> None:
    """Messages without a receive wait in order, appear in `arrived`, and do not block other messages."""
    many = 300
    signatures = [message(4) for _ in range(many)]
    for number in range(many):
        send(ranks[0], 1, at(5, MESSAGES_LANE, number), number.to_bytes(4, "big"), signatures[number])
    seen: list[int] = []

    def some_there() -> bool:
        arrived = list(ranks[1].arrived(0, MESSAGES_LANE))
        seen[:] = [identity.sequence for identity, _ in arrived]
        in_order = seen == list(range(len(seen)))
        expect(in_order or not ranks[1].capabilities.ordered, f"messages arrived in another order: {seen[:8]}, …")
        is_equal = all(signature == message(4) for _, signature in arrived)
        expect(is_equal, "arrived() returned another signature than was sent")
        return len(seen) > 0

    ranks.until(some_there, "arrived() returned messages without a receive")
    other, memory = receive(ranks[1], 2, at(0))
    ranks.complete([send(ranks[2], 1, at(0), b"pass"), other], "a message next to many unexpected ones")
    expect(memory == b"pass", "a message next to many unexpected ones arrived with other bytes")
    receives = [receive(ranks[1], 0, at(5, MESSAGES_LANE, number), 4, message(4)) for number in range(many)]
    ranks.complete([request for request, _ in receives], "unexpected messages")
    numbers = [int.from_bytes(memory, "big") for _, memory in receives]
    expect(numbers == list(range(many)), "unexpected messages were mixed up")
    expect(not ranks[1].arrived(0, MESSAGES_LANE), "arrived() returned messages that were received")


def _nothing_at_all(ranks: Ranks) -> None:
    """Messages of zero bytes arrive in order, and are counted."""
    for number in range(3):
        ranks[0].post_send(1, at(0, MESSAGES_LANE, number), message(0), [])
    receives = [receive(ranks[1], 0, at(0, MESSAGES_LANE, number), 0, message(0))[0] for number in range(3)]
    ranks.complete(receives, "messages of zero bytes")
    traffic = ranks[1].traffic()[0]
    expect((traffic.received_messages, traffic.received_nbytes) == (3, 0), f"messages of zero bytes count as {traffic}")


def _memory_of_the_sender(ranks: Ranks) -> None:
    """Changes of the sender's memory after a send is done, or at once if the transport copies, change no message."""
    data = bytearray(b"x" * 300_000)
    sent = ranks[0].post_send(1, at(0), message(len(data)), [memoryview(data)])
    ranks.idle()
    if sent.done() or not ranks[0].capabilities.zero_copy:
        data[:] = b"y" * len(data)
    received, memory = receive(ranks[1], 0, at(0), len(data), message(len(data)))
    ranks.until(sent.done, "a large message")
    data[:] = b"y" * len(data)
    ranks.complete([received], "a large message")
    expect(memory == b"x" * len(data), "a message changed with the memory of its sender, after its send was done")


def _many_peers(ranks: Ranks) -> None:
    """Every rank exchanges messages with every other one at once."""
    pairs = list(permutations(range(len(ranks.transports)), 2))
    data = {pair: bytes(f"{pair}".encode() * 500) for pair in pairs}
    receives = {(a, b): receive(ranks[b], a, at(0), len(data[a, b]), message(len(data[a, b]))) for a, b in pairs[::2]}
    sent = [send(ranks[a], b, at(0), data[a, b], message(len(data[a, b]))) for a, b in pairs]
    receives |= {(a, b): receive(ranks[b], a, at(0), len(data[a, b]), message(len(data[a, b]))) for a, b in pairs[1::2]}
    ranks.complete([*sent, *(request for request, _ in receives.values())], f"messages of {len(pairs)} pairs")
    wrong = [pair for pair, (_, memory) in receives.items() if memory != data[pair]]
    expect(not wrong, f"messages of the pairs {wrong} arrived with other bytes")


def _traffic(ranks: Ranks) -> None:
    """Counters show the messages and bytes of each peer on both sides, and nothing else."""
    posted = [send(ranks[0], 1, at(group), bytes(nbytes), message(nbytes)) for group, nbytes in enumerate((3, 5000))]
    posted += [receive(ranks[1], 0, at(group), nbytes, message(nbytes))[0] for group, nbytes in enumerate((3, 5000))]
    ranks.complete(posted, "two messages")
    name = ranks[0].name
    expected: tuple[dict[int, Traffic], ...] = (
        {1: Traffic(name, sent_messages=2, sent_nbytes=5003)},
        {0: Traffic(name, received_messages=2, received_nbytes=5003)},
        {},
    )
    for rank, of_rank in enumerate(expected):
        counted = {peer: traffic for peer, traffic in ranks[rank].traffic().items() if traffic != Traffic(name)}
        expect(counted == of_rank, f"the counters of rank {rank} are {counted} instead of {of_rank}")


def _posting_never_blocks(ranks: Ranks) -> None:
    """Posting a large message returns at once, even if its receiver does nothing."""
    data = bytes(range(256)) * (1 << 16)
    request = ranks[0].post_send(1, at(0), message(len(data)), [memoryview(data)])
    request.done()
    received, memory = receive(ranks[1], 0, at(0), len(data), message(len(data)))
    received.done()
    ranks.complete([request, received], "a large message")
    expect(memory == data, "a large message arrived with other bytes")


def _subgroups(ranks: Ranks) -> None:
    """Subgroups know their members, and their messages stay separate."""
    groups = [ranks[rank].subgroup((2, 0), 0) for rank in (2, 0)]
    twins = [ranks[rank].subgroup((2, 0), 1) for rank in (2, 0)]
    expect([each.rank for each in groups] == [0, 1], "the ranks of a subgroup are not in the requested order")
    expect(all(tuple(each.members) == (2, 0) for each in groups), "a subgroup has other members")
    sent = [send(ends[1], 0, at(0), data) for ends, data in zip((groups, twins), (b"one ", b"two "), strict=True)]
    sent.append(send(ranks[0], 2, at(0), b"all "))
    receives = [receive(twins[0], 1, at(0)), receive(groups[0], 1, at(0)), receive(ranks[2], 0, at(0))]
    ranks.complete([*sent, *(request for request, _ in receives)], "messages of three communicators")
    for (_, memory), expected in zip(receives, (b"two ", b"one ", b"all "), strict=True):
        expect(memory == expected, "a message of one communicator went to another")
    counted = groups[0].traffic()[1].received_messages, ranks[2].traffic()[0].received_messages
    expect(counted == (1, 1), "the counters of communicators are not separate")
    for transport in (*groups, *twins):
        transport.close()
    received, _ = receive(ranks[2], 0, at(1))
    ranks.complete([send(ranks[0], 2, at(1), b"more"), received], "a message after subgroups were closed")


# --- errors --------------------------------------------------------------------------------------------------------


def _mismatch(ranks: Ranks, call: Signature, nbytes: int, problem: str) -> None:
    received, memory = receive(ranks[1], 0, at(0), nbytes, call)
    send(ranks[0], 1, at(0), b"four")
    attempts = (received.done, ranks[0].progress, ranks[2].progress)
    for rank, attempt in zip((1, 0, 2), attempts, strict=True):
        error = error_of(ranks, attempt, f"rank {rank} raised that {problem}")
        expect(
            isinstance(error, MismatchError), f"rank {rank} raised {type(error).__name__}, though {problem}: {error}"
        )
    expect(memory == bytes(nbytes), f"memory was written, though {problem}")


def _other_call(ranks: Ranks) -> None:
    """A message of another call fails on every rank, and is not received."""
    _mismatch(ranks, replace(CALL, op="max"), 4, "two ranks made different calls")


def _other_length(ranks: Ranks) -> None:
    """A message of another length fails on every rank, and is not received."""
    _mismatch(ranks, CALL, 5, "a message has another length")


def _abort(ranks: Ranks) -> None:
    """An abort fails every pending and later request of every rank with the same error; the first abort counts."""
    pending = {rank: receive(ranks[rank], (rank + 1) % 3, at(0)) for rank in range(3)}
    ranks.idle()
    ranks[0].abort(AbortedError("enough is enough"))
    ranks[0].abort(AbortedError("more than enough"))
    later = {rank: receive(ranks[rank], (rank + 1) % 3, at(7)) for rank in range(3)}
    for rank in range(3):
        for name, (request, _) in (("pending", pending[rank]), ("later", later[rank])):
            error = error_of(ranks, request.done, f"a {name} receive of rank {rank} failed after an abort by rank 0")
            is_first = type(error) is AbortedError and error.message == "enough is enough"
            expect(is_first, f"a {name} receive of rank {rank} got another error than the first abort's: {error!r}")
        error_of(ranks, ranks[rank].progress, f"progress of rank {rank} failed after an abort")
        error_of(ranks, send(ranks[rank], (rank + 1) % 3, at(8), b"late").done, "a send failed after an abort")
    ranks.idle()
    untouched = all(memory == bytes(4) for _, memory in (*pending.values(), *later.values()))
    expect(untouched, "memory was written after an abort")


def _abort_of_a_full_link(ranks: Ranks) -> None:
    """An abort does not wait for a peer that receives nothing."""
    data = bytes(4 << 20)
    for group in range(8):
        ranks[0].post_send(1, at(group), message(len(data)), [memoryview(data)])
    pending, _ = receive(ranks[0], 1, at(99))
    ranks[0].abort(AbortedError("enough"))
    try:
        pending.done()
    except AbortedError:
        return
    raise CheckError("a request of the rank that aborted did not fail at once")


def _departure(ranks: Ranks) -> None:
    """A rank that leaves is lost only to ranks that need it, and messages that it sent before still arrive."""
    sent = send(ranks[1], 0, at(0), b"last")
    ranks.idle()
    was_taken = sent.done()  # some transports complete a send before there is a receive
    needs, _ = receive(ranks[0], 1, at(1))
    other, memory = receive(ranks[0], 2, at(0))
    ranks.close(1)
    for group in range(3):  # sends to a closed rank, which must not keep arrived messages from being received
        send(ranks[0], 1, at(group), bytes(300_000), message(300_000))
    error = error_of(ranks, needs.done, "a receive from a rank that had left failed")
    expect(isinstance(error, PeerLostError), f"a rank that left was reported as {type(error).__name__}: {error}")
    expect("rank 1" in str(error), f"the rank that left is not named: {error}")
    expect(ranks[0].departed(1), "departed() is False for a rank that left")
    expect(not ranks[0].departed(2), "departed() is True for a rank that is there")
    ranks.complete([send(ranks[2], 0, at(0), b"more"), other], "a message of a rank that is there")
    expect(memory == b"more", "a message of a rank that is there arrived with other bytes")
    if was_taken:
        last, memory = receive(ranks[0], 1, at(0))
        ranks.complete([last], "a message sent before its rank left")
        expect(memory == b"last", "a message sent before its rank left arrived with other bytes")


def _end_of_links(ranks: Ranks) -> None:
    """A rank whose links end without a farewell, as if killed, is lost only to ranks that need it.

    Only a `FramedTransport` has links that a check can end.
    """
    links = getattr(ranks[1], "links", None)
    if links is None:
        return
    sent = send(ranks[1], 0, at(0), b"last")
    ranks.until(sent.done, "a message")
    needs, _ = receive(ranks[0], 1, at(1))
    other, memory = receive(ranks[0], 2, at(0))
    links.close()
    ranks.closed.add(1)
    lost = "a receive from a rank that had closed its links failed, as ended() must report"
    error = error_of(ranks, needs.done, lost)
    name = type(error).__name__
    expect(isinstance(error, PeerLostError), f"a rank whose links had ended was reported as {name}: {error}")
    expect(not ranks[0].departed(2), "ended() reports a rank that is there")
    ranks.complete([send(ranks[2], 0, at(0), b"more"), other], "a message of a rank that is there")
    expect(memory == b"more", "a message of a rank that is there arrived with other bytes")
    last, memory = receive(ranks[0], 1, at(0))
    before = "a message sent before its rank's links ended"
    try:
        ranks.complete([last], before)
    except PeerLostError:
        raise CheckError(f"{before} was lost, although its send was done") from None
    expect(memory == b"last", f"{before} arrived with other bytes")


def _close_with_pending(ranks: Ranks) -> None:
    """Closing does not wait for pending requests."""
    send(ranks[0], 1, at(0), bytes(8 << 20), message(8 << 20))
    receive(ranks[0], 1, at(1))
    for rank in range(len(ranks.transports)):
        ranks.close(rank)


# --- more than messages --------------------------------------------------------------------------------------------


def _collectives(ranks: Ranks) -> None:
    """Random calls of all collectives give the right results on it."""
    size = len(ranks.transports)
    host_layout = HostLayout((tuple(range(size)),), "tcp")
    failures: list[Exception] = []

    def run(transport: MessageTransport) -> None:
        try:
            with Communicator(GenericExecutor(transport), host_layout, Options(timeout_s=_CALL_LIMIT_S)) as comm:
                check_collectives(comm, cases=30, seed=7)
                comm.barrier()
        except Exception as error:  # noqa: BLE001  (it is raised again below)
            failures.append(error)

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in ranks.transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ranks.closed |= set(range(size))
    if failures:
        raise failures[0]


def _large(ranks: Ranks) -> None:
    """A message of more than 2 GiB arrives complete."""
    with mmap.mmap(-1, LARGE_NBYTES) as source, mmap.mmap(-1, LARGE_NBYTES) as target:
        ends = (slice(0, 8), slice((1 << 31) - 4, (1 << 31) + 4), slice(LARGE_NBYTES - 8, LARGE_NBYTES))
        for number, end in enumerate(ends):
            source[end] = bytes([number + 1] * 8)
        signature = message(LARGE_NBYTES)
        with memoryview(source) as data, memoryview(target) as memory:
            received = ranks[1].post_recv(0, at(0), signature, [memory])
            sent = ranks[0].post_send(1, at(0), signature, [data])
            deadline = time.monotonic() + _LARGE_LIMIT_S
            while not (sent.done() and received.done()):
                expect(time.monotonic() < deadline, "a message of more than 2 GiB does not arrive")
                ranks.progress()
            ranks.close_all()
            right = all(bytes(memory[each]) == bytes(data[each]) for each in ends)
            nothing = not np.frombuffer(memory, np.uint8)[8 : (1 << 31) - 4 : 4093].any()
            expect(right and nothing, "a message of more than 2 GiB arrived with other bytes")
            del received, sent


def _open_and_close(ranks: Ranks) -> None:
    """A thousand transports that are opened, used and closed leave no file descriptor, thread or memory behind."""

    def cycle() -> None:
        pair = Ranks(ranks.factory, 2)
        received, _ = receive(pair[1], 0, at(0))
        pair.complete([send(pair[0], 1, at(0), b"four"), received], "a message")
        pair.close_all()

    for _ in range(CYCLES // 10):
        cycle()
    before = _held()
    for _ in range(CYCLES):
        cycle()
    deadline = time.monotonic() + _GRACE_S
    while (after := _held())[:2] > before[:2] and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    for kind, then, now in zip(("descriptors", "threads"), before, after, strict=False):
        expect(now <= then, f"{CYCLES} transports that were opened and closed left {now - then} {kind} behind")
    kept = after[2] - before[2]
    expect(kept < LEAK_NBYTES, f"{CYCLES} transports that were opened and closed left {kept >> 10} KiB behind")


def _held() -> tuple[int, int, int]:
    """Return the numbers of file descriptors and threads, and the bytes of memory, of this process."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return len(os.listdir("/proc/self/fd")), threading.active_count(), pages * os.sysconf("SC_PAGE_SIZE")


class TransportCheck(NamedTuple):
    """A check: its function, the number of ranks, and its time limit."""

    run: Callable[[Ranks], None]
    size: int = 3
    limit_s: float = 60.0


CHECKS: dict[str, TransportCheck] = {
    "messages": TransportCheck(_messages_arrive),
    "identities": TransportCheck(_identities),
    "early receives": TransportCheck(_nothing_comes_early),
    "unexpected messages": TransportCheck(_unexpected),
    "zero bytes": TransportCheck(_nothing_at_all),
    "memory of the sender": TransportCheck(_memory_of_the_sender),
    "many peers": TransportCheck(_many_peers, size=8),
    "traffic": TransportCheck(_traffic),
    "nonblocking": TransportCheck(_posting_never_blocks),
    "subgroups": TransportCheck(_subgroups),
    "another call": TransportCheck(_other_call),
    "another length": TransportCheck(_other_length),
    "abort": TransportCheck(_abort),
    "abort of a full link": TransportCheck(_abort_of_a_full_link),
    "departure": TransportCheck(_departure),
    "end of links": TransportCheck(_end_of_links),
    "close with pending": TransportCheck(_close_with_pending),
    "collectives": TransportCheck(_collectives),
    "open and close": TransportCheck(_open_and_close, limit_s=300.0),
}
# This check needs gigabytes, so it runs only on request.
LARGE = {"large": TransportCheck(_large, size=2, limit_s=300.0)}
