"""Results of a benchmark as text for other tools: CSV, and the tables of the OSU micro-benchmarks and of nccl-tests.

Only measured rows appear; failures are left to the caller. A benchmark of several libraries or placements has a table
for each of them, after a comment that names it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby

from unisono.bench.driver import Results, Settings
from unisono.bench.report import LibraryTimes, document
from unisono.dtypes import DTYPES

_CSV = ("collective", "dtype", "ranks", "nbytes", "library", "placement", "median_us", "p90_us", "busbw", "calls")


def as_json(settings: Settings, results: Results, rows: Sequence[LibraryTimes]) -> str:
    """Return the whole benchmark as JSON, as `file-formats.md` describes it."""
    return json.dumps(document(settings, results, rows), indent=2, ensure_ascii=False) + "\n"


def as_csv(settings: Settings, _: Results, rows: Sequence[LibraryTimes]) -> str:
    """Return a line for each measured row, after a line with the names of the columns."""
    facts = {"collective": settings.collective, "dtype": settings.dtype, "ranks": settings.ranks}
    text = io.StringIO()
    writer = csv.DictWriter(text, _CSV, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**facts, **asdict(row)} for row in _measured(rows))
    return text.getvalue()


def as_osu(settings: Settings, _: Results, rows: Sequence[LibraryTimes]) -> str:
    """Return sizes and latencies in two columns, as the OSU micro-benchmarks print them."""

    def line(row: LibraryTimes) -> str:
        return f"{row.nbytes:<10}{row.median_us:>18.2f}"

    return _tables(settings, rows, ["# Size       Avg Latency(us)"], line)


def as_nccl_tests(settings: Settings, _: Results, rows: Sequence[LibraryTimes]) -> str:
    """Return the columns of nccl-tests for one kind of call: time in µs, bandwidths in GB/s, and no wrong results."""
    dtype = DTYPES[settings.dtype]
    name = {"float32": "float", "float64": "double", "float16": "half"}.get(settings.dtype, settings.dtype)
    reduces = settings.collective in ("allreduce", "reduce", "reduce_scatter", "scan")
    has_root = settings.collective in ("broadcast", "reduce", "gather", "scatter")

    def line(row: LibraryTimes) -> str:
        assert row.median_us is not None
        algbw = row.nbytes / row.median_us / 1e3
        columns = f"{row.nbytes:>12}{row.nbytes // dtype.itemsize:>14}{name:>10}{'sum' if reduces else 'none':>8}"
        speeds = f"{row.median_us:>9.2f}{algbw:>8.2f}{row.busbw or 0.0:>8.2f}{0:>7}"
        return f"{columns}{0 if has_root else -1:>8}{speeds}"

    heading = [
        "#       size         count      type   redop    root     time   algbw   busbw #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)       ",
    ]
    return _tables(settings, rows, heading, line)


Format = Callable[[Settings, Results, Sequence[LibraryTimes]], str]
FORMATS: Mapping[str, Format] = {"json": as_json, "csv": as_csv, "osu": as_osu, "nccl-tests": as_nccl_tests}


def _measured(rows: Sequence[LibraryTimes]) -> list[LibraryTimes]:
    return [row for row in rows if row.failure is None]


def _tables(
    settings: Settings, rows: Sequence[LibraryTimes], heading: Sequence[str], line: Callable[[LibraryTimes], str]
) -> str:
    def key(row: LibraryTimes) -> tuple[str, str]:
        return row.library, row.placement

    text = ""
    for (library, placement), group in groupby(sorted(_measured(rows), key=key), key=key):
        about = f"# {settings.collective} {settings.dtype}, {settings.ranks} ranks: {library}, placement {placement}"
        text += "\n".join([about, *heading, *(line(row) for row in group)]) + "\n"
    return text
