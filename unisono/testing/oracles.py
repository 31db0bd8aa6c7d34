"""Inputs and expected results of each rank, computed by numpy in wide arithmetic without any code of Unisono.

Every rank computes the data of all ranks, so nothing has to be communicated. Values are integers or halves, and only a
few ranks contribute to the sum or product of an element. So every partial result is exact in the dtype, in any order
and for any number of ranks. Only the division of an average may be inexact: there, one unit in the last place is
allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np
from numpy.typing import NDArray

from unisono.dtypes import DTYPES
from unisono.testing.cases import OPS, PREFIXES, Case, factor_of
from unisono.testing.functions import BASE, PRIME

_Array = NDArray[Any]

MOST_TERMS = 7
# The most terms of an 8-bit sum. In an average of several terms, no partial sum would be exact.
_SUMS = {"sum": MOST_TERMS, "premul_sum": 3, "avg": 1}
_RANGES = {"sum": (-8, 8), "premul_sum": (-8, 8), "avg": (-2, 2), "land": (0, 5), "lor": (0, 1), "lxor": (0, 2)}
# Products of these complex numbers have no zero part, because the sign of such a zero would depend on the order.
_FACTORS: dict[str, list[Any]] = {
    "integer": [1, -1, 2, 3],
    "float": [1.0, -1.0, 2.0, 0.5],
    "float8": [1.0, -1.0, 2.0, 0.5],
    "complex": [1, 2, 2 + 1j],
}
_WIDE = {"bool": np.int64, "integer": np.int64, "float": np.float64, "float8": np.float64, "complex": np.complex128}


def inputs(case: Case, size: int) -> list[_Array]:
    """Return the `x` of each rank. Ranks that need none get other data, which must not matter."""
    shapes = [case.shape(size, rank) for rank in range(size)]
    if case.reduces:
        stack = contributions(case.dtype, case.op, size, int(np.prod(shapes[0])), case.seed)
        return [row.reshape(shapes[0]) for row in stack]
    return [_numbered(7 * rank + case.seed, shapes[rank], case.dtype) for rank in range(size)]


def _numbered(first: int, shape: tuple[int, ...], dtype: str) -> _Array:
    values = (np.arange(int(np.prod(shape))) * 3 + first) % (2 if dtype == "bool" else 61)
    return values.astype(dtype).reshape(shape)


def result_of(case: Case, xs: list[_Array], rank: int) -> _Array | None:
    """Return the expected result of `rank`; None if it has no result, or its `out` must stay unchanged."""
    size = len(xs)
    if not case.contract.has_output(rank, case.root % size) or (case.collective == "exscan" and rank == 0):
        return None
    starts = np.cumsum([0, *case.counts_of(size)])
    own = slice(starts[rank], starts[rank + 1])
    if case.name in PREFIXES:
        return _combined(case, xs[: rank + (case.name == "scan")])
    if case.contract.reduces:
        total = _combined(case, xs)
        return total[own] if case.name == "reduce_scatter" else total
    if case.name == "alltoall":
        cuts = [np.cumsum(case.sent(size, peer))[:-1] for peer in range(size)]
        return np.concatenate([np.split(x, cut)[rank] for x, cut in zip(xs, cuts, strict=True)])
    if case.name in ("allgather", "gather"):
        return np.concatenate(xs)
    whole = xs[case.root % size]
    return whole[own] if case.name == "scatter" else whole


def _combined(case: Case, xs: list[_Array]) -> _Array:
    if case.op != "premul_sum":
        return reduced(case.op, np.stack(xs))
    scaled = [x * np.array(factor_of(case, rank), x.dtype) for rank, x in enumerate(xs)]
    return reduced("sum", np.stack(scaled))


def most_ulps(case: Case, size: int) -> int:
    """Return the number of units in the last place by which a correct result may differ from `result_of`."""
    return int(case.contract.reduces and case.op == "avg" and size > MOST_TERMS)


def contributions(dtype: str, op: str, size: int, count: int, seed: int = 0) -> _Array:
    """Return an array (size, count) whose reduction is exact in the dtype, in any order; see `most_ulps`."""
    # numpy keeps the stream of RandomState the same in all versions.
    state = np.random.RandomState([seed, size, count, OPS.index(op)])
    kind, shape = DTYPES[dtype].kind, (size, count)
    if op in ("minloc", "maxloc"):
        return (state.randint(-3, 4, shape) + 1j * state.randint(0, 21, shape)).astype(dtype)
    if op == "prod":
        return _few(state.choice(_factors(dtype), shape), MOST_TERMS, 1).astype(dtype)
    if op == "composition":
        return (state.randint(1, PRIME, shape) * BASE + state.randint(0, PRIME, shape)).astype(dtype)
    low, high = _range(dtype, op)
    values = state.randint(low, high + 1, shape)
    if kind == "complex" and op in _SUMS:
        values = values + 1j * state.randint(low, high + 1, shape)
    if op == "first_nonzero":
        values = values * state.randint(0, 2, shape)
    if op in _SUMS:
        values = _few(values, _SUMS[op] if kind == "float8" else MOST_TERMS, 0)
    if op == "avg" and kind != "integer" and size <= MOST_TERMS:
        values = values * size
    return values.astype(dtype)


def _range(dtype: str, op: str) -> tuple[int, int]:
    kind = DTYPES[dtype].kind
    low, high = _RANGES.get(op, (-100, 100))
    if kind == "float8":
        low, high = max(low, -1), min(high, 1)
    if kind == "bool" or dtype.startswith("uint"):
        low, high = 0, 1 if kind == "bool" else high
    return low, high


def _factors(dtype: str) -> list[Any]:
    if dtype.startswith("uint"):
        return [1, 2, 3]
    return _FACTORS[DTYPES[dtype].kind]


def _few(values: _Array, most: int, neutral: int) -> _Array:
    """Return `values` with all but `most` ranks neutral in each element. The choice rotates, so all ranks count."""
    size, count = values.shape
    takes_part = (np.arange(size)[:, None] - np.arange(count)) % size < most
    return np.where(takes_part, values, neutral)


def reduced(op: str, stack: _Array) -> _Array:
    """Return the reduction of `stack` along its first axis, rounded to its dtype."""
    wide = stack.astype(_WIDE[DTYPES[stack.dtype.name].kind])
    reduce: dict[str, Callable[[], Any]] = {
        "sum": lambda: wide.sum(axis=0),
        "prod": lambda: wide.prod(axis=0),
        "min": lambda: wide.min(axis=0),
        "max": lambda: wide.max(axis=0),
        "avg": lambda: _mean(wide),
        "band": lambda: np.bitwise_and.reduce(wide),
        "bor": lambda: np.bitwise_or.reduce(wide),
        "bxor": lambda: np.bitwise_xor.reduce(wide),
        "land": lambda: (wide != 0).all(axis=0),
        "lor": lambda: (wide != 0).any(axis=0),
        "lxor": lambda: (wide != 0).sum(axis=0) % 2,
        "minloc": lambda: _located(wide, 1),
        "maxloc": lambda: _located(wide, -1),
        "composition": lambda: _composed(wide),
        "first_nonzero": lambda: np.take_along_axis(wide, (wide != 0).argmax(axis=0)[np.newaxis], axis=0),
        "maximum": lambda: wide.max(axis=0),
    }
    return np.asarray(reduce[op]()).astype(stack.dtype).reshape(stack.shape[1:])


def _mean(wide: _Array) -> _Array:
    total = wide.sum(axis=0)
    if wide.dtype.kind == "c":
        parts: _Array = total.real / len(wide) + 1j * (total.imag / len(wide))
        return parts
    mean: _Array = np.trunc(total / len(wide)) if wide.dtype.kind == "i" else total / len(wide)
    return mean


def _located(wide: _Array, sign: int) -> _Array:
    """Return the (value, index) pairs with the least value times `sign` and, among equal ones, the least index."""
    best: _Array = wide[0]
    for row in wide[1:]:
        ahead, tied = sign * row.real < sign * best.real, row.real == best.real
        best = np.where(ahead | (tied & (row.imag < best.imag)), row, best)
    return best


def _composed(wide: _Array) -> _Array:
    """Return the composition of all maps, computed from its values at 0 and 1."""
    zero, one = np.zeros_like(wide[0]), np.ones_like(wide[0])
    for factor, constant in (np.divmod(row, BASE) for row in wide):
        zero, one = ((factor * point + constant) % PRIME for point in (zero, one))
    maps: _Array = (one - zero) % PRIME * BASE + zero
    return maps
