"""Raises the limit of open files of this process."""

from __future__ import annotations

import resource


def lift_limit_of_files(needed: int) -> int | None:
    """Let this process open `needed` files; return None, or the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        return hard
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return None
