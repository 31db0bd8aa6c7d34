"""The limit of files that this process may have open, raised to what it needs."""

from __future__ import annotations

import resource


def lift_limit_of_files(needed: int) -> int | None:
    """Let this process open `needed` files; return None, or how many the system allows at most, if that is less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        return hard
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return None
