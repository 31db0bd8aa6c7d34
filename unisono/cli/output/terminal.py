"""Terminal output of subcommands: consoles, progress bars and columns."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

_WIDTH_OF_PIPE = 1000  # wide enough for any table


def console(*, stderr: bool = False) -> Console:
    """Return the console for results on stdout, or on stderr. If that is not a terminal, no line is folded."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, width=None if is_terminal else _WIDTH_OF_PIPE)


def errors_console() -> Console:
    """Return the console for progress and errors."""
    return Console(stderr=True)


def progress(*, auto_refresh: bool = True) -> Progress:
    """Return a progress bar on standard error, which vanishes at the end and is hidden if that is not a terminal."""
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    errors = errors_console()
    return Progress(*columns, console=errors, auto_refresh=auto_refresh, transient=True, disable=not errors.is_terminal)


def add_names(table: Table, heading: str, names: Iterable[str]) -> None:
    """Add a column of names that is never folded, because people copy the names into settings."""
    table.add_column(heading, no_wrap=True, min_width=max(map(len, (heading, *names))))
