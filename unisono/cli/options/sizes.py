"""The option for the bytes of a vector, and the check of such options."""

from __future__ import annotations

import click

from unisono.options import parse_nbytes


def checked_nbytes(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Return the bytes in the text of an option; None if the option is missing and has no default.

    Raises:
        BadParameter: the text is no size, such as 64M.
    """
    try:
        return None if text is None else parse_nbytes(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not {error}.") from None


def nbytes_moved(collective: str, nbytes: int) -> int:
    """Return the bytes with which a call is predicted: those of the vector, and 1 for a barrier, which has none."""
    return 1 if collective == "barrier" else nbytes


nbytes_option = click.option(
    "--size", "nbytes", default="1M", show_default=True, callback=checked_nbytes, help="Bytes of the vector."
)
