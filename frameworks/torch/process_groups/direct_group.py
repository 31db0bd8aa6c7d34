"""`DirectGroup`: the process group of a backend that serves all devices of the group, since torch 2.14.

Problem: torch's own process group sends a call of Python through its dispatcher and its C++ classes to the backend, and
back into Python. That takes longer than a short call takes itself. On the way, the work that Python gets loses all
methods but `wait` and `get_future`: it is never complete, and does not know the source of a message.

Idea: a process group in whose place Python finds the methods of the backend. C++ finds the backend as usual.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from unisono.frameworks.torch.constants import NAME
from unisono.frameworks.torch.process_groups.backend import Backend
from unisono.frameworks.torch.process_groups.collectives import Collectives
from unisono.frameworks.torch.process_groups.options import Options
from unisono.frameworks.torch.process_groups.point_to_point import PointToPoint

_CALLS = [name for calls in (Collectives, PointToPoint) for name in vars(calls) if not name.startswith("_")]


class DirectGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group with one backend for all devices, whose methods Python calls directly.

    Args:
        group: the process group of torch whose place this one takes.
        devices: the types of devices of the group.
        backend: the backend.
    """

    def __init__(self, group: Any, devices: Iterable[str], backend: Backend) -> None:
        super().__init__(group.get_group_store(), backend.rank(), backend.size())
        for device in devices:
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        for name in _CALLS:
            setattr(self, name, getattr(backend, name))


def devices_of_direct_group(options: Options) -> Collection[str]:
    """Return the types of devices of the group that torch is creating if it may be a `DirectGroup`, or else nothing.

    The group cannot be a `DirectGroup` if other backends serve some of the devices. Nor can it be one if torch puts
    layers between the group and the backend: hooks, or the checks of ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.
    """
    is_observed = (
        options.hooks
        or dist.get_debug_level() == dist.DebugLevel.DETAIL
        or os.environ.get("TORCH_DIST_NAN_CHECK") == "1"
    )
    backends = {} if is_observed else _backends_by_device()
    return backends if set(backends.values()) == {NAME} else ()


def _backends_by_device() -> Mapping[str, str]:
    """Return the backend of each type of device for the group that torch is creating; nothing if it is unknown.

    torch does not pass them to the factory of a backend. They are a local variable of the function that calls it.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    config = frame.f_locals.get("backend_config") if frame else None
    return getattr(config, "device_backend_map", {})
