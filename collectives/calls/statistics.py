"""The result of `Communicator.stats`: traffic by peer, and calls by collective, algorithm and size."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from unisono.foundation import log
from unisono.transports.contracts.call import Call, Usage
from unisono.transports.contracts.transport import Traffic

_log = log.get()
# Each size class reaches up to 4 times as many bytes as the class before.
_FACTOR = 4


class CallStatistics(NamedTuple):
    """Counters for the calls of one collective by one algorithm in one size class.

    Attributes:
        collective, algorithm: their names.
        most_nbytes: the largest vector of the size class, a power of 4; the smallest is larger than a quarter of it.
        calls: the number of calls.
        nbytes: the sum of the bytes of their vectors.
        seconds: the time that all of the calls took on this rank, from start to end. It is extrapolated if there are
            many calls, because then only some of them are timed.
    """

    collective: str
    algorithm: str
    most_nbytes: int
    calls: int
    nbytes: int
    seconds: float


class DeviceStatistics(NamedTuple):
    """Counters for calls and messages on arrays of a GPU.

    Attributes:
        by_ipc: the traffic over CUDA IPC, by peer.
        to_host_nbytes, to_device_nbytes: the bytes copied to the host and back, for calls and messages that went
            through the host.
    """

    by_ipc: Mapping[int, Traffic]
    to_host_nbytes: int
    to_device_nbytes: int


class Statistics(dict[int, Traffic]):
    """The traffic by peer, as a dict.

    Attributes:
        calls: the counters of collective calls; those that took the most time come first.
        on_device: the counters of arrays on a GPU.
    """

    def __init__(
        self, traffic: Mapping[int, Traffic], used: Iterable[tuple[Call, Usage]], on_device: DeviceStatistics
    ) -> None:
        super().__init__(traffic)
        self.calls = _calls(used)
        self.on_device = on_device


def append_to(
    directory: str, rank: int, traffic: Iterable[tuple[int, Traffic]], used: Iterable[tuple[Call, Usage]]
) -> None:
    """Add the counters of a communicator as a line of JSON to ``rank-N.jsonl`` in a directory, or log why it cannot.

    Args:
        directory: it is made if it is missing.
        rank: this rank in the job.
        traffic: counters with a peer in the job; a peer may occur several times.
        used: the calls of the communicator.
    """
    calls = _calls(used)
    line = {
        "calls": sum(row.calls for row in calls),
        "seconds": sum(row.seconds for row in calls),
        "peers": [[peer, each.sent_nbytes, each.received_nbytes, each.waited_s] for peer, each in traffic],
    }
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")
    except OSError as error:
        _log.warning("no statistics could be written to %s: %s", directory, error.strerror)


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
    return tuple(sorted(totals.values(), key=lambda row: -row.seconds))


def _nbytes(call: Call) -> int:
    """Return the bytes of the vector of a call, which is the longer one of INPUT and OUTPUT."""
    return max((sum(each.elements[side] * each.dtype.itemsize for each in call.extents) for side in (0, 1)), default=0)


def _size_class(nbytes: int) -> int:
    most = 1
    while most < nbytes:
        most *= _FACTOR
    return most
