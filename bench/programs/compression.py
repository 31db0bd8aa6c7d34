"""Measures the processor time of each compression of gradients, without a network.

    unisono bench compression

One thread makes the reductions of one rank of four, whose collectives only copy. The time of a reduction is that of its
thread: encoding the own gradient, decoding and adding up the part of the rank or the elements of the others, and
decoding the result.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from unisono import Communicator
from unisono.frameworks.gradients.compression import compression_of
from unisono.frameworks.gradients.layout import Piece
from unisono.frameworks.gradients.stages import Flat
from unisono.frameworks.sparse_sums import SparseSums

DEFAULT = (
    *("float16", "bfloat16", "int8", "float8", "int4", "onebit"),
    *("topk:ratio=0.01", "topk:ratio=0.001", "powersgd:rank=1", "powersgd:rank=4"),
)
_COLUMNS = 1024
_WARMUP = 3


class ReductionCost(NamedTuple):
    """The cost of one reduction of a rank.

    Attributes:
        milliseconds: the processor time.
        sent_nbytes: the bytes that the rank sends, by the fewest that its collectives need.
    """

    milliseconds: float
    sent_nbytes: int


class _Copies:
    """A communicator of four ranks whose collectives copy the own array instead of receiving others."""

    size, rank = 4, 0

    def __init__(self) -> None:
        self.sent_nbytes = 0

    def plan(self, call: str, x: Any, *, out: Any, **_: Any) -> Callable[..., None]:
        # The bytes that each rank sends, as multiples of the array's: in an allreduce, an allgather and an alltoall.
        share = {"allreduce": 2 * (self.size - 1) / self.size, "allgather": self.size - 1}.get(
            call, (self.size - 1) / self.size
        )

        def run(*, wait: bool) -> None:
            self.sent_nbytes += round(share * x.nbytes)
            if call != "allreduce":
                np.copyto(out.reshape(self.size, -1), x.reshape(-1, out.size // self.size))

        return run


def cost(compression: str, elements: int, rounds: int) -> ReductionCost:
    """Return the cost of the reduction of a matrix of 1,024 columns, as the median over rounds.

    Raises:
        UsageError: there is no such compression.
    """
    form, comm = compression_of(compression), _Copies()
    x = np.random.default_rng(0).normal(size=elements).astype(np.float32)
    memory = x.copy()
    state = {kind: np.zeros(elements, np.float32) for kind in form.state}
    communicators = [cast(Communicator, comm)] * len(form.calls)
    sums, pieces = SparseSums(communicators[0]), [Piece(0, elements, _COLUMNS)]
    stages = form.stages(Flat(communicators, sums, memory, state, pieces, "avg", None))
    times = []
    for _ in range(_WARMUP + rounds):
        memory[...] = x
        began = time.thread_time()
        for start in stages.starts:
            start()
        stages.finish()
        times.append(time.thread_time() - began)
    return ReductionCost(1e3 * statistics.median(times[_WARMUP:]), comm.sent_nbytes // len(times))


@click.command()
@click.option("--mib", type=click.IntRange(min=1), default=4, show_default=True, help="MiB of float32 gradients.")
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True, help="Reductions of each.")
@click.argument("compressions", nargs=-1)
def main(mib: int, rounds: int, compressions: Sequence[str]) -> None:
    """Measure the processor time of COMPRESSIONS of gradients; by default, of all."""
    elements = mib << 18
    uncompressed = 2 * (_Copies.size - 1) / _Copies.size * 4 * elements
    table = Table("compression", "ms", "sent MB", "of float32", title=f"{mib} MiB of gradients, one of four ranks")
    for name in compressions or DEFAULT:
        row = cost(name, elements, rounds)
        table.add_row(
            name, f"{row.milliseconds:.1f}", f"{row.sent_nbytes / 1e6:.3f}", f"{row.sent_nbytes / uncompressed:.4f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
