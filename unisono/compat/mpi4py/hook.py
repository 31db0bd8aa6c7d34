"""`install` makes ``import mpi4py`` find this package, for `unisono run --mpi4py`."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from unisono.errors import UsageError

_NAME, _OURS = "mpi4py", "unisono.compat.mpi4py"
# Variables that launchers of MPI set for their processes.
_LAUNCHERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "MPI_LOCALRANKID")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `mpi4py` and its modules in this package."""

    def __init__(self) -> None:
        self._specs: dict[ModuleType, importlib.machinery.ModuleSpec | None] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _NAME and not name.startswith(f"{_NAME}."):
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(_OURS + spec.name[len(_NAME) :])
        self._specs[module] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module, which has been imported by its own name, its own specification again."""
        module.__spec__ = self._specs.pop(module)


def install() -> None:
    """Make ``import mpi4py`` find this package in this process.

    Raises:
        UsageError: a launcher of MPI has started this process, or mpi4py has been imported already.
    """
    launcher = next((name for name in _LAUNCHERS if name in os.environ), None)
    if launcher is not None:
        raise UsageError(
            f"a launcher of MPI has started this process ({launcher} is set), so `import mpi4py` must find that MPI: "
            "start the program by `unisono run --mpi4py`, or leave out the option"
        )
    if _NAME in sys.modules and sys.modules[_NAME].__name__ != _OURS:
        raise UsageError("mpi4py has been imported already: install the hook before")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def own_name(module: str) -> str:
    """Return the name of the module of this package that stands for a module of mpi4py; other names as they are."""
    return _OURS + module[len(_NAME) :] if module == _NAME or module.startswith(f"{_NAME}.") else module
