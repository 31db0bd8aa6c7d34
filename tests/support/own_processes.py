"""The processes that this one has started and that have not been waited for."""

from __future__ import annotations

import os
from pathlib import Path

from support.forked_ranks import server


def children() -> list[int]:
    """Return the ids of the children of all threads of this process.

    They are found by their parent: the lists that ``/proc`` has by thread lose a child whose thread ends meanwhile. The
    process that forks ranks for the tests is none of them.
    """
    found = [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if _parent(folder) == os.getpid()]
    return [pid for pid in found if pid != server().pid]


def _parent(folder: Path) -> int | None:
    """Return who the parent of the process of a folder of ``/proc`` is; None if it has ended."""
    try:
        after_name = (folder / "stat").read_text().rpartition(")")[2]
    except OSError:
        return None
    return int(after_name.split()[1])
