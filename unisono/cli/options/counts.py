"""Parses an option with several numbers of ranks, such as 2,3,4."""

from __future__ import annotations

import click


def numbers_of_ranks(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """Return the numbers in an option, ascending and without duplicates.

    Raises:
        BadParameter: the text is not a list of numbers, or one is less than 2.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 1 for part in parts):
        raise click.BadParameter(f"{text!r} must be numbers of ranks, at least 2, with commas between.")
    return tuple(sorted({int(part) for part in parts}))
