"""Programs whose ranks are told torch's four variables, as scripts and operators of Kubernetes tell them."""

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
    """Run a program on ranks that meet at a port of this machine, and return how they ended.

    `before` are the words before the command of each rank, if there are any.
    """
    processes = []
    port = port or free_port()
    for rank in range(ranks):
        told = dict(zip(NAMES, (str(rank), str(ranks), "127.0.0.1", str(port)), strict=True))
        processes.append(
            subprocess.Popen(
                [*(before[rank] if before else ()), sys.executable, "-c", program, *arguments],
                cwd=folder,
                env={**os.environ, **told, **environ},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        texts = [process.communicate(timeout=DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *said)
        for process, said in zip(processes, texts, strict=True)
    ]
