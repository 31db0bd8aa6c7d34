"""``unisono bench``: measures collectives, next to other libraries if these are installed, and much else.

``unisono bench COLLECTIVE`` measures a collective. ``unisono bench compare`` compares two such measurements. Every
other name is a program of its own, of `unisono.bench.programs` or `unisono.bench.studies`, with options of its own.
"""

from __future__ import annotations

import importlib
import sys
from copy import copy
from importlib.util import find_spec
from pathlib import Path

import click
from rich.table import Table

from unisono.bench import comparison
from unisono.bench.driver import BenchDriver, Results, Settings, steps
from unisono.bench.formats import FORMATS, as_json as as_json_text
from unisono.bench.peers import PEERS, Library, peer, peers, unisono_over
from unisono.bench.report import append, circumstances, document, rows, table
from unisono.bench.sizes import format_size, parse_sizes
from unisono.bench.statistics import BUS_FACTORS
from unisono.cli.groups import SuggestingGroup
from unisono.cli.messages import tell
from unisono.cli.options.loading import load_option
from unisono.cli.options.outputs import PICTURE, OutputFile, write_text
from unisono.cli.output.terminal import console, progress
from unisono.dtypes import DTYPES
from unisono.errors import UsageError
from unisono.options import parse_transports
from unisono.transports.host.core_distance import PLACEMENTS

# Collectives whose vector is divided equally among the ranks.
SHARED = ("gather", "scatter", "allgather", "reduce_scatter", "alltoall")
SAVED = Path("bench", "results")
DTYPE_NAMES = [dtype.name for dtype in DTYPES.values() if dtype.kind in {"integer", "float"}]


class _Bar:
    """A progress bar on standard error. It is drawn only between measurements, because a thread would disturb them."""

    def __init__(self, total: int) -> None:
        self.progress = progress(auto_refresh=False)
        self._task = self.progress.add_task("", total=total)

    def step(self, doing: str) -> None:
        self.progress.update(self._task, advance=1, description=doing, refresh=True)


def _names(text: str, what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(set(names)) < len(names):
        raise UsageError(f"a {what} is named twice in {text!r}: name it once")
    return names


def _libraries(transports: str, against: str) -> tuple[Library, ...]:
    chosen = _names(transports, "transport")
    for transport in chosen:
        try:
            parse_transports(transport)
        except ValueError as error:
            raise UsageError(f"{transport!r} cannot be measured as a transport: it must be {error}") from None
    return (*map(unisono_over, chosen), *map(peer, _names(against, "peer")))


def _sizes(text: str, collective: str, itemsize: int, ranks: int) -> tuple[int, ...]:
    if BUS_FACTORS[collective] is None:
        return (0,)
    sizes = parse_sizes(text)
    shares = ranks if collective in SHARED else 1
    for size in sizes:
        if size % (itemsize * shares):
            per_rank = f" for each of {ranks} ranks" if shares > 1 else ""
            raise UsageError(f"{format_size(size)} is no whole number of elements of {itemsize} bytes{per_rank}")
    return sizes


# The programs of each package, and what they measure. Only a checkout has those that made the pages of measurements.
PROGRAMS = {
    "unisono.bench": {
        "curves": "Draw saved results as curves.",
    },
    "unisono.bench.programs": {
        "algorithms": "Rank every algorithm of a collective, as a map of sizes and ranks.",
        "bootstrap": "The time in which ranks start and meet.",
        "churn": "A swarm whose members are killed, stopped and cut off.",
        "compression": "The processor time of compressions of gradients.",
        "crowded": "A collective on cores that other processes want too.",
        "ddp": "Training steps of DDP over Unisono and over Gloo.",
        "gradients": "The exposed communication of gradients.",
        "hybrid": "Hybrid groups beside synchronous training.",
        "jax_calls": "Calls in compiled programs of JAX.",
        "memory": "The memory of a rank for its peers.",
        "overlap": "How far calls overlap with computing.",
        "shaped": "A collective between hosts on slow links.",
        "tls": "The cost of TLS.",
        "torch_calls": "Calls of torch.distributed over Unisono and Gloo.",
        "training": "The time to a loss, across a wide-area network.",
        "transports": "Messages between two ranks over each transport.",
        "wan": "Allreduce across a wide-area network.",
    },
    "unisono.bench.studies": {
        "campaign": "How jobs end in which faults are planted.",
        "cluster": "Measurements of a real cluster beside the simulator.",
        "contention": "New and old algorithms on networks with shared links.",
        "decision": "The cost of the choice of an algorithm at each call.",
        "faults": "Which sources name the culprit of a planted fault.",
        "footprint": "What a rank of a large host holds.",
        "horovod_itself": "Training steps of Horovod itself.",
        "host_orders": "The order of far hosts against all orders.",
        "joins": "The time in which a process joins a job.",
        "leaks": "What long use leaves behind.",
        "mixture": "Decision tables with algorithms of an MPI library.",
        "regret": "How good the tuner's choices are.",
        "replay": "Campaigns and the model on recorded times.",
        "scaling": "Published scaling studies, repeated by the simulator.",
        "selection": "Choices at unmeasured numbers of ranks.",
        "sparse_sums": "Sums of sparse vectors beside gathering all rows.",
    },
}


class _Benchmarks(SuggestingGroup):
    """The collectives, `compare`, and the programs; those are imported only when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all benchmarks."""
        programs = [name for package, names in PROGRAMS.items() if find_spec(package) for name in names]
        return [*BUS_FACTORS, *super().list_commands(ctx), *programs]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the benchmark `cmd_name`; None if it does not exist."""
        if cmd_name in BUS_FACTORS:
            measure = copy(_measure)
            measure.name, measure.short_help = cmd_name, f"Measure {cmd_name}."
            return measure
        for package, names in PROGRAMS.items():
            if cmd_name in names:
                return _program(package, cmd_name, names[cmd_name])
        return super().get_command(ctx, cmd_name)


def _program(package: str, name: str, purpose: str) -> click.Command:
    """Return the command that runs a program of a package, which parses its own arguments."""

    def run(arguments: tuple[str, ...]) -> int:
        if find_spec(package) is None:
            raise UsageError(f"'{name}' is a study, which the installed package lacks: run it in a checkout of Unisono")
        sys.argv = [f"unisono bench {name}", *arguments]
        status = importlib.import_module(f"{package}.{name}").main()
        return status if isinstance(status, int) else 0

    settings = {"ignore_unknown_options": True, "help_option_names": []}
    argument = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
    return click.Command(
        name, context_settings=settings, params=[argument], callback=run, short_help=purpose, help=purpose
    )


@click.group(cls=_Benchmarks, short_help="Measure collectives, next to other libraries, and much else.")
def command() -> None:
    """Measure a collective, next to other libraries, or something else by its name.

    For example: unisono bench allreduce -n 2 --against gloo --out new.json

    unisono bench compare old.json new.json
    """


command.add_command(peers, "peers")


@command.command("compare", short_help="Compare two saved benchmarks.")
@click.argument("old", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("new", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
def _compare(*, old: Path, new: Path, as_json: bool) -> int:
    """Show the changes from OLD to NEW that are larger than noise. Both are files of --out or --save.

    The exit code is 1 if Unisono has become slower somewhere.
    """
    documents = comparison.read(old), comparison.read(new)
    changes = comparison.changes(*documents)
    if as_json:
        click.echo(comparison.as_json(changes), nl=False)
    else:
        console().print(comparison.table(*documents, changes))
    return int(any(each.verdict == "slower" and each.library.startswith("unisono") for each in changes))


@click.command()
@click.option("-n", "ranks", type=click.IntRange(min=1), default=2, show_default=True, help="Number of ranks.")
@click.option("--sizes", default="8:64M", show_default=True, help="FIRST:LAST[:FACTOR], or sizes with commas between.")
@click.option("--dtype", type=click.Choice(DTYPE_NAMES), default="float32", show_default=True, metavar="DTYPE")
@click.option(
    "--transports", "transport", default="shm", show_default=True, help="Transports of Unisono, with commas between."
)
@click.option("--against", default="", help=f"Peers, with commas between: {', '.join(PEERS)}.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Rounds at each size.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Seconds for each library at each size.",
)
@click.option(
    "--bind",
    type=click.Choice(["auto", "core", "none"]),
    default="auto",
    show_default=True,
    help="Bind ranks to cores.",
)
@click.option("--placement", type=click.Choice(PLACEMENTS), default="any", help="Keep only rounds with this placement.")
@click.option("--format", "form", type=click.Choice(["table", *FORMATS]), default="table", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines, as --format json.")
@click.option("--out", type=OutputFile(), help="Write the results as JSON to this file.")
@click.option("--html", type=PICTURE, help="Write a page with curves and ratios.")
@click.option("--save", is_flag=True, help=f"Append the results to {SAVED}/COLLECTIVE.jsonl.")
@load_option
@click.pass_context
def _measure(
    context: click.Context,
    *,
    ranks: int,
    sizes: str,
    dtype: str,
    transport: str,
    against: str,
    rounds: int,
    seconds: float,
    bind: str,
    placement: str,
    form: str,
    as_json: bool,
    out: Path | None,
    html: Path | None,
    save: bool,
) -> int:
    """Measure the collective in interleaved rounds, next to the libraries named by --against.

    --seconds is the time budget of one library at one size. All libraries are bound to cores in the same way (--bind
    auto: one rank per core, if there are enough). --placement keeps only rounds in which the cores of the first two
    ranks were two threads of one core, near, or far. The exit code is 1 if a library failed.
    """
    collective = str(context.info_name)  # the name of the command
    itemsize = DTYPES[dtype].itemsize
    settings = Settings(
        collective,
        ranks,
        _sizes(sizes, collective, itemsize, ranks),
        dtype,
        itemsize,
        _libraries(transport, against),
        rounds,
        seconds,
        bind,
        placement,
    )
    bar = _Bar(steps(settings))
    with bar.progress:
        results = BenchDriver(settings, bar).run()
    measured_rows = rows(settings, results)
    if as_json or form != "table":
        click.echo(FORMATS["json" if as_json else form](settings, results, measured_rows), nl=False)
    else:
        _show(results, table(settings, measured_rows))
    for failure in results.failures:
        tell(f"{failure.library}, {format_size(failure.nbytes)}: {failure.reason}")
    if out:
        write_text(out, as_json_text(settings, results, measured_rows))
    if html:
        from unisono.bench import page

        write_text(html, page.html(document(settings, results, measured_rows)))
    if save:
        append(SAVED / f"{collective}.jsonl", document(settings, results, measured_rows))
    return 1 if results.failures else 0


def _show(results: Results, shown: Table) -> None:
    terminal = console()
    terminal.print(shown)
    terminal.print(circumstances(results), highlight=False)
    for name, version in results.versions.items():
        terminal.print(f"{name}: {version}", highlight=False)
