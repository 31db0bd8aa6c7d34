"""The identity of a machine, and its fingerprint: a hash that is equal on machines with the same times.

The identity has only facts that stay: processor, numbers of cores and NUMA nodes, GPUs, operating system. Nothing in it
changes from boot to boot, or with load. `measure/calibration_files.py` keeps the measurements of a machine.
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
    """Return the facts that identify this machine, for people and for `fingerprint`."""
    facts = {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count() or 1,
        "numa_nodes": _count("/sys/devices/system/node", "node"),
        "system": platform.system(),
    }
    gpus = _gpus("/proc/driver/nvidia/gpus")
    return {**facts, "gpus": gpus} if gpus else facts


def fingerprint(identity: Mapping[str, Any] | None = None) -> str:
    """Return 16 hexadecimal digits that are equal for equal identities, by default those of this machine.

    Raises:
        UsageError: the identity has a value that JSON cannot hold.

    >>> fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1})
    True
    """
    facts = describe() if identity is None else identity
    try:
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"an identity must consist of JSON values: {error}") from None
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def maker() -> str:
    """Return the maker of the processor in the words of Linux ("GenuineIntel"); empty if Linux does not say."""
    return _of_cores("vendor_id")


def cache_folder(environ: Mapping[str, str] = os.environ) -> str:
    """Return the user's cache folder of Unisono, which need not exist."""
    base = environ.get("XDG_CACHE_HOME", "")
    return os.path.join(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "unisono")


def _processor() -> str:
    return _of_cores("model name", "CPU part") or platform.processor()


def _of_cores(*fields: str) -> str:
    """Return the value of the first of `fields` that /proc/cpuinfo has for the first core; empty if it has none."""
    return next((line.partition(":")[2].strip() for line in _about_cores() if line.startswith(fields)), "")


@cache
def _about_cores() -> tuple[str, ...]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return tuple(file.read(_HEAD).splitlines())
    except OSError:
        return ()


def _gpus(folder: str | os.PathLike[str]) -> list[str]:
    """Return the models of the NVIDIA GPUs from /proc; `machine/gpu_inventory.py` finds more, and takes longer."""
    models = list[str]()
    for name in _names(folder):
        try:
            with open(os.path.join(folder, name, "information"), encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()
        except OSError:
            continue
        models += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return sorted(models)


def _count(folder: str, prefix: str) -> int:
    return sum(name.removeprefix(prefix).isdigit() for name in _names(folder) if name.startswith(prefix)) or 1


def _names(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names in a folder; none if the folder cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []
