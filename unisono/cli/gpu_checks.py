"""What `unisono doctor` tries of GPUs: the driver, what compiles for them, the device, and sharing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from unisono.cli.checks import Finding
from unisono.errors import UnisonoError


def _driver(found: dict[str, Any]) -> str:
    from unisono.transports.cuda.driver_errors import Driver

    found["driver"] = driver = Driver()
    devices = driver("cuDeviceGetCount")
    return f"of CUDA {driver.version[0]}.{driver.version[1]}, which sees {devices} GPU{'s' if devices != 1 else ''}"


def _compiler(found: dict[str, Any]) -> str:
    from unisono.transports.cuda.compiler import version

    return "of CUDA {}.{}".format(*version())


def _device(found: dict[str, Any]) -> str:
    from unisono.transports.cuda.driver import CudaDevice

    found["device"] = device = CudaDevice()
    return f"{device.name}, {device.uuid}"


def _topology(found: dict[str, Any]) -> str:
    from unisono.transports.cuda.driver import CudaDevice

    devices = [CudaDevice(ordinal) for ordinal in range(found["driver"]("cuDeviceGetCount"))]
    if len(devices) == 1:
        return "one GPU, whose ranks read each other's memory"
    apart = [f"{a.ordinal} and {b.ordinal}" for a, b in combinations(devices, 2) if not a.can_reach(b.uuid)]
    if not apart:
        return f"all {len(devices)} GPUs read each other's memory"
    return f"staged through the host between GPUs {', '.join(apart)}, which do not read each other's memory"


def _sharing(found: dict[str, Any]) -> str:
    from unisono.transports.cuda.ipc_probe import try_sharing

    try_sharing(found["device"])
    return "another process opened memory and events, and saw what was written"


# What was checked, how, and what it needs: each puts what it finds into a dictionary, for those behind it.
_CHECKS: Sequence[tuple[str, Callable[[dict[str, Any]], str], str]] = (
    ("GPU driver", _driver, ""),
    ("NVRTC", _compiler, ""),
    ("GPU 0", _device, "driver"),
    ("GPU topology", _topology, "device"),
    ("CUDA IPC", _sharing, "device"),
)


def gpu_findings() -> list[Finding]:
    """Return the finding of each check; what needs one that failed is not tried."""
    found: dict[str, Any] = {}
    return [_checked(subject, attempt, needs, found) for subject, attempt, needs in _CHECKS]


def _checked(subject: str, attempt: Callable[[dict[str, Any]], str], needs: str, found: dict[str, Any]) -> Finding:
    if needs and needs not in found:
        return Finding(subject, False, f"not tried: it needs the {needs}")
    try:
        return Finding(subject, True, attempt(found))
    except UnisonoError as error:
        # Errors of what cannot be used say why, and what to do.
        why, _, remedy = error.message.rpartition(": ")
        return Finding(subject, False, why or error.message, remedy if why else "")
