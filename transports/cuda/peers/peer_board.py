"""The board of a rank: a page of numbers about its device, in memory that all ranks of the host map.

Theory of operation
-------------------
Each rank writes to its own board only, and other ranks read it. A signal is one word, stored at once: its number, a
part of the digest of its call, and the index of the recorded event. A rank that sees a signal also sees everything
written before the event was recorded. On x86 that holds because other cores see the stores of a thread in order. On
aarch64 it holds because the driver's locks lie between these stores and order them.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.transports.cuda.memory.host import HostMemory, MemoryHandle

CHANNELS = 2
# The number of records of a channel that peers may not have followed yet.
RING = 8

_TOKEN, _LEFT, _FIRST_CHANNEL = 0, 1, 2
_SOURCE, _TARGET, _GENERATION, _GENERATION_LEFT, _SLABS = 0, 1, 2, 3, 4
# The words of a slab: its number, its address, the length of its handle, and the handle.
_NUMBER, _SLAB, _NBYTES, _HANDLE = 0, 1, 2, 3
_HANDLE_WORDS = 32
_SLAB_WORDS = _HANDLE + _HANDLE_WORDS
# A rank may be one slab ahead of another one, so it shows its last two.
_SHOWN_SLABS = 2
_ACKNOWLEDGED = _SLABS + _SHOWN_SLABS * _SLAB_WORDS
_LOW = (1 << 32) - 1
_MARK = _LOW // RING


class Slab(NamedTuple):
    """Exported memory of a rank: a counter of its slabs, the address in that rank, and the handle."""

    generation: int
    pointer: int
    handle: bytes


class Board:
    """The board of one rank of `size`. Only that rank calls the methods that write."""

    def __init__(self, memory: HostMemory, size: int) -> None:
        self._memory = memory
        self._size = size
        self._words = memory.view.cast("Q")

    @classmethod
    def new(cls, size: int, token: int) -> Board:
        """Return an empty board. Other ranks recognise it by `token`."""
        board = cls(HostMemory.new(8 * (_FIRST_CHANNEL + CHANNELS * _channel_words(size))), size)
        board._words[_TOKEN] = token
        return board

    @property
    def token(self) -> int:
        """The number by which other ranks recognise the board."""
        return self._words[_TOKEN]

    def handle(self) -> MemoryHandle:
        """Return the handle with which other ranks open the board."""
        return self._memory.handle()

    def close(self) -> None:
        """Unmap the board."""
        self._words.release()
        self._memory.close()

    def leave(self) -> None:
        """Publish that this rank has closed all memory of other ranks."""
        self._words[_LEFT] = 1

    @property
    def has_left(self) -> bool:
        """Whether the rank has closed all memory of other ranks."""
        return bool(self._words[_LEFT])

    def show_operands(self, channel: int, source: int, target: int) -> None:
        """Publish the addresses of INPUT and OUTPUT in this process."""
        at = self._at(channel)
        self._words[at + _SOURCE], self._words[at + _TARGET] = source, target

    def operands(self, channel: int) -> tuple[int, int]:
        """Return the addresses from `show_operands`."""
        at = self._at(channel)
        return self._words[at + _SOURCE], self._words[at + _TARGET]

    def show_slab(self, channel: int, slab: Slab) -> None:
        """Publish the handle of this rank's slab, so that other ranks can open it."""
        at, handle = self._slab_at(channel, slab.generation), at_words(slab.handle)
        self._words[at + _SLAB], self._words[at + _NBYTES] = slab.pointer, len(slab.handle)
        for index, word in enumerate(handle):
            self._words[at + _HANDLE + index] = word
        self._words[at + _NUMBER] = slab.generation
        self._words[self._at(channel) + _GENERATION] = slab.generation

    def slab(self, channel: int, generation: int) -> Slab:
        """Return one of the last two slabs from `show_slab`."""
        at = self._slab_at(channel, generation)
        nbytes = min(self._words[at + _NBYTES], 8 * _HANDLE_WORDS)
        words = self._words[at + _HANDLE : at + _HANDLE + _HANDLE_WORDS].tobytes()
        return Slab(self._words[at + _NUMBER], self._words[at + _SLAB], words[:nbytes])

    def generation(self, channel: int) -> int:
        """Return the counter of the slab that is exported now."""
        return self._words[self._at(channel) + _GENERATION]

    def leave_slabs(self, channel: int, generation: int) -> None:
        """Publish that this rank uses no slab of any rank up to a generation."""
        self._words[self._at(channel) + _GENERATION_LEFT] = generation

    def left_slabs(self, channel: int) -> int:
        """Return the generation from `leave_slabs`; 0 before that."""
        return self._words[self._at(channel) + _GENERATION_LEFT]

    def signal(self, channel: int, peer: int, number: int, record: int, digest: int) -> None:
        """Publish signal `number` at `peer`, for a record of this rank in the call with `digest`."""
        content = mark_of(digest) * RING + record % RING
        self._words[self._slot(channel, peer, number)] = (number + 1 & _LOW) << 32 | content

    def signalled(self, channel: int, peer: int, number: int) -> tuple[int, int] | None:
        """Return the event of signal `number` at `peer`, as index in the ring, and its mark; None if not signalled."""
        word = self._words[self._slot(channel, peer, number)]
        if word >> 32 != number + 1 & _LOW:
            return None
        mark, event = divmod(word & _LOW, RING)
        return event, mark

    def acknowledge(self, channel: int, peer: int, signals: int) -> None:
        """Publish for `peer` that the waits for its first `signals` signals have been issued."""
        self._words[self._at(channel) + _ACKNOWLEDGED + peer] = signals

    def acknowledged(self, channel: int, peer: int) -> int:
        """Return the number from `acknowledge` for `peer`."""
        return self._words[self._at(channel) + _ACKNOWLEDGED + peer]

    def _slab_at(self, channel: int, generation: int) -> int:
        return self._at(channel) + _SLABS + generation % _SHOWN_SLABS * _SLAB_WORDS

    def _at(self, channel: int) -> int:
        return _FIRST_CHANNEL + channel * _channel_words(self._size)

    def _slot(self, channel: int, peer: int, number: int) -> int:
        return self._at(channel) + _ACKNOWLEDGED + self._size + peer * RING + number % RING


def mark_of(digest: int) -> int:
    """Return the part of a call's digest that a signal carries."""
    return digest & _MARK


def at_words(data: bytes) -> list[int]:
    """Return bytes as 64-bit words, the last padded with zeros."""
    padded = data.ljust(-(-len(data) // 8) * 8, b"\0")
    return memoryview(padded).cast("Q").tolist()


def _channel_words(size: int) -> int:
    return _ACKNOWLEDGED + size + RING * size
