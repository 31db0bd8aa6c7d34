"""The place of a rank, as a colour for `Communicator.split`: its host, its machine or its NUMA nodes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

from unisono.errors import UsageError
from unisono.foundation.near_names import did_you_mean
from unisono.transports.host.host_discovery import Surroundings
from unisono.tuning.machine.levels import processors

_Hosts: TypeAlias = "Sequence[Sequence[int]]"


def color_of_place(kind: str, hosts: _Hosts, rank: int) -> int:
    """Return an integer of 64 bits that is equal on two ranks exactly if they are in one place.

    Args:
        kind: "shared", "host" or "numa", as `Communicator.split` documents.
        hosts: the ranks of each host.
        rank: this rank.

    Raises:
        UsageError: there is no such kind.
    """
    place = _PLACES.get(kind) if isinstance(kind, str) else None
    if place is None:
        hint = did_you_mean(str(kind), _PLACES) or ""
        raise UsageError(f"type={kind!r} cannot be used: it must be one of {', '.join(map(repr, _PLACES))}{hint}")
    number = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    digest = hashlib.sha256(f"{kind} {place(number)}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _machine(host: int) -> str:
    """Return the id of this machine. Containers on one machine have equal ones, though they may share no memory."""
    return Surroundings.here().machine or f"the machine of host {host}"


def _nodes(host: int) -> str:
    """Return the NUMA nodes whose cores this process may use."""
    cores = os.sched_getaffinity(0)
    nodes = processors().levels.get("numa", ())
    return f"{_machine(host)}, host {host}: {[number for number, node in enumerate(nodes) if node & cores]}"


_PLACES: dict[str, Callable[[int], str]] = {"shared": str, "host": _machine, "numa": _nodes}
