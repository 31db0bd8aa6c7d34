"""Decision tables: for each collective and place, which variant of an algorithm from how many bytes on, and the times.

Theory of operation. A table is compiled from measurements (`tuning.store`). In one context, each variant has times at
some sizes; between two of them its time is interpolated, by logarithms of bytes and seconds, and the fastest is taken:
so ranges begin where two curves cross. For a number of ranks between two that were measured, the curves themselves are
interpolated, by the logarithm of the number of ranks, and then the best is taken; winners are not copied from one
number of ranks to another. A variant is compared only where it was measured on both sides, for there is a reason where
it was not.

A table is a JSON file that people can read and change: ranges decide, and times say why.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from unisono import log
from unisono.algorithms.catalogue.registry import check_variant
from unisono.algorithms.catalogue.variants import parsed
from unisono.errors import NoAlgorithmError, UsageError
from unisono.tuning.machine.parameters import between
from unisono.tuning.measure.measurement_log import Context, Measurement

_log = log.get()

FORMAT = 1
# How many times as long as the best another variant takes before it gives way.
WORTH_IT = 1.02
KIND = "unisono table"
_NUMBERS = ("ranks", "ranks_per_host")


class Range(NamedTuple):
    """The variant for vectors of at least `first` and fewer than `end` bytes; `end` is None for all that are longer."""

    first: int
    end: int | None
    variant: str


class Decision(NamedTuple):
    """What is known in one context.

    Attributes:
        ranges: ascending, apart from each other.
        sizes: bytes at which times were measured, ascending.
        times_s: of each variant, one for each size; None where it was not measured.
    """

    ranges: tuple[Range, ...]
    sizes: tuple[int, ...]
    times_s: Mapping[str, tuple[float | None, ...]]

    def times_at(self, nbytes: int) -> dict[str, float]:
        """Return the time of each variant that was measured on both sides of `nbytes`, or right there."""
        after = bisect_left(self.sizes, nbytes)
        if after < len(self.sizes) and self.sizes[after] == nbytes:
            places: tuple[int, ...] = (after,)
        else:
            places = tuple(place for place in (after - 1, after) if 0 <= place < len(self.sizes))
        found = {
            variant: self._between([(self.sizes[place], seconds) for place, seconds in known], nbytes)
            for variant, times in self.times_s.items()
            if len(known := [(place, s) for place in places if (s := times[place]) is not None]) == len(places)
        }
        return found

    @staticmethod
    def _between(known: Sequence[tuple[int, float]], nbytes: int) -> float:
        (low, below), (high, above) = known[0], known[-1]
        if low == high:  # Right there, or beyond the end, where longer ones take as much longer as they are.
            return below * max(1.0, nbytes / max(1, low))
        return between(nbytes, (low, below), (high, above))

    def variant_at(self, nbytes: int) -> str | None:
        """Return the variant of the range that `nbytes` is in, if there is one."""
        place = bisect_right([each.first for each in self.ranges], nbytes) - 1
        found = self.ranges[place] if place >= 0 else None
        return found.variant if found and (found.end is None or nbytes < found.end) else None


class Reading(NamedTuple):
    """What a table says about a call.

    Attributes:
        tier: how: "table" (this number of ranks) or "table, interpolated" (between numbers of ranks), with ", another
            dtype" or ", another machine" where it knows no better.
        variant: the one that the range names; None where the times decide.
        times_s: of all variants that it has times of.
        is_interpolated: whether all that is of other numbers of ranks.
    """

    tier: str
    variant: str | None
    times_s: Mapping[str, float]
    is_interpolated: bool


class Table(NamedTuple):
    """What a table file holds.

    Attributes:
        decisions: by context.
        machines: by fingerprint, what is known of the machines that were measured: their identity
            (`tuning.identity.describe`), and when and at which load that was (`measured_when`).
    """

    decisions: Mapping[Context, Decision]
    machines: Mapping[str, Mapping[str, Any]] = {}

    def read(self, context: Context, nbytes: int) -> Reading | None:
        """Return what is known about calls in a context, or else with another dtype or machine; None if nothing is."""
        machines = sorted({each.machine for each in self.decisions}, key=lambda name: (name != context.machine, name))
        for machine in machines:
            for dtype in dict.fromkeys((context.dtype, "plain")):
                reading = self._read(context._replace(machine=machine, dtype=dtype), nbytes)
                if reading is not None:
                    others = "" if dtype == context.dtype else ", another dtype"
                    others += "" if machine == context.machine else ", another machine"
                    return reading._replace(tier=reading.tier + others)
        return None

    def _read(self, context: Context, nbytes: int) -> Reading | None:
        known = self.decisions.get(context)
        if known is not None:
            times = known.times_at(nbytes)
            variant = known.variant_at(nbytes)
            return Reading("table", variant, times, False) if variant or times else None
        few, many = self._neighbours(context)
        if few is None or many is None:
            return None
        times_of_few, times_of_many = self.decisions[few].times_at(nbytes), self.decisions[many].times_at(nbytes)
        times = {
            variant: between(context.ranks, (few.ranks, seconds), (many.ranks, times_of_many[variant]))
            for variant, seconds in times_of_few.items()
            if variant in times_of_many
        }
        return Reading("table, interpolated", None, times, True) if times else None

    def _neighbours(self, context: Context) -> tuple[Context | None, Context | None]:
        """Return the contexts with the nearest smaller and larger number of ranks, with as many on each host."""
        alike = sorted(
            (each for each in self.decisions if each._replace(ranks=0) == _with_ranks(context, each)._replace(ranks=0)),
            key=lambda each: each.ranks,
        )
        few = [each for each in alike if each.ranks < context.ranks]
        many = [each for each in alike if each.ranks > context.ranks]
        return (few[-1] if few else None, many[0] if many else None)


def _with_ranks(context: Context, other: Context) -> Context:
    """Return the context with as many ranks on a host as another has, where both are on one host."""
    both_on_one_host = context.ranks == context.ranks_per_host and other.ranks == other.ranks_per_host
    return context._replace(ranks_per_host=other.ranks_per_host) if both_on_one_host else context


def compiled(measurements: Iterable[Measurement]) -> Table:
    """Return the table that follows from measurements; of several of one variant and size, their rounds count."""
    by_context = defaultdict[Context, dict[tuple[str, int], list[Measurement]]](lambda: defaultdict(list))
    for each in measurements:
        by_context[each.context][each.variant, each.nbytes].append(each)
    return Table({context: _decision(found) for context, found in sorted(by_context.items())})


def measured_when(measurements: Iterable[Measurement]) -> dict[str, dict[str, Any]]:
    """Return for each machine, by its fingerprint, when it was measured and how busy it was then.

    The fields are ``measured``, the first and the last date, and ``load``, the least and the greatest load average;
    a field that no measurement of the machine has is left out.
    """
    by_machine = defaultdict[str, list[Measurement]](list)
    for each in measurements:
        by_machine[each.context.machine].append(each)
    found = dict[str, dict[str, Any]]()
    for machine, of_machine in by_machine.items():
        dates = sorted(each.date for each in of_machine if each.date)
        loads = sorted(each.load for each in of_machine if each.load is not None)
        found[machine] = {
            name: [every[0], every[-1]] for name, every in (("measured", dates), ("load", loads)) if every
        }
    return found


def _decision(found: Mapping[tuple[str, int], Sequence[Measurement]]) -> Decision:
    sizes = tuple(sorted({nbytes for _, nbytes in found}))
    times = {
        variant: tuple(_pooled_s(found.get((variant, nbytes), ())) for nbytes in sizes)
        for variant in sorted({variant for variant, _ in found})
    }
    return Decision(_ranges(Decision((), sizes, times)), sizes, times)


def _pooled_s(found: Sequence[Measurement]) -> float | None:
    """Return the mean of the medians by their rounds, of logarithms, as jobs differ by factors; None of none."""
    if not found:
        return None
    return math.exp(sum(math.log(each.median_s) * each.rounds for each in found) / sum(each.rounds for each in found))


def _ranges(known: Decision) -> tuple[Range, ...]:
    """Return the ranges in which one variant is fastest: looked for at each size, and between where winners differ."""
    winners = _winners(known)
    edges = [(0, winners[0][1])]
    for (low, before), (high, after) in pairwise(winners):
        if before != after:
            edges += _crossings(known, (low, before), (high, after))
    firsts = [edge for number, edge in enumerate(edges) if number == 0 or edge[1] != edges[number - 1][1]]
    ends = [*(first for first, _ in firsts[1:]), None]
    return tuple(Range(first, end, variant) for (first, variant), end in zip(firsts, ends, strict=True))


def _winners(known: Decision) -> list[tuple[int, str]]:
    """Return the variant to take at each size: the one of the size before, unless another is worth a change."""
    found = list[tuple[int, str]]()
    for nbytes in known.sizes:
        times = known.times_at(nbytes)
        best = min(times, key=times.__getitem__)
        before = found[-1][1] if found else best
        found.append((nbytes, before if times.get(before, math.inf) <= WORTH_IT * times[best] else best))
    return found


def _crossings(known: Decision, low: tuple[int, str], high: tuple[int, str]) -> list[tuple[int, str]]:
    """Return from how many bytes on which variant is fastest, between two sizes at which two others are."""
    edges, (nbytes, variant) = list[tuple[int, str]](), low
    steps = 64
    for step in range(1, steps):
        there = round(max(1, low[0]) * (high[0] / max(1, low[0])) ** (step / steps))
        if there <= nbytes or not (times := known.times_at(there)):
            continue
        best = min(times, key=times.__getitem__)
        nbytes = there
        if best != variant and times.get(variant, math.inf) > WORTH_IT * times[best]:
            edges.append((there, best))
            variant = best
    return edges if variant == high[1] else [*edges, high]


def to_json(table: Table, **about: Any) -> dict[str, Any]:
    """Return a table as JSON has it; `about` says where it is from."""
    return {
        "format": KIND,
        "version": FORMAT,
        **about,
        "decisions": [
            {
                **context._asdict(),
                "ranges": [{"from": each.first, "to": each.end, "algorithm": each.variant} for each in decision.ranges],
                "sizes": list(decision.sizes),
                "times_us": {
                    variant: [None if seconds is None else round(seconds * 1e6, 3) for seconds in times]
                    for variant, times in decision.times_s.items()
                },
            }
            for context, decision in table.decisions.items()
        ],
    }


def dumped(content: Mapping[str, Any]) -> str:
    """Return the text of a table's file: a line for each range and each row of times."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in content.items() if name != "decisions"]
    decisions = ",\n".join(map(_dumped_decision, content["decisions"]))
    return "{\n" + "\n".join(lines) + '\n "decisions": [\n' + decisions + "\n ]\n}\n"


def _dumped_decision(decision: Mapping[str, Any]) -> str:
    where = {name: value for name, value in decision.items() if name not in ("ranges", "sizes", "times_us")}
    head = json.dumps(where)[1:-1]
    ranges = ",\n".join(f"   {json.dumps(each)}" for each in decision["ranges"])
    times = ",\n".join(f"   {json.dumps(name)}: {json.dumps(each)}" for name, each in decision["times_us"].items())
    sizes = json.dumps(decision["sizes"])
    return f'  {{{head},\n  "ranges": [\n{ranges}],\n  "sizes": {sizes},\n  "times_us": {{\n{times}}}}}'


def loaded(path: Path) -> Table:
    """Return the table in a file.

    Raises:
        UsageError: it cannot be read, or is none; says where and what to do.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the table {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return from_text(text, str(path))


def from_text(text: str, name: str) -> Table:
    """Return the table in the text of its file, which is called `name`; raises as `loaded` does."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        advice = f"`unisono tune merge {name} --out {name}` compiles it anew from the measurements beside it"
        raise UsageError(f"the table {name} is no whole JSON, as of a file cut short: {error}; {advice}") from None
    if not isinstance(content, dict) or content.get("format") != KIND:
        raise UsageError(f"{name} is no table of Unisono: `unisono tune` makes one")
    if content.get("version") != FORMAT:
        what = f"of version {content.get('version')!r}, and this Unisono reads version {FORMAT}"
        raise UsageError(f"the table {name} is {what}: use the Unisono that wrote it, or tune again")
    if not isinstance(content.get("decisions"), list):
        raise UsageError(f"the table {name} cannot be used: it has no list of decisions")
    decisions: dict[Context, Decision] = {}
    for number, each in enumerate(content["decisions"], start=1):
        try:
            context, decision = _read_decision(each, number)
            if context in decisions:
                raise ValueError(f"decision {number} is of the same calls as an earlier one: leave one of the two out")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"the table {name} cannot be used: {_reason(error, number)}") from None
        decisions[context] = decision
    machines = content.get("machines", {})
    are_described = isinstance(machines, dict) and all(isinstance(each, dict) for each in machines.values())
    return Table(decisions, machines if are_described else {})


def _reason(error: Exception, number: int) -> str:
    if isinstance(error, ValueError):
        return str(error)
    lack = f"{error} is missing" if isinstance(error, KeyError) else "it is not written as `unisono tune` does"
    return f"decision {number}: {lack}"


def _read_decision(found: Mapping[str, Any], number: int) -> tuple[Context, Decision]:
    context = Context(**{field: found[field] for field in Context._fields})
    for field, value in context._asdict().items():
        if not (type(value) is int and value > 0 if field in _NUMBERS else type(value) is str):
            raise ValueError(f"decision {number}: its {field} is {value!r}")
    where = f"decision {number} ({context.collective}, {context.ranks} ranks by {context.link})"
    ranges = tuple(Range(each["from"], each["to"], each["algorithm"]) for each in found["ranges"])
    _check_ranges(ranges, where)
    sizes = tuple(found["sizes"])
    if list(sizes) != sorted(set(sizes)) or not all(type(nbytes) is int and nbytes >= 0 for nbytes in sizes):
        raise ValueError(f"{where}: sizes are not ascending numbers of bytes")
    known = {variant: times for variant, times in found["times_us"].items() if _is_known(context, variant, where)}
    for variant, times in known.items():
        if len(times) != len(sizes) or not all(each is None or 0 < each < math.inf for each in times):
            raise ValueError(f"{where}: the times of {variant} are not a positive number or null for each size")
    times_s = {variant: tuple(None if us is None else us / 1e6 for us in times) for variant, times in known.items()}
    kept = tuple(each for each in ranges if _is_known(context, each.variant, where))
    return context, Decision(kept, sizes, times_s)


def _check_ranges(ranges: Sequence[Range], where: str) -> None:
    for each in ranges:
        whole = type(each.first) is int and (each.end is None or type(each.end) is int)
        if not whole or each.first < 0 or (each.end is not None and each.end <= each.first):
            raise ValueError(f"{where}: no range goes from {each.first!r} to {each.end!r}")
    for before, after in pairwise(ranges):
        if before.end is None or before.end > after.first:
            them = f"{before.variant} to {before.end} and {after.variant} from {after.first}"
            raise ValueError(f"{where}: ranges overlap or are not ascending: {them}; mend one of the two")


_told = set[str]()


def _is_known(context: Context, variant: str, where: str) -> bool:
    """Return whether the algorithm of a variant is there; if not, say so once."""
    try:
        check_variant(context.collective, parsed(variant))
        return True
    except (NoAlgorithmError, UsageError) as error:
        reason = str(error)
    except ValueError:
        reason = f"{variant!r} names no algorithm"
    if reason not in _told:
        _told.add(reason)
        _log.warning("%s of a table is left out: %s", where, reason)
    return False


def differences(first: Table, second: Table) -> list[str]:
    """Return a line for each decision that two tables do not have in common, or in which other variants are chosen."""
    found = list[str]()
    for context in sorted({*first.decisions, *second.decisions}):
        where = f"{context.collective}, {context.ranks} ranks by {context.link}, {context.dtype}"
        if context not in first.decisions or context not in second.decisions:
            found.append(f"{where}: only in the {'first' if context in first.decisions else 'second'}")
            continue
        one, other = first.decisions[context], second.decisions[context]
        for nbytes in sorted({each.first for each in (*one.ranges, *other.ranges)}):
            names = one.variant_at(nbytes), other.variant_at(nbytes)
            if names[0] != names[1]:
                found.append(f"{where}, from {nbytes} B: {names[0]} and {names[1]}")
    return found
