"""Decision tables: for each kind of call, the variant of an algorithm to use from how many bytes on, and all times.

A table is a JSON file that people can read and change. Its ranges decide, and its times show why.

Theory of operation
-------------------
A table is compiled from measurements (`measure/measurement_log.py`). In one context, each variant has times at some
sizes. Between two sizes, its time is interpolated linearly in the logarithms of bytes and seconds. The fastest variant
wins, so a range begins where the curves of two variants cross.

For a number of ranks between two measured ones, the curves are interpolated by the logarithm of the number of ranks,
and then the fastest variant is taken. The winner of another number of ranks is never copied.

A variant is compared only where it was measured on both sides, because a missing measurement has a reason.

A campaign measures sizes all over a range, so its first and last winners also decide beyond them. A job that tries
algorithms in its calls measures the sizes that it happens to use. Such a decision has a *reach*: it says nothing about
sizes that are further than a factor from every measured one, and the model decides there.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from unisono.algorithms.catalogue.on_devices import ROUTES
from unisono.algorithms.catalogue.registry import check_variant
from unisono.algorithms.catalogue.variants import parsed
from unisono.errors import NoAlgorithmError, UsageError
from unisono.foundation import log
from unisono.foundation.json_checks import parsed_json
from unisono.tuning.machine.parameters import LEAST_S, MOST, MOST_S, between
from unisono.tuning.measure.measurement_log import Context, Measurement

_log = log.get("tuning")

FORMAT = 1
# A variant keeps its range until another one is faster by this factor.
WORTH_IT = 1.02
KIND = "unisono table"
# The reach of decisions that follow from the calls of jobs alone.
REACH = 4
_NUMBERS = ("ranks", "ranks_per_host")


class Range(NamedTuple):
    """The variant for vectors of at least `first` and fewer than `end` bytes; `end` is None for the last range."""

    first: int
    end: int | None
    variant: str


class Decision(NamedTuple):
    """A decision: the ranges and the times of one context (collective, ranks, link and class of dtypes).

    Attributes:
        ranges: ascending and disjoint.
        sizes: bytes at which times were measured, ascending.
        times_s: for each variant, one time for each size; None where it was not measured.
        reach: the factor up to which times count at other sizes than the measured ones; None if there is no limit.
    """

    ranges: tuple[Range, ...]
    sizes: tuple[int, ...]
    times_s: Mapping[str, tuple[float | None, ...]]
    reach: int | None = None

    def reached(self) -> list[tuple[int, int | None]]:
        """Return the intervals of bytes in which times count, each from its first size to before its end."""
        if self.reach is None:
            return [(0, None)]
        intervals = list[tuple[int, int | None]]()
        for nbytes in self.sizes:
            first, end = -(-nbytes // self.reach), nbytes * self.reach + 1
            if intervals and first <= (intervals[-1][1] or 0):
                first = intervals.pop()[0]
            intervals.append((first, end))
        return intervals

    def times_at(self, nbytes: int) -> dict[str, float]:
        """Return the time of each variant that was measured at `nbytes`, or at the sizes on both sides of it."""
        if not self.sizes:  # the table has been written by hand, and has only ranges
            return {}
        if not any(first <= nbytes and (end is None or nbytes < end) for first, end in self.reached()):
            return {}
        after = bisect_left(self.sizes, nbytes)
        if after < len(self.sizes) and self.sizes[after] == nbytes:
            places: tuple[int, ...] = (after,)
        else:
            places = tuple(place for place in (after - 1, after) if 0 <= place < len(self.sizes))
        return {
            variant: self._between([(self.sizes[place], seconds) for place, seconds in points], nbytes)
            for variant, times in self.times_s.items()
            if len(points := [(place, s) for place in places if (s := times[place]) is not None]) == len(places)
        }

    def measured_at(self, nbytes: int) -> dict[str, float]:
        """Return the time of each variant that was measured at exactly `nbytes`."""
        return self.times_at(nbytes) if nbytes in self.sizes else {}

    @staticmethod
    def _between(points: Sequence[tuple[int, float]], nbytes: int) -> float:
        (low, below), (high, above) = points[0], points[-1]
        if low == high:  # `nbytes` was measured, or is beyond an end. Longer vectors take time in proportion.
            return below * max(1.0, nbytes / max(1, low))
        return between(nbytes, (low, below), (high, above))

    def variant_at(self, nbytes: int) -> str | None:
        """Return the variant of the range that holds `nbytes`, or None."""
        place = bisect_right([each.first for each in self.ranges], nbytes) - 1
        holder = self.ranges[place] if place >= 0 else None
        return holder.variant if holder and (holder.end is None or nbytes < holder.end) else None


class Reading(NamedTuple):
    """The answer of a decision table to the question which variant is fastest for one call.

    Attributes:
        tier: how the table got the answer: "table" (measured at this number of ranks) or "table, interpolated"
            (between two numbers of ranks). It ends with ", another dtype" if the times are of another class of dtypes.
        variant: the variant of the range; None if the times decide.
        times_s: the times of all variants that the table knows here.
        is_interpolated: whether the times come from other numbers of ranks.
    """

    tier: str
    variant: str | None
    times_s: Mapping[str, float]
    is_interpolated: bool


class Table(NamedTuple):
    """The content of a table file.

    Attributes:
        decisions: by context.
        machines: by fingerprint, the machines that were measured: their identity (`machine.fingerprint.describe`), and
            the dates and loads of the measurements (`measured_when`).
    """

    decisions: Mapping[Context, Decision]
    machines: Mapping[str, Mapping[str, Any]] = {}

    def read(self, context: Context, nbytes: int) -> Reading | None:
        """Return the answer for a context, if need be with another dtype; None if the table has none."""
        for dtype in dict.fromkeys((context.dtype, "plain")):
            reading = self._read(context._replace(dtype=dtype), nbytes)
            if reading is not None:
                return reading._replace(tier=reading.tier + ("" if dtype == context.dtype else ", another dtype"))
        return None

    def of(self, machine: str, name: str) -> Table | None:
        """Return the part of the table `name` that was measured on a machine; None, with a warning, if none was."""
        own = {context: decision for context, decision in self.decisions.items() if context.machine == machine}
        if not own:
            _log.warning("%s", self._refusal(machine, name))
            return None
        return Table(own, {each: about for each, about in self.machines.items() if each == machine})

    def _refusal(self, machine: str, name: str) -> str:
        others = sorted({context.machine for context in self.decisions})
        shown = [f"{each}{_processor(self.machines.get(each, {}))}" for each in others]
        return (
            f"the table {name} is ignored, because it has no times of this machine, whose fingerprint is {machine}: it "
            f"is of {', '.join(shown) or 'no machine'}; `unisono tune --out {name}` on this machine adds some"
        )

    def _read(self, context: Context, nbytes: int) -> Reading | None:
        decision = self.decisions.get(context)
        if decision is not None:
            times = decision.times_at(nbytes)
            variant = decision.variant_at(nbytes)
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
        """Return the contexts with the next smaller and the next larger number of ranks, which are otherwise equal.

        The ranks per host are equal too, unless both contexts are on one host.
        """
        alike = sorted(
            (each for each in self.decisions if each._replace(ranks=0) == _with_ranks(context, each)._replace(ranks=0)),
            key=lambda each: each.ranks,
        )
        few = [each for each in alike if each.ranks < context.ranks]
        many = [each for each in alike if each.ranks > context.ranks]
        return (few[-1] if few else None, many[0] if many else None)


def _processor(about: Mapping[str, Any]) -> str:
    return f" ({about['processor']})" if "processor" in about else ""


def _with_ranks(context: Context, other: Context) -> Context:
    """Return a context. If it and `other` are both on one host, the result has the ranks per host of `other`."""
    both_on_one_host = context.ranks == context.ranks_per_host and other.ranks == other.ranks_per_host
    return context._replace(ranks_per_host=other.ranks_per_host) if both_on_one_host else context


def compiled(measurements: Iterable[Measurement]) -> Table:
    """Return the table that follows from measurements; equal points of several jobs are averaged."""
    by_context = defaultdict[Context, dict[tuple[str, int], list[Measurement]]](lambda: defaultdict(list))
    for measurement in measurements:
        by_context[measurement.context][measurement.variant, measurement.nbytes].append(measurement)
    return Table({context: _decision(points) for context, points in sorted(by_context.items())})


def measured_when(measurements: Iterable[Measurement]) -> dict[str, dict[str, Any]]:
    """Return, for each machine by its fingerprint, the dates of its measurements and its load then.

    The fields are ``measured``, the first and last date, and ``load``, the least and greatest load average. A field is
    absent if no measurement of the machine has it.
    """
    by_machine = defaultdict[str, list[Measurement]](list)
    for measurement in measurements:
        by_machine[measurement.context.machine].append(measurement)
    machines = dict[str, dict[str, Any]]()
    for machine, of_machine in by_machine.items():
        dates = sorted(measurement.date for measurement in of_machine if measurement.date)
        loads = sorted(measurement.load for measurement in of_machine if measurement.load is not None)
        machines[machine] = {
            name: [every[0], every[-1]] for name, every in (("measured", dates), ("load", loads)) if every
        }
    return machines


def _decision(points: Mapping[tuple[str, int], Sequence[Measurement]]) -> Decision:
    sizes = tuple(sorted({nbytes for _, nbytes in points}))
    times = {
        variant: tuple(_pooled_s(points.get((variant, nbytes), ())) for nbytes in sizes)
        for variant in sorted({variant for variant, _ in points})
    }
    are_trials = all(measurement.trial for of_point in points.values() for measurement in of_point)
    decision = Decision((), sizes, times, REACH if are_trials else None)
    return decision._replace(ranges=tuple(_within(_ranges(decision), decision.reached())))


def _pooled_s(measurements: Sequence[Measurement]) -> float | None:
    """Return the geometric mean of the medians, weighted by rounds; None if there are none.

    The mean is geometric because jobs differ by factors.
    """
    if not measurements:
        return None
    weighted = sum(math.log(each.median_s) * each.rounds for each in measurements)
    return math.exp(weighted / sum(each.rounds for each in measurements))


def _within(ranges: Iterable[Range], intervals: Sequence[tuple[int, int | None]]) -> Iterator[Range]:
    """Yield the parts of ranges that lie in the intervals, ascending."""
    for part in ranges:
        for first, end in intervals:
            begin = max(part.first, first)
            stop = min((each for each in (part.end, end) if each is not None), default=None)
            if stop is None or begin < stop:
                yield Range(begin, stop, part.variant)


def _ranges(decision: Decision) -> tuple[Range, ...]:
    """Return the ranges in which one variant is fastest.

    The winner is determined at each size, and between two sizes whose winners differ.
    """
    winners = _winners(decision)
    edges = [(0, winners[0][1])]
    for (low, before), (high, after) in pairwise(winners):
        if before != after:
            edges += _crossings(decision, (low, before), (high, after))
    firsts = [edge for number, edge in enumerate(edges) if number == 0 or edge[1] != edges[number - 1][1]]
    ends = [*(first for first, _ in firsts[1:]), None]
    return tuple(Range(first, end, variant) for (first, variant), end in zip(firsts, ends, strict=True))


def _winners(decision: Decision) -> list[tuple[int, str]]:
    """Return the winner at each size: that of the size before, unless another is faster by more than `WORTH_IT`."""
    winners = list[tuple[int, str]]()
    for nbytes in decision.sizes:
        times = decision.times_at(nbytes)
        best = min(times, key=times.__getitem__)
        before = winners[-1][1] if winners else best
        winners.append((nbytes, before if times.get(before, math.inf) <= WORTH_IT * times[best] else best))
    return winners


def _crossings(decision: Decision, low: tuple[int, str], high: tuple[int, str]) -> list[tuple[int, str]]:
    """Return the sizes between `low` and `high`, which have different winners, at which the winner changes."""
    edges, (nbytes, variant) = list[tuple[int, str]](), low
    steps = 64
    for step in range(1, steps):
        middle = round(max(1, low[0]) * (high[0] / max(1, low[0])) ** (step / steps))
        if middle <= nbytes or not (times := decision.times_at(middle)):
            continue
        best = min(times, key=times.__getitem__)
        nbytes = middle
        if best != variant and times.get(variant, math.inf) > WORTH_IT * times[best]:
            edges.append((middle, best))
            variant = best
    return edges if variant == high[1] else [*edges, high]


def to_json(table: Table, **about: Any) -> dict[str, Any]:
    """Return a table in its JSON form; `about` adds fields that say where it comes from."""
    return {
        "format": KIND,
        "version": FORMAT,
        **about,
        "decisions": [
            {
                **context._asdict(),
                **({} if decision.reach is None else {"reach": decision.reach}),
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
    """Return the text of a table file: one line for each range and each row of times."""
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


def loaded(path: Path, *, is_used_here: bool = True) -> Table:
    """Return the table in a file. If it `is_used_here`, without algorithms that this process does not know.

    Raises:
        UsageError: the file cannot be read, or is not a valid table; says where and what to do.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the table {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return from_text(text, str(path), is_used_here=is_used_here)


def _has_measurements(name: str) -> bool:
    """Return whether there are measurements beside the file of a table. Its name may come from another rank."""
    try:
        return Path(name).with_suffix(".jsonl").is_file()
    except (OSError, ValueError):  # no file can have this name
        return False


def from_text(text: str, name: str, *, is_used_here: bool = True) -> Table:
    """Return the table in the text of a file with this `name`; otherwise as `loaded` does."""
    try:
        content = parsed_json(text)
    except ValueError as error:
        advice = "`unisono tune` makes one"
        if _has_measurements(name):
            advice = f"`unisono tune merge {name} --out {name}` compiles it anew from the measurements beside it"
        raise UsageError(f"the table {name} is not complete JSON, as if cut short: {error}; {advice}") from None
    if not isinstance(content, dict) or content.get("format") != KIND:
        raise UsageError(f"{name} is not a decision table of Unisono: `unisono tune` makes one")
    if content.get("version") != FORMAT:
        version = f"has version {content.get('version')!r}, and this Unisono reads version {FORMAT}"
        raise UsageError(f"the table {name} {version}: use the Unisono that wrote it, or tune again")
    if not isinstance(content.get("decisions"), list):
        raise UsageError(f"the table {name} cannot be used: it has no list of decisions")
    decisions: dict[Context, Decision] = {}
    for number, entry in enumerate(content["decisions"], start=1):
        try:
            context, decision = _read_decision(entry, number, _is_known if is_used_here else _is_variant)
            if context in decisions:
                raise ValueError(f"decision {number} is for the same calls as an earlier one: remove one of the two")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"the table {name} cannot be used: {_reason(error, number)}") from None
        decisions[context] = decision
    if gpu := content.get("shared_gpu"):
        _log.warning("the times of the table %s are of ranks that shared one GPU (%s): they hold only there", name, gpu)
    machines = content.get("machines", {})
    are_described = isinstance(machines, dict) and all(isinstance(each, dict) for each in machines.values())
    return Table(decisions, machines if are_described else {})


def _reason(error: Exception, number: int) -> str:
    if isinstance(error, ValueError):
        return str(error)
    lack = f"{error} is missing" if isinstance(error, KeyError) else "it is not written as `unisono tune` does"
    return f"decision {number}: {lack}"


def _read_decision(
    entry: Mapping[str, Any], number: int, is_kept: Callable[[Context, str, str], bool]
) -> tuple[Context, Decision]:
    context = Context(**{field: entry[field] for field in Context._fields})
    for field, value in context._asdict().items():
        if not (type(value) is int and 0 < value <= MOST if field in _NUMBERS else type(value) is str):
            raise ValueError(f"decision {number}: {field} cannot be {value!r}")
    where = f"decision {number} ({context.collective}, {context.ranks} ranks by {context.link})"
    ranges = tuple(Range(each["from"], each["to"], each["algorithm"]) for each in entry["ranges"])
    _check_ranges(ranges, where)
    sizes = tuple(entry["sizes"])
    if list(sizes) != sorted(set(sizes)) or not all(type(nbytes) is int and 0 <= nbytes <= MOST for nbytes in sizes):
        raise ValueError(f"{where}: sizes must be ascending numbers of bytes")
    times_us = {variant: times for variant, times in entry["times_us"].items() if is_kept(context, variant, where)}
    for variant, times in times_us.items():
        if len(times) != len(sizes) or not all(each is None or LEAST_S <= each / 1e6 <= MOST_S for each in times):
            raise ValueError(f"{where}: the times of {variant} must be a positive number or null for each size")
    times_s = {variant: tuple(None if us is None else us / 1e6 for us in times) for variant, times in times_us.items()}
    existing = tuple(each for each in ranges if is_kept(context, each.variant, where))
    reach = entry.get("reach")
    if reach is not None and not (type(reach) is int and 0 < reach <= MOST):
        raise ValueError(f"{where}: reach must be a positive integer, not {reach!r}")
    return context, Decision(existing, sizes, times_s, reach)


def _check_ranges(ranges: Sequence[Range], where: str) -> None:
    for part in ranges:
        whole = type(part.first) is int and (part.end is None or type(part.end) is int)
        if not whole or part.first < 0 or (part.end is not None and part.end <= part.first):
            raise ValueError(f"{where}: a range cannot go from {part.first!r} to {part.end!r}")
    for before, after in pairwise(ranges):
        if before.end is None or before.end > after.first:
            overlap = f"{before.variant} to {before.end} and {after.variant} from {after.first}"
            raise ValueError(f"{where}: ranges overlap or are not ascending: {overlap}; correct one of the two")


_reported = set[str]()


def _is_known(context: Context, variant: str, where: str) -> bool:
    """Return whether a variant exists; if not, log a warning once."""
    if context.memory == "device" and variant in ROUTES:
        return True
    try:
        check_variant(context.collective, parsed(variant))
        return True
    except (NoAlgorithmError, UsageError) as error:
        reason = str(error)
    except ValueError:
        reason = f"{variant!r} is not the name of an algorithm"
    if reason not in _reported:
        _reported.add(reason)
        _log.warning("%s of a table is ignored: %s", where, reason)
    return False


def _is_variant(context: Context, variant: str, where: str) -> bool:
    """Return whether a text is written as a variant, of an algorithm that may be unknown; if not, log a warning."""
    try:
        return bool(parsed(variant))
    except (TypeError, ValueError):
        return _is_known(context, variant, where)


def differences(first: Table, second: Table) -> list[str]:
    """Return a line for each decision that only one of two tables has, or in which they choose different variants."""
    lines = list[str]()
    for context in sorted({*first.decisions, *second.decisions}):
        where = f"{context.collective}, {context.ranks} ranks by {context.link}, {context.dtype}"
        where += "" if context.memory == "host" else f", on a {context.memory}"
        if context not in first.decisions or context not in second.decisions:
            lines.append(f"{where}: only in the {'first' if context in first.decisions else 'second'}")
            continue
        one, other = first.decisions[context], second.decisions[context]
        for nbytes in sorted({each.first for each in (*one.ranges, *other.ranges)}):
            names = one.variant_at(nbytes), other.variant_at(nbytes)
            if names[0] != names[1]:
                lines.append(f"{where}, from {nbytes} B: {names[0]} and {names[1]}")
    return lines
