"""The network between hosts that are far apart: the delay and the rate from each host to each other one.

The ranks measure it when they meet (`transports.links.network_probes`). All ranks have the same map, so they
choose alike by it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from unisono.errors import UsageError
from unisono.foundation.json_checks import checked, parsed_json, text_of_file
from unisono.tuning.machine.parameters import INCAST, Link

Matrix = tuple[tuple[float, ...], ...]

# The bytes under way that one stream carries: half of the least limit of buffers that kernels have (4 MiB for sending),
# because the kernel counts its own structures too, and a fraction, so that streams also share losses.
_STREAM_NBYTES = 640 << 10
_MOST_STREAMS = 16
OVERHEAD_S = 10e-6
_LEAST_SEGMENT_NBYTES = 256 << 10
_FORMAT = 1
# Hosts are in different regions if their delay is more than this part of the longest.
_APART = 3


class NetworkMap(NamedTuple):
    """The measurements of the ranks between hosts, in the order of the communicator's hosts.

    Attributes:
        delay_s: half of the least round trip between two hosts; 0 from a host to itself.
        per_byte_s: the seconds of a byte from a host (row) to another (column), if nothing else is under way.
    """

    delay_s: Matrix
    per_byte_s: Matrix

    @classmethod
    def of(cls, round_trip_s: Matrix, per_byte_s: Matrix) -> NetworkMap:
        """Return the map of measured round trips and seconds of a byte."""
        return cls(tuple(tuple(seconds / 2 for seconds in row) for row in round_trip_s), per_byte_s)

    @classmethod
    def read(cls, path: Path) -> NetworkMap:
        """Return the map in a file that `write` has written.

        Raises:
            UsageError: the file cannot be read, or has no map.
        """
        try:
            content = parsed_json(text_of_file(path))
            checked(content, {"format": int, "delay_s": [[float]], "per_byte_s": [[float]]})
        except (OSError, ValueError) as error:
            raise UsageError(f"the map {path} cannot be read: {error}") from None
        network = cls(*(tuple(map(tuple, content[name])) for name in cls._fields))
        if content["format"] != _FORMAT or not _is_map(network):
            raise UsageError(f"the map {path} must have format {_FORMAT} and square matrices of positive numbers")
        return network

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the map to a JSON file, for `unisono explain --map`; raises OSError if that is not possible."""
        Path(path).write_text(json.dumps({"format": _FORMAT, **self._asdict()}, indent=1), encoding="utf-8")

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return len(self.delay_s)

    def among(self, hosts: Sequence[int]) -> NetworkMap:
        """Return the map of these hosts, which are numbered anew in this order."""
        return NetworkMap(*(tuple(tuple(matrix[i][j] for j in hosts) for i in hosts) for matrix in self))

    def regions(self) -> tuple[tuple[int, ...], ...]:
        """Return the regions: hosts that are near each other, in the order of their lowest numbers.

        All delays between hosts of a region are at most a third of the longest delay of all. The two regions with the
        shortest delay between their hosts are joined first. If no two hosts can be joined, all are in one region.
        """
        most_s = max((self.delay_s[i][j] for i, j in self.pairs), default=0.0) / _APART
        regions: list[tuple[int, ...]] = [(host,) for host in range(self.hosts)]

        def longest_s(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> float:
            return max(self.delay_s[i][j] for i in pair[0] for j in pair[1])

        while len(regions) > 1:
            nearest = min(combinations(regions, 2), key=longest_s)
            if longest_s(nearest) > most_s:
                break
            joined = tuple(sorted(nearest[0] + nearest[1]))
            regions = sorted([*(region for region in regions if region not in nearest), joined])
        return (tuple(range(self.hosts)),) if len(regions) == self.hosts else tuple(regions)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """All pairs of different hosts, as (from, to)."""
        return [(i, j) for i in range(self.hosts) for j in range(self.hosts) if i != j]

    def under_way_nbytes(self) -> float:
        """Return the most bytes that are under way on a pair at its full rate: round trip × rate."""
        return max(2 * self.delay_s[i][j] / self.per_byte_s[i][j] for i, j in self.pairs)

    def streams(self) -> int:
        """Return the number of TCP streams that carry the bytes under way between two hosts."""
        return max(1, min(_MOST_STREAMS, math.ceil(self.under_way_nbytes() / _STREAM_NBYTES)))

    def link(self, name: str) -> Link:
        """Return a link with the longest delay and the lowest rate of all pairs of hosts.

        Its segments are twice as long as the bytes that are under way on it at a time, because a pipeline waits for the
        delay after each segment.
        """
        segment_nbytes = max(_LEAST_SEGMENT_NBYTES, 1 << math.ceil(math.log2(2 * self.under_way_nbytes())))
        return Link(
            name,
            latency_s=max(self.delay_s[i][j] for i, j in self.pairs),
            overhead_s=OVERHEAD_S,
            per_byte_s=max(self.per_byte_s[i][j] for i, j in self.pairs),
            segment_nbytes=segment_nbytes,
            whole_nbytes=segment_nbytes,
            incast=INCAST,
        )


def _is_map(network: NetworkMap) -> bool:
    """Return whether the matrices have one row and one column for each of 2 or more hosts, and possible values."""
    hosts = network.hosts
    rows = [row for matrix in network for row in matrix]
    if hosts < 2 or len(network.per_byte_s) != hosts or any(len(row) != hosts for row in rows):
        return False
    return all(
        0 < value < math.inf if i != j else value == 0
        for matrix in network
        for i, row in enumerate(matrix)
        for j, value in enumerate(row)
    )
