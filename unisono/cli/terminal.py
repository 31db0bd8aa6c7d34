"""What subcommands show on the terminal, and how wide it is where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

_WIDTH_OF_PIPE = 1000  # Tables are no wider than they need to be.


def console() -> Console:
    """Return the console for results; where they are not read on a terminal, nothing is folded."""
    return Console() if sys.stdout.isatty() else Console(width=_WIDTH_OF_PIPE)


def errors_console() -> Console:
    """Return the console for progress and errors."""
    return Console(stderr=True)


def progress(*, auto_refresh: bool = True) -> Progress:
    """Return a progress bar on stderr, which shows nothing where that is no terminal and vanishes at the end."""
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    errors = errors_console()
    return Progress(*columns, console=errors, auto_refresh=auto_refresh, transient=True, disable=not errors.is_terminal)


def add_names(table: Table, heading: str, names: Iterable[str]) -> None:
    """Add the column of these names, which stay whole where the terminal is narrow: people copy them into settings."""
    table.add_column(heading, no_wrap=True, min_width=max(map(len, (heading, *names))))
