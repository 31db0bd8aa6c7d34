"""The factory that torch calls for a group of the backend."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from unisono.frameworks.torch.process_groups.backend import BASE, Backend
from unisono.frameworks.torch.process_groups.direct_group import DirectGroup, devices_of_direct_group
from unisono.frameworks.torch.process_groups.options import Options
from unisono.frameworks.torch.process_groups.process_group import ProcessGroup


def create(facts: Any, options: Any) -> Backend | dist.ProcessGroup:
    """Return the backend of a group, or a process group to take the place of torch's own.

    Args:
        facts: torch's description of the group: its store, rank, size, timeout and name.
        options: the ``pg_options`` of the program, or None.

    Raises:
        TypeError: `options` are not `Options`.
        dist.DistBackendError: the ranks did not meet in time, or have different versions of torch.
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"pg_options must be unisono.torch.Options, not {type(options).__name__}")
    options = options or Options()
    members = facts.store, facts.group_rank, facts.group_size, facts.timeout
    if BASE is object:
        return ProcessGroup(*members, options, facts.group_id)
    devices = devices_of_direct_group(options)
    backend = Backend(*members, options)
    return DirectGroup(facts.process_group, devices, backend) if devices else backend
