"""What a machine is, as far as it decides which times hold on it.

A fingerprint is a hash of identities only: processor, numbers of cores and NUMA nodes, GPUs, system. What changes from
boot to boot, or with load, is not in it. `tuning.calibration_files` has what was measured on a machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from functools import cache
from typing import Any

from unisono.errors import UsageError

_HEAD = 4096  # of /proc/cpuinfo, which has a part for each core


def describe() -> dict[str, Any]:
    """Return what identifies this machine, for people and for `fingerprint`."""
    found = {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count() or 1,
        "numa_nodes": _count("/sys/devices/system/node", "node"),
        "system": platform.system(),
    }
    gpus = _gpus("/proc/driver/nvidia/gpus")
    return {**found, "gpus": gpus} if gpus else found


def fingerprint(identity: Mapping[str, Any] | None = None) -> str:
    """Return 16 hexadecimal digits that are equal for equal identities, by default for this machine's.

    Raises:
        UsageError: it is not made of what JSON has.

    >>> fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1})
    True
    """
    found = describe() if identity is None else identity
    try:
        text = json.dumps(found, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"an identity is made of what JSON has: {error}") from None
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def maker() -> str:
    """Return who has made the processor, as Linux names it ("GenuineIntel"); nothing where it does not say."""
    return _of_cores("vendor_id")


def cache_folder(environ: Mapping[str, str] = os.environ) -> str:
    """Return the user's cache folder of Unisono, which need not be there."""
    base = environ.get("XDG_CACHE_HOME", "")
    return os.path.join(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "unisono")


def _processor() -> str:
    return _of_cores("model name", "CPU part") or platform.processor()


def _of_cores(*fields: str) -> str:
    """Return what Linux says of the first core by the first of these fields that it has; nothing if it has none."""
    return next((line.partition(":")[2].strip() for line in _about_cores() if line.startswith(fields)), "")


@cache
def _about_cores() -> tuple[str, ...]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return tuple(file.read(_HEAD).splitlines())
    except OSError:
        return ()


def _gpus(folder: str | os.PathLike[str]) -> list[str]:
    """Return the models of the GPUs that the driver of NVIDIA tells; `tuning.gpus` knows more, and takes longer."""
    found = list[str]()
    for name in _names(folder):
        try:
            with open(os.path.join(folder, name, "information"), encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()
        except OSError:
            continue
        found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return sorted(found)


def _count(folder: str, prefix: str) -> int:
    return sum(name.removeprefix(prefix).isdigit() for name in _names(folder) if name.startswith(prefix)) or 1


def _names(folder: str | os.PathLike[str]) -> list[str]:
    """Return what is in a folder; nothing if there is none, or it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []
