"""Reads the memory of a flight recorder, of this process or of another one.

The layout is that of native/core/recorder/flight_memory.h, where it is explained. The rank writes on while the memory
is being copied, so a record counts only if it is whole, and a text only if nothing newer has been written over it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from unisono.dtypes import DTYPES
from unisono.foundation.json_checks import checked, parsed_json
from unisono.foundation.printable import printable
from unisono.foundation.records import record

MAGIC = b"\0UNISONO"
VERSION = 1
# The name of the memory in /proc.
NAME = "unisono-flight-recorder"
# More than a store admits. A size in a damaged file or memory must not make a reader allocate without bound.
MOST_RANKS = 1 << 16
# The ranks of all communicators together, and the bytes of the description and the channels in the memory of one rank.
_MOST_MEMBERS = 1 << 22
_MOST_ABOUT_NBYTES = 1 << 20
_MOST_CHANNELS = 1 << 16

_HEADER = struct.Struct("<8sIiii12I2Q")
_RECORD = struct.Struct("<5Q4q2Q4iI")
_COMMUNICATOR = struct.Struct("<Q248s")
_TRAFFIC = struct.Struct("<Ii16s5Q")
# This bit of a communicator's id marks messages, which are numbered apart from collectives.
_MESSAGE_BIT = 1 << 63
STATES = {1: "running", 2: "done", 3: "failed"}
_DTYPES_BY_CODE = {dtype.code: dtype for dtype in DTYPES.values()}


@record
class RecordedCall:
    """A collective or a message of one rank.

    Times are in nanoseconds of the host's CLOCK_MONOTONIC; 0 means not yet.

    Attributes:
        number: the number of the call on its rank, from 0, over all communicators.
        communicator: the id of the communicator; 0 is that of all ranks.
        sequence: its number among the collectives of the communicator; of a message, among the messages.
        is_message: whether it is a message and not a collective.
        digest: the hash of the signature, which is equal on ranks that make the same collective.
        text: the call as the user wrote it: "allreduce(float32[8], op=sum)".
        facts: the collective, dtype, operation, root, algorithm and so on; of a message, its dtype and elements.
        nbytes: the size of its arrays on this rank.
        called_ns: when the program made the call.
        begun_ns: when it was the call's turn.
        moved_ns: when its first message passed. A call that ended at once has none.
        ended_ns: when it ended.
        site: the place of the call in the program, such as "train.py:12"; empty if unknown. A call that ends at once
            has the place of the first call with these arguments.
        peer: of a message, the other rank in the job; None for any rank.
        waits_for: the rank for whose message the call waits, if it waits for some time already; or None.
        state: "running", "done" or "failed".
    """

    number: int
    communicator: int
    sequence: int
    is_message: bool
    digest: int
    text: str
    facts: Mapping[str, Any]
    nbytes: int
    called_ns: int
    begun_ns: int
    moved_ns: int
    ended_ns: int
    site: str
    peer: int | None
    waits_for: int | None
    state: str

    def __str__(self) -> str:
        """Return the call as errors show it: ``#4 barrier() at train.py:12``."""
        number = "" if self.is_message else f"#{self.sequence} "
        return f"{number}{self.text}{f' at {self.site}' if self.site else ''}"


@record
class ChannelTraffic:
    """The counters of an open channel.

    Attributes:
        slot: the number of the channel, which another one may get after it is closed.
        peer: the other rank, in the job.
        transport: the transport, such as "shm".
        sent_messages, sent_nbytes, received_messages, received_nbytes: the messages and bytes that it has moved.
        waited_ns: how long calls have waited for the peer, in nanoseconds; waits under a millisecond are not counted.
    """

    slot: int
    peer: int
    transport: str
    sent_messages: int
    sent_nbytes: int
    received_messages: int
    received_nbytes: int
    waited_ns: int


@record
class Snapshot:
    """A copy of the memory of one rank's recorder.

    Attributes:
        rank, size, pid: the rank, the number of ranks of the job, and the rank's process.
        about: a description of the rank: its job, host, program and versions.
        communicators: by id, the ranks of each communicator, except the one of all ranks.
        traffic: the counters of each open channel.
        made: how many calls the rank has made so far.
        calls: the last ones, in the order in which they began.
    """

    rank: int
    size: int
    pid: int
    about: Mapping[str, Any]
    communicators: Mapping[int, tuple[int, ...]]
    traffic: tuple[ChannelTraffic, ...]
    made: int
    calls: tuple[RecordedCall, ...]

    @property
    def job(self) -> str:
        """The id and the epoch of its job."""
        return job_name(self.about)

    @property
    def epoch(self) -> int:
        """The epoch of its job."""
        return int(self.about.get("epoch", 0))

    @property
    def launch_rank(self) -> int:
        """The number that the rank was launched with."""
        return int(self.about.get("launch_rank", self.rank))


def job_name(about: Mapping[str, Any]) -> str:
    """Return the id and the epoch of a job, by which people tell jobs apart, from the description of one of its ranks.

    >>> job_name({"job": "1a2b3c4d5e6f7a8b", "epoch": 0})
    '1a2b3c4d-0'
    """
    return f"{str(about.get('job', '?'))[:8]}-{about.get('epoch', 0)}"


def check_place(rank: int, size: int) -> None:
    """Raise ValueError unless `rank` is a rank of a job of `size` ranks, which is at most `MOST_RANKS`."""
    if not 0 <= rank < size <= MOST_RANKS:
        raise ValueError(f"there is no rank {rank} of {size}")


def parse(memory: bytes, last: int | None = None) -> Snapshot:
    """Return the content of a copy of a recorder's memory.

    Args:
        memory: the copy.
        last: how many of the last calls to return; None for all.

    Raises:
        ValueError: it is no such memory, or one of another version.
    """
    if len(memory) < _HEADER.size or memory[: len(MAGIC)] != MAGIC:
        raise ValueError("this is not the memory of a flight recorder of Unisono")
    _, version, pid, rank, size, *areas, made, texts_end = _HEADER.unpack_from(memory)
    if version != VERSION:
        raise ValueError(f"the flight recorder has version {version}, and this Unisono reads version {VERSION}")
    check_place(rank, size)
    about_at, about_nbytes, communicators_at, slots, traffic_at, traffic_slots, *of_calls, named = areas
    records_at, record_nbytes, depth, texts_at, texts_nbytes = of_calls
    if about_nbytes > _MOST_ABOUT_NBYTES or traffic_slots > _MOST_CHANNELS:
        raise ValueError("the header of a flight recorder counts more channels or bytes than a rank can have")
    for begin, count, each in (
        (communicators_at, min(slots, named), _COMMUNICATOR.size),
        (traffic_at, traffic_slots, _TRAFFIC.size),
        (records_at, depth, max(record_nbytes, _RECORD.size)),
    ):
        if begin + count * each > len(memory):
            raise ValueError("the memory of a flight recorder is shorter than its header says")
    texts = _Texts(memory[texts_at : texts_at + texts_nbytes], texts_end)
    slots_read = {(made - 1 - back) % depth for back in range(min(depth, depth if last is None else last))}
    offsets = [records_at + slot * record_nbytes for slot in slots_read]
    records = (memory[offset : offset + _RECORD.size] for offset in offsets)
    calls = [call for each in records if (call := _call(each, texts)) is not None]
    return Snapshot(
        rank,
        size,
        pid,
        checked(parsed_json(memory[about_at : about_at + about_nbytes] or b"{}"), dict, "the description"),
        dict(_communicators(memory, communicators_at, min(slots, named))),
        tuple(_traffic(memory, traffic_at, traffic_slots)),
        made,
        tuple(sorted(calls, key=lambda call: call.number)),
    )


class _Texts:
    """The ring of texts. `end` is the number of bytes that were ever written."""

    def __init__(self, ring: bytes, end: int) -> None:
        self._ring = ring
        self._end = end

    def at(self, place: int) -> str | None:
        """Return the text at a place; None if there is none, or newer ones have been written over it."""
        if not place or not 0 < self._end - place <= len(self._ring):
            return None
        begin = place % len(self._ring)
        end = self._ring.find(b"\0", begin)
        return printable(self._ring[begin : end if end >= 0 else None].decode(errors="replace"))


def _call(memory: bytes, texts: _Texts) -> RecordedCall | None:
    """Return the call of a record; None if the slot is empty, or is being written."""
    number, communicator, sequence, digest, nbytes, *times, text_at, file_at, line, code, peer, waits_for, state = (
        _RECORD.unpack(memory)
    )
    if not number or state not in STATES:
        return None
    text, _, facts = (texts.at(text_at) or "?").partition("\n")
    file = texts.at(file_at)
    called_ns, begun_ns, moved_ns, ended_ns = times
    dtype = _DTYPES_BY_CODE.get(code)
    of_message = {} if dtype is None else {"dtype": dtype.name, "count": nbytes // dtype.itemsize}
    return RecordedCall(
        number - 1,
        communicator & ~_MESSAGE_BIT,
        sequence,
        bool(communicator & _MESSAGE_BIT),
        digest,
        text,
        {**checked(parsed_json(facts or "{}"), dict, "the facts of a call"), **of_message},
        nbytes,
        called_ns,
        begun_ns,
        moved_ns,
        ended_ns,
        f"{file}:{line}" if file else "",
        peer if peer >= 0 else None,
        waits_for if waits_for >= 0 else None,
        STATES[state],
    )


def _communicators(memory: bytes, begin: int, count: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    members = 0
    for slot in range(count):
        communicator, text = _COMMUNICATOR.unpack_from(memory, begin + slot * _COMMUNICATOR.size)
        ranks = parse_ranks(text.rstrip(b"\0").decode(errors="replace"))
        members += len(ranks)
        if members > _MOST_MEMBERS:
            raise ValueError(f"the communicators of a rank cannot have more than {_MOST_MEMBERS} ranks together")
        yield communicator, ranks


def _traffic(memory: bytes, begin: int, count: int) -> Iterator[ChannelTraffic]:
    for slot in range(count):
        used, peer, transport, *counts = _TRAFFIC.unpack_from(memory, begin + slot * _TRAFFIC.size)
        if used:
            yield ChannelTraffic(slot, peer, printable(transport.rstrip(b"\0").decode(errors="replace")), *counts)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks in a text for people.

    >>> parse_ranks(" in ranks 0, 2 and 5"), parse_ranks("ranks 0-3")
    ((0, 2, 5), (0, 1, 2, 3))
    """
    ranks: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        if len(ranks) + int(last or first) - int(first) >= MOST_RANKS or int(last or first) >= MOST_RANKS:
            raise ValueError(f"a communicator cannot have the ranks {text!r}")
        ranks += range(int(first), int(last or first) + 1)
    return tuple(ranks)
