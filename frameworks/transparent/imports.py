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
        sys.meta_path.insert(0, _FrameworkFinder(name, on_import))


class _FrameworkFinder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and extends its loader. It ends when the module is imported.

    Programs also look for a module without importing it, by `importlib.util.find_spec`.
    """

    def __init__(self, name: str, on_import: OnImport) -> None:
        self._name, self._on_import = name, on_import
        self._is_looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(fullname)  # by the other finders
        finally:
            self._is_looking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            self._on_import(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
