"""``unisono export``: writes the schedule of an algorithm for MSCCL."""

from __future__ import annotations

from pathlib import Path

import click

from unisono.algorithms.builders.arguments import check_ranks
from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.schedules.msccl_writing import msccl_xml
from unisono.cli.commands.show import given_parameters
from unisono.cli.options.completion import algorithms as complete_algorithms, collectives as complete_collectives
from unisono.cli.options.loading import load_option
from unisono.cli.options.outputs import OutputFile


@click.command(short_help="Write the schedule of an algorithm for MSCCL.")
@click.argument("collective", shell_complete=complete_collectives)
@click.argument("algorithm", shell_complete=complete_algorithms)
@click.option("-n", "size", type=int, default=8, show_default=True, help="Number of ranks.")
@click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="Parameter of the algorithm: radix=4.")
@click.option("--out", type=OutputFile(), help="Write to this file.  [default: the terminal]")
@load_option
def command(collective: str, algorithm: str, size: int, params: tuple[str, ...], out: Path | None) -> None:
    """Write the schedule of ALGORITHM as XML of MSCCL.

    MSCCL has no barriers and scans, no shares of different lengths, and no reads of peers' memory:
    such algorithms are refused.

    For example: unisono export allreduce rabenseifner -n 8 --out rabenseifner.xml
    """
    definition = find(collective, algorithm)
    arguments = given_parameters(definition, params)
    check_ranks(size, 0, 0)
    definition.check_supports(size)
    text = msccl_xml([definition.build(size, rank, 0, **arguments) for rank in range(size)])
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text)
