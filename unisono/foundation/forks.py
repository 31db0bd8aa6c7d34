"""Files that a forked child must close: sockets, selectors and locked files of its parent.

A forked child has copies of all descriptors of its parent. As long as it keeps them, a port stays in use, a lock stays
locked, and a peer does not notice that the parent has died. So code that opens such a file registers it by
`closed_in_child`. The child closes its copies right after the fork, and the parent's files stay open. The native core
does the same for its own descriptors (`transports/native/core/system/descriptor.h`).
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
    """Register an open file, and return it: each child that is forked from now on closes its copy."""
    global _is_registered  # noqa: PLW0603 (a hook cannot be removed, so it is registered once, at the first call)
    if not _is_registered:
        _is_registered = True
        os.register_at_fork(after_in_child=_close_all)
    _opened.add(opened)
    return opened


def _close_all() -> None:
    for file in list(_opened):
        with contextlib.suppress(OSError):
            file.close()
    _opened.clear()
