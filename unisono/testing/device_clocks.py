"""What is ordered before what on devices: vector clocks of streams, and the accesses to a piece of memory.

A stream counts its accesses. Its clock says of each stream, by number, up to which count it is ordered behind that
one's accesses: by a record and a wait, or because the host has seen a record happen. Two accesses that overlap, of
which one writes, must be ordered. That is found when the second is issued, whatever the device would have done first.
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
        """Return whether both touch a byte that one of them writes."""
        return self.start < other.stop and other.start < self.stop and bool(self.writes or other.writes)

    def covers(self, other: Access) -> bool:
        """Return whether who is ordered behind this one need not know of `other`, which this one is behind."""
        inside = self.start <= other.start and other.stop <= self.stop
        return inside and bool(self.writes or (self.stream == other.stream and not other.writes))


def join(clock: MutableMapping[int, int], other: Mapping[int, int]) -> None:
    """Let `clock` be behind what `other` is behind."""
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count


def store_clock(words: Words, clock: Clock) -> None:
    """Keep `clock` in memory that other processes may map; of too many streams, those that it heard of last."""
    pairs = list(clock.items())[-((len(words) - 1) // 2) :]
    words[0] = len(pairs)
    words[1 : 1 + 2 * len(pairs)] = np.array(pairs, np.int64).reshape(-1)


def load_clock(words: Words) -> Clock:
    """Return what `store_clock` kept."""
    pairs = words[1 : 1 + 2 * int(words[0])].tolist()
    return dict(zip(pairs[::2], pairs[1::2], strict=True))


class History:
    """The accesses to a piece of memory that a later one may conflict with, in words that processes may share.

    Its user holds a lock that all users of the words share.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        self._most = (len(words) - 1) // _FIELDS

    def add(self, access: Access, clock: Mapping[int, int]) -> Access | None:
        """Add an access of a stream whose clock is `clock`; return one that it conflicts with and is not behind."""
        known = self._accesses()
        behind = [earlier.number <= clock.get(earlier.stream, 0) for earlier in known]
        for earlier, is_behind in zip(known, behind, strict=True):
            if not is_behind and earlier.conflicts(access):
                return earlier
        kept = [
            earlier
            for earlier, is_behind in zip(known, behind, strict=True)
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
