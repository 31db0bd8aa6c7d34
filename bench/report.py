"""Results of a benchmark as rows, as a table for people, and as JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from unisono import __version__
from unisono.bench.driver import Results, Sample, Settings
from unisono.bench.sizes import format_size
from unisono.bench.statistics import Ratio, bus_bandwidth, median, p90, paired_ratio

FORMAT = 1


@dataclass(frozen=True, slots=True)
class LibraryTimes:
    """One library at one size, in the rounds of one placement.

    Attributes:
        nbytes: size of the vector.
        placement: "core", "near", "far" or "unknown".
        latency_ns: median over the rounds of the one-way latency of a flag between the first two ranks' cores.
        library: its name in the settings.
        rounds, calls: their numbers.
        median_us, p90_us: of the time of a call, the maximum over ranks.
        busbw: bus bandwidth in 1e9 bytes per second; None if no data moves.
        ratios: for each variant of Unisono, the ratio of this library's time to its time, paired by round.
        failure: the reason if there are no times. The numbers are None then, and there are no ratios.
    """

    nbytes: int
    placement: str
    library: str
    latency_ns: float | None = None
    rounds: int = 0
    calls: int = 0
    median_us: float | None = None
    p90_us: float | None = None
    busbw: float | None = None
    ratios: dict[str, Ratio] | None = None
    failure: str | None = None


def rows(settings: Settings, results: Results) -> list[LibraryTimes]:
    """Return the rows by size, placement and library; at each size, failures come last."""
    names = [library.name for library in settings.libraries]
    samples_of: dict[tuple[int, str, str], list[Sample]] = {}
    for sample in results.samples:
        samples_of.setdefault((sample.nbytes, sample.placement.label, sample.library), []).append(sample)
    measured = [_row(settings, key, samples_of) for key in samples_of]
    failed = [LibraryTimes(failure.nbytes, "", failure.library, failure=failure.reason) for failure in results.failures]
    return sorted(
        measured + failed, key=lambda row: (row.nbytes, not row.placement, row.placement, names.index(row.library))
    )


def _row(
    settings: Settings, key: tuple[int, str, str], samples_of: dict[tuple[int, str, str], list[Sample]]
) -> LibraryTimes:
    nbytes, placement, library = key
    samples = samples_of[key]
    rounds = [sample.times_us for sample in samples]
    middle = median(rounds)
    latencies = [sample.placement.latency_ns for sample in samples if sample.placement.latency_ns is not None]
    return LibraryTimes(
        nbytes=nbytes,
        placement=placement,
        library=library,
        latency_ns=float(np.median(latencies)) if latencies else None,
        rounds=len(rounds),
        calls=sum(times.size for times in rounds),
        median_us=middle,
        p90_us=p90(rounds),
        busbw=bus_bandwidth(settings.collective, nbytes, settings.ranks, middle),
        ratios={
            name: _paired(samples, samples_of[nbytes, placement, name])
            for name in _baselines(settings)
            if name != library and _shared(samples, samples_of.get((nbytes, placement, name), []))
        },
    )


def _baselines(settings: Settings) -> list[str]:
    """Return the names of the libraries to which the report compares the others: the variants of Unisono."""
    return [library.name for library in settings.libraries if library.adapter == "unisono_api"]


def _shared(one: Iterable[Sample], other: Iterable[Sample]) -> list[int]:
    return sorted({sample.round for sample in one} & {sample.round for sample in other})


def _paired(peer: Sequence[Sample], own: Sequence[Sample]) -> Ratio:
    medians = [{sample.round: median([sample.times_us]) for sample in samples} for samples in (peer, own)]
    shared = _shared(peer, own)
    return paired_ratio([medians[0][number] for number in shared], [medians[1][number] for number in shared])


def table(settings: Settings, measured_rows: Sequence[LibraryTimes]) -> Table:
    """Return the rows as a table for a terminal."""
    baselines = _baselines(settings)
    title = f"{settings.collective} {settings.dtype}, {settings.ranks} ranks"
    shown = Table(title=title, caption="time ÷ X: how many times as long as X, paired by round [95 % interval]")
    for heading in ("size", "placement", "library", "median µs", "p90 µs", "busbw GB/s", "calls"):
        shown.add_column(heading, justify="left" if heading in {"placement", "library"} else "right", no_wrap=True)
    for name in baselines:
        shown.add_column(f"÷ {name}", justify="right", no_wrap=True)
    previous = None
    for row in measured_rows:
        if previous is not None and previous.nbytes != row.nbytes:
            shown.add_section()
        shown.add_row(*_cells(row, baselines))
        previous = row
    return shown


def _cells(row: LibraryTimes, baselines: Sequence[str]) -> list[str]:
    if row.failure is not None:
        return [format_size(row.nbytes), "", row.library, "failed"]
    latency = f" {row.latency_ns:.0f} ns" if row.latency_ns is not None else ""
    return [
        format_size(row.nbytes),
        row.placement + latency,
        row.library,
        _number(row.median_us),
        _number(row.p90_us),
        _number(row.busbw),
        str(row.calls),
        *(_ratio((row.ratios or {}).get(name)) for name in baselines),
    ]


def _number(value: float | None) -> str:
    """Return a number with three significant digits, or as an integer from 100 on."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{_number(ratio.value)} [{_number(ratio.low)}–{_number(ratio.high)}]"


def machine() -> dict[str, Any]:
    """Return facts about the kind of machine and software that do not identify this machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "unisono": __version__,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"model name", "CPU part"}:
            return value.strip()
    return platform.machine()


def circumstances(results: Results) -> str:
    """Return the date, the machine and its load before the measurement, in one line for people."""
    facts = machine()
    return (
        f"{datetime.datetime.now():%Y-%m-%d %H:%M}, {facts['cpu']}, {facts['cores']} cores, "
        f"load {results.load:.1f} before, Linux {facts['kernel']}, Python {facts['python']}, numpy {facts['numpy']}"
    )


def document(settings: Settings, results: Results, measured_rows: Sequence[LibraryTimes]) -> dict[str, Any]:
    """Return a whole benchmark in its JSON form."""
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "load": round(results.load, 2),
        "versions": results.versions,
        "collective": settings.collective,
        "dtype": settings.dtype,
        "ranks": settings.ranks,
        "bind": settings.bind,
        "seconds": settings.seconds,
        "rows": [_jsonable(row) for row in measured_rows],
    }


def _jsonable(row: LibraryTimes) -> dict[str, Any]:
    ratios = {name: ratio._asdict() for name, ratio in (row.ratios or {}).items()}
    return {**asdict(row), "ratios": ratios}


def append(path: Path, content: dict[str, Any]) -> None:
    """Append `content` to the file `path` as one line of JSON; its folder is created if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(content, ensure_ascii=False) + "\n")
