"""Shows the results of a run of `bench/gpu.py` as tables, and whether the targets are met."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unisono.bench.gpu_stages.results.targets import Record, outcomes
from unisono.bench.sizes import format_size
from unisono.foundation.program import begin

_MET = {True: "[green]met[/]", False: "[red]missed[/]", None: "[yellow]not measured[/]"}


_KINDS = ("machine", "probe", "premise", "cost", "kernel", "variant", "issue", "allreduce", "training")
_HOLDS = {True: "[green]confirmed[/]", False: "[red]refuted[/]"}
_VARIANT = ("dtype", "op", "k", "nbytes", "variant")
_ISSUE = ("ranks", "nbytes")
_TRAINING = ("way", "device", "ranks", "ms a step", "off Gloo's losses by", "right")
_CASE = ("placement", "ranks", "nbytes")


def tables(document: dict[str, Any]) -> list[Table]:
    """Return the tables of a run."""
    records: list[Record] = document["records"]
    by_kind = {kind: [r for r in records if r["kind"] == kind] for kind in _KINDS}
    return [
        _plain("Machine", by_kind["machine"], ("name", "value")),
        _plain("What works", by_kind["probe"], ("name", "usable", "detail")),
        _premises(by_kind["premise"]),
        _plain("Costs of the driver", list(map(_cost, by_kind["cost"])), ("name", "µs", "GB/s")),
        _plain("Stages", document["stages"], ("name", "seconds", "ended")),
        _pivot("Reductions, GB/s", by_kind["kernel"], ("dtype", "k", "nbytes"), "contender", _bandwidth),
        _pivot("Variants of reductions, GB/s, by waves", by_kind["variant"], _VARIANT, "waves", _bandwidth),
        _pivot("Allreduce float32, µs", by_kind["allreduce"], _CASE, "library", _time),
        _pivot("Allreduce float32 on the device, µs", by_kind["allreduce"], _CASE, "library", _device_time),
        _pivot("Allreduce float32 until issued, µs", by_kind["allreduce"], _CASE, "library", _host_time),
        _pivot("Allreduce of processes, µs that the host is busy", by_kind["issue"], _ISSUE, "way", _host_time),
        _plain("Training", list(map(_training, by_kind["training"])), _TRAINING),
        _plain("Not measured", _failures(records), ("what", "failure")),
        _targets(records),
    ]


def _bandwidth(record: Record) -> str:
    return f"{record['gbps']:.0f}"


def _time(record: Record) -> str:
    return f"{record['median_us']:.1f}"


def _device_time(record: Record) -> str:
    return f"{record['device_us']:.1f}" if "device_us" in record else ""


def _host_time(record: Record) -> str:
    return f"{record['host_us']:.1f}" if "host_us" in record else ""


def _cost(record: Record) -> Record:
    return {
        "name": record["name"],
        "µs": f"{record['us']:.2f}",
        "GB/s": f"{record['gbps']:.0f}" if "gbps" in record else "",
    }


def _training(record: Record) -> Record:
    """Return a row of a training; one that failed is without figures, and among what was not measured."""
    has = (
        {"ms a step": f"{record['step_ms']:.2f}", "off Gloo's losses by": f"{record['off']:.1e}"}
        if "off" in record
        else {}
    )
    return {**dict.fromkeys(_TRAINING, ""), **record, **has}


def _premises(records: Sequence[Record]) -> Table:
    table = Table("premise", "", "figure", "what stands on it", title="Premises of the code", title_justify="left")
    for record in records:
        said = [escape(record[column]) for column in ("name", "figure", "premise")]
        table.add_row(said[0], _HOLDS[record["holds"]], *said[1:])
    return table


def _plain(title: str, rows: Sequence[Record], columns: Sequence[str]) -> Table:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(escape(str(row[column])) for column in columns))
    return table


def _pivot(
    title: str, records: Sequence[Record], case: Sequence[str], across: str, cell: Callable[[Record], str]
) -> Table:
    """Return a table with a row for each case, and a column for each value of `across`."""
    columns = list(dict.fromkeys(record[across] for record in records if "failure" not in record))
    table = Table(*case, *map(str, columns), title=title, title_justify="left")
    rows: dict[tuple[Any, ...], dict[str, str]] = {}
    for record in records:
        row = rows.setdefault(tuple(record[name] for name in case), {})
        if "failure" not in record:
            row[record[across]] = cell(record)
    for key, row in rows.items():
        named = [format_size(value) if name == "nbytes" else str(value) for name, value in zip(case, key, strict=True)]
        table.add_row(*named, *(row.get(column, "") for column in columns))
    return table


def _failures(records: Sequence[Record]) -> list[Record]:
    """Return each failure once, with the contender or library that reported it first."""
    failures: dict[tuple[str, str], Record] = {}
    for record in records:
        if "failure" in record:
            who = str(
                record.get("contender")
                or record.get("way")
                or record.get("library")
                or record.get("tool")
                or record.get("variant")
                or record["kind"]
            )
            failures.setdefault((who, record["failure"]), {"what": who, "failure": record["failure"]})
    return list(failures.values())


def _targets(records: Sequence[Record]) -> Table:
    table = Table("target", "", "worst", title="Targets", title_justify="left")
    for outcome in outcomes(records):
        table.add_row(outcome.target, _MET[outcome.met], escape(outcome.worst))
    return table


def main() -> int:
    """Show the results in a file, add the targets to the file, and return 1 if one is missed."""
    path = Path(sys.argv[1])
    document = json.loads(path.read_text())
    results = outcomes(document["records"])
    document["targets"] = [outcome._asdict() for outcome in results]
    path.write_text(json.dumps(document, indent=1) + "\n")
    console = Console() if sys.stdout.isatty() else Console(width=140)
    for table in tables(document):
        if table.row_count:
            console.print(table)
    return 1 if any(outcome.met is False for outcome in results) else 0


if __name__ == "__main__":
    begin()
    sys.exit(main())
