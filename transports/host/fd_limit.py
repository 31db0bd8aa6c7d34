"""The limit of open files of this process: raises it, and counts how many files may still be opened."""

from __future__ import annotations

import os
import resource

_OPEN = "/proc/self/fd"


def lift_limit_of_files(needed: int) -> int | None:
    """Raise this process's limit of open files to `needed`.

    Returns:
        None if that many may be open now. Otherwise the hard limit, to which the limit has been raised.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = hard == resource.RLIM_INFINITY or needed <= hard
    allowed = needed if is_enough else hard
    if soft != resource.RLIM_INFINITY and allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return None if is_enough else hard


def free_descriptors() -> int | None:
    """Return how many more files this process may open; None if that is unknown or without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    try:
        return max(0, soft - len(os.listdir(_OPEN)) + 1)  # the list has the descriptor of the folder itself
    except FileNotFoundError:
        return None
    except OSError:
        return 0
