"""``unisono export``: writes a schedule for MSCCL or ASTRA-sim, or a decision table for another library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from unisono.algorithms.builders.arguments import check_ranks
from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.ir.plan import Plan
from unisono.algorithms.schedules.chakra import chakra_traces
from unisono.algorithms.schedules.limited import MOST_RANKS
from unisono.algorithms.schedules.msccl_writing import msccl_xml
from unisono.cli.commands.show import given_parameters
from unisono.cli.messages import tell
from unisono.cli.options.completion import algorithms as complete_algorithms, collectives as complete_collectives
from unisono.cli.options.loading import load_option
from unisono.cli.options.outputs import OutputFile
from unisono.cli.options.sizes import nbytes_option
from unisono.errors import UsageError
from unisono.tuning.decide.table import loaded
from unisono.tuning.exports import mpich, nccl, openmpi, ucc
from unisono.tuning.exports.counterparts import Library, Rule, rules_of

_SCHEDULES = ("msccl", "chakra")
# The libraries whose choice of algorithms a decision table can set.
_TABLES: dict[str, Library] = {
    "nccl": nccl.LIBRARY,
    "openmpi": openmpi.LIBRARY,
    "ucc": ucc.LIBRARY,
    "mpich": mpich.LIBRARY,
}
_ITEMSIZE = 4


@click.command(short_help="Write a schedule for MSCCL or ASTRA-sim, or a decision table for another library.")
@click.argument("source", metavar="COLLECTIVE|TABLE", shell_complete=complete_collectives)
@click.argument("algorithm", required=False, shell_complete=complete_algorithms)
@click.option("--to", "form", type=click.Choice([*_SCHEDULES, *_TABLES]), default="msccl", show_default=True)
@click.option("-n", "size", type=int, default=8, show_default=True, help="Number of ranks.")
@click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="Parameter of the algorithm: radix=4.")
@nbytes_option
@click.option("--link", help="Export the decisions for this link, such as shm.")
@click.option("--machine", help="Export the decisions of the machine with this fingerprint.")
@click.option("--protocol", type=click.Choice(nccl.PROTOCOLS), default="simple", show_default=True, help="Of NCCL.")
@click.option(
    "--base", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="MPICH's generic.json or libmpi.so."
)
@click.option("--out", type=OutputFile(), help="Write to this file.  [default: the terminal]")
@load_option
def command(
    *,
    source: str,
    algorithm: str | None,
    form: str,
    size: int,
    params: tuple[str, ...],
    nbytes: int,
    link: str | None,
    machine: str | None,
    protocol: str,
    base: Path | None,
    out: Path | None,
) -> None:
    """Write the schedule of an algorithm, or a decision table, for another program.

    COLLECTIVE ALGORITHM is written as XML of MSCCL, or with --to chakra as a trace for each rank, in
    the files OUT.0.et, OUT.1.et and so on, for a vector of --size. Both have no shares of different
    lengths and no reads of peers' memory: such algorithms are refused.

    TABLE is a file of `unisono tune`. --to nccl, openmpi, ucc or mpich writes its choices for that
    library. Algorithms that the library does not have, such as schedules of others, are left out and
    named. MPICH needs --base, because its file must cover all collectives.

    For example: unisono export allreduce rabenseifner -n 8 --out rabenseifner.xml

    unisono export table.json --to openmpi --out rules.conf
    """
    if (algorithm is None) != (form in _TABLES):
        raise UsageError(
            f"--to {form} needs a decision table: unisono export table.json --to {form}"
            if algorithm
            else f"--to {form} needs a collective and an algorithm; a table is written --to {', '.join(_TABLES)}"
        )
    if algorithm is None:
        _write(out, _table(Path(source), form, link, machine, protocol, base))
        return
    plans = _plans(source, algorithm, size, params)
    if form == "msccl":
        _write(out, msccl_xml(plans))
    else:
        _write_traces(out, plans, nbytes)


def _plans(collective: str, algorithm: str, size: int, params: Sequence[str]) -> list[Plan]:
    definition = find(collective, algorithm)
    arguments = given_parameters(definition, params)
    check_ranks(size, 0, 0)
    if size > MOST_RANKS:
        raise UsageError(f"a schedule has at most {MOST_RANKS} ranks, not {size}")
    definition.check_supports(size)
    return [definition.build(size, rank, 0, **arguments) for rank in range(size)]


def _write_traces(out: Path | None, plans: Sequence[Plan], nbytes: int) -> None:
    if out is None:
        raise UsageError("a trace of Chakra has a file for each rank: name their beginning by --out")
    for rank, trace in enumerate(chakra_traces(plans, nbytes // _ITEMSIZE, _ITEMSIZE)):
        out.with_name(f"{out.name}.{rank}.et").write_bytes(trace)


def _table(path: Path, form: str, link: str | None, machine: str | None, protocol: str, base: Path | None) -> str:
    """Return the decisions of a table in the format of a library; name those that are left out."""
    if form == "mpich" and base is None:
        raise UsageError("--to mpich needs --base, the generic.json or the libmpi.so of your MPICH")
    rules, omissions = rules_of(loaded(path, is_used_here=False), _TABLES[form], link=link, machine=machine)
    for omission in omissions:
        tell(str(omission))
    if not rules:
        raise UsageError(f"no algorithm of {path} has a counterpart in {_TABLES[form].name}")
    writers: dict[str, Callable[[Sequence[Rule]], str]] = {
        "nccl": lambda rules: nccl.written(rules, protocol),
        "openmpi": openmpi.written,
        "ucc": ucc.written,
        "mpich": lambda rules: mpich.written(rules, mpich.base_in(base.read_bytes(), str(base)) if base else {}),
    }
    return writers[form](rules)


def _write(out: Path | None, text: str) -> None:
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text)
