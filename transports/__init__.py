"""Transports, the executors that run plans over them, and the native core `unisono.transports._core`."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if not TYPE_CHECKING:  # the stub of _core says what is in it

    def __getattr__(name: str) -> object:
        if name != "_core":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _import_core()


def _import_core() -> object:
    """Import the native core. Raises ImportError, saying what to do, if this copy of Unisono has none."""
    name = f"{__name__}._core"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(_explanation(), name=name) from None


def _explanation() -> str:
    folder = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if os.path.exists(os.path.join(folder, "pyproject.toml")):
        return (
            f"Unisono was imported from its source folder {folder}, where its native core has not been built. Run from "
            f"another directory to use the installed one, or install this one: pip install --editable {folder}"
        )
    return f"Unisono in {folder} is incomplete: its native core is not there. Install it again: pip install unisono"
