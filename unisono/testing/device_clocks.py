"""Vector clocks of the streams of a device double, and the history of accesses to a piece of memory.

A stream counts its accesses. Its clock holds, for each stream, the count up to which that stream's accesses come before
its own: because of a record and a wait, or because the host has seen a record happen. Two overlapping accesses must be
ordered if one of them writes. A violation is detected when the second access is issued, whatever the device would have
run first.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Clock: TypeAlias = dict[int, int]
Words: TypeAlias = NDArray[np.int64]

_FIELDS = 5


class Access(NamedTuple):
    """Bytes [start, stop) of a piece of memory, read or written as the `number`-th access of a stream."""

    stream: int
    number: int
    start: int
    stop: int
    writes: int

    def conflicts(self, other: Access) -> bool:
        """Return whether both accesses touch a byte, and one of them writes it."""
        return self.start < other.stop and other.start < self.stop and bool(self.writes or other.writes)

    def covers(self, other: Access) -> bool:
        """Return whether a later access that is ordered after this one is therefore safe from the earlier `other`."""
        inside = self.start <= other.start and other.stop <= self.stop
        return inside and bool(self.writes or (self.stream == other.stream and not other.writes))


def join(clock: MutableMapping[int, int], other: Mapping[int, int]) -> None:
    """Order `clock` after everything that `other` is ordered after."""
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count


def store_clock(words: Words, clock: Clock) -> None:
    """Store `clock` in memory that other processes may map; if there are too many streams, keep the last ones."""
    pairs = list(clock.items())[-((len(words) - 1) // 2) :]
    words[0] = len(pairs)
    words[1 : 1 + 2 * len(pairs)] = np.array(pairs, np.int64).reshape(-1)


def load_clock(words: Words) -> Clock:
    """Return the clock that `store_clock` stored."""
    pairs = words[1 : 1 + 2 * int(words[0])].tolist()
    return dict(zip(pairs[::2], pairs[1::2], strict=True))


class AccessHistory:
    """The accesses to a piece of memory with which a later one may conflict, in words that processes may share.

    The caller holds a lock that all users of the words share.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        self._most = (len(words) - 1) // _FIELDS

    def add(self, access: Access, clock: Mapping[int, int]) -> Access | None:
        """Add an access of a stream with this clock; return an earlier access that it conflicts with unordered."""
        accesses = self._accesses()
        behind = [earlier.number <= clock.get(earlier.stream, 0) for earlier in accesses]
        for earlier, is_behind in zip(accesses, behind, strict=True):
            if not is_behind and earlier.conflicts(access):
                return earlier
        kept = [
            earlier
            for earlier, is_behind in zip(accesses, behind, strict=True)
            if not (is_behind and access.covers(earlier))
        ]
        self._keep([*kept, access][-self._most :])
        return None

    def _accesses(self) -> list[Access]:
        rows: Any = self._words[1 : 1 + _FIELDS * int(self._words[0])].reshape(-1, _FIELDS).tolist()
        return [Access(*row) for row in rows]

    def _keep(self, accesses: list[Access]) -> None:
        self._words[0] = len(accesses)
        self._words[1 : 1 + _FIELDS * len(accesses)] = np.array(accesses, np.int64).reshape(-1)
