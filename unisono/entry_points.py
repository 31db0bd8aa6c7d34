"""Entry points of installed packages, at little cost where there are none of a group.

Importing `importlib.metadata` takes longer than the ranks of a job need to meet, and most installations have no package
that names a group of Unisono. So the files are looked at first, for the name of the group.
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
    """Return the entry points of `group` in the packages that are installed along `sys.path`.

    Raises:
        OSError: files cannot be read now, as there is no descriptor left.
    """
    if not any(_may_name(group, place) for place in sys.path):
        return ()
    from importlib import metadata

    return metadata.entry_points(group=group)


def _may_name(group: str, place: str) -> bool:
    """Return whether a package installed in `place` may have entry points of `group`; True if files cannot tell."""
    try:
        with os.scandir(place or ".") as entries:
            folders = [entry.path for entry in entries if entry.name.lower().endswith(_FOLDERS)]
    except NotADirectoryError:  # an archive
        return True
    except (FileNotFoundError, PermissionError):
        return False
    return any(group.encode() in _content(os.path.join(folder, "entry_points.txt")) for folder in folders)


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # most packages have none
        return b""
