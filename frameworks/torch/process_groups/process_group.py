"""The process group of the backend for versions of torch that take no `Backend` written in Python."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono.frameworks.torch.calls.dynamo_skip import skip_dynamo
from unisono.frameworks.torch.calls.work import Work
from unisono.frameworks.torch.constants import DEVICES
from unisono.frameworks.torch.process_groups.group_operations import GroupOperations
from unisono.frameworks.torch.process_groups.options import Options


@skip_dynamo
class ProcessGroup(GroupOperations, dist.ProcessGroup):  # type: ignore[misc]
    """A process group of torch.distributed. It takes the place of all backends of the group, for all devices.

    Args:
        store: the store of torch, for the values of this group only.
        rank, size: this rank in the group, and the number of ranks.
        timeout: the time limit of each call that passes none, and of the rendezvous of all ranks in this constructor.
        options: the options of the program; None for the defaults.
        name: the name of the group.

    Raises:
        dist.DistBackendError: the ranks did not meet in time, or have different versions of torch.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, options: Options | None = None, name: str = ""
    ) -> None:
        dist.ProcessGroup.__init__(self, rank, size)
        self._name = name
        self._description = "undefined"
        self.join(store, rank, size, timeout, options)

    # Attributes that torch looks up by name.

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name of the group."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description that the program has set."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set the description of the group."""
        self._description = description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device(device) for device in DEVICES]

    supports_shrinking = supports_splitting = False

    def _get_backend(self, _device: Any) -> ProcessGroup:
        """Return the backend for a device: this object, because it has no backend in C++."""
        return self

    def get_group_store(self) -> Any:
        """Return the store of torch for the values of this group."""
        return self.store

    def _start_coalescing(self, _device: Any) -> None:
        self._keeper.start_coalescing()

    def _end_coalescing(self, _device: Any) -> Work:
        return self._keeper.end_coalescing()
