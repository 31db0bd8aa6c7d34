"""Compares two saved benchmarks: which libraries have become faster or slower at which sizes, beyond noise.

A point has changed if its median differs by more than its own spread: the larger ratio of the 90th percentile to the
median, of the two benchmarks. One slow machine makes everything slower. So if both benchmarks have a library other than
Unisono, the change relative to this library is shown too, in which the speed of the machine cancels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from unisono.bench.sizes import format_size
from unisono.errors import UsageError
from unisono.foundation.json_checks import checked, parsed_json
from unisono.foundation.records import record

_SHAPE = {
    "format": int,
    "date": str,
    "collective": str,
    "dtype": str,
    "ranks": int,
    "machine": {"cpu": str},
    "rows": [{"nbytes": int, "library": str, "placement": str}],
}
_TIMES = {"median_us": (int, float), "p90_us": (int, float)}


@record
class Change:
    """The times of one library at one size in the old benchmark and in the new one.

    Attributes:
        nbytes, placement, library: the point.
        old_us, new_us: the median times of a call.
        noise: the larger spread of the two, as the ratio of the 90th percentile to the median.
        relative: the change of the time relative to that of the reference library; None without one.
    """

    nbytes: int
    placement: str
    library: str
    old_us: float
    new_us: float
    noise: float
    relative: float | None

    @property
    def ratio(self) -> float:
        """The time of a call in the new benchmark over that in the old one."""
        return self.new_us / self.old_us

    @property
    def verdict(self) -> str:
        """Return "faster", "slower" or "same"."""
        if 1 / self.noise <= self.ratio <= self.noise:
            return "same"
        return "faster" if self.ratio < 1 else "slower"


def read(path: Path) -> dict[str, Any]:
    """Return the benchmark in a file that `unisono bench` wrote; of a file with several, the last.

    Raises:
        UsageError: the file cannot be read, or has another content.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
        value = parsed_json(text.splitlines()[-1] if path.suffix == ".jsonl" and text else text)
        document: dict[str, Any] = checked(value, _SHAPE)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path} is no result of `unisono bench`: {reason}") from None
    return document


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Return the points that both benchmarks have, by size.

    Raises:
        UsageError: they measured different calls, or have no point in common.
    """
    for name in ("collective", "dtype", "ranks"):
        if old[name] != new[name]:
            raise UsageError(f"the benchmarks cannot be compared: one has {name} {old[name]}, the other {new[name]}")
    before, after = _points(old), _points(new)
    common = sorted(before.keys() & after.keys())
    if not common:
        raise UsageError("the benchmarks have no size, placement and library in common")
    return [_change(key, before, after) for key in common]


_Key = tuple[int, str, str]
_Points = Mapping[_Key, Mapping[str, float]]


def _points(document: Mapping[str, Any]) -> _Points:
    measured = [row for row in document["rows"] if row.get("median_us") and row.get("p90_us")]
    return {(row["nbytes"], row["placement"], row["library"]): checked(row, _TIMES) for row in measured}


def _change(key: _Key, before: _Points, after: _Points) -> Change:
    nbytes, placement, library = key
    times = before[key], after[key]
    references = [
        other
        for other in before.keys() & after.keys()
        if other[:2] == key[:2] and not other[2].startswith("unisono") and other[2] != library
    ]
    ratio = times[1]["median_us"] / times[0]["median_us"]
    relative = None
    if references:
        reference = min(references)
        relative = ratio / (after[reference]["median_us"] / before[reference]["median_us"])
    noise = max(1.0, *(each["p90_us"] / each["median_us"] for each in times))
    return Change(nbytes, placement, library, times[0]["median_us"], times[1]["median_us"], noise, relative)


def table(old: Mapping[str, Any], new: Mapping[str, Any], changes: Sequence[Change]) -> Table:
    """Return the changes as a table for people."""
    title = f"{new['collective']} {new['dtype']}, {new['ranks']} ranks: {old['date'][:10]} → {new['date'][:10]}"
    caption = "a change counts if it is larger than the noise, the 90th percentile ÷ the median"
    shown = Table(title=title, caption=caption)
    for heading in ("size", "placement", "library", "old µs", "new µs", "new ÷ old", "noise", "relative to a peer", ""):
        shown.add_column(heading, justify="left" if heading in {"placement", "library", ""} else "right", no_wrap=True)
    colours = {"faster": "green", "slower": "red", "same": "dim"}
    for change in changes:
        relative = "" if change.relative is None else f"{change.relative:.2f}"
        numbers = (
            f"{change.old_us:.3g}",
            f"{change.new_us:.3g}",
            f"{change.ratio:.2f}",
            f"{change.noise:.2f}",
            relative,
        )
        verdict = f"[{colours[change.verdict]}]{change.verdict}[/]"
        shown.add_row(format_size(change.nbytes), change.placement, change.library, *numbers, verdict)
    if old["machine"]["cpu"] != new["machine"]["cpu"]:
        shown.caption = f"the machines differ: {old['machine']['cpu']} and {new['machine']['cpu']}; {caption}"
    return shown


def as_json(changes: Sequence[Change]) -> str:
    """Return the changes as JSON for machines."""
    fields = ("nbytes", "placement", "library", "old_us", "new_us", "ratio", "noise", "relative", "verdict")
    return json.dumps([{name: getattr(change, name) for name in fields} for change in changes], indent=2) + "\n"
