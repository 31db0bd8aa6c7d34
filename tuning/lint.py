"""What cannot be right in a table: performance guidelines that hold on any machine (Träff, Gropp, Thakur 2010)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from unisono.tuning.store import Context
from unisono.tuning.table import Decision, Table

# What a collective can be put together from, at the same number of bytes of its vector: slower than them, it can be no
# good choice.
_MOCK_UPS = {
    "allreduce": (("reduce", "broadcast"), ("reduce_scatter", "allgather")),
    "reduce": (("allreduce",), ("reduce_scatter", "gather")),
    "broadcast": (("scatter", "allgather"),),
    "allgather": (("gather", "broadcast"),),
    "reduce_scatter": (("reduce", "scatter"),),
    "gather": (("allgather",),),
    "barrier": (("allreduce",),),
}
# Times are noisy; what is less than this much slower is left alone.
_SLACK = 1.10


def lint(table: Table) -> list[str]:
    """Return a line for each thing that is suspicious in a table, none if there is nothing."""
    found = list[str]()
    for context, decision in table.decisions.items():
        where = f"{context.collective}, {context.ranks} ranks by {context.link}"
        found += [f"{where}: {problem}" for problem in _alone(decision)]
        found += [f"{where}: {problem}" for problem in _beside(table, context, decision)]
    return found


def _alone(decision: Decision) -> Iterator[str]:
    for low, high in pairwise(decision.sizes):
        before, after = _best_s(decision, low), _best_s(decision, high)
        if before is not None and after is not None and before > _SLACK * after:
            yield f"{low} B take {before / after:.2f} times as long as {high} B: measure both again"
    for one, other in pairwise(decision.ranges):
        if one.end != other.first:
            yield f"no range covers {one.end} to {other.first} B, where the times decide"
    for nbytes in decision.sizes:
        chosen, times = decision.variant_at(nbytes), decision.times_at(nbytes)
        best = min(times, key=times.__getitem__, default=None)
        if chosen in times and best is not None and times[chosen] > _SLACK * times[best]:
            yield f"at {nbytes} B {chosen} takes {times[chosen] / times[best]:.2f} times as long as {best}"


def _beside(table: Table, context: Context, decision: Decision) -> Iterator[str]:
    for parts in _MOCK_UPS.get(context.collective, ()):
        others = [table.decisions.get(context._replace(collective=part, dtype="plain")) for part in parts]
        known = [other for other in others if other is not None]
        for nbytes in decision.sizes if len(known) == len(parts) else ():
            of_parts = [_best_s(other, nbytes) for other in known]
            own = _best_s(decision, nbytes)
            together = sum(each for each in of_parts if each is not None)
            if own is not None and None not in of_parts and own > _SLACK * together:
                yield f"{nbytes} B take {own / together:.2f} times as long as {' and then '.join(parts)}"


def _best_s(decision: Decision, nbytes: int) -> float | None:
    return min(decision.times_at(nbytes).values(), default=None)
