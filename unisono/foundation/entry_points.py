"""Entry points of installed packages, without importing `importlib.metadata` if a group has none.

That import takes longer than the rendezvous of a job, and most installations have no package with a group of Unisono.
So the files ``entry_points.txt`` are first searched for the name of the group.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_FOLDERS = (".dist-info", "egg-info")


def entry_points(*, group: str) -> Iterable[EntryPoint]:
    """Return the entry points of `group` in the packages that are installed on `sys.path`.

    Raises:
        OSError: files cannot be read, because this process has no free file descriptor.
    """
    if not any(_may_name(group, folder) for folder in sys.path):
        return ()
    from importlib import metadata

    return metadata.entry_points(group=group)


def _may_name(group: str, folder: str) -> bool:
    """Return whether a package installed in `folder` may have entry points of `group`; True if that is unknown."""
    try:
        with os.scandir(folder or ".") as entries:
            metadata_folders = [entry.path for entry in entries if entry.name.lower().endswith(_FOLDERS)]
    except NotADirectoryError:  # an archive
        return True
    except (FileNotFoundError, PermissionError):
        return False
    return any(group.encode() in _content(os.path.join(path, "entry_points.txt")) for path in metadata_folders)


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # most packages have no such file
        return b""
