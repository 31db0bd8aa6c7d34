"""The chunks of a rank in a schedule, as blocks of the INPUT, OUTPUT and SCRATCH of its plan.

Theory of operation. A schedule may write its input, and a plan may not. A plan knows the length of every block, which
differs by an element from block to block, while a schedule uses a chunk of its scratch for anything. So the memory of a
rank is renamed:

- A chunk of the input is a block of INPUT until it is written. Afterwards it is a block of OUTPUT, if the schedule is
  in place and the output lies there, or else a block of SCRATCH.
- A chunk of scratch is a block of SCRATCH that is as long as the data in it. If it holds data of another length later,
  it is another block.

The *kind* of data says how long it is: the number of its block in a vector, or of its part in a share. SCRATCH consists
of copies of INPUT or of OUTPUT, so its block n has the kind n modulo the number of kinds.

Example, an allreduce in place of two chunks: chunk 1 of the input is block 1 of INPUT for the first `send`, and block 1
of OUTPUT after a `recv`. If the scratch chunk 0 receives chunk 1 of a peer, it is block 1 of SCRATCH.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.algorithms.ir.plan import Buffer, Partition, even, in_parts, scratch_like
from unisono.algorithms.schedules.moves import Cell, Schedule
from unisono.errors import PlanError

CELL_NAMES = {"i": "input", "o": "output", "s": "scratch", "t": "values passed on"}


class ScheduleBlock(NamedTuple):
    """A block of a buffer of a plan."""

    buffer: Buffer
    number: int


class Content(NamedTuple):
    """The content of a chunk: the kind of its data, and the ranks that have contributed, as bits."""

    kind: int
    ranks: int


class RankMemory:
    """The memory of one rank while its schedule runs step by step."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._collective, self._rank, self._in_place = schedule.collective, rank, schedule.in_place
        self._contract = CONTRACTS[schedule.collective]
        self._has_input, self._has_output = self._contract.has_input(rank, 0), self._contract.has_output(rank, 0)
        self._chunks, self._size = schedule.chunks, schedule.size
        # In collectives that reduce, shares are parts of a vector of any length, so all of them differ.
        self._kinds = schedule.chunks * (schedule.size if self._contract.reduces and self._has_shares() else 1)
        self._contents: dict[Cell, Content] = {}
        self._written: dict[Cell, ScheduleBlock] = {}
        self._scratch: dict[tuple[Cell, int], int] = {}
        self._taken: set[int] = set()
        self.input = self._partition(self._contract.input) if self._has_input else Partition(0)
        self.output = self._partition(self._contract.output) if self._has_output else Partition(0)

    def home(self, cell: Cell) -> Cell:
        """Return the chunk that stands for all names of the same memory."""
        letter, index = cell
        if not self._in_place or letter not in "io":
            return cell
        shift = self._chunks * self._rank
        if self._contract.input is Cut.SHARE and self._contract.output is Cut.SHARES:
            return ("o", index + shift) if letter == "i" else cell
        if self._contract.input is Cut.SHARES and self._contract.output is Cut.SHARE:
            return ("i", index + shift) if letter == "o" else cell
        return ("i", index)

    def read(self, cell: Cell) -> tuple[ScheduleBlock, Content]:
        """Return the block that a chunk is now, and its content.

        Raises:
            PlanError: nothing has been written there.
        """
        home = self.home(cell)
        if home in self._written:
            return self._written[home], self._contents[home]
        index = self._input_index(home)
        if index is None:
            raise PlanError(f"chunk {cell[1]} of the {CELL_NAMES[cell[0]]} is read before anything is written there")
        share_or_vector = index if self._contract.reduces or not self._has_shares() else index % self._chunks
        return ScheduleBlock(Buffer.INPUT, index), Content(share_or_vector, 1 << self._rank)

    def write(self, cells: Sequence[Cell], contents: Sequence[Content]) -> list[ScheduleBlock]:
        """Note that chunks are written; return the blocks that they are from now on.

        Raises:
            PlanError: a chunk belongs to an input that must stay unchanged.
        """
        homes = [self.home(cell) for cell in cells]
        self._take_scratch(homes, contents)
        blocks = [self._block_to_write(home, content.kind) for home, content in zip(homes, contents, strict=True)]
        self._written.update(zip(homes, blocks, strict=True))
        self._contents.update(zip(homes, contents, strict=True))
        return blocks

    def unwritten(self) -> list[tuple[ScheduleBlock, ScheduleBlock, Content]]:
        """Return the blocks of INPUT that are results as they are, with the block of OUTPUT and the content of each."""
        result = []
        for index in range(self.output.blocks):
            home = self.home(("o", index))
            if home not in self._written and self._input_index(home) is not None:
                source, content = self.read(home)
                result.append((source, ScheduleBlock(Buffer.OUTPUT, index), content))
        return result

    def scratch(self) -> Partition:
        """Return the partition of SCRATCH with all blocks that were used."""
        like = max((Buffer.INPUT, Buffer.OUTPUT), key=lambda buffer: (self.input, self.output)[buffer].blocks)
        whole = (self.input, self.output)[like]
        return scratch_like(like, whole, max(self._taken) // whole.blocks + 1) if self._taken else Partition(0)

    def _take_scratch(self, homes: Sequence[Cell], contents: Sequence[Content]) -> None:
        """Choose blocks of SCRATCH for chunks that lie there and have none yet: one after the other, if possible."""
        missing = [
            (home, content.kind)
            for home, content in zip(homes, contents, strict=True)
            if self._output_index(home) is None and (home, content.kind) not in self._scratch
        ]
        kinds = [kind for _, kind in missing]
        runs = [n for n, kind in enumerate(kinds) if not n or kind != (kinds[n - 1] + 1) % self._kinds]
        for first, end in pairwise([*runs, len(missing)]):
            start = kinds[first]
            while not self._taken.isdisjoint(range(start, start + end - first)):
                start += self._kinds
            for number, key in enumerate(missing[first:end]):
                self._scratch[key] = start + number
                self._taken.add(start + number)

    def _block_to_write(self, home: Cell, kind: int) -> ScheduleBlock:
        index = self._output_index(home)
        if index is not None:
            return ScheduleBlock(Buffer.OUTPUT, index)
        if home[0] == "i" and not self._in_place:
            raise PlanError(f"chunk {home[1]} of the input is written, which only a schedule in place may do")
        return ScheduleBlock(Buffer.SCRATCH, self._scratch[home, kind])

    def _input_index(self, home: Cell) -> int | None:
        """Return the block of INPUT that lies at a chunk, or None."""
        letter, index = home
        if letter == "o" and self._in_place and self._contract.input is Cut.SHARE:
            index -= self._chunks * self._rank
        elif letter != "i":
            return None
        return index if self._has_input and 0 <= index < self.input.blocks else None

    def _output_index(self, home: Cell) -> int | None:
        """Return the block of OUTPUT that lies at a chunk, or None."""
        letter, index = home
        if letter == "i" and self._in_place:
            if self._contract.output is Cut.SHARE:
                index -= self._chunks * self._rank
        elif letter != "o":
            return None
        return index if self._has_output and 0 <= index < self.output.blocks else None

    def _has_shares(self) -> bool:
        return Cut.SHARES in (self._contract.input, self._contract.output)

    def _blocks(self, cut: Cut) -> int:
        return self._chunks * self._size if cut is Cut.SHARES else self._chunks

    def _partition(self, cut: Cut | None) -> Partition:
        if cut is Cut.VECTOR:
            return even(self._chunks)
        return in_parts(even(1 if cut is Cut.SHARE else self._size), self._chunks)
