"""Calling a function as soon as a module has been imported."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

OnImport = Callable[[ModuleType], None]


def after_import(name: str, on_import: OnImport) -> None:
    """Call `on_import` with a top-level module once it has been imported: now, or when the program imports it."""
    if name in sys.modules:
        on_import(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, on_import))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and extends its loader."""

    def __init__(self, name: str, on_import: OnImport) -> None:
        self._name, self._on_import = name, on_import

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)  # the other finders find it
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)  # the program may install it later
            return None
        execute, on_import = spec.loader.exec_module, self._on_import

        def exec_module(module: ModuleType) -> None:
            execute(module)
            on_import(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
