"""The rows of an array in which the shares of the ranks lie, by counts and displacements.

Used by: `displaced.py`, and `device/displaced.py` for GPU arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from unisono.collectives.calls.shapes import checked_rows
from unisono.errors import UsageError
from unisono.foundation.records import record

# The arguments that say where shares lie: counts and displacements.
ROWS = ("counts", "displacements")
SENT = ("send_counts", "send_displacements")
RECEIVED = ("recv_counts", "recv_displacements")


class Moved(NamedTuple):
    """An array with all shares, one after the other, and the function that copies them from or to the caller's array.

    The function does nothing if the array is a part of the caller's array.
    """

    array: Any
    move: Callable[[], None]


class RowBlock(NamedTuple):
    """The share of one rank: its rows in the array, and its rows where the shares of all ranks follow each other."""

    rank: int
    rows: slice
    place: slice


@record
class Blocks:
    """The shares of all ranks that have rows.

    Attributes:
        names: the names of the arguments with the counts and the displacements.
        blocks: the shares.
        total: the number of their rows.
    """

    names: tuple[str, str]
    blocks: tuple[RowBlock, ...]
    total: int

    @property
    def run(self) -> slice | None:
        """The rows of all shares, if they follow each other in the order of ranks; otherwise None."""
        starts = {block.rows.start - block.place.start for block in self.blocks}
        if len(starts) > 1:
            return None
        start = starts.pop() if starts else 0
        return slice(start, start + self.total)

    def check_inside(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that an array of this shape, which the error calls `name`, has the rows of all shares.

        Raises:
            UsageError: it has not.
        """
        if not shape:
            raise UsageError(f"{name} is 0-dimensional, and {self.names[1]} count rows: pass an array with rows")
        for rank, (start, stop) in ((block.rank, (block.rows.start, block.rows.stop)) for block in self.blocks):
            if stop > shape[0]:
                counts, displacements = self.names
                raise UsageError(
                    f"{displacements}[{rank}] is {start} and {counts}[{rank}] is {stop - start}, but {name} has "
                    f"{shape[0]} rows"
                )

    def check_apart(self) -> None:
        """Check that no row is in the shares of two ranks.

        Raises:
            UsageError: a row is.
        """
        for one, other in pairwise(sorted(self.blocks, key=lambda block: block.rows.start)):
            if other.rows.start < one.rows.stop:
                raise UsageError(
                    f"by {self.names[1]}, the block of rank {one.rank} (rows {_text(one.rows)}) overlaps that of rank "
                    f"{other.rank} (rows {_text(other.rows)}), and a row can be received only once: move one of them"
                )


def checked_blocks(names: tuple[str, str], counts: Sequence[int], displacements: Sequence[int], size: int) -> Blocks:
    """Return the shares of `size` ranks with these counts and displacements, of which `names` are the names.

    Raises:
        UsageError: one of the two is not a sequence of `size` numbers of rows.
    """
    rows = checked_rows(names[0], counts, size)
    starts = checked_rows(names[1], displacements, size)
    places = accumulate(rows, initial=0)
    blocks = (
        RowBlock(rank, slice(start, start + count), slice(place, place + count))
        for rank, (count, start, place) in enumerate(zip(rows, starts, places, strict=False))
        if count
    )
    return Blocks(names, tuple(blocks), sum(rows))


def _text(rows: slice) -> str:
    return f"{rows.start} to {rows.stop - 1}"
