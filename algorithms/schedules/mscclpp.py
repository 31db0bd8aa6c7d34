"""Reads execution plans of MSCCL++: the JSON that its language writes (DSL version 2).

Theory of operation
-------------------
A rank runs threadblocks, which run their operations in order. An operation moves chunks to or from the memory of a
peer, or combines chunks. Four things order the operations of different threadblocks:

- *Channels.* The k-th ``signal`` on a channel precedes the k-th ``wait`` at its other end. The n-th channel of rank a
  to rank b leads to the n-th channel of the same type of b to a.
- *Semaphores* between the threadblocks of a rank: the k-th release precedes acquisition k + the initial value.
- *Barriers* of the threadblocks of a rank.
- *Packets*, which carry a flag with their data: who reads one waits until it has come.

A threadblock names a channel, or the buffer of a peer, by its place in a list of its own. A group of threadblocks that
share an operation (``tbg_info``) cuts its chunks into parts, so all chunks of the schedule are cut into as many. The
operations of a ``pipeline`` run once, because a plan runs over segments by itself.

Operations on a switch (``gstore``, ``glre``, ``glres``) are refused: NVLink SHARP adds values in the network, which no
transport of Unisono can do.

Reference: the language and the executor of MSCCL++ define the format; Shah et al., "MSCCL++: Rethinking GPU
Communication Abstractions for Cutting-edge AI Applications", arXiv:2504.09014.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import lcm
from typing import Any, NamedTuple

from unisono.algorithms.schedules.building import Building, chunks_of, collective_named
from unisono.algorithms.schedules.limited import MOST_CHUNKS, MOST_RANKS, checked
from unisono.algorithms.schedules.moves import Cell, Place, Schedule
from unisono.errors import PlanError, UsageError

_BUFFERS = {"i": "input", "o": "output", "s": "scratch"}
_MOST_PARTS = 64
_MOST_THREADBLOCKS = 1024
_MOST_CHANNELS = 1 << 12
_MOST_VALUE = 1 << 16
_MOST_DEPTH = 8  # of pipelines in pipelines

_SWITCH = ("gstore", "glre", "glres")
# Operations that copy the n-th source to the n-th target.
_COPYING = ("copy", "put", "get", "pws", "pwsf", "cpkt", "tpkt", "upkt", "ppkt", "rppkt")
# Operations that combine all sources, and write the result to all targets.
_COMBINING = ("re", "res", "rre", "rres", "repkt", "respkt", "recpkt", "recspkt")
# Those of them that write packets to all targets but the first.
_PACKETS_SENT = ("respkt", "recpkt", "recspkt")
# Operations that only make memory consistent. The order of a threadblock's operations says it already.
_EMPTY = ("nop", "flush")
_SIGNALS, _WAITS = ("signal", "rlxsignal", "pws", "pwsf"), ("wait", "rlxwait")


class _Channel(NamedTuple):
    """One end of a channel: its rank, the peer, the type, and its number among those of this type to this peer."""

    rank: int
    peer: int
    type: str
    number: int

    def other_end(self) -> _Channel:
        return _Channel(self.peer, self.rank, self.type, self.number)


def schedule_of(text: bytes) -> Schedule:
    """Return the schedule that an execution plan of MSCCL++ describes.

    Raises:
        UsageError: the text is no such plan; the message names the place.
        PlanError: signals and waits do not match.
    """
    try:
        plan = _object(json.loads(text), "the plan")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"this is no JSON: {error}") from None
    if "gpus" not in plan:
        raise UsageError("this JSON is no plan of MSCCL++: it has no list of gpus")
    gpus = _list(plan, "gpus", "the plan")
    if "colletive" in plan or any("inputChunks" in _object(gpu, "a gpu") for gpu in gpus):
        raise UsageError("this is a plan of the first version of MSCCL++'s language; write it again with version 2")
    return _Reader(plan, gpus).schedule()


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be an object, not {value!r:.40}")
    return value


def _list(values: object, name: str, where: str) -> list[Any]:
    items = _object(values, where).get(name, [])
    if not isinstance(items, list):
        raise UsageError(f"{where}: {name} must be a list, not {items!r:.40}")
    return items


def _item(items: Sequence[Any], number: object, where: str) -> Any:
    """Return an item of a list by its number."""
    return items[checked(number, where, 0, len(items) - 1)]


def _parts(gpus: object) -> int:
    """Return into how many parts groups of threadblocks cut chunks: a multiple of all their sizes."""
    parts, pending = 1, [gpus]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if isinstance(value.get("tbg_info"), dict):
                parts = lcm(parts, checked(value["tbg_info"].get("tbg_size"), "tbg_size", 1, _MOST_PARTS))
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return checked(parts, "the least multiple of all tbg_size", 1, _MOST_PARTS)


class _Reader:
    """The whole plan. Its ranks add their events and moves to `building`."""

    def __init__(self, plan: Mapping[str, Any], gpus: Sequence[Any]) -> None:
        self._plan = plan
        self.size = checked(len(gpus), "the number of gpus", 1, MOST_RANKS)
        self.collective = collective_named(plan.get("collective"))
        by_id = {checked(_object(gpu, "a gpu").get("id"), "the id of a gpu", 0, self.size - 1): gpu for gpu in gpus}
        self.gpus = {rank: by_id[rank] for rank in sorted(by_id)}
        if len(self.gpus) != self.size:
            raise UsageError("two gpus have the same id")
        self.parts = _parts(gpus)
        self.building = Building()
        self.counts = [
            {
                letter: self.parts * checked(gpu.get(f"{name}_chunks", 0), f"gpu {rank}: {name}_chunks", 0, MOST_CHUNKS)
                for letter, name in _BUFFERS.items()
            }
            for rank, gpu in self.gpus.items()
        ]
        self.signals: dict[_Channel, list[int]] = defaultdict(list)
        self.waits: dict[_Channel, list[int]] = defaultdict(list)
        # Cell of a rank → the events that write a packet there; and the cells that operations on packets read.
        self.packets: dict[tuple[int, Cell], list[int]] = defaultdict(list)
        self.packet_reads: list[tuple[int, Cell, int]] = []

    def schedule(self) -> Schedule:
        """Return the whole schedule."""
        for rank, gpu in self.gpus.items():
            _Rank(self, rank, gpu).read()
        self._match_signals()
        self._match_packets()
        chunks = chunks_of(self.collective, self.size, self.counts)
        in_place = self._plan.get("inplace", False) is True
        return self.building.schedule(self._plan.get("name", ""), self.collective, self.size, chunks, in_place=in_place)

    def _match_signals(self) -> None:
        for channel, waits in self.waits.items():
            signals = self.signals.get(channel.other_end(), [])
            if len(signals) < len(waits):
                waiting = self.building.events[waits[len(signals)]]
                raise PlanError(
                    f"{waiting} waits for a signal of rank {channel.peer}, which signals only {len(signals)} times on "
                    "this channel"
                )
            for signal, wait in zip(signals, waits, strict=False):
                self.building.order(signal, wait)

    def _match_packets(self) -> None:
        for rank, cell, event in self.packet_reads:
            writes = self.packets.get((rank, cell), [])
            if len(writes) > 1:
                raise UsageError(
                    f"{self.building.events[event]}: several steps write a packet to chunk {cell[1]} of the scratch, "
                    "so this one does not say for which it waits"
                )
            for write in writes:
                if write != event:
                    self.building.order(write, event)


class _Rank:
    """One rank of the plan."""

    def __init__(self, reader: _Reader, rank: int, gpu: Mapping[str, Any]) -> None:
        self.reader, self.rank, self.gpu, self.building = reader, rank, gpu, reader.building
        self._where = f"rank {rank}"
        self.channels = self._all_channels()
        self.releases: dict[int, list[tuple[int, int]]] = defaultdict(list)  # semaphore → threadblock and event
        self.acquisitions: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.arrivals: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(
            list
        )  # barrier and turn → both events

    def read(self) -> None:
        """Add the events and moves of all threadblocks."""
        for block in _list(self.gpu, "threadblocks", self._where):
            self._read_block(_object(block, f"{self._where}: a threadblock"))
        self._match_semaphores()
        for meeting in self.arrivals.values():
            for _, leave in meeting:
                for arrive, _ in meeting:
                    self.building.order(arrive, leave)

    def _all_channels(self) -> dict[str, list[_Channel]]:
        """Return the channels of each type."""
        channels: dict[str, list[_Channel]] = {}
        for entry in _list(self.gpu, "channels", self._where):
            kind = str(_object(entry, f"{self._where}: a channel").get("channel_type"))
            to_peer: dict[int, int] = defaultdict(int)
            for peer in _list(entry, "connected_to", f"{self._where}: a channel"):
                if isinstance(peer, (dict, list)):
                    continue  # a group of ranks that a switch connects
                number = checked(peer, f"{self._where}: connected_to", 0, self.reader.size - 1)
                channels.setdefault(kind, []).append(_Channel(self.rank, number, kind, to_peer[number]))
                to_peer[number] += 1
        return channels

    def _read_block(self, block: Mapping[str, Any]) -> None:
        number = checked(block.get("id"), f"{self._where}: the id of a threadblock", 0, _MOST_THREADBLOCKS)
        reading = _Threadblock(self, number, block)
        previous: list[int] = []
        for at, operation in enumerate(_operations(block, f"{self._where}, threadblock {number}")):
            where = f"{self._where}, threadblock {number}, operation {at}"
            event = self.building.add_event(where, previous)
            previous = [reading.read(operation, event, where)]

    def _match_semaphores(self) -> None:
        semaphores = _list(self.gpu, "semaphores", self._where)
        for number, acquisitions in self.acquisitions.items():
            name = f"{self._where}: semaphore {number}"
            entry = _object(_item(semaphores, number, name), name)
            initial = checked(entry.get("init_value", 0), f"{name}: init_value", 0, _MOST_VALUE)
            releases = self.releases.get(number, [])
            if len({block for block, _ in releases}) > 1 or len({block for block, _ in acquisitions}) > 1:
                raise UsageError(f"{name} is released or acquired by several threadblocks, in an order that is open")
            if initial + len(releases) < len(acquisitions):
                raise PlanError(f"{name} is acquired {len(acquisitions)} times and released {len(releases)} times")
            for (_, release), (_, acquisition) in zip(releases, acquisitions[initial:], strict=False):
                self.building.order(release, acquisition)


def _operations(value: Mapping[str, Any], where: str, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield the operations of a threadblock, with those of pipelines in their places."""
    if depth > _MOST_DEPTH:
        raise UsageError(f"{where}: pipelines lie in each other more than {_MOST_DEPTH} deep")
    for operation in _list(value, "ops", where):
        if _object(operation, f"{where}: an operation").get("name") == "pipeline":
            yield from _operations(operation, where, depth + 1)
        else:
            yield operation


class _Threadblock:
    """One threadblock of a rank."""

    def __init__(self, of: _Rank, number: int, block: Mapping[str, Any]) -> None:
        self._of, self._number, self._block, self._building = of, number, block, of.building
        self._turns: dict[int, int] = defaultdict(int)

    def read(self, operation: Mapping[str, Any], event: int, where: str) -> int:
        """Add what an operation does, of which `event` is the first event; return its last event."""
        name = str(operation.get("name"))
        if name in _SWITCH:
            raise UsageError(f"{where} ({name}) adds values in an NVLink switch, which no transport of Unisono can do")
        if name in _COPYING:
            self._copy(operation, name, event, where)
        elif name in _COMBINING:
            return self._combine(operation, name, event, where)
        elif name == "barrier":
            return self._meet(operation, event, where)
        elif name in ("sem_acquire", "sem_release"):
            semaphores = self._of.acquisitions if name == "sem_acquire" else self._of.releases
            for number in _list(operation, "semaphore_ids", where):
                semaphores[checked(number, f"{where}: a semaphore", 0, _MOST_VALUE)].append((self._number, event))
        elif name not in (*_EMPTY, *_SIGNALS, *_WAITS):
            raise UsageError(f"{where}: MSCCL++ has no operation {name!r}")
        for names, ends in ((_SIGNALS, self._of.reader.signals), (_WAITS, self._of.reader.waits)):
            if name in names:
                for channel in self._channels(operation, where):
                    ends[channel].append(event)
        return event

    def _meet(self, operation: Mapping[str, Any], event: int, where: str) -> int:
        number = checked(operation.get("barrier_id"), f"{where}: barrier_id", 0, _MOST_VALUE)
        leave = self._building.add_event(where, [event])
        self._of.arrivals[number, self._turns[number]].append((event, leave))
        self._turns[number] += 1
        return leave

    def _channels(self, operation: Mapping[str, Any], where: str) -> list[_Channel]:
        kind = str(operation.get("channel_type"))
        names = [
            number
            for entry in _list(self._block, "channels", where)
            if _object(entry, where).get("channel_type") == kind
            for number in _list(entry, "channel_ids", where)
        ]
        of_rank = self._of.channels.get(kind, [])
        numbers = _list(operation, "channel_ids", where)
        return [
            _item(of_rank, _item(names, number, f"{where}: channel_ids"), f"{where}: a channel") for number in numbers
        ]

    def _copy(self, operation: Mapping[str, Any], name: str, event: int, where: str) -> None:
        sources, targets = self._places(operation, "src_buff", where), self._places(operation, "dst_buff", where)
        if len(sources) != len(targets):
            raise UsageError(f"{where}: {len(sources)} sources and {len(targets)} targets")
        for source, target in zip(sources, targets, strict=True):
            self._check_lengths([source, target], where)
            self._building.move(source, target, (event, event))
        self._note_packets(name, sources, targets, event)

    def _combine(self, operation: Mapping[str, Any], name: str, event: int, where: str) -> int:
        """Add a reduction, whose moves come one after the other; return the last event."""
        sources, targets = self._places(operation, "src_buff", where), self._places(operation, "dst_buff", where)
        if len(sources) < 2 or not targets or sources[0].rank != self._of.rank or targets[0].rank != self._of.rank:
            raise UsageError(
                f"{where}: a reduction has two sources or more, and a target, and the first of both is local"
            )
        self._check_lengths([*sources, *targets], where)
        self._note_packets(name, sources, [], event)
        own, result = sources[0].cells, targets[0]
        for source in sources[1:]:
            self._building.move(source, result, (event, event), own)
            own, event = result.cells, self._building.add_event(where, [event])
        for target in targets[1:]:
            self._building.move(result, target, (event, event))
        if name in _PACKETS_SENT:
            self._note_packets(name, [], targets[1:], event)
        return event

    def _note_packets(self, name: str, sources: Sequence[Place], targets: Sequence[Place], event: int) -> None:
        """Note the chunks that an operation reads and writes as packets. Packets lie in scratch."""
        if not name.endswith("pkt"):
            return
        for place in sources:
            self._of.reader.packet_reads += [(place.rank, cell, event) for cell in place.cells if cell[0] == "s"]
        for place in targets:
            for cell in place.cells:
                if cell[0] == "s":
                    self._of.reader.packets[place.rank, cell].append(event)

    def _check_lengths(self, places: Sequence[Place], where: str) -> None:
        if len({len(place.cells) for place in places}) != 1:
            raise UsageError(f"{where}: the chunks have the lengths {[len(place.cells) for place in places]}")

    def _places(self, operation: Mapping[str, Any], side: str, where: str) -> list[Place]:
        return [self._place(_object(chunk, where), operation, where) for chunk in _list(operation, side, where)]

    def _place(self, chunk: Mapping[str, Any], operation: Mapping[str, Any], where: str) -> Place:
        """Return the chunks that an operation uses, of this rank or of a peer."""
        rank, letter = self._of.rank, chunk.get("type")
        if "buffer_id" in chunk:
            rank, letter = self._remote(chunk["buffer_id"], str(operation.get("channel_type")), where)
        if not isinstance(letter, str) or letter not in _BUFFERS:
            raise UsageError(f"{where}: a buffer is one of {', '.join(_BUFFERS)}, not {letter!r}")
        parts = self._of.reader.parts
        first = parts * checked(chunk.get("index"), f"{where}: index", 0, MOST_CHUNKS)
        length = parts * checked(chunk.get("size"), f"{where}: size", 1, MOST_CHUNKS)
        self._check_inside(rank, str(letter), first + length, where)
        group = _object(operation.get("tbg_info") or {"tb_id": 0, "tbg_size": 1}, f"{where}: tbg_info")
        number, size = (checked(group.get(name), f"{where}: {name}", 0, _MOST_PARTS) for name in ("tb_id", "tbg_size"))
        start, end = (first + length * at // max(size, 1) for at in (number, number + 1))
        return Place(rank, tuple((str(letter), at) for at in range(start, end)))

    def _check_inside(self, rank: int, letter: str, end: int, where: str) -> None:
        counts = self._of.reader.counts[rank]
        total = counts["s"] if letter == "s" else max(counts["i"], counts["o"])
        if end > total:
            parts = self._of.reader.parts
            name = f"the {_BUFFERS[letter]} of rank {rank}"
            raise UsageError(f"{where}: chunk {end // parts - 1} of {name}, which has {total // parts}")

    def _remote(self, number: object, kind: str, where: str) -> tuple[int, object]:
        """Return the rank and the buffer that a threadblock knows by a number."""
        numbers = [
            buffer
            for entry in _list(self._block, "remote_buffer_refs", where)
            if _object(entry, where).get("access_channel_type") == kind
            for buffer in _list(entry, "remote_buffer_ids", where)
        ]
        buffers = _list(self._of.gpu, "remote_buffers", where)
        buffer = _object(
            _item(buffers, _item(numbers, number, f"{where}: buffer_id"), f"{where}: a remote buffer"), where
        )
        return checked(buffer.get("rank"), f"{where}: the rank of a buffer", 0, self._of.reader.size - 1), buffer.get(
            "type"
        )
