"""``unisono bench``: measures collectives, next to other libraries if these are installed."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from unisono.bench.driver import Driver, Results, Settings, steps
from unisono.bench.formats import FORMATS, as_json as as_json_text
from unisono.bench.peers import PEERS, Library, peer, unisono_over
from unisono.bench.report import append, document, rows, table
from unisono.bench.sizes import format_size, parse_sizes
from unisono.bench.statistics import BUS_FACTORS
from unisono.cli.loading import load_option
from unisono.cli.messages import tell
from unisono.cli.terminal import console, progress
from unisono.dtypes import DTYPES
from unisono.errors import UsageError
from unisono.options import parse_transports
from unisono.transports.host.core_distance import PLACEMENTS

# Collectives whose vector is divided equally among the ranks.
SHARED = ("allgather", "reduce_scatter", "alltoall")
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


@click.command(short_help="Measure collectives, next to other libraries.")
@click.argument("collective", type=click.Choice(list(BUS_FACTORS)))
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
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results as JSON to this file.")
@click.option("--save", is_flag=True, help=f"Append the results to {SAVED}/COLLECTIVE.jsonl.")
@load_option
def command(
    collective: str,
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
    save: bool,
) -> int:
    """Measure COLLECTIVE in interleaved rounds, next to the libraries named by --against.

    --seconds is the time budget of one library at one size. All libraries are bound to cores in the same way (--bind
    auto: one rank per core, if there are enough). --placement keeps only rounds in which the cores of the first two
    ranks were two threads of one core, near, or far. The exit code is 1 if a library failed.
    """
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
        results = Driver(settings, bar).run()
    measured_rows = rows(settings, results)
    if as_json or form != "table":
        click.echo(FORMATS["json" if as_json else form](settings, results, measured_rows), nl=False)
    else:
        _show(results, table(settings, measured_rows))
    for failure in results.failures:
        tell(f"{failure.library}, {format_size(failure.nbytes)}: {failure.reason}")
    if out:
        out.write_text(as_json_text(settings, results, measured_rows), encoding="utf-8")
    if save:
        append(SAVED / f"{collective}.jsonl", document(settings, results, measured_rows))
    return 1 if results.failures else 0


def _show(results: Results, shown: Table) -> None:
    terminal = console()
    terminal.print(shown)
    for name, version in results.versions.items():
        terminal.print(f"{name}: {version}", highlight=False)
