"""Compression "powersgd": matrices travel as the product of two narrow matrices.

Theory of operation
-------------------
A gradient M of n × m elements is about P Qᵀ, where P has n × r elements and Q has m × r. The Q of the last step is a
good start (*warm start*), so one step of the power method suffices:

1. Each rank computes P = M Q. The ranks average P, and each makes its columns orthonormal.
2. Each rank computes Q = Mᵀ P. The ranks average Q. The result is P Qᵀ.

The rank keeps M - P Qᵀ with its own Q as its residual, so the residuals of all ranks are together what the result
lacks. A column of Q that is zero or not finite cannot be multiplied into a better one, so it begins anew.

All ranks must get the same P and the same result. These are computed by operations on single elements and by sums in a
fixed order, because libraries add up matrices in an order of their own on each processor.

A matrix is the whole rows of a gradient that lie in the memory. Other elements travel as they are, as do vectors, and
matrices that would not become smaller.

Reference: Vogels, Karimireddy and Jaggi, "PowerSGD", arXiv:1905.13727.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono import Work
from unisono.frameworks.arrays import Array, same_bits
from unisono.frameworks.gradients.layout import Piece
from unisono.frameworks.gradients.stages import Flat, Floats, Stages

# A column that keeps less of its length beside those before it is a rounding error.
_LEAST_REMAINDER = 1e-5


class Matrix(NamedTuple):
    """Whole rows of a gradient in flat memory: `rows` × `columns` elements from `start`."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        """The index behind the last element."""
        return self.start + self.rows * self.columns

    def of(self, memory: Array) -> Array:
        """Return the matrix in flat memory, as a view."""
        return memory[self.start : self.stop].reshape(self.rows, self.columns)

    def basis(self, memory: Array, rank: int) -> Array:
        """Return Q in the memory of bases, as a view. It lies at the place of the matrix, which is larger."""
        return memory[self.start : self.start + self.columns * rank].reshape(self.columns, rank)


def matrices_of(pieces: Sequence[Piece], rank: int) -> list[Matrix]:
    """Return the matrices of `pieces` that become smaller as two factors of `rank` columns."""
    matrices = []
    for piece in pieces:
        start = piece.start + -piece.column % piece.columns
        rows = max(0, piece.stop - start) // piece.columns
        if rank * (rows + piece.columns) < rows * piece.columns:
            matrices.append(Matrix(start, rows, piece.columns))
    return matrices


def _sum(x: Array) -> Any:
    """Return the sum of a flat array that is not empty, in an order that depends on its length alone."""
    while len(x) > 1:
        half = len(x) // 2
        x = np.concatenate([x[:half] + x[half : 2 * half], x[2 * half :]])
    return x[0]


@same_bits
def orthonormal(p: Array) -> Array:
    """Return float32 columns that are orthonormal and span those of `p`; zeros for one that the others span."""
    columns: list[Array] = []
    for column in p.T.astype(np.float64):
        rest = column
        for other in columns:
            rest = rest - _sum(rest * other) * other
        length = np.sqrt(_sum(rest**2))
        is_spanned = length <= np.sqrt(_sum(column**2)) * _LEAST_REMAINDER
        columns.append(np.zeros_like(rest) if is_spanned else rest / length)
    return np.stack(columns, axis=1).astype(np.float32)


@same_bits
def product(p: Array, q: Array) -> Array:
    """Return P Qᵀ as float32, added up in the order of columns."""
    result = np.zeros((len(p), len(q)), np.float32)
    for left, right in zip(p.T, q.T, strict=True):
        result += left[:, None] * right
    return result


def _renew(q: Array) -> None:
    """Give each column of Q that is zero or not finite new elements, which are the same on all ranks."""
    for index, column in enumerate(q.T):
        if not (np.isfinite(column).all() and column.any()):
            column[...] = np.random.default_rng([index, len(q)]).random(len(q)) - 0.5


def power_sgd(flat: Flat, *, rank: int) -> Stages:
    """Return the stages of a reduction of matrices as factors of `rank` columns.

    Args:
        flat: the memory. Its state are the residual and the bases, which are the same on all ranks.
        rank: the number of columns of the factors, 1 or more.
    """
    residual, bases, floats = flat.state["residuals"], flat.state["bases"], Floats(flat.memory)
    matrices = matrices_of(flat.pieces, rank)
    edges = [0, *(edge for each in matrices for edge in (each.start, each.stop)), flat.memory.size]
    plain = [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
    sources = [np.empty((each.rows, each.columns), np.float32) for each in matrices]
    left, lefts = _views([(each.rows, rank) for each in matrices], sum(each.stop - each.start for each in plain))
    right, rights = _views([(each.columns, rank) for each in matrices])
    own = [np.empty_like(each) for each in rights]
    reduce_left, reduce_right = (
        comm.plan("allreduce", memory, op=flat.op, out=memory, timeout_s=flat.timeout_s)
        for comm, memory in zip(flat.communicators, (left, right), strict=True)
    )

    def start() -> Work[Any]:
        x = floats.read()
        for matrix, source, p in zip(matrices, sources, lefts, strict=False):
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(matrix.of(x), matrix.of(residual), out=source)
                matrix.of(residual)[...] = 0
                q = matrix.basis(bases, rank)
                _renew(q)
                np.matmul(source, q, out=p)
        lefts[-1][...] = np.concatenate([x[each] for each in plain]) if plain else 0
        work: Work[Any] = reduce_left(wait=False)
        return work

    def start_right() -> Work[Any]:
        with np.errstate(over="ignore", invalid="ignore"):
            for source, p, q, kept in zip(sources, lefts, rights, own, strict=False):
                p[...] = orthonormal(p)
                np.matmul(source.T, p, out=q)
                kept[...] = q
        work: Work[Any] = reduce_right(wait=False)
        return work

    @same_bits
    def finish() -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            for matrix, source, p, q, kept in zip(matrices, sources, lefts, rights, own, strict=False):
                lost = source - product(p, kept)
                lost[~np.isfinite(lost)] = 0
                matrix.of(residual)[...] += lost
                matrix.basis(bases, rank)[...] = q
                matrix.of(floats.x)[...] = product(p, q)
        taken = 0
        for each in plain:
            floats.x[each] = lefts[-1][taken : taken + each.stop - each.start]
            taken += each.stop - each.start
        floats.write_back()

    return Stages((start, start_right), finish)


def _views(shapes: Sequence[tuple[int, int]], more: int = 0) -> tuple[Array, list[Array]]:
    """Return flat float32 memory for matrices and `more` elements behind them, and views of all these."""
    sizes = [rows * columns for rows, columns in shapes]
    memory = np.zeros(sum(sizes) + more, np.float32)
    ends = np.cumsum(sizes).tolist()
    views = [memory[end - size : end].reshape(shape) for shape, size, end in zip(shapes, sizes, ends, strict=True)]
    return memory, [*views, memory[len(memory) - more :]]
