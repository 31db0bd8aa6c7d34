"""Files that commands write. An option of this type is checked before the work begins, so that no result is lost."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import click

from unisono.errors import UsageError


class OutputFile(click.Path):
    """The type of an option that names a file to write, in a folder that exists.

    Args:
        needs: a package without which the file cannot be written; empty if there is none.
    """

    def __init__(self, needs: str = "") -> None:
        super().__init__(dir_okay=False, path_type=Path)
        self._needs = needs

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; fails if the file could not be written."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        folder = path.absolute().parent
        if not folder.is_dir():
            self.fail(f"there is no folder {str(folder)!r}", param, ctx)
        if not os.access(path if path.exists() else folder, os.W_OK):
            self.fail(f"{str(path)!r} cannot be written", param, ctx)
        if self._needs and importlib.util.find_spec(self._needs) is None:
            self.fail(f"it needs {self._needs}: pip install 'unisono[report]'", param, ctx)
        return path


# The type of an option that names a file with a picture.
PICTURE = OutputFile("matplotlib")


def write_text(path: Path, text: str) -> None:
    """Write a file; raises UsageError if the disk refuses it after all."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written: {error.strerror}") from None
