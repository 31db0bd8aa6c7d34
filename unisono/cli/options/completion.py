"""Completion of collectives and algorithms in a shell; docs/command-line.md says how to switch it on."""

from __future__ import annotations

import click

from unisono.algorithms.catalogue.registry import algorithms_of
from unisono.algorithms.ir.contracts import CONTRACTS


def collectives(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the collectives that begin with `incomplete`."""
    return [name for name in CONTRACTS if name.startswith(incomplete)]


def algorithms(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the algorithms that begin with `incomplete`: of the collective in the line, or else of all."""
    collective = context.params.get("collective")
    names = {name for each in ([collective] if collective in CONTRACTS else CONTRACTS) for name in algorithms_of(each)}
    return sorted(name for name in names if name.startswith(incomplete))
