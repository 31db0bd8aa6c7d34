"""What a communicator has done so far: traffic by peer, and calls by collective, algorithm and size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from unisono.transports.contracts.call import Call, Usage
from unisono.transports.contracts.transport import Traffic

_FACTOR = 4


class CallStatistics(NamedTuple):
    """Collective calls of one kind.

    Attributes:
        collective, algorithm: what was called, and what carried it out.
        most_nbytes: the size class: a power of 4, and vectors of more than a quarter of so many bytes.
        calls: how many there were.
        nbytes: of the vectors of all of them.
        seconds: what all of them took on this rank, from their beginning to their end: estimated, as of many calls only
            some are timed.
    """

    collective: str
    algorithm: str
    most_nbytes: int
    calls: int
    nbytes: int
    seconds: float


class DeviceStatistics(NamedTuple):
    """What calls on arrays of a GPU have moved.

    Attributes:
        by_ipc: over CUDA IPC, by peer.
        to_host_nbytes, to_device_nbytes: what has been copied through the host, of messages too.
    """

    by_ipc: Mapping[int, Traffic]
    to_host_nbytes: int
    to_device_nbytes: int


class Statistics(dict[int, Traffic]):
    """The traffic by peer; and `calls`, the collective calls, those that took longest first, and `on_device`."""

    def __init__(
        self, traffic: Mapping[int, Traffic], used: Iterable[tuple[Call, Usage]], on_device: DeviceStatistics
    ) -> None:
        super().__init__(traffic)
        self.calls = _calls(used)
        self.on_device = on_device


def _calls(used: Iterable[tuple[Call, Usage]]) -> tuple[CallStatistics, ...]:
    totals: dict[tuple[str, str, int], CallStatistics] = {}
    for call, usage in used:
        if not usage.calls:
            continue
        nbytes, signature = _nbytes(call), call.signature
        key = signature.collective, signature.algorithm, _size_class(nbytes)
        before = totals.get(key, CallStatistics(*key, calls=0, nbytes=0, seconds=0.0))
        totals[key] = before._replace(
            calls=before.calls + usage.calls,
            nbytes=before.nbytes + usage.calls * nbytes,
            seconds=before.seconds + usage.seconds * usage.calls / max(1, usage.timed),
        )
    return tuple(sorted(totals.values(), key=lambda each: -each.seconds))


def _nbytes(call: Call) -> int:
    """Return the bytes of the vector: of the longer of INPUT and OUTPUT."""
    return max((sum(each.elements[side] * each.dtype.itemsize for each in call.extents) for side in (0, 1)), default=0)


def _size_class(nbytes: int) -> int:
    most = 1
    while most < nbytes:
        most *= _FACTOR
    return most
