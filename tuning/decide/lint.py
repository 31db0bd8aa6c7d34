"""Checks a decision table against performance guidelines that hold on any machine (Träff, Gropp, Thakur 2010).

For example, an allreduce must not take longer than a reduce and then a broadcast, because these two do the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from unisono.tuning.decide.table import Decision, Table
from unisono.tuning.measure.measurement_log import Context

# For each collective, the sequences of other collectives that do the same with as many bytes. A table that makes the
# collective slower than one of these sequences is suspicious.
_MOCK_UPS = {
    "allreduce": (("reduce", "broadcast"), ("reduce_scatter", "allgather")),
    "reduce": (("allreduce",), ("reduce_scatter", "gather")),
    "broadcast": (("scatter", "allgather"),),
    "allgather": (("gather", "broadcast"),),
    "reduce_scatter": (("reduce", "scatter"),),
    "gather": (("allgather",),),
    "barrier": (("allreduce",),),
}
# Times are noisy, so a guideline counts as broken only if a time is larger by this factor.
_SLACK = 1.10


class Suspicion(NamedTuple):
    """A place in a decision table where measured times break one guideline.

    Attributes:
        text: a sentence about it.
        points: the measured points that break it, each a context and the bytes of the vector. There are none if a
            range was written by hand.
        factor: by how much a measured time is too large; 1 without points.
    """

    text: str
    points: tuple[tuple[Context, int], ...]
    factor: float = 1.0


def lint(table: Table) -> list[Suspicion]:
    """Return the suspicious times of a table; none if all its times and ranges agree with each other."""
    suspicions = list[Suspicion]()
    for context, decision in table.decisions.items():
        where = f"{context.collective}, {context.ranks} ranks by {context.link}"
        for suspicion in (*_alone(context, decision), *_beside(table, context, decision)):
            suspicions.append(suspicion._replace(text=f"{where}: {suspicion.text}"))
    return suspicions


def _alone(context: Context, decision: Decision) -> Iterator[Suspicion]:
    for low, high in pairwise(decision.sizes):
        before, after = _best_s(decision, low), _best_s(decision, high)
        if before is not None and after is not None and before > _SLACK * after:
            text = f"{low} B take {before / after:.2f} times as long as {high} B: measure both again"
            yield Suspicion(text, ((context, low), (context, high)), before / after)
    for one, other in pairwise(decision.ranges):
        if one.end != other.first and decision.reach is None:
            yield Suspicion(f"no range covers {one.end} to {other.first} B, where the times decide", ())
    for nbytes in decision.sizes:
        chosen, times = decision.variant_at(nbytes), decision.times_at(nbytes)
        best = min(times, key=times.__getitem__, default=None)
        if chosen in times and best is not None and times[chosen] > _SLACK * times[best]:
            text = f"at {nbytes} B {chosen} takes {times[chosen] / times[best]:.2f} times as long as {best}"
            yield Suspicion(text, ())


def _beside(table: Table, context: Context, decision: Decision) -> Iterator[Suspicion]:
    for parts in _MOCK_UPS.get(context.collective, ()):
        contexts = [context._replace(collective=part, dtype="plain") for part in parts]
        decisions = [table.decisions[each] for each in contexts if each in table.decisions]
        for nbytes in decision.sizes if len(decisions) == len(parts) else ():
            of_parts = [_best_s(other, nbytes) for other in decisions]
            own = _best_s(decision, nbytes)
            together = sum(each for each in of_parts if each is not None)
            if own is not None and None not in of_parts and own > _SLACK * together:
                text = f"{nbytes} B take {own / together:.2f} times as long as {' and then '.join(parts)}"
                yield Suspicion(text, tuple((each, nbytes) for each in (context, *contexts)), own / together)


def _best_s(decision: Decision, nbytes: int) -> float | None:
    return min(decision.times_at(nbytes).values(), default=None)
