"""The algorithms that another library shares with Unisono, and the rules of a decision table in its names.

Theory of operation. A decision says which variant is fastest from how many bytes on, among how many ranks. Another
library has algorithms of its own. A `Library` names, for each algorithm of Unisono, the algorithm that passes the same
messages there. An algorithm without such a counterpart makes no rule: the library then chooses by itself. An
`Omission` names each such range and the reason.

All libraries here count bytes as Unisono does: those of the whole vector, which for an allgather is the result on each
rank. MPICH counts otherwise for an alltoall, so its writer converts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from unisono.algorithms.catalogue.variants import SEGMENT, Variant, parsed
from unisono.errors import UsageError
from unisono.tuning.decide.table import Table
from unisono.tuning.measure.measurement_log import Context


class Rule(NamedTuple):
    """A rule: the algorithm of the other library for vectors of `first` to `end` - 1 bytes; `end` None has no end.

    Attributes:
        collective: the collective of the other library.
        ranks, ranks_per_host: of the communicator.
        algorithm: the name or number in the other library.
        segment_nbytes: the bytes of a segment; 0 for whole blocks.
    """

    collective: str
    ranks: int
    ranks_per_host: int
    first: int
    end: int | None
    algorithm: str
    segment_nbytes: int = 0


class Omission(NamedTuple):
    """A range that makes no rule, and the reason."""

    context: Context
    first: int
    variant: str
    reason: str

    def __str__(self) -> str:
        where = f"{self.context.collective} among {self.context.ranks} ranks from {self.first} B"
        return f"{where}: {self.variant} is left out, because {self.reason}"


class Library(NamedTuple):
    """Another library.

    Attributes:
        name: in messages.
        collectives: the collectives there, for each collective of Unisono.
        algorithms: for each collective there, its algorithms by the names of Unisono's.
        segmented: pairs of a collective there and an algorithm there that take a length of segments.
        memory: where the arrays of its calls are: "host" or "device".
    """

    name: str
    collectives: Mapping[str, tuple[str, ...]]
    algorithms: Mapping[str, Mapping[str, str]]
    segmented: frozenset[tuple[str, str]] = frozenset()
    memory: str = "host"


def rules_of(
    table: Table, library: Library, *, link: str | None = None, machine: str | None = None
) -> tuple[list[Rule], list[Omission]]:
    """Return the rules of a table in the names of a library, and the ranges that make none.

    Args:
        table: decisions for dtypes that are not "plain" are ignored, because no library here asks for the dtype.
        library: names the algorithms.
        link: only decisions for this kind of link are used.
        machine: only decisions of the machine with this fingerprint are used.

    Raises:
        UsageError: two decisions are for the same calls, or none is for the memory of the library.
    """
    rules, omissions = list[Rule](), list[Omission]()
    for context, ranges in _decisions(table, library, link, machine).items():
        there = library.collectives.get(context.collective, ())
        for part in ranges:
            variant = parsed(part.variant)
            reasons = []
            for collective in there:
                algorithm, reason = _counterpart(library, collective, variant)
                reasons.append(reason)
                if not reason:
                    segment = int(dict(variant.params).get(SEGMENT, 0))
                    where = (collective, context.ranks, context.ranks_per_host)
                    rules.append(Rule(*where, part.first, part.end, algorithm, segment))
            if all(reasons):
                reason = reasons[0] if reasons else f"{library.name} has no {context.collective} to tune"
                omissions.append(Omission(context, part.first, part.variant, reason))
    return sorted(rules, key=lambda rule: (rule.collective, rule.ranks, rule.first)), omissions


def _counterpart(library: Library, collective: str, variant: Variant) -> tuple[str, str]:
    """Return the algorithm of the library and "", or "" and the reason why it has none."""
    algorithm = library.algorithms[collective].get(variant.algorithm)
    if algorithm is None:
        return "", f"{library.name} has no such algorithm for {collective}"
    params = dict(variant.params)
    has_segments = params.pop(SEGMENT, None) is not None
    if has_segments and (collective, algorithm) not in library.segmented:
        return "", f"{library.name} sets no segments for it"
    if params:
        return "", f"{library.name} sets no {', '.join(params)} for it"
    return algorithm, ""


def _decisions(table: Table, library: Library, link: str | None, machine: str | None) -> dict[Context, tuple]:  # type: ignore[type-arg]
    """Return the ranges by context, for the contexts that fit."""
    fitting = [
        each
        for each in sorted(table.decisions)
        if each.dtype == "plain" and each.memory == library.memory
        if link in (None, each.link) and machine in (None, each.machine)
    ]
    if not fitting:
        raise UsageError(f"the table has no decision for arrays in {library.memory} memory that fits {library.name}")
    by_call: dict[tuple[str, int], Context] = {}
    for each in fitting:
        other = by_call.setdefault((each.collective, each.ranks), each)
        if other != each:
            fields = [name for name in each._fields if getattr(each, name) != getattr(other, name)]
            differ = ", ".join(f"{name} {getattr(other, name)} and {getattr(each, name)}" for name in fields)
            both = f"the table has two decisions for {each.collective} among {each.ranks} ranks ({differ})"
            raise UsageError(f"{both}, and {library.name} tells them not apart: choose one by --link or --machine")
    return {each: table.decisions[each].ranges for each in fitting}
