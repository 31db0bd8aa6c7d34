"""``unisono run``: runs a program on several ranks, merges their output, and shows the error that came first.

The ranks run on this machine, on hosts that ssh reaches, or on several machines with a launcher on each of them.
"""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from unisono.cli.messages import tell
from unisono.errors import UsageError
from unisono.foundation.streams import write_all
from unisono.launchers.output import MergedOutput, Write
from unisono.launchers.placement import Here, Job, OnHosts, OnOneOfSeveral, Placement, PlacementRules
from unisono.launchers.process import BINDINGS, Exit, signal_name, statistics_folder
from unisono.launchers.root_cause import LastError, last_error, root_cause
from unisono.options import FIELDS, Options, variable

TIMED_OUT = 124  # the exit code of timeout(1)
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OTHER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")


class _ProgramCommand(click.Command):
    """Leaves all arguments from the program on untouched, and notes whether ``--`` is before the program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        arguments = list(args)
        rest = super().parse_args(ctx, args)
        program = ctx.params.get("program", ())
        before = arguments[: len(arguments) - len(program)]
        ctx.meta["executable"] = before[-1:] == ["--"]
        return rest


class _Option(click.Option):
    """An option that other launchers name otherwise: those names work too, and the help shows only ours.

    Args:
        habits: the names in mpirun, torchrun and horovodrun.
    """

    def __init__(self, *arguments: Any, habits: Sequence[str], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._habits = habits

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Let the parser know all names of the option."""
        own = self.opts
        self.opts = [*own, *self._habits]
        super().add_to_parser(parser, ctx)
        self.opts = own


def _number(what: str, least: int) -> Callable[[click.Context, click.Parameter, str | None], int | None]:
    """Return the callback of an option that takes a number of at least `least`; `what` describes it in errors."""

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
            raise click.BadParameter(f"{text!r} is not a {what}.")
        return int(text)

    return read


def _variables(context: click.Context, parameter: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
    """Return the variables in ``NAME=VALUE``; ``NAME`` alone means its value here."""
    variables = {}
    for text in texts:
        name, has_value, value = text.partition("=")
        if not name or not (has_value or name in os.environ):
            raise click.BadParameter(f"{text!r} is not NAME=VALUE, nor the name of a variable that is set here.")
        variables[name] = value if has_value else os.environ[name]
    return variables


def _seconds(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    try:
        return None if text is None else float(FIELDS["timeout_s"].parse(text))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not {error}.") from None


@click.command(
    cls=_ProgramCommand,
    context_settings={"allow_interspersed_args": False},
    options_metavar="-n RANKS [OPTIONS]",
    short_help="Run a program on several ranks.",
)
@click.option(
    "-n",
    "size",
    cls=_Option,
    habits=("-np", "--np", "--num-proc", "--nproc-per-node", "--nproc_per_node"),
    metavar="RANKS",
    callback=_number("positive number of ranks", 1),
    help="Number of ranks; with --nnodes, on this machine.",
)
@click.option("-m", "module", is_flag=True, help="PROGRAM is the name of a module, as in python -m.")
@click.option("--data-parallel", is_flag=True, help="Train data-parallel by a program for one process.")
@click.option("--mpi4py", "of_mpi4py", is_flag=True, help="Let `import mpi4py` of the program find Unisono.")
@click.option(
    "--hosts", metavar="A:2,B:2", cls=_Option, habits=("-H",), help="Run the ranks on these hosts, which ssh reaches."
)
@click.option("--ssh", metavar="COMMAND", help="The ssh of --hosts with options, such as 'ssh -p 2222'.")
@click.option(
    "--nnodes",
    "nodes",
    metavar="N",
    callback=_number("positive number of machines", 1),
    help="Number of machines, each with a launcher.",
)
@click.option(
    "--node-rank",
    "node",
    metavar="R",
    callback=_number("number of a machine", 0),
    help="The number of this machine, from 0.",
)
@click.option("--store", metavar="URL", help="Where the launchers meet, such as tcp://10.0.0.1:29400 of machine 0.")
@click.option(
    "--env",
    "variables",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_variables,
    cls=_Option,
    habits=("-x",),
    help="Set a variable.",
)
@click.option("--bind", type=click.Choice(["none", *BINDINGS]), default="none", help="Bind ranks to cores.")
@click.option("--timeout", "timeout_s", metavar="SECONDS", callback=_seconds, help="Stop the ranks after this time.")
@click.option("--keep-going", is_flag=True, help="Let the other ranks run on when a rank fails.")
@click.option(
    "--max-restarts",
    metavar="N",
    callback=_number("number of restarts", 0),
    help="Start lost ranks anew, N times in all.",
)
@click.option("--label/--no-label", default=True, help="Begin each line with the rank that wrote it.")
@click.option("--log", metavar="LEVEL", help=f"Set {variable('log')}, such as info or debug:links.")
@click.option(
    "--trace", metavar="FOLDER", help=f"Set {variable('trace')}: write what the ranks do, for `unisono trace`."
)
@click.option("--verbose", is_flag=True, help="Show the tracebacks of all ranks, as soon as they are written.")
@click.option("--stats", is_flag=True, help="Show at the end what each rank has called, and for whom it has waited.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def command(
    context: click.Context,
    *,
    size: int | None,
    module: bool,
    data_parallel: bool,
    of_mpi4py: bool,
    hosts: str | None,
    ssh: str | None,
    nodes: int | None,
    node: int | None,
    store: str | None,
    variables: dict[str, str],
    bind: str,
    timeout_s: float | None,
    keep_going: bool,
    max_restarts: int | None,
    label: bool,
    log: str | None,
    trace: str | None,
    verbose: bool,
    stats: bool,
    program: tuple[str, ...],
) -> int:
    """Run PROGRAM with its arguments on several ranks.

    PROGRAM is a Python file; with -m a module; after "--" any executable. Its exit code is that of the rank that
    failed first, or 128 plus the number of the signal that ended it. With --keep-going it is 0 if a rank ended with 0.
    --max-restarts implies --keep-going.

    With --data-parallel, PROGRAM is a program for one process that trains by torch or Keras. It is not changed: each
    rank trains on its share of the samples, and gradients are averaged. The ranks report what is done differently.

    With --mpi4py, PROGRAM is a program of mpi4py, which is not changed: its calls are made by Unisono.

    All ranks run on this machine, unless --hosts names other hosts. Without ssh, start the same command on each
    machine, with --nnodes, --store and a different --node-rank.
    """
    settings = {"log": log, "trace": trace}
    variables |= {variable(name): value for name, value in settings.items() if value}
    environ = {**os.environ, **variables}
    options = Options.from_environment(environ)
    restarts = max_restarts or 0
    keep_going = keep_going or restarts > 0
    is_of_mpi4py = of_mpi4py and module and program[0].partition(".")[0] == "mpi4py"
    argv = _program(program, module=module, executable=context.meta["executable"], is_known=is_of_mpi4py)
    for option, is_set, runner in (
        ("--data-parallel", data_parallel, "unisono.frameworks.transparent"),
        ("--mpi4py", of_mpi4py, "unisono.compat.mpi4py.run"),
    ):
        if is_set:
            argv = _run_by(runner, option, argv, executable=context.meta["executable"])
    placement = _placement(size, hosts, ssh, nodes, node, store, restarts)
    everything = verbose or keep_going or options.log.startswith("debug")
    write = _Writer(placement.ranks, label=label)
    output = MergedOutput(write, hold=not everything, keep_going=keep_going)
    with statistics_folder(stats) as folder:
        if stats:
            environ[variable("stats")] = folder
        rules = PlacementRules(
            bind=None if bind == "none" else bind,
            environ=environ,
            passed=variables,
            on_loss=_tell_failure if keep_going else None,
            max_restarts=restarts,
        )
        job = placement.job(argv, output, rules)
        write.keep_waiting = job.attend
        with _signals_forwarded(job) as received:
            exits = job.run(timeout_s)
        tracebacks = output.finish()
        if stats:
            _show_statistics(Path(folder), placement.ranks, exits)
    for line in job.whereabouts:
        tell(line)
    if received:
        return _tell_signal(received[0])
    if job.late:
        return _tell_timeout(timeout_s, job.late)
    if job.alone:
        tell(f"stopped {_named(job.alone)}: no rank was left that could admit a process that joins")
    if keep_going and any(ended.code == 0 for ended in exits):
        _tell_survival(exits)
        return _tell_losses(write.errors)
    status = _tell_exits(exits, tracebacks, None if everything else write)
    return status or _tell_losses(write.errors)


def _placement(
    size: int | None,
    hosts: str | None,
    ssh: str | None,
    nodes: int | None,
    node: int | None,
    store: str | None,
    restarts: int,
) -> Placement:
    """Return where the ranks run; raises `UsageError` if the options contradict each other."""
    if (hosts or nodes) and restarts:
        raise UsageError("--max-restarts starts ranks anew on one machine only, without --hosts and --nnodes")
    if hosts and nodes:
        raise UsageError(
            "--hosts starts the ranks of all hosts from here, and --nnodes those of one machine: choose one"
        )
    if hosts:
        return OnHosts.of(hosts, size, "ssh" if ssh is None else ssh)
    if ssh is not None:
        raise UsageError("--ssh belongs to --hosts, which names the hosts")
    if size is None:
        raise UsageError("how many ranks? Write -n RANKS, or --hosts with a number for each host, as in a:2,b:2")
    if nodes:
        return OnOneOfSeveral.of(size, node, nodes, store)
    if store or node is not None:
        raise UsageError("--store and --node-rank belong to --nnodes, which says how many machines have a launcher")
    return Here.of(size)


def _show_statistics(folder: Path, ranks: range, exits: Sequence[Exit]) -> None:
    from unisono.cli.output import job_statistics
    from unisono.cli.output.terminal import console

    statistics = job_statistics.read(folder, ranks)
    console(stderr=True).print(job_statistics.summary(statistics))
    sentence = job_statistics.straggler(statistics)
    if sentence and not any(ended.code for ended in exits):  # the others wait for a failed rank, too
        tell(sentence)


def _program(words: Sequence[str], *, module: bool, executable: bool, is_known: bool) -> tuple[str, ...]:
    """Return the command of each rank; raises `UsageError` if the program is not `is_known` and does not exist."""
    name, *arguments = words
    if executable:
        if shutil.which(name) is None:
            raise UsageError(f"there is no executable {name!r}")
        return tuple(words)
    if module:
        if not is_known:
            _check_module(name)
        return (sys.executable, "-m", *words)
    _check_script(Path(name))
    return (sys.executable, name, *arguments)


def _run_by(runner: str, option: str, argv: Sequence[str], *, executable: bool) -> tuple[str, ...]:
    """Return the command that lets a module run a Python program, whose command is `argv`."""
    if executable:
        raise UsageError(f"{option} runs a Python file or, with -m, a module, and no other executable")
    return (argv[0], "-m", runner, *argv[1:])


def _check_module(name: str) -> None:
    top = name.partition(".")[0]
    places = [os.getcwd(), *sys.path]
    if top not in sys.builtin_module_names and importlib.machinery.PathFinder.find_spec(top, places) is None:
        raise UsageError(f"there is no module {name!r}")


def _check_script(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{str(path)!r} is a directory, not a Python file")
    if not path.exists():
        raise UsageError(f"there is no file {str(path)!r}{_hint(str(path))}")
    try:
        with path.open("rb") as file:
            first = file.readline(256)
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    if path.suffix not in {".py", ".pyw"} and not (first.startswith(b"#!") and b"python" in first):
        raise UsageError(f"{str(path)!r} is not a Python file{_hint(str(path))}")


def _hint(name: str) -> str:
    return f"; to run an executable, put -- before it: -- {name}" if shutil.which(name) else ""


class _Writer:
    """Writes a line of a rank to the stream of the same name, with a label if requested.

    A job does not end because its output cannot be written.

    Attributes:
        keep_waiting: called while there is no room for a line; if it returns False, the line is dropped.
        errors: by stream, the error because of which lines were lost, such as a full disk.
    """

    def __init__(self, ranks: Iterable[int], *, label: bool) -> None:
        self.keep_waiting: Callable[[], bool] = lambda: True
        self.errors: dict[str, OSError] = {}
        self._sinks = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._labels = {
            name: {rank: _label(rank, coloured=sink.isatty()) if label else b"" for rank in ranks}
            for name, sink in self._sinks.items()
        }

    def __call__(self, rank: int, stream: str, line: bytes) -> None:
        try:
            write_all(self._sinks[stream].fileno(), self._labels[stream][rank] + line, self.keep_waiting)
        except OSError as error:
            self.errors[stream] = error


def _label(rank: int, *, coloured: bool) -> bytes:
    text = f"[{rank}]"
    if coloured and "NO_COLOR" not in os.environ:
        from rich.color import ColorSystem
        from rich.style import Style

        text = Style(color=COLOURS[rank % len(COLOURS)]).render(text, color_system=ColorSystem.STANDARD)
    return f"{text} ".encode()


@contextmanager
def _signals_forwarded(job: Job) -> Iterator[list[int]]:
    """Forward signals to the ranks, and yield the list of received signals that end a job.

    A second such signal kills the ranks. Signals that this process was started to ignore stay ignored, such as SIGHUP
    under nohup.
    """
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if received:
            job.kill()
        else:
            job.forward(number)
        received.append(number)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            job.report(tell)
        job.pass_on(number)

    handlers = dict.fromkeys(ENDING_SIGNALS, end) | dict.fromkeys(OTHER_SIGNALS, pass_on)
    before = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield received
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _tell_signal(number: int) -> int:
    tell("interrupted" if number == signal.SIGINT else f"stopped by {signal_name(number)}")
    return 128 + number


def _tell_timeout(timeout_s: float | None, late: Sequence[int]) -> int:
    tell(f"stopped after {timeout_s:g} s (--timeout): {_named(late)} had not ended")
    return TIMED_OUT


def _tell_failure(ended: Exit, living: int, is_restarted: bool) -> None:
    others = f"{living} other rank{' goes' if living == 1 else 's go'} on" if living else "no other rank is running"
    then = ", and it is started anew" if is_restarted else ""
    place = f"host {ended.host or os.uname().nodename}" + (f", pid {ended.pid}" if ended.pid else "")
    tell(f"rank {ended.rank} ({place}) {ended}; {others}{then}")


def _tell_survival(exits: Sequence[Exit]) -> None:
    """Print the lost ranks, the ranks that were started anew and ended with 0, and all other ranks; each rank once."""
    failed = {ended.rank for ended in exits if ended.code}
    if not failed:
        return
    succeeded = {ended.rank for ended in exits if ended.code == 0}
    were = "were" if len(failed - succeeded) > 1 else "was"
    parts = (
        (failed - succeeded, f"{were} lost (--keep-going)"),
        (failed & succeeded, "ended with 0 after a new start"),
        (succeeded - failed, "ended with 0"),
    )
    *first, last = [f"{_named(sorted(ranks))} {how}" for ranks, how in parts if ranks]
    tell(", and ".join(filter(None, [", ".join(first), last])))


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _tell_losses(errors: Mapping[str, OSError]) -> int:
    """Report the output that could not be written; return the exit code."""
    for stream, error in errors.items():
        tell(f"lines of ranks are missing, because {stream} could not be written: {error.strerror}")
    return 1 if errors else 0


def _tell_exits(exits: Sequence[Exit], tracebacks: Mapping[int, list[bytes]], write: Write | None) -> int:
    """Write the traceback of the rank that failed first, and a line about each other one; return the exit code.

    Output that was held back and does not end in an exception, such as a dump of faulthandler, is written too.

    Args:
        exits: how the ranks ended, in that order.
        tracebacks: by rank, its last output on standard error.
        write: writes a line that was held back; None if all lines have been written.
    """
    errors = {rank: error for rank, lines in tracebacks.items() if (error := last_error(lines))}
    cause = root_cause(exits, errors)
    succeeded = {ended.rank for ended in exits if ended.code == 0}
    for rank, lines in tracebacks.items():
        if write and (rank in succeeded or rank not in errors or (cause and rank == cause.rank)):
            for line in lines:
                write(rank, "stderr", line)
    if cause is None:
        return 0
    tell(f"rank {cause.rank} {cause}")
    for ended in sorted(exits, key=lambda ended: ended.rank):
        if ended.code != 0 and ended is not cause:
            tell(f"rank {ended.rank} {_aftermath(ended, errors.get(ended.rank))}")
    return cause.status


def _aftermath(ended: Exit, error: LastError | None) -> str:
    if ended.stopped:
        return f"was stopped ({signal_name(-ended.code)})"
    return f"then {ended} ({error})" if error else f"then {ended}"
