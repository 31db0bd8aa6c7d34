"""What a forked child must not hold open: sockets, selectors and locked files that belong to its parent.

A child has copies of all descriptors of its parent. As long as it keeps them, a port stays in use, a lock stays locked,
and a peer does not learn that the parent has died. So whoever opens such a thing registers it here. The child closes
its copies right after the fork, which does not touch those of the parent. The native core does the same for its own
(`transports/native/core/descriptor.h`).
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any, Protocol, TypeVar


class _Closable(Protocol):
    def close(self) -> Any:
        """Close the descriptor."""


Opened = TypeVar("Opened", bound=_Closable)

_opened: weakref.WeakSet[Any] = weakref.WeakSet()
_is_registered = False


def closed_in_child(opened: Opened) -> Opened:
    """Return `opened`, of which each child that is forked from now on closes its copy."""
    global _is_registered  # noqa: PLW0603 (a hook cannot be removed, so it is registered once, at the first need)
    if not _is_registered:
        _is_registered = True
        os.register_at_fork(after_in_child=_close_all)
    _opened.add(opened)
    return opened


def _close_all() -> None:
    for each in list(_opened):
        with contextlib.suppress(OSError):
            each.close()
    _opened.clear()
