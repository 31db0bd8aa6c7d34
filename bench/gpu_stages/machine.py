"""Describes the machine: its hardware, its packages, and the checks of `unisono doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from unisono.bench.gpu_stages.records import reason_of, tell
from unisono.cli.checks import CHECKS, run_checks
from unisono.cli.gpu_checks import gpu_findings
from unisono.program import begin

PACKAGES = (
    "numpy",
    "ml_dtypes",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "torch",
    "cupy-cuda13x",
    "nvidia-nccl-cu13",
    "mpi4py",
)
SMI_FIELDS = (
    "name,uuid,driver_version,memory.total,compute_mode,clocks.max.sm,clocks.max.mem,power.limit,mig.mode.current"
)
MPS = Path("/usr/local/nvidia/bin/nvidia-cuda-mps-control")
TIMEOUT_S = 20.0


def _versions() -> str:
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    return ", ".join(versions)


def _nvidia_smi() -> str:
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout.strip()


def _memory() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB"


IDENTITY: dict[str, Callable[[], str]] = {
    "system": lambda: f"{platform.system()} {platform.release()} {platform.machine()}",
    "python": platform.python_version,
    "cores": lambda: str(len(os.sched_getaffinity(0))),
    "memory": _memory,
    "packages": _versions,
    "nvidia-smi": _nvidia_smi,
    "MPS": lambda: shutil.which("nvidia-cuda-mps-control") or (str(MPS) if MPS.exists() else "not there"),
}


def main() -> None:
    """Print a record of each fact; if it cannot be determined, the record says why."""
    for name, find in IDENTITY.items():
        try:
            value = find()
        except (OSError, subprocess.SubprocessError) as error:
            value = reason_of(error)
        tell("machine", name=name, value=value)
    for finding in (*run_checks(CHECKS), *gpu_findings()):
        detail = f"{finding.detail}: {finding.remedy}" if finding.remedy else finding.detail
        tell("probe", name=finding.subject, usable=finding.usable, detail=detail)


if __name__ == "__main__":
    begin()
    main()
