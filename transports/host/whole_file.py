"""Files that appear as a whole: other processes see all of a file or nothing of it, also if its writer is killed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def whole_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Yield a file to write; at the end of the block it gets the name `path`, and replaces an older file.

    Text is encoded as UTF-8. If the block raises, or the file cannot be written, nothing stays in the directory.

    Raises:
        OSError: the directory does not exist or cannot be written, or the disk is full.
    """
    handle, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
