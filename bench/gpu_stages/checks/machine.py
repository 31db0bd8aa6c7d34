"""Describes the machine: its hardware, its packages, and the checks of `unisono doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from unisono.bench.gpu_stages.nccl import library_version
from unisono.bench.gpu_stages.results.records import reason_of, tell
from unisono.cli.machine.checks import CHECKS, CheckResult, run_checks
from unisono.cli.machine.gpu_checks import gpu_findings
from unisono.foundation.program import begin

PACKAGES = (
    *("numpy", "ml_dtypes", "click", "rich", "cloudpickle", "cuda-bindings", "nvidia-cuda-nvrtc", "torch"),
    *("cupy-cuda13x", "jax", "nvidia-nccl-cu13", "nccl4py", "mpi4py", "pytest", "pytest-timeout", "pytest-xdist"),
    "hypothesis",
)
# The name of the double of the driver (tests/native/fake_libcuda.cpp), and the variable that forbids it.
DOUBLE, FORBIDDEN = "GPU of the tests", "FAKE_CUDA_FORBIDDEN"
SMI_FIELDS = (
    "name,uuid,driver_version,memory.total,compute_mode,clocks.max.sm,clocks.max.mem,power.limit,mig.mode.current"
)
MPS = Path("/usr/local/nvidia/bin/nvidia-cuda-mps-control")
TIMEOUT_S = 20.0
DRIVER, GPU = "GPU driver", "GPU 0"


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


def _nccl() -> str:
    version = library_version()
    return "not there" if version is None else f"{version[0]}.{version[1]}"


def _mps() -> str:
    program = shutil.which("nvidia-cuda-mps-control") or (str(MPS) if MPS.exists() else "not there")
    return f"{program}, in use" if "CUDA_MPS_PIPE_DIRECTORY" in os.environ else program


def _memory() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB"


IDENTITY: dict[str, Callable[[], str]] = {
    "system": lambda: f"{platform.system()} {platform.release()} {platform.machine()}",
    "python": platform.python_version,
    "cores": lambda: str(len(os.sched_getaffinity(0))),
    "memory": _memory,
    "packages": _versions,
    "nvidia-smi": _nvidia_smi,
    "NCCL": _nccl,
    "MPS": _mps,
}


def why_no_gpu(findings: Sequence[CheckResult]) -> str:
    """Return why this machine has no GPU that can be measured; "" if it has one."""
    gpu = next(finding for finding in findings if finding.subject == GPU)
    if gpu.usable and DOUBLE in gpu.detail and os.environ.get(FORBIDDEN):
        return "the driver is the double of the tests"
    refused = next((finding for finding in findings if not finding.usable and finding.subject in (DRIVER, GPU)), None)
    return "" if refused is None else refused.detail


def main() -> int:
    """Print a record of each fact; if it cannot be determined, the record says why. Return 1 if there is no GPU."""
    for name, find in IDENTITY.items():
        try:
            value = find()
        except (OSError, subprocess.SubprocessError) as error:
            value = reason_of(error)
        tell("machine", name=name, value=value)
    of_gpu = gpu_findings()
    for finding in (*run_checks(CHECKS), *of_gpu):
        detail = f"{finding.detail}: {finding.remedy}" if finding.remedy else finding.detail
        tell("probe", name=finding.subject, usable=finding.usable, detail=detail)
    if reason := why_no_gpu(of_gpu):
        sys.stderr.write(f"no GPU can be measured here, so no other stage runs: {reason}\n")
        return 1
    return 0


if __name__ == "__main__":
    begin()
    sys.exit(main())
