"""Writes decision tables, and reads the measurements that belong to them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.errors import UsageError
from unisono.tuning.decide.table import Table, compiled, dumped, loaded, measured_when, to_json
from unisono.tuning.machine.fingerprint import describe, fingerprint
from unisono.tuning.measure.measurement_log import Context, Measurement, MeasurementStore

LOG_SUFFIX = ".jsonl"


def log_of(table: Path) -> Path:
    """Return the path of the measurements that belong to a table: the file beside it."""
    return table.with_suffix(LOG_SUFFIX)


def check_writable(table: Path) -> None:
    """Raise UsageError if a table, or the measurements beside it, could not be written at the end of a job."""
    folder = table.absolute().parent
    if table.suffix == LOG_SUFFIX:
        raise UsageError(f"the table cannot be {table}, because a file {LOG_SUFFIX} is for measurements: call it .json")
    if not folder.is_dir():
        raise UsageError(f"the table cannot be written to {table}: there is no folder {folder}")
    for path in (table, log_of(table)):
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise UsageError(f"the table cannot be written to {table}: {path} cannot be written")


def compile_table(out: Path, measurements: Sequence[Measurement], library: str, others: Sequence[Path] = ()) -> Table:
    """Write the decision table of these measurements to `out` in one step, and return it.

    Args:
        out: the file.
        measurements: all measurements of the table.
        library: the version of Unisono.
        others: tables that describe other machines, as the one at `out` does, if they exist.

    Raises:
        UsageError: the file cannot be written.
    """
    described = {name: each for path in (*others, out) for name, each in _machines_in(path).items()}
    described[fingerprint()] = describe()
    machines = {name: {**described.get(name, {}), **when} for name, when in measured_when(measurements).items()}
    table = compiled(measurements)._replace(machines=machines)
    scratch = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        scratch.write_text(dumped(to_json(table, library=library, machines=machines)), encoding="utf-8")
        scratch.replace(out)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink()
        raise UsageError(f"the table cannot be written to {out}: {error.strerror}") from None
    return table


def measurements_of(path: Path) -> list[Measurement]:
    """Return the measurements of the table at `path`: those beside it, or without them the times in the table itself.

    Times in a table count as those of one round, on the last day on which its machine was measured.

    Raises:
        UsageError: a file cannot be read, or the table has no times, because someone has written it by hand.
    """
    log = log_of(path)
    if log.exists() or path == log:
        return MeasurementStore(log).read()
    table = loaded(path, is_used_here=False)
    if any(decision.ranges and not decision.sizes for decision in table.decisions.values()):
        raise UsageError(f"the table {path} has decisions without times, which cannot be merged: measure them instead")
    return [
        _of_one_round(context, variant, nbytes, seconds, table.machines)._replace(trial=decision.reach is not None)
        for context, decision in table.decisions.items()
        for variant, times_s in decision.times_s.items()
        for nbytes, seconds in zip(decision.sizes, times_s, strict=True)
        if seconds is not None
    ]


def _of_one_round(
    context: Context, variant: str, nbytes: int, seconds: float, machines: Mapping[str, Mapping[str, Any]]
) -> Measurement:
    date = ""
    with suppress(LookupError, TypeError):  # people may have edited the table
        date = str(machines[context.machine]["measured"][-1])
    return Measurement(context, variant, nbytes, seconds, seconds, seconds, seconds, seconds, 1, date=date)


def _machines_in(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return the machines that the table in a file describes; empty if there is no valid table."""
    try:
        return loaded(path).machines
    except UsageError:
        return {}
