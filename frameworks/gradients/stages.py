"""The stages of a compressed reduction, and what a compression is made for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from unisono import Communicator
from unisono.frameworks.arrays import Array
from unisono.frameworks.gradients.layout import Piece
from unisono.frameworks.pending import Pending
from unisono.frameworks.sparse_sums import SparseSums

Start: TypeAlias = Callable[[], Pending]


class Stages(NamedTuple):
    """The stages of a compressed reduction of flat memory in place. Each training step uses them again.

    Attributes:
        starts: functions that each prepare and start a collective: the first one when the memory is ready, each other
            one when the collective before it has ended.
        finish: a function that writes the result to the memory when the last collective has ended.

    Only ``starts[0]`` and `finish` use the memory and its state, because with a lag the memories of several training
    steps share the state.
    """

    starts: Sequence[Start]
    finish: Callable[[], None]


class Flat(NamedTuple):
    """Flat memory that is reduced in place, with its state.

    Attributes:
        communicators: one for each collective of the reduction.
        sparse_sums: computes sums on the first of them, for a compression that makes no other calls there.
        memory: the elements, of a dtype of floats.
        state: the values that the compression keeps from one training step to the next, by their kind, such as
            "residual". Each kind is float32, with as many elements as `memory`.
        pieces: the gradients in the memory, in ascending order. Elements between them are zero.
        op: "avg" or "sum".
        timeout_s: the time limit of each collective.
    """

    communicators: Sequence[Communicator]
    sparse_sums: SparseSums
    memory: Array
    state: Mapping[str, Array]
    pieces: Sequence[Piece]
    op: str
    timeout_s: float | None

    def gaps(self) -> list[slice]:
        """Return the ranges between the pieces."""
        starts, stops = [piece.start for piece in self.pieces], [piece.stop for piece in self.pieces]
        between = zip([0, *stops], [*starts, self.memory.size], strict=True)
        return [slice(start, stop) for start, stop in between if start < stop]


class Floats:
    """Memory as float32: the memory itself, or a float32 copy if it has another dtype."""

    def __init__(self, memory: Array) -> None:
        self._memory = memory
        self.x = memory if memory.dtype == np.float32 else np.empty(memory.size, np.float32)

    def read(self) -> Array:
        if self.x is not self._memory:
            with np.errstate(over="ignore"):
                np.copyto(self.x, self._memory, casting="same_kind")
        return self.x

    def write_back(self) -> None:
        if self.x is not self._memory:
            np.copyto(self._memory, self.x, casting="same_kind")
