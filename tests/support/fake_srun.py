"""srun for one machine: ``fake_srun.py -n 3 CMD …`` starts the tasks of a step with the variables that srun sets."""

from __future__ import annotations

import os
import subprocess
import sys


def variables(rank: int, tasks: int, *, nodes: str = "localhost") -> dict[str, str]:
    """Return the variables that srun sets for a task of a step."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_NTASKS": str(tasks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NODELIST": nodes,
    }


def main() -> int:
    """Start the tasks, wait for all of them, and return the highest exit code."""
    tasks, command = int(sys.argv[2]), sys.argv[3:]
    job = {"SLURM_JOB_ID": str(os.getpid())}
    started = [subprocess.Popen(command, env={**os.environ, **variables(rank, tasks), **job}) for rank in range(tasks)]
    return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main())
