"""Files that register algorithms of the user's: those of the option `load`, and of ``--load`` on the command line."""

from __future__ import annotations

import os
import runpy
import sys

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registration import registered
from unisono.algorithms.catalogue.registry import algorithms_of
from unisono.errors import UsageError

# By the path of a file, what it has registered in this process.
_of_file: dict[str, list[Algorithm]] = {}


def load_all(paths: str) -> None:
    """Load the files in `paths`, which has ``:`` between them; raises as `load` does."""
    for path in filter(None, paths.split(os.pathsep)):
        load(path)


def load(path: str) -> list[Algorithm]:
    """Run a Python file and return the algorithms that it registers. A file that has been run is not run again.

    It is run as ``python FILE`` would run it, except that its ``__name__`` is not ``"__main__"``.

    Raises:
        UsageError: there is no such file, or it registers no algorithm.
        PlanError: an algorithm is wrong at a number of ranks that it is proved for when it is registered.
        Exception: whatever the file raises.
    """
    path = os.path.realpath(path)
    known = _of_file.get(path, [])
    if known and all(algorithm in registered() for algorithm in known):
        return known
    if not os.path.isfile(path):
        raise UsageError(f"there is no file {path!r} to load algorithms from")
    algorithms_of("allreduce")  # Algorithms of installed packages are registered before those of the file.
    before = registered()
    if os.path.dirname(path) not in sys.path:
        sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name=os.path.splitext(os.path.basename(path))[0])
    _of_file[path] = [algorithm for algorithm in registered() if algorithm not in before]
    if not _of_file[path]:
        raise UsageError(f"{path!r} registers no algorithm: put @un.algorithm(collective, name) above a builder")
    return _of_file[path]
