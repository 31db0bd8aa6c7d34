"""Measures the cost of the decision at call time: which algorithm runs, with which plan, over how many segments.

    unisono bench decision

The native core looks a call up by its collective, dtype, shape, memory order, op, root and algorithm. One rank alone
makes the calls, so a call consists of Python's call, the lookup, and the copy of a few elements. If calls of many
shapes take turns, each has to be looked up among all. The extra time, compared with one repeated call, is the cost of
the lookup. The first call of a shape is decided in Python by the tuner, and is shown for comparison.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import click
import numpy as np

import unisono as un
from unisono.errors import UnisonoError


class Costs(NamedTuple):
    """Nanoseconds of a call: with the same arrays again, with known shapes in turn, and the first call of a shape."""

    same_ns: float
    known_ns: float
    first_ns: float

    @property
    def lookup_ns(self) -> float:
        """The cost of the lookup, compared with a call on the same arrays."""
        return self.known_ns - self.same_ns


def measure(world: un.Communicator, kinds: int, calls: int, rounds: int) -> Costs:
    """Return the costs with `kinds` known shapes, as minima over interleaved rounds because other load only adds.

    Raises:
        UsageError: there is more than one rank.
    """
    if world.size > 1:
        raise un.UsageError("decisions are measured by one rank alone, because other ranks would add waiting")
    arrays = [(np.ones(1 + kind, np.float32), np.empty(1 + kind, np.float32)) for kind in range(kinds)]
    first_ns = median(_per_call(world, [pair]) for pair in arrays)
    same, known = [arrays[0]] * calls, [arrays[k % kinds] for k in range(calls)]
    times = [(_per_call(world, same), _per_call(world, known)) for _ in range(rounds)]
    return Costs(min(one for one, _ in times), min(other for _, other in times), first_ns)


def _per_call(world: un.Communicator, arrays: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    def run() -> None:
        allreduce = world.allreduce
        for x, out in arrays:
            allreduce(x, out=out)

    return _timed(run, len(arrays))


def _timed(run: Callable[[], object], calls: int) -> float:
    began = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - began) / calls


@click.command()
@click.option("--kinds", type=click.IntRange(min=2), default=64, show_default=True, help="Shapes in turn.")
@click.option("--calls", type=click.IntRange(min=1), default=10_000, show_default=True, help="In each round.")
@click.option("--rounds", type=click.IntRange(min=1), default=31, show_default=True)
def main(kinds: int, calls: int, rounds: int) -> None:
    """Show the cost of the decision at call time."""
    costs = un.launch(measure, 1, kinds, calls, rounds)[0]
    click.echo(f"the same arrays again:      {costs.same_ns:8.0f} ns for each call")
    click.echo(
        f"{kinds:4} known shapes in turn:  {costs.known_ns:8.0f} ns, so the lookup takes {costs.lookup_ns:.0f} ns"
    )
    click.echo(f"the first call of a shape:  {costs.first_ns:8.0f} ns, decided by the tuner")


if __name__ == "__main__":
    try:
        main()
    except UnisonoError as error:
        sys.exit(f"unisono: {error}")
