"""Runs an unchanged program of mpi4py over Unisono: ``python -m unisono.compat.mpi4py.run program.py``.

``unisono run --mpi4py`` starts it on each rank. An exception that the program does not catch ends all ranks, because
the launcher stops them.
"""

from __future__ import annotations

import os
import runpy
import sys

from unisono.compat.mpi4py import hook
from unisono.errors import UsageError


def set_abort_status(status: object) -> None:
    """Do nothing: the exit code of the rank that fails first is the one of the job."""


def main(arguments: list[str] | None = None) -> None:
    """Run a program, ``-m`` and a module, or ``-c`` and a text, with its arguments.

    Raises:
        UsageError: a launcher of MPI has started this process, or there is no program.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if not words or (words[0] in {"-m", "-c"} and len(words) < 2):
        raise UsageError("which program? Write a file, or -m and a module")
    hook.install()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(hook.own_name(words[1]), run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        if not getattr(sys.flags, "safe_path", False):  # as Python does
            sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
