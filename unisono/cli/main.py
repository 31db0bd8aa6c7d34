"""The command `unisono`: the table of subcommands, and how errors are shown."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

import click

from unisono import __version__
from unisono.cli.groups import SuggestingGroup
from unisono.cli.messages import tell
from unisono.errors import NoAlgorithmError, PlanError, UnisonoError, UsageError
from unisono.foundation import interrupts
from unisono.foundation.program import begin
from unisono.foundation.streams import StreamError
from unisono.transports import CORE

# The subcommands, with their lines in the help. Each is `command` in the module of its name in `unisono.cli.commands`,
# or in that of `_MODULES` where Python has another use for the name.
SUBCOMMANDS = {
    "run": "Run a program on several ranks.",
    "swarm": "Serve the place where the members of a swarm meet.",
    "top": "Show what the running jobs on this host do, and who waits for whom.",
    "postmortem": "Say from the dumps of a failed or hanging job which rank did what wrong.",
    "trace": "Merge the traces of a job's ranks.",
    "doctor": "Check what works on this machine, and say why the rest does not.",
    "bench": "Measure collectives, next to other libraries, and much else.",
    "explain": "Explain which algorithm a call uses, and why.",
    "calibrate": "Measure the links and the memory of this machine.",
    "tune": "Measure which algorithms are fastest here, and write a decision table.",
    "simulate": "Predict a collective on a described machine, at any number of ranks.",
    "place": "Propose the order of a job's hosts on a described machine.",
    "show": "Show the schedule of an algorithm and its cost.",
    "import": "Prove a schedule of MSCCL or MSCCL++, and show its cost beside other algorithms.",
    "export": "Write a schedule for MSCCL or ASTRA-sim, or a decision table for another library.",
    "verify": "Prove the algorithms that a file registers, or all algorithms.",
    "test": "Run random calls of every collective, and check their results.",
}


_MODULES = {"import": "import_schedule", "export": "export_schedule"}


def _imported(module: str) -> ModuleType:
    interrupts.end_process()
    try:
        return importlib.import_module(module)
    finally:
        interrupts.raise_error()


class LazyGroup(SuggestingGroup):
    """A group that imports the module of a subcommand only when the subcommand is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the subcommands, in the order of the table."""
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the subcommand `cmd_name`; None if it does not exist."""
        if cmd_name not in SUBCOMMANDS:
            return None
        command = _imported(f"unisono.cli.commands.{_MODULES.get(cmd_name, cmd_name)}").command
        assert isinstance(command, click.Command)
        command.name = cmd_name  # the functions that define the commands are all named `command`
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([*SUBCOMMANDS.items()])


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", message="unisono %(version)s")
@click.pass_context
def unisono(context: click.Context) -> None:
    """Collective communication for Python."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; 2 means that the command line is wrong, and one line says why."""
    begin()
    try:
        status = unisono.main(arguments, prog_name="unisono", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", interrupts.INTERRUPTED)
    except UnisonoError as error:
        if os.environ.get("UNISONO_LOG", "").lower().startswith("debug"):
            raise
        if isinstance(error, PlanError):
            tell(str(error))  # several lines, because the error has a picture
            return 1
        return _fail(str(error), 2 if isinstance(error, (UsageError, NoAlgorithmError)) else 1)
    except StreamError as error:
        return _fail(f"the output cannot be written: {error.strerror}", 1)
    except ImportError as error:
        if error.name != CORE:
            raise
        return _fail(str(error), 1)
    return status if isinstance(status, int) else 0


def _fail(message: str, status: int) -> int:
    tell(" ".join(message.split()))
    return status
