"""Transports over the `local` transport that break one promise of the contract each. The checks must detect them."""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from unisono.errors import AbortedError, UnisonoError
from unisono.testing.transports import local_factory
from unisono.transports.contracts.call import Signature
from unisono.transports.contracts.transport import Traffic
from unisono.transports.message.framed import FramedTransport
from unisono.transports.message.plugin import Bootstrap

kept: list[Any] = []  # leaked objects, which the test frees
released = threading.Event()  # ends the loops of transports that block
ANY_CALL = Signature("anything", "uint8", None, "C", None, None, "direct", 1)


class Double:
    """A transport over `inner` that keeps every promise."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def subgroup(self, ranks: tuple[int, ...], number: int) -> Any:
        return type(self)(self.inner.subgroup(ranks, number))


class Request:
    """A request that is done when a function says so."""

    def __init__(self, done: Callable[[], bool]) -> None:
        self.done = done


class Reorders(Double):
    def arrived(self, peer: int, lane: int) -> Any:
        return list(reversed(self.inner.arrived(peer, lane)))


class Loses(Double):
    sent = 0

    def post_send(self, peer: int, *message: Any) -> Any:
        self.sent += 1
        return Request(lambda: True) if self.sent % 40 == 0 else self.inner.post_send(peer, *message)


class Damages(Double):
    def post_send(self, peer: int, identity: Any, call: Any, pieces: Sequence[memoryview]) -> Any:
        data = bytearray(b"".join(pieces))
        if len(data) > 60_000:
            data[1 << 15] ^= 1
        return self.inner.post_send(peer, identity, call, [memoryview(data)] if data else [])


class MixesSegments(Double):
    def post_send(self, peer: int, identity: Any, *message: Any) -> Any:
        return self.inner.post_send(
            peer, identity._replace(segment=0, sequence=identity.sequence + identity.segment), *message
        )

    def post_recv(self, peer: int, identity: Any, *message: Any) -> Any:
        return self.inner.post_recv(
            peer, identity._replace(segment=0, sequence=identity.sequence + identity.segment), *message
        )


class IsDoneEarly(Double):
    def post_recv(self, *message: Any) -> Any:
        self.inner.post_recv(*message)
        return Request(lambda: True)


class LosesEmptyMessages(Double):
    def post_send(self, peer: int, identity: Any, call: Any, pieces: Any) -> Any:
        return self.inner.post_send(peer, identity, call, pieces) if pieces else Request(lambda: True)


class ReadsLate(Double):
    """A send is done while the transport still reads the sender's memory."""

    def post_send(self, *message: Any) -> Any:
        self.inner.post_send(*message)
        return Request(lambda: True)


class ClaimsToCopy(Double):
    capabilities = replace(
        local_factory(0)(Bootstrap(0, 1, (0,), lambda data: [data], 0)).capabilities, zero_copy=False
    )


class SendsToFourPeersOnly(Double):
    def post_send(self, peer: int, *message: Any) -> Any:
        return self.inner.post_send(peer, *message) if peer < 4 else Request(lambda: True)


class CountsTwice(Double):
    def traffic(self) -> Any:
        return {peer: of_peer + of_peer for peer, of_peer in self.inner.traffic().items()}


class CountsNothingReceived(Double):
    def traffic(self) -> Any:
        counted = self.inner.traffic().items()
        return {
            peer: Traffic(of_peer.transport, of_peer.sent_messages, of_peer.sent_nbytes) for peer, of_peer in counted
        }


class SendBlocks(Double):
    def post_send(self, *message: Any) -> Any:
        request = self.inner.post_send(*message)
        while not request.done() and not released.wait(0.001):
            pass
        return request


class EqualSubgroupsShareMessages(Double):
    def subgroup(self, ranks: tuple[int, ...], number: int) -> Any:
        return EqualSubgroupsShareMessages(self.inner.subgroup(ranks, 0))


class IgnoresTheCall(Double):
    def post_send(self, peer: int, identity: Any, call: Any, pieces: Any) -> Any:
        return self.inner.post_send(peer, identity, ANY_CALL, pieces)

    def post_recv(self, peer: int, identity: Any, call: Any, pieces: Any) -> Any:
        return self.inner.post_recv(peer, identity, ANY_CALL, pieces)


class IgnoresTheLength(Double):
    def post_send(self, peer: int, identity: Any, call: Any, pieces: Sequence[memoryview]) -> Any:
        return self.inner.post_send(peer, identity, call, [memoryview(b"".join(pieces).ljust(64, b"\0"))])

    def post_recv(self, peer: int, identity: Any, call: Any, pieces: Any) -> Any:
        return self.inner.post_recv(peer, identity, call, [memoryview(bytearray(64))])


class AbortBlocks(Double):
    def abort(self, error: Exception) -> None:
        released.wait()
        self.inner.abort(error)


class AbortWaitsForRoom(Double):
    """`abort` waits until the last message has been received."""

    pending: Any = None

    def post_send(self, *message: Any) -> Any:
        self.pending = self.inner.post_send(*message)
        return self.pending

    def abort(self, error: Exception) -> None:
        while self.pending is not None and not self.pending.done() and not released.wait(0.001):
            pass
        self.inner.abort(error)


class AbortsAlone(Double):
    """`abort` ends the calls of this rank alone."""

    error: UnisonoError | None = None

    def abort(self, error: UnisonoError) -> None:
        self.error = self.error or error

    def progress(self) -> None:
        if self.error is not None:
            raise self.error
        self.inner.progress()

    def post_recv(self, *message: Any) -> Any:
        request = self.inner.post_recv(*message)

        def done() -> bool:
            if self.error is not None:
                raise self.error
            return bool(request.done())

        return Request(done)

    post_send = post_recv


class AbortChangesTheError(Double):
    def abort(self, error: Exception) -> None:
        self.inner.abort(AbortedError("something went wrong"))


class PendingHangs(Double):
    """An error does not end the requests that are pending."""

    def post_recv(self, *message: Any) -> Any:
        request = self.inner.post_recv(*message)

        def done() -> bool:
            try:
                return bool(request.done())
            except UnisonoError:
                return False

        return Request(done)


class WritesAfterAbort(Double):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.memories: list[memoryview] = []

    def post_recv(self, peer: int, identity: Any, call: Any, pieces: Sequence[memoryview]) -> Any:
        self.memories += pieces
        return self.inner.post_recv(peer, identity, call, pieces)

    def abort(self, error: Exception) -> None:
        self.inner.abort(error)
        for memory in self.memories:
            memory[:] = b"\xff" * memory.nbytes


class MissesDepartures(PendingHangs):
    def departed(self, peer: int) -> bool:
        return False


class CloseWaits(Double):
    pending: Any = None

    def post_send(self, *message: Any) -> Any:
        self.pending = self.inner.post_send(*message)
        return self.pending

    def close(self) -> None:
        while self.pending is not None and not self.pending.done() and not released.wait(0.001):
            pass
        self.inner.close()


class LeaksDescriptors(Double):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        kept.append(os.memfd_create("leak"))


class LeaksThreads(Double):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        threading.Thread(target=released.wait, daemon=True).start()


class LeaksMemory(Double):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        # New pages, because memory from Python's allocator may have been freed before. The number is larger than the
        # memory of earlier tests that the process may free meanwhile.
        pages = mmap.mmap(-1, 1 << 20)
        pages.write(b"x" * (1 << 20))
        kept.append(pages)


class QueueLinks:
    """Frame links over queues between the ranks of one process. They keep every promise."""

    name = "queues"

    def __init__(self, rank: int, boxes: list[queue.SimpleQueue[Any]]) -> None:
        self.rank, self.boxes, self.gone = rank, boxes, set[int]()

    def send(self, peer: int, parts: Sequence[memoryview]) -> Any:
        self.boxes[peer].put((self.rank, b"".join(parts)))
        return Request(lambda: True)

    def receive(self) -> Any:
        while not self.boxes[self.rank].empty():
            sender, frame = self.boxes[self.rank].get()
            if frame is None:
                self.gone.add(sender)
            else:
                yield sender, memoryview(frame)

    def ended(self, peer: int) -> bool:
        return peer in self.gone

    def close(self) -> None:
        for box in self.boxes:
            box.put((self.rank, None))


class NeverEnds(QueueLinks):
    def ended(self, peer: int) -> bool:
        return False


class StaysOpen(QueueLinks):
    def close(self) -> None:
        pass


class EndsWithAnyRank(QueueLinks):
    def ended(self, peer: int) -> bool:
        return bool(self.gone)


class CloseDropsFrames(QueueLinks):
    """`close` drops all frames that have been sent and not yet received."""

    def close(self) -> None:
        for box in self.boxes:
            while not box.empty():
                box.get()
        super().close()


class SendsWithoutRequest(QueueLinks):
    def send(self, peer: int, parts: Sequence[memoryview]) -> Any:
        super().send(peer, parts)


class ReceivesBytes(QueueLinks):
    def receive(self) -> Any:
        return [(sender, bytes(frame)) for sender, frame in super().receive()]


class ReceivesNothing(QueueLinks):
    def receive(self) -> Any:
        return None


# The check that must detect each bug of links, and the text of its report.
BUGS_OF_LINKS: dict[type[QueueLinks], tuple[str, str]] = {
    NeverEnds: ("end of links", "as ended() must report: not within"),
    StaysOpen: ("end of links", "as ended() must report: not within"),
    EndsWithAnyRank: ("end of links", "ended() reports a rank that is there"),
    CloseDropsFrames: ("end of links", "a message sent before its rank's links ended"),
    SendsWithoutRequest: ("messages", "queues: send() returned None: it must return an object whose done() says"),
    ReceivesBytes: ("messages", "queues: receive() yielded ['int', 'bytes']: it must yield pairs"),
    ReceivesNothing: ("messages", "queues: receive() returned None: it must yield pairs"),
}


def framed_factory_of(links: type[QueueLinks]) -> Callable[[Bootstrap], FramedTransport]:
    """Return a factory of framed transports over links of the class `links`."""
    boxes: dict[bytes, list[queue.SimpleQueue[Any]]] = {}

    def opened(bootstrap: Bootstrap) -> FramedTransport:
        token = os.urandom(16)
        if bootstrap.rank == 0:
            boxes[token] = [queue.SimpleQueue() for _ in range(bootstrap.size)]
        of_job = boxes[bootstrap.exchange(token)[0]]
        return FramedTransport(links(bootstrap.rank, of_job), bootstrap)

    return opened


# The check that must detect each bug.
BUGS: dict[type[Double], str] = {
    Reorders: "unexpected messages",
    Loses: "unexpected messages",
    Damages: "messages",
    MixesSegments: "identities",
    IsDoneEarly: "early receives",
    LosesEmptyMessages: "zero bytes",
    ReadsLate: "memory of the sender",
    ClaimsToCopy: "memory of the sender",
    SendsToFourPeersOnly: "many peers",
    CountsTwice: "traffic",
    CountsNothingReceived: "traffic",
    SendBlocks: "nonblocking",
    EqualSubgroupsShareMessages: "subgroups",
    IgnoresTheCall: "another call",
    IgnoresTheLength: "another length",
    AbortBlocks: "abort",
    AbortsAlone: "abort",
    AbortChangesTheError: "abort",
    PendingHangs: "abort",
    WritesAfterAbort: "abort",
    AbortWaitsForRoom: "abort of a full link",
    MissesDepartures: "departure",
    CloseWaits: "close with pending",
    LeaksDescriptors: "open and close",
    LeaksThreads: "open and close",
    LeaksMemory: "open and close",
}


def factory_of(bug: type[Double], capacity: int = 0) -> Callable[[Bootstrap], Any]:
    """Return a factory of transports with the bug `bug`."""
    inner = local_factory(capacity)
    return lambda bootstrap: bug(inner(bootstrap))
