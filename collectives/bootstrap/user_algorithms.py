"""Runs the Python files that register a user's algorithms: those of the option `load` and of ``--load``."""

from __future__ import annotations

import os
import runpy
import sys

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registration import registered
from unisono.algorithms.catalogue.registry import algorithms_of
from unisono.errors import UsageError

# The algorithms that each file has registered in this process, by its path.
_loaded: dict[str, list[Algorithm]] = {}


def load_all(paths: str) -> None:
    """Load the files in `paths`, a list separated by ``:``; raises the errors of `load`."""
    for path in filter(None, paths.split(os.pathsep)):
        load(path)


def load(path: str) -> list[Algorithm]:
    """Run a Python file and return the algorithms that it registers. A second call does not run the file again.

    The file runs as by ``python FILE``, except that its ``__name__`` is not ``"__main__"``.

    Raises:
        UsageError: there is no such file, or it registers no algorithm.
        PlanError: the proof at registration failed for a number of ranks.
        Exception: any exception that the file raises.
    """
    path = os.path.realpath(path)
    loaded = _loaded.get(path, [])
    if loaded and all(algorithm in registered() for algorithm in loaded):
        return loaded
    if not os.path.isfile(path):
        raise UsageError(f"there is no file {path!r} to load algorithms from")
    algorithms_of("allreduce")  # registers the algorithms of installed packages first, which the file did not register
    before = registered()
    if os.path.dirname(path) not in sys.path:
        sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name=os.path.splitext(os.path.basename(path))[0])
    _loaded[path] = [algorithm for algorithm in registered() if algorithm not in before]
    if not _loaded[path]:
        raise UsageError(f"{path!r} registers no algorithm: put @un.algorithm(collective, name) above a builder")
    return _loaded[path]
