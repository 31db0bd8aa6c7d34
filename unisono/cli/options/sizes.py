"""The option for the bytes of a vector."""

from __future__ import annotations

import click

from unisono.options import parse_nbytes


def _nbytes(context: click.Context, parameter: click.Parameter, text: str) -> int:
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not {error}.") from None


nbytes_option = click.option(
    "--size", "nbytes", default="1M", show_default=True, callback=_nbytes, help="Bytes of the vector."
)
