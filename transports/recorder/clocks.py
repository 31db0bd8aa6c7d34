"""The clocks of hosts: the time at which CLOCK_MONOTONIC of each rank was 0, on one clock for all.

Ranks on different hosts have different clocks. Each rank that is not on the host of rank 0 measures how far rank 0's
CLOCK_MONOTONIC is ahead of its own, over their control link (control.h). It does so at its start, and again before it
writes a dump or a trace, because clocks drift apart by up to some milliseconds a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.foundation.json_checks import checked
from unisono.foundation.records import record

# How long a rank waits for rank 0, which may be stopped.
LIMIT_S = 0.1
_OFFSET, _UNCERTAINTY = "clock_offset_ns", "clock_uncertainty_ns"


@record
class Clock:
    """The clock of a rank.

    Attributes:
        zero_ns: when its CLOCK_MONOTONIC was 0 by the time of day of its host, in nanoseconds since 1970.
        offset_ns: how far rank 0's CLOCK_MONOTONIC is ahead of it, in nanoseconds; None if unknown.
    """

    zero_ns: int
    offset_ns: int | None


def facts_of(measured: tuple[int, int] | None) -> dict[str, int]:
    """Return the fields of dumps and traces for a measured offset and its uncertainty; none if it is unknown."""
    return {} if measured is None else dict(zip((_OFFSET, _UNCERTAINTY), measured, strict=True))


def measured(about: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the offset and the uncertainty that a dump or a trace has; None if they are unknown.

    Raises:
        ValueError: they are no whole numbers.
    """
    if _OFFSET not in about:
        return None
    checked(about, {_OFFSET: int, _UNCERTAINTY: int})
    return about[_OFFSET], about[_UNCERTAINTY]


def clock_of(about: Mapping[str, Any], zero_ns: int) -> Clock:
    """Return the clock of a rank with these fields in its dump or trace."""
    offset = measured(about)
    return Clock(zero_ns, offset[0] if offset else None)


def aligned(clocks: Mapping[int, Clock]) -> dict[int, int]:
    """Return for each rank when its CLOCK_MONOTONIC was 0, in nanoseconds since 1970 by the time of day of one host.

    A rank whose offset is unknown keeps the time of day of its own host.

    >>> aligned({0: Clock(5_000, 0), 1: Clock(9_999, 700), 2: Clock(5_001, None)})
    {0: 5000, 1: 5700, 2: 5001}
    """
    zeros = [clock.zero_ns - clock.offset_ns for clock in clocks.values() if clock.offset_ns is not None]
    return {
        rank: clock.zero_ns if clock.offset_ns is None else zeros[0] + clock.offset_ns for rank, clock in clocks.items()
    }
