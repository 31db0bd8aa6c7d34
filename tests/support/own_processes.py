"""The children of this process that run, or that have ended and whose parent has not waited for them."""

from __future__ import annotations

import os
from pathlib import Path

from support.forked_ranks import SERVERS


def children() -> list[int]:
    """Return the process ids of the children of all threads of this process, except the fork servers of the tests.

    It searches all processes for their parent's id. The lists of children in ``/proc`` would not do, because each
    belongs to a thread, and loses the children of a thread that ends.
    """
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if _parent(folder) == os.getpid()]
    return [pid for pid in pids if pid not in [server.pid for server in SERVERS]]


def _parent(folder: Path) -> int | None:
    """Return the parent's id of the process that has `folder` in ``/proc``; None if the process has ended."""
    try:
        after_name = (folder / "stat").read_text().rpartition(")")[2]
    except OSError:
        return None
    return int(after_name.split()[1])
