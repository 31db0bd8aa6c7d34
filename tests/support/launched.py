"""Runs programs whose ranks have torch's four environment variables, which scripts and Kubernetes operators set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.deadlines import DEADLINE_S
from support.ports import free_port

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def by_variables(
    program: str,
    *arguments: str,
    folder: Path,
    port: int | None = None,
    ranks: int = 2,
    before: Sequence[Sequence[str]] = (),
    **environ: str,
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program on ranks that meet at a port of this machine; return their exit codes and outputs.

    Args:
        program: the text of a Python program.
        arguments: its arguments.
        folder: its current folder.
        port: where the ranks meet; a free port by default.
        ranks: the number of ranks.
        before: for each rank, the words before its command line; none by default.
        environ: environment variables of the ranks, in addition to those of this process.
    """
    processes = []
    port = port or free_port()
    for rank in range(ranks):
        variables = dict(zip(NAMES, (str(rank), str(ranks), "127.0.0.1", str(port)), strict=True))
        processes.append(
            subprocess.Popen(
                [*(before[rank] if before else ()), sys.executable, "-c", program, *arguments],
                cwd=folder,
                env={**os.environ, **variables, **environ},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(processes, outputs, strict=True)
    ]
