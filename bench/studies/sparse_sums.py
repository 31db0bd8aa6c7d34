"""Sums of sparse vectors by `SparseSums`, and by gathering all rows, as torch's Gloo does: bytes and times.

    unisono bench sparse_sums [--json]

The bytes are those that the busiest rank receives, counted without ranks. The times are medians of 2 and 4 ranks, whose
calls alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

import unisono as un
from unisono import Communicator
from unisono.foundation.program import begin
from unisono.frameworks.sparse_sums import SparseForm, SparseRows, SparseSums

RANKS = (4, 8, 16, 64)
TIMED_RANKS = (2, 4)
_ROUNDS = 41
_WARMUP = 5


class Data(NamedTuple):
    """Sparse vectors of a kind.

    Attributes:
        name: the name in the table.
        length: the number of indices.
        draws: how many indices a rank draws; equal ones count once.
        width: the number of float32 in a row.
        exponent: of the Zipf distribution of the indices, as words have; 0 for a uniform one.
    """

    name: str
    length: int
    draws: int
    width: int
    exponent: float = 0.0

    @property
    def form(self) -> SparseForm:
        return SparseForm(self.length, self.width, np.dtype(np.float32))

    def indices(self, rank: int) -> Any:
        """Return the ascending indices of a rank."""
        random = np.random.default_rng(rank)
        if not self.exponent:
            return np.sort(random.choice(self.length, self.draws, replace=False))
        weights = np.arange(1, self.length + 1) ** -self.exponent
        return np.unique(random.choice(self.length, self.draws, p=weights / weights.sum()))

    def rows(self, rank: int) -> SparseRows:
        """Return the rows of a rank."""
        indices = self.indices(rank)
        return SparseRows(indices, np.full((indices.size, self.width), 1 + rank, np.float32))


DATA = (
    Data("1 % of 1 Mi elements, uniform", 1 << 20, 10486, 1),
    Data("10 % of 1 Mi elements, uniform", 1 << 20, 104858, 1),
    Data("4,096 words, rows of 64", 100_000, 4096, 64, 1.0),
    Data("256 words, rows of 64", 100_000, 256, 64, 1.0),
)


def received(data: Data, size: int) -> dict[str, int]:
    """Return, by way, the bytes that the busiest of `size` ranks receives."""
    form, vectors = data.form, [data.rows(rank) for rank in range(size)]
    counts = [rows.places.size for rows in vectors]
    row = 8 + 4 * data.width  # indices of torch have 8 bytes
    return {
        "gathering": (sum(counts) - min(counts)) * row,
        "doubling": _received_by_doubling(form, vectors),
        "splitting": _received_by_splitting(form, vectors),
    }


def _received_by_doubling(form: SparseForm, vectors: Sequence[SparseRows]) -> int:
    """Return the bytes that the busiest rank receives, of a power of two of ranks."""
    nbytes, current = np.zeros(len(vectors), np.int64), [form.shorter(rows) for rows in vectors]
    distance = 1
    while distance < len(vectors):
        nbytes += [form.packed(current[rank ^ distance]).size for rank in range(len(vectors))]
        # Ranks that differ in the bits below 2 · distance have the same sum.
        totals = {at: form.added(current[at], current[at + distance]) for at in range(0, len(vectors), 2 * distance)}
        current = [totals[rank - rank % (2 * distance)] for rank in range(len(vectors))]
        distance *= 2
    return int(nbytes.max())


def _received_by_splitting(form: SparseForm, vectors: Sequence[SparseRows]) -> int:
    size = len(vectors)
    sent = np.array([np.bincount(rows.places % size, minlength=size) for rows in vectors])
    parts = np.bincount(np.unique(np.concatenate([rows.places for rows in vectors])) % size, minlength=size)
    first = (sent.sum(axis=0) - np.diag(sent)) * form.row_nbytes
    is_dense = form.is_shorter_dense(int(parts.sum()))
    second = form.dense_nbytes * (size - 1) // size if is_dense else (parts.sum() - parts) * form.row_nbytes
    return int((first + second).max())


def gathered(comm: Communicator, form: SparseForm, rows: SparseRows) -> SparseRows:
    """Return the sum after gathering the rows of all ranks, as before `SparseSums`."""
    counts = comm.allgather(np.array([rows.places.size])).tolist()
    places = comm.allgatherv(rows.places, counts, wait=False)
    values = comm.allgatherv(rows.values, counts, wait=False)
    return form.added_all(SparseRows(places.wait(), values.wait()), counts)


def _times(world: Communicator, number: int) -> tuple[float, float]:
    """Return the median seconds of gathering and of `SparseSums`, on this rank."""
    data = DATA[number]
    rows, sums = data.rows(world.rank), SparseSums(world)
    ways: Sequence[Callable[[], Any]] = (
        lambda: gathered(world, data.form, rows),
        lambda: sums.start(rows.places, rows.values, data.length),
    )
    times: list[list[float]] = [[], []]
    for _ in range(_WARMUP + _ROUNDS):
        for way, seconds in zip(ways, times, strict=True):
            world.barrier()
            began = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - began)
    before, after = (statistics.median(seconds[_WARMUP:]) for seconds in times)
    return before, after


def _rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for number, data in enumerate(DATA):
        results += [{"data": data.name, "ranks": size, **received(data, size)} for size in RANKS]
        for size in TIMED_RANKS if arguments.times else ():
            before, after = max(un.launch(_times, size, number))
            results.append({"data": data.name, "ranks": size, "gathering_s": before, "sparse_sums_s": after})
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Count bytes, measure times, and show a table."""
    begin()
    parser = argparse.ArgumentParser(prog="unisono bench sparse_sums", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    parser.add_argument("--no-times", dest="times", action="store_false", help="count bytes only")
    options = parser.parse_args(arguments)
    results = _rows(options)
    if options.json:
        sys.stdout.write(f"{json.dumps(results, indent=1)}\n")
        return 0
    table = Table("data", "ranks", "gathering", "doubling", "splitting")
    for row in results:
        if "gathering_s" in row:
            numbers = [f"{1e3 * row['gathering_s']:.2f} ms", f"SparseSums: {1e3 * row['sparse_sums_s']:.2f} ms", ""]
        else:
            numbers = [f"{row[way] / 1e3:,.0f} kB" for way in ("gathering", "doubling", "splitting")]
        table.add_row(row["data"], str(row["ranks"]), *numbers)
    (Console() if sys.stdout.isatty() else Console(width=120)).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
