"""Programs on ranks that torchrun starts. Ranks end with their agent, and agents with the process of the tests."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support.deadlines import DEADLINE_S
from support.import_path import import_path
from support.ports import free_port
from support.programs import started

# The agent of torchrun ends its ranks when it gets SIGTERM. The kernel sends it when the parent has died.
_AGENT = (
    "import ctypes, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "from torch.distributed.run import main; main(sys.argv[1:])"
)
# The agent gives ranks that ignore SIGTERM 30 s.
_END_S = 40.0


class TorchrunResult(NamedTuple):
    """The output of all ranks, and their reports in the order of ranks."""

    output: str
    reports: list[dict[str, Any]]


def report(**facts: Any) -> None:
    """Write the report of this rank into its current folder. A later one takes its place."""
    Path(f"rank-{os.environ['RANK']}.json").write_text(json.dumps(facts))


def torchrun(
    program: Path, folder: Path, *words: str, ranks: int = 2, agents: int = 1, restarts: int = 0
) -> TorchrunResult:
    """Run a program on the ranks of one or several agents; return once all agents have ended well.

    Args:
        program: its file.
        folder: the current folder of the ranks.
        words: the arguments of the program.
        ranks: of each agent.
        agents: how many, as on so many hosts.
        restarts: how often each agent starts its ranks again.
    """
    deadline = time.monotonic() + DEADLINE_S
    command = [sys.executable, "-c", _AGENT, *_options(ranks, agents, restarts), str(program), *words]
    variables = {"PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
    with started([command] * agents, [variables] * agents, folder) as processes:
        try:
            written = [process.communicate(timeout=max(0.1, deadline - time.monotonic())) for process in processes]
        finally:
            _end(processes)
    assert [process.returncode for process in processes] == [0] * agents, "\n".join(errors for _, errors in written)
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    return TorchrunResult("".join(output for output, _ in written), reports)


def _options(ranks: int, agents: int, restarts: int) -> list[str]:
    options = {
        "nnodes": agents,
        "nproc-per-node": ranks,
        "max-restarts": restarts,
        "monitor-interval": 0.1,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": f"127.0.0.1:{free_port()}",
        "rdzv-id": "tests",
        "local-addr": "127.0.0.1",
    }
    return [f"--{name}={value}" for name, value in options.items()]


def _end(agents: Sequence[subprocess.Popen[str]]) -> None:
    """Let agents that still run end their ranks, which are in sessions of their own."""
    for agent in agents:
        agent.terminate()
    for agent in agents:
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.communicate(timeout=_END_S)
