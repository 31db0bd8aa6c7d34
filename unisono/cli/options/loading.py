"""The option ``--load`` of all commands that accept algorithms by name or start ranks."""

from __future__ import annotations

import os

import click

from unisono.options import variable

_VARIABLE = variable("load")


def _load(context: click.Context, parameter: click.Parameter, files: tuple[str, ...]) -> None:
    """Load the files into this process, and set the environment so that started ranks load them too."""
    if not files:
        return
    from unisono.collectives.bootstrap.user_algorithms import load

    for file in files:
        load(file)
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = os.pathsep.join(map(os.path.abspath, files))
    context.call_on_close(lambda: _restore(before))


def _restore(before: str | None) -> None:
    os.environ.pop(_VARIABLE, None)
    if before is not None:
        os.environ[_VARIABLE] = before


load_option = click.option(
    "--load",
    "files",
    type=click.Path(exists=True, dir_okay=False),
    multiple=True,
    is_eager=True,
    expose_value=False,
    callback=_load,
    envvar=_VARIABLE,
    help="First load a Python file that registers algorithms, or a schedule.  [default: UNISONO_LOAD]",
)


def loaded_files() -> str:
    """Return the value of the option `load` for the ranks that a command starts."""
    return os.environ.get(_VARIABLE, "")
