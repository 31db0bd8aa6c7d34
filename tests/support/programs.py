"""Programs of Python that run together, as the ranks of a job or as several launchers. No process outlives its test.

`completed` runs command lines to their end. `by_variables` runs ranks that find each other by environment variables,
and `by_launcher` runs a program under ``unisono run``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from support.deadlines import DEADLINE_S
from support.import_path import import_path
from support.ports import free_port

Completed: TypeAlias = subprocess.CompletedProcess[str]


@contextlib.contextmanager
def started(
    commands: Sequence[Sequence[str]], environs: Sequence[Mapping[str, str]] = (), folder: Path | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes; at the end of the with-block, kill the sessions of those that still run.

    Args:
        commands: their command lines.
        environs: for each process, environment variables in addition to those of this process; by default none.
        folder: their current folder.
    """
    processes: list[subprocess.Popen[str]] = []
    try:
        for command, environ in zip(commands, environs or [{}] * len(commands), strict=True):
            processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **environ},
                    cwd=folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            end_session(process)
            process.communicate()


def completed(
    commands: Sequence[Sequence[str]],
    environs: Sequence[Mapping[str, str]] = (),
    folder: Path | None = None,
    deadline_s: float = DEADLINE_S,
) -> list[Completed]:
    """Run processes as `started` does; return their exit codes and outputs.

    A process that still runs at the deadline is killed, and has the exit code of its signal.
    """
    until = time.monotonic() + deadline_s
    with started(commands, environs, folder) as processes:
        outputs = [_output(process, until) for process in processes]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(processes, outputs, strict=True)
    ]


def by_variables(
    program: str,
    *arguments: str,
    folder: Path,
    port: int | None = None,
    ranks: int = 2,
    before: Sequence[Sequence[str]] = (),
    **environ: str,
) -> list[Completed]:
    """Run a program on ranks that meet at a port of this machine; return their exit codes and outputs.

    The ranks have torch's four variables, which scripts and Kubernetes operators set.

    Args:
        program: the text of a Python program.
        arguments: its arguments.
        folder: its current folder.
        port: where the ranks meet; a free port by default.
        ranks: the number of ranks.
        before: for each rank, the words before its command line; none by default.
        environ: environment variables of the ranks, in addition to those of this process.
    """
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port()), **environ}
    return completed(
        [[*words, sys.executable, "-c", program, *arguments] for words in before or [()] * ranks],
        [{"RANK": str(rank), **shared} for rank in range(ranks)],
        folder,
    )


def by_launcher(text: str, directory: Path, ranks: int = 2) -> Completed:
    """Write a program to `directory` and run it by ``unisono run``. It can import `support`."""
    file = directory / "program.py"
    file.write_text(text)
    command = [sys.executable, "-m", "unisono", "run", "-n", str(ranks), str(file)]
    return completed([command], [{"PYTHONPATH": import_path()}])[0]


def survivors_of_rank_1(program: str, *words: str) -> list[str]:
    """Run a program on three ranks, of which rank 1 kills itself. Return the standard output of ranks 0 and 2.

    The arguments of the program are its rank and `words`. Ranks 0 and 2 must end with exit code 0.
    """
    ranks = completed([[sys.executable, "-c", program, str(rank), *words] for rank in range(3)])
    assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL, 0], [rank.stderr for rank in ranks]
    return [ranks[0].stdout, ranks[2].stdout]


def _output(process: subprocess.Popen[str], until: float) -> tuple[str, str]:
    try:
        return process.communicate(timeout=max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()


def end_session(process: subprocess.Popen[Any]) -> None:
    """Kill a process that still runs, and the processes of its session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
