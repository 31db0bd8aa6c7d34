"""Files that commands write. An option of this type is checked before the work begins, so that no result is lost."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import click

from unisono.errors import UsageError
from unisono.foundation.installing import install_command


class OutputFile(click.Path):
    """The type of an option that names a file, or a folder, to write in a folder that exists.

    Args:
        needs: a package without which it cannot be written; empty if there is none.
        is_folder: whether it is a folder, which the command makes if it is missing.
    """

    def __init__(self, needs: str = "", *, is_folder: bool = False) -> None:
        super().__init__(dir_okay=is_folder, file_okay=not is_folder, path_type=Path)
        self._needs = needs

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; fails if the file could not be written."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not os.fspath(value):
            self.fail("the name of the file is empty", param, ctx)
        folder = path.absolute().parent
        if not folder.is_dir():
            self.fail(f"there is no folder {str(folder)!r}", param, ctx)
        if not os.access(path if path.exists() else folder, os.W_OK):
            self.fail(f"{str(path)!r} cannot be written", param, ctx)
        if self._needs and importlib.util.find_spec(self._needs) is None:
            self.fail(f"it needs {self._needs}: {install_command('report')}", param, ctx)
        return path


# The types of options that name a file with a picture, and a folder with pictures.
PICTURE = OutputFile("matplotlib")
PICTURES = OutputFile("matplotlib", is_folder=True)


def write_text(path: Path, text: str) -> None:
    """Write a file; raises UsageError if the disk refuses it after all."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written: {error.strerror}") from None
