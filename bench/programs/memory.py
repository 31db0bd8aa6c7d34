"""Measures the memory of a rank for its peers: ``unisono bench memory [--peers 1000] [--json]``.

One rank of a large job is simulated. Its peers are the other ends of shared-memory channels in the same process. The
result is resident memory, which is the memory that messages have touched; both ends share that of a segment.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np

from unisono.bench import argument_types
from unisono.dtypes import DTYPES
from unisono.transports import _core
from unisono.transports.host.sealed_memory import sealed_memory

_DESCRIPTORS_PER_PEER = 12
_PENDING = 0
_UINT8 = DTYPES["uint8"].code
_SMALL_NBYTES, _LARGE_NBYTES = 8, 1 << 20


def main() -> None:
    """Measure the memory that a rank needs for its peers, and print the sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=argument_types.count, default=1000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure(options.peers)
    if options.json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    for row in rows:
        sys.stdout.write(f"{row['peers']:>6} peers, {row['state']:<46} {row['resident_kib'] / 1024:>8.1f} MiB more\n")


def measure(peers: int) -> list[dict[str, Any]]:
    """Return the resident memory, in KiB, that each state of `peers` peers adds."""
    _allow_descriptors(peers)
    rows: list[dict[str, Any]] = []
    before = _resident_kib()

    def note(state: str) -> None:
        rows.append({"peers": peers, "state": state, "resident_kib": _resident_kib() - before})

    control = _core.Control(0, peers + 1)
    ours = _core.Endpoint(control, 1, True)
    note("no channel open")
    others = [_connect(ours, peer) for peer in range(1, peers + 1)]
    note("a channel open to each")
    for nbytes, state in ((_SMALL_NBYTES, "8 messages of 8 B to each"), (_LARGE_NBYTES, "1 MiB to each")):
        for peer, other in enumerate(others, 1):
            for _ in range(8 if nbytes == _SMALL_NBYTES else 1):
                _carry(ours, other, peer, nbytes)
        note(state)
    return rows


def _connect(ours: _core.Endpoint, peer: int) -> _core.Endpoint:
    theirs = _core.Endpoint(_core.Control(1, 2), 1, True)  # with one peer only, so that it adds little
    memory = sealed_memory("unisono-bench", _core.SHM_NBYTES)
    bells = [os.eventfd(0), os.eventfd(0)]
    links = socket.socketpair()
    ours.add_shm(_core.SENDING_LANE, peer, True, os.dup(memory), os.dup(bells[0]), os.dup(bells[1]), links[0].detach())
    theirs.add_shm(_core.RECEIVING_LANE, 0, False, memory, bells[1], bells[0], links[1].detach())
    return theirs


def _carry(ours: _core.Endpoint, theirs: _core.Endpoint, peer: int, nbytes: int) -> None:
    data = np.zeros(nbytes, np.uint8)
    requests = [ours.send(peer, _UINT8, 0, data), theirs.receive(0, _UINT8, 0, np.empty_like(data))]
    while _PENDING in [request.poll() for request in requests]:
        pass


def _allow_descriptors(peers: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 100 + peers * _DESCRIPTORS_PER_PEER), hard))


def _resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


if __name__ == "__main__":
    main()
