"""What a rank tells the other ranks of its host about its device: numbers in memory that all of them have mapped.

Theory of operation. Each rank writes to its own board only, and others look at it. A signal is one word, which is
stored at once: its number, a part of the digest of the call that it belongs to, and which event was recorded. Whoever
sees it sees what was written before the event was recorded: stores of one thread are seen in their order (x86), or
what lies between them, the locks of the driver, keeps them so (aarch64).
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.transports.cuda.host_memory import Handle, HostMemory

CHANNELS = 2
# How many records of a channel others may have yet to follow.
RING = 8

_TOKEN, _LEFT, _FIRST_CHANNEL = 0, 1, 2
_SOURCE, _TARGET, _GENERATION, _SLAB, _NBYTES, _HANDLE = 0, 1, 2, 3, 4, 5
_HANDLE_WORDS = 32
_ACKNOWLEDGED = _HANDLE + _HANDLE_WORDS
_LOW = (1 << 32) - 1
_MARK = _LOW // RING


class Slab(NamedTuple):
    """Exported memory of a rank: which of its slabs it is, its address there, and its handle."""

    generation: int
    pointer: int
    handle: bytes


class Board:
    """The board of one rank of `size`; only that rank calls what tells something."""

    def __init__(self, memory: HostMemory, size: int) -> None:
        self._memory = memory
        self._size = size
        self._words = memory.view.cast("Q")

    @classmethod
    def new(cls, size: int, token: int) -> Board:
        """Return a board on which nothing is told but `token`, by which others know it."""
        board = cls(HostMemory.new(8 * (_FIRST_CHANNEL + CHANNELS * _channel_words(size))), size)
        board._words[_TOKEN] = token
        return board

    @property
    def token(self) -> int:
        """By what the board is known."""
        return self._words[_TOKEN]

    def handle(self) -> Handle:
        """Return by what others open it."""
        return self._memory.handle()

    def close(self) -> None:
        """Let go of it."""
        self._words.release()
        self._memory.close()

    def leave(self) -> None:
        """Tell that this rank has closed all memory of others."""
        self._words[_LEFT] = 1

    @property
    def has_left(self) -> bool:
        """Whether the rank has closed all memory of others."""
        return bool(self._words[_LEFT])

    def show_operands(self, channel: int, source: int, target: int) -> None:
        """Tell where INPUT and OUTPUT of the call are in this process."""
        at = self._at(channel)
        self._words[at + _SOURCE], self._words[at + _TARGET] = source, target

    def operands(self, channel: int) -> tuple[int, int]:
        """Return what `show_operands` told."""
        at = self._at(channel)
        return self._words[at + _SOURCE], self._words[at + _TARGET]

    def show_slab(self, channel: int, slab: Slab) -> None:
        """Tell which memory is exported."""
        at, handle = self._at(channel), at_words(slab.handle)
        self._words[at + _SLAB], self._words[at + _NBYTES] = slab.pointer, len(slab.handle)
        for index, word in enumerate(handle):
            self._words[at + _HANDLE + index] = word
        self._words[at + _GENERATION] = slab.generation

    def slab(self, channel: int) -> Slab:
        """Return what `show_slab` told."""
        at = self._at(channel)
        nbytes = min(self._words[at + _NBYTES], 8 * _HANDLE_WORDS)
        words = self._words[at + _HANDLE : at + _HANDLE + _HANDLE_WORDS].tobytes()
        return Slab(self._words[at + _GENERATION], self._words[at + _SLAB], words[:nbytes])

    def generation(self, channel: int) -> int:
        """Return the generation of the slab that is exported now."""
        return self._words[self._at(channel) + _GENERATION]

    def signal(self, channel: int, peer: int, number: int, record: int, digest: int) -> None:
        """Raise signal `number` at `peer`, which stands for a record of this rank, in the call of `digest`."""
        told = mark_of(digest) * RING + record % RING
        self._words[self._slot(channel, peer, number)] = (number + 1 & _LOW) << 32 | told

    def signalled(self, channel: int, peer: int, number: int) -> tuple[int, int] | None:
        """Return which event of the ring signal `number` at `peer` stands for, and its mark; None if not yet."""
        word = self._words[self._slot(channel, peer, number)]
        if word >> 32 != number + 1 & _LOW:
            return None
        mark, event = divmod(word & _LOW, RING)
        return event, mark

    def acknowledge(self, channel: int, peer: int, signals: int) -> None:
        """Tell `peer` that the waits for its first `signals` signals have been issued."""
        self._words[self._at(channel) + _ACKNOWLEDGED + peer] = signals

    def acknowledged(self, channel: int, peer: int) -> int:
        """Return what `acknowledge` told `peer`."""
        return self._words[self._at(channel) + _ACKNOWLEDGED + peer]

    def _at(self, channel: int) -> int:
        return _FIRST_CHANNEL + channel * _channel_words(self._size)

    def _slot(self, channel: int, peer: int, number: int) -> int:
        return self._at(channel) + _ACKNOWLEDGED + self._size + peer * RING + number % RING


def mark_of(digest: int) -> int:
    """Return the part of the digest of a call that a signal has."""
    return digest & _MARK


def at_words(data: bytes) -> list[int]:
    """Return bytes as words of 64 bits, the last filled with zeros."""
    padded = data.ljust(-(-len(data) // 8) * 8, b"\0")
    return memoryview(padded).cast("Q").tolist()


def _channel_words(size: int) -> int:
    return _ACKNOWLEDGED + size + RING * size
