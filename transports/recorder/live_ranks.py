"""Finds the ranks that run on this host, and reads their flight recorders.

Each rank keeps its recorder in a memfd (native/core/recorder/flight_memory.h), which /proc shows among its open
files. The kernel lets only the same user, and root, look at the open files of a process. So other users see nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator

from unisono.foundation.records import record
from unisono.transports.recorder import memory
from unisono.transports.recorder.memory import Snapshot

# How many of the last calls are read. An asynchronous call that is older and still runs is not seen.
_LAST = 64
# The memory of a rank that keeps 4,096 calls has 1.2 MiB. Another user's process must not make root read without bound.
_MOST_NBYTES = 64 << 20


@record
class LiveRank:
    """A rank that runs on this host.

    Attributes:
        pid: its process, as this process sees it. In a container the process may have another number.
        snapshot: the records of its flight recorder.
        read_ns: when it was read, by CLOCK_MONOTONIC, in nanoseconds.
        is_stopped: whether the process is stopped, as by SIGSTOP or a debugger.
    """

    pid: int
    snapshot: Snapshot
    read_ns: int
    is_stopped: bool

    @property
    def job(self) -> str:
        """The id and the epoch of its job."""
        return self.snapshot.job


def live_ranks(job: str = "", pids: Collection[int] | None = None) -> list[LiveRank]:
    """Return the ranks of this user on this host, in the order of jobs and ranks.

    Args:
        job: the beginning of the id of the job; empty for all jobs.
        pids: the processes to look at; None for all.
    """
    found = [rank for pid in (_processes() if pids is None else pids) for rank in _ranks_of(pid)]
    return sorted((rank for rank in found if rank.job.startswith(job)), key=lambda rank: (rank.job, rank.snapshot.rank))


def open_memory(pid: int, name: str) -> Iterator[str]:
    """Yield the paths of the memfds of this name that a process has open; none if it has ended or is another user's."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{number}").startswith(f"/memfd:{name} "):
                    yield f"{folder}/{number}"


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _ranks_of(pid: int) -> Iterator[LiveRank]:
    rest = _MOST_NBYTES
    for path in open_memory(pid, memory.NAME):
        # The process has ended, is of another version, or has published what no rank publishes.
        with contextlib.suppress(OSError, ValueError):
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size > rest:
                    return
                copy, read_ns = file.read(rest), time.monotonic_ns()
                rest -= len(copy)
            snapshot = memory.parse(copy, _LAST)
            if snapshot.about:  # else it has not met the others yet
                yield LiveRank(pid, snapshot, read_ns, _is_stopped(pid))


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] in "tT"
    except (OSError, IndexError):
        return False
