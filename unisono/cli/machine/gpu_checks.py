"""The GPU checks of `unisono doctor`: the driver, the compiler, the device, and sharing between processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from unisono.cli.machine.checks import CheckResult
from unisono.errors import UnisonoError


def _driver(results: dict[str, Any]) -> str:
    from unisono.transports.cuda.driver_api.errors import Driver

    results["driver"] = driver = Driver()
    devices = driver("cuDeviceGetCount")
    return f"of CUDA {driver.version[0]}.{driver.version[1]}, which sees {devices} GPU{'s' if devices != 1 else ''}"


def _compiler(results: dict[str, Any]) -> str:
    from unisono.transports.cuda.kernels.compiler import version

    return "of CUDA {}.{}".format(*version())


def _device(results: dict[str, Any]) -> str:
    from unisono.transports.cuda.driver_api.cuda_device import CudaDevice

    results["device"] = device = CudaDevice()
    return f"{device.name}, {device.uuid}"


def _memory(results: dict[str, Any]) -> str:
    if results["device"].has_pool():
        return "results come from a pool, to which they return in the order of streams"
    return "results are allocated and freed by a thread, as the driver has no pools of memory"


def _topology(results: dict[str, Any]) -> str:
    from unisono.transports.cuda.driver_api.cuda_device import CudaDevice

    devices = [CudaDevice(ordinal) for ordinal in range(results["driver"]("cuDeviceGetCount"))]
    if len(devices) == 1:
        return "one GPU, whose ranks read each other's memory"
    apart = [f"{a.ordinal} and {b.ordinal}" for a, b in combinations(devices, 2) if not a.can_reach(b.uuid)]
    if not apart:
        return f"all {len(devices)} GPUs read each other's memory"
    return f"staged through the host between GPUs {', '.join(apart)}, which do not read each other's memory"


def _sharing(results: dict[str, Any]) -> str:
    from unisono.transports.cuda.peers.probe import try_sharing

    way = try_sharing(results["device"])
    return f"another process opened the memory, and read the written data in the order of {way}"


# Each check has a subject, a function and the earlier result that it needs. The function stores its result for later
# ones.
_CHECKS: Sequence[tuple[str, Callable[[dict[str, Any]], str], str]] = (
    ("GPU driver", _driver, ""),
    ("NVRTC", _compiler, ""),
    ("GPU 0", _device, "driver"),
    ("GPU memory", _memory, "device"),
    ("GPU topology", _topology, "device"),
    ("CUDA IPC", _sharing, "device"),
)


def gpu_findings() -> list[CheckResult]:
    """Return the finding of each check. A check whose requirement failed is not tried."""
    results: dict[str, Any] = {}
    return [_checked(subject, attempt, needs, results) for subject, attempt, needs in _CHECKS]


def _checked(
    subject: str, attempt: Callable[[dict[str, Any]], str], needs: str, results: dict[str, Any]
) -> CheckResult:
    if needs and needs not in results:
        return CheckResult(subject, False, f"not tried: it needs the {needs}")
    try:
        return CheckResult(subject, True, attempt(results))
    except UnisonoError as error:
        # Such an error has the form "reason: remedy".
        why, _, remedy = error.message.rpartition(": ")
        return CheckResult(subject, False, why or error.message, remedy if why else "")
