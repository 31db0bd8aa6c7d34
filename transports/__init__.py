"""Transports, the executors that run plans over them, and the native core `unisono.transports._core`.

Import the core as ``from unisono.transports import _core``: where it is missing, that says why and what to do.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

CORE = f"{__name__}._core"

if not TYPE_CHECKING:  # the stub of _core says what is in it

    def __getattr__(name: str) -> object:
        if name != "_core":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _import_core()


def core_path() -> str:
    """Return the path of the native core, without loading it.

    Raises:
        ImportError: this copy of Unisono has no native core. The message says what to do.
    """
    from importlib.util import find_spec  # ranks do not need it at their start

    spec = find_spec(CORE)
    if spec is None or spec.origin is None:
        raise ImportError(_explanation(), name=CORE)
    return spec.origin


def _import_core() -> object:
    """Import the native core; raises as `core_path` does."""
    try:
        return importlib.import_module(CORE)
    except ModuleNotFoundError as error:
        if error.name != CORE:
            raise
        raise ImportError(_explanation(), name=CORE) from None


def _explanation() -> str:
    folder = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if os.path.exists(os.path.join(folder, "pyproject.toml")):
        return (
            f"Unisono was imported from its source folder {folder}, where its native core has not been built. Run from "
            f"another directory to use the installed one, or install this one: pip install --editable {folder}"
        )
    return f"Unisono in {folder} is incomplete: its native core is not there. Install it again: pip install unisono"
