"""Reads schedules of MSCCL: the XML that msccl-tools, SCCL and TACCL write.

Theory of operation
-------------------
An ``<algo>`` has a ``<gpu>`` for each rank, which has threadblocks ``<tb>``. A threadblock sends to one peer and
receives from one peer, on a channel, and runs its steps in order. The k-th message that a rank sends to a peer on a
channel is the k-th one that the peer receives from it there. ``depid`` and ``deps`` name a step of another threadblock
of the rank that must have ended. The types of steps are those of MSCCL's interpreter:

====  =======================================================================
s     send the source
r     receive to the target
rcs   receive to the target, and send it on
rrc   combine the source with what comes, write the target
rrs   combine the source with what comes, send it on, and keep nothing
rrcs  combine the source with what comes, write the target, and send it on
cpy   copy the source to the target
re    combine the target with the source
nop   only wait
====  =======================================================================

Each step becomes one event, or two if it receives and sends. Both forms of the format are read: ``<step s= srcbuf=
srcoff= dstbuf= dstoff=>`` and ``<op step= buf= off=>``.

Reference: Cowan et al., "MSCCLang: Microsoft Collective Communication Language", ASPLOS 2023; the parser of MSCCL's
runtime defines the format. A file may name entities or a document type, with which small files grow without limit in
memory: `defusedxml` refuses both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, ParseError

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from unisono.algorithms.schedules.building import Building, chunks_of, collective_named
from unisono.algorithms.schedules.limited import MOST_CHUNKS, MOST_RANKS, checked
from unisono.algorithms.schedules.moves import Cell, Place, Schedule
from unisono.errors import PlanError, UsageError

_BUFFERS = ("i", "o", "s")
_MOST_CHANNELS = 64
_MOST_THREADBLOCKS = 1024


class _Kind(NamedTuple):
    """What a type of step does: how it receives, whether it sends, and whether it works on one rank."""

    receives: str = ""  # "", "copy" or "combine"
    sends: bool = False
    keeps: bool = True  # whether it writes what it receives
    local: str = ""  # "", "copy" or "combine"


_KINDS = {
    "s": _Kind(sends=True),
    "r": _Kind("copy"),
    "rcs": _Kind("copy", sends=True),
    "rrc": _Kind("combine"),
    "rrs": _Kind("combine", sends=True, keeps=False),
    "rrcs": _Kind("combine", sends=True),
    "cpy": _Kind(local="copy"),
    "re": _Kind(local="combine"),
    "nop": _Kind(),
}


class _Message(NamedTuple):
    """One end of a message: its event and its chunks; on the receiving side also those that are combined with it."""

    event: int
    cells: tuple[Cell, ...]
    own: tuple[Cell, ...] | None = None


def schedule_of(text: bytes) -> Schedule:
    """Return the schedule that an XML file of MSCCL describes.

    Raises:
        UsageError: the text is no such file; the message names the place.
        PlanError: messages have no partner, or differ in length at their ends.
    """
    try:
        root = fromstring(text, forbid_dtd=True)
    except ParseError as error:
        raise UsageError(f"this is no XML: {error}") from None
    except DefusedXmlException:
        raise UsageError("the XML declares a document type or entities, which a schedule does not need") from None
    if root.tag != "algo":
        raise UsageError(f"an XML file of MSCCL begins with <algo>, not <{root.tag}>")
    return _Reader(root).schedule()


class _Reader:
    def __init__(self, algo: Element) -> None:
        self._algo = algo
        self.size = checked(algo.get("ngpus"), "ngpus", 1, MOST_RANKS)
        self._collective = collective_named(algo.get("coll"))
        self._gpus = self._ranks()
        self._chunks_of_buffers = self._chunk_counts()
        self.building = Building()
        self._sent: dict[tuple[int, int, int], list[_Message]] = defaultdict(list)
        self._received: dict[tuple[int, int, int], list[_Message]] = defaultdict(list)
        self._passed = count()

    def schedule(self) -> Schedule:
        """Return the whole schedule."""
        for rank, gpu in enumerate(self._gpus):
            self._read_gpu(rank, gpu)
        self._match()
        chunks = chunks_of(self._collective, self.size, self._chunks_of_buffers)
        in_place = checked(self._algo.get("inplace", "0"), "inplace", 0, 1) == 1
        return self.building.schedule(self._algo.get("name"), self._collective, self.size, chunks, in_place=in_place)

    def _ranks(self) -> list[Element]:
        gpus = {checked(gpu.get("id"), "the id of a gpu", 0, self.size - 1): gpu for gpu in self._algo.iter("gpu")}
        if len(gpus) != self.size or len(list(self._algo.iter("gpu"))) != self.size:
            raise UsageError(f"ngpus is {self.size}, and the file describes the gpus {sorted(gpus)}")
        return [gpus[rank] for rank in range(self.size)]

    def _chunk_counts(self) -> list[dict[str, int]]:
        """Return the number of chunks of each buffer of each rank."""
        return [
            {
                name: checked(gpu.get(f"{name}_chunks", "0"), f"gpu {rank}: {name}_chunks", 0, MOST_CHUNKS)
                for name in _BUFFERS
            }
            for rank, gpu in enumerate(self._gpus)
        ]

    def _read_gpu(self, rank: int, gpu: Element) -> None:
        blocks = {
            checked(tb.get("id"), f"gpu {rank}: the id of a tb", 0, _MOST_THREADBLOCKS): tb for tb in gpu.iter("tb")
        }
        self._check_connections(rank, blocks)
        last_events: dict[tuple[int, int], int] = {}
        waits: list[tuple[int, tuple[int, int], str]] = []
        for block, tb in blocks.items():
            _Threadblock(self, rank, block, tb).read(last_events, waits)
        for event, step, where in waits:
            if step not in last_events:
                raise UsageError(f"{where} waits for step {step[1]} of threadblock {step[0]}, which does not exist")
            self.building.order(last_events[step], event)

    def _check_connections(self, rank: int, blocks: Mapping[int, Element]) -> None:
        """Check that one threadblock alone uses a connection, so that its messages have an order."""
        users: dict[tuple[str, str | None, str | None], int] = {}
        for number, tb in blocks.items():
            for way in ("send", "recv"):
                connection = way, tb.get(way, "-1"), tb.get("chan", "0")
                if connection[1] != "-1" and users.setdefault(connection, number) != number:
                    raise UsageError(
                        f"rank {rank}: the threadblocks {users[connection]} and {number} both have "
                        f"{way}={connection[1]} on channel {connection[2]}"
                    )

    def add_sent(self, way: tuple[int, int, int], message: _Message) -> None:
        """Add the sending end of a message from rank to rank on a channel."""
        self._sent[way].append(message)

    def add_received(self, way: tuple[int, int, int], message: _Message) -> None:
        """Add the receiving end of a message from rank to rank on a channel."""
        self._received[way].append(message)

    def passed(self, length: int) -> tuple[Cell, ...]:
        """Return chunks that hold values which a rank only passes on."""
        return tuple(("t", next(self._passed)) for _ in range(length))

    def cells(self, rank: int, buffer: object, offset: object, length: int, where: str) -> tuple[Cell, ...]:
        """Return chunks of a buffer, which must have them."""
        if buffer not in _BUFFERS:
            raise UsageError(f"{where}: a buffer is one of {', '.join(_BUFFERS)}, not {buffer!r}")
        name = str(buffer)
        total = self._limit(rank, name)
        first = checked(offset, f"{where}: the offset in {name}", 0, MOST_CHUNKS)
        if first + length > total:
            raise UsageError(f"{where}: chunks {first} to {first + length - 1} of {name}, which has {total}")
        return tuple((name, first + at) for at in range(length))

    def _limit(self, rank: int, buffer: str) -> int:
        """Return the number of chunks of a buffer. A file may declare only one of two buffers in the same memory."""
        counts = self._chunks_of_buffers[rank]
        return counts["s"] if buffer == "s" else max(counts["i"], counts["o"])

    def _match(self) -> None:
        """Join both ends of each message."""
        for way in sorted(self._sent.keys() | self._received.keys()):
            sent, received = self._sent[way], self._received[way]
            source, target, channel = way
            name = f"from rank {source} to rank {target} on channel {channel}"
            if len(sent) != len(received):
                raise PlanError(f"{len(sent)} messages are sent {name}, and {len(received)} are received")
            for number, (one, other) in enumerate(zip(sent, received, strict=True)):
                if len(one.cells) != len(other.cells):
                    sender, receiver = (self.building.events[end.event] for end in (one, other))
                    raise PlanError(
                        f"message {number} {name}: {sender} sends {len(one.cells)} chunks, and {receiver} receives "
                        f"{len(other.cells)}"
                    )
                self.building.order(one.event, other.event)
                places = Place(source, one.cells), Place(target, other.cells)
                self.building.move(*places, (one.event, other.event), other.own)


class _Threadblock:
    """A threadblock: its peers, its channel and its steps."""

    def __init__(self, reader: _Reader, rank: int, number: int, element: Element) -> None:
        self._reader, self._rank, self._number, self._element = reader, rank, number, element
        where, most = f"rank {rank}, threadblock {number}", reader.size - 1
        self._send = checked(element.get("send", "-1"), f"{where}: send", -1, most)
        self._receive = checked(element.get("recv", "-1"), f"{where}: recv", -1, most)
        self._channel = checked(element.get("chan", "0"), f"{where}: chan", -1, _MOST_CHANNELS)

    def read(self, last_events: dict[tuple[int, int], int], waits: list[tuple[int, tuple[int, int], str]]) -> None:
        """Add all steps to the reader; note the last event of each step, and the steps that they wait for."""
        previous: list[int] = []
        for number, step in self._steps():
            where = f"rank {self._rank}, threadblock {self._number}, step {number}"
            first = self._reader.building.add_event(where, previous)
            block = checked(step.get("depid", "-1"), f"{where}: depid", -1, _MOST_THREADBLOCKS)
            if block >= 0:
                waits.append((first, (block, checked(step.get("deps"), f"{where}: deps", 0, MOST_CHUNKS)), where))
            last = self._read_step(step, first, where)
            last_events[self._number, number] = last
            previous = [last]

    def _steps(self) -> Iterator[tuple[int, Element]]:
        steps: dict[int, Element] = {}
        for element in self._element:
            name = {"step": "s", "op": "step"}.get(element.tag)
            if name is None:
                raise UsageError(f"rank {self._rank}, threadblock {self._number}: <{element.tag}> is no step")
            steps[checked(element.get(name), "the number of a step", 0, MOST_CHUNKS)] = element
        if len(steps) != len(self._element):
            raise UsageError(f"rank {self._rank}, threadblock {self._number}: two steps have the same number")
        yield from sorted(steps.items())

    def _read_step(self, step: Element, event: int, where: str) -> int:
        """Add the moves of a step, of which `event` is the first event; return its last event."""
        name = step.get("type", "")
        kind = _KINDS.get(name)
        if kind is None:
            raise UsageError(f"{where} has the type {name!r}: MSCCL has {', '.join(_KINDS)}")
        if kind == _KINDS["nop"]:
            return event
        length = checked(step.get("cnt", "1"), f"{where}: cnt", 1, MOST_CHUNKS)
        source, target = (self._cells(step, side, length, where) for side in ("src", "dst"))
        if kind.local:
            places = Place(self._rank, source()), Place(self._rank, target())
            own = target() if kind.local == "combine" else None
            self._reader.building.move(*places, (event, event), own)
        if kind.receives:
            arrived = target() if kind.keeps else self._reader.passed(length)
            own = source() if kind.receives == "combine" else None
            self._reader.add_received(self._way(self._receive, "recv", where), _Message(event, arrived, own))
        if not kind.sends:
            return event
        last = self._reader.building.add_event(where, [event]) if kind.receives else event
        way = self._way(self._send, "send", where)
        self._reader.add_sent(way, _Message(last, arrived if kind.receives else source()))
        return last

    def _way(self, peer: int, name: str, where: str) -> tuple[int, int, int]:
        """Return source, target and channel of a message."""
        if peer < 0 or peer == self._rank:
            raise UsageError(f"{where} needs a peer, and its threadblock has {name}={peer}")
        return (self._rank, peer, self._channel) if name == "send" else (peer, self._rank, self._channel)

    def _cells(self, step: Mapping[str, Any] | Element, side: str, length: int, where: str) -> Any:
        """Return a function that returns the chunks on one side of a step. The short form names one side only."""

        def cells() -> tuple[Cell, ...]:
            buffer, offset = step.get(f"{side}buf", step.get("buf")), step.get(f"{side}off", step.get("off"))
            return self._reader.cells(self._rank, buffer, offset, length, where)

        return cells
