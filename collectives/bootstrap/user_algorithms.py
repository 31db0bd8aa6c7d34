"""Loads files with a user's algorithms: those of the option `load`, of ``--load`` and of `un.algorithm.load`.

A Python file registers algorithms when it runs. Any other file is a schedule of another program.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from unisono.algorithms.catalogue import registration
from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registration import registered
from unisono.algorithms.catalogue.registry import algorithms_of, find
from unisono.algorithms.schedules.proving import Loaded, proved, register, schedule_of
from unisono.errors import PlanError, UsageError

_SCHEDULES = (".xml", ".json")
# A schedule of this many bytes has far more steps than can be checked.
_MOST_NBYTES = 16 << 20
# The algorithms that each file has registered in this process, by its path.
_loaded: dict[str, list[Algorithm]] = {}


def load_all(paths: str) -> None:
    """Load the files in `paths`, a list separated by ``:``; raises the errors of `load`."""
    for path in filter(None, paths.split(os.pathsep)):
        load(path)


def load(path: str) -> list[Algorithm]:
    """Load a file and return the algorithms that it registers. A second call does not load the file again.

    A Python file runs as by ``python FILE``, except that its ``__name__`` is not ``"__main__"``. A file that ends in
    ``.xml`` or ``.json`` is a schedule, as for `load_schedule`.

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
    if path.endswith(_SCHEDULES):
        schedule = load_schedule(path, replace=True)
        _loaded[path] = [find(schedule.collective, schedule.name)]
        return _loaded[path]
    if os.path.dirname(path) not in sys.path:
        sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name=os.path.splitext(os.path.basename(path))[0])
    _loaded[path] = [algorithm for algorithm in registered() if algorithm not in before]
    if not _loaded[path]:
        raise UsageError(f"{path!r} registers no algorithm: put @un.algorithm(collective, name) above a builder")
    return _loaded[path]


def load_schedule(path: str | os.PathLike[str], *, name: str | None = None, replace: bool = False) -> Loaded:
    """Prove the schedule in a file, and register it as an algorithm for its number of ranks.

    The file is the XML of MSCCL, as msccl-tools, SCCL and TACCL write it, or a JSON execution plan of MSCCL++. From
    then on ``algorithm=name`` names the algorithm, and the tuner compares its cost with the costs of the others. All
    ranks load the same file, between the same two calls. Unless the schedule is for another number of ranks, any array
    and any length will do: chunks are nearly equal parts of it.

    Args:
        path: the file, of 16 MiB at most.
        name: the name of the algorithm; by default that in the file, in lower case, with ``imported_`` before it if
            Unisono has an algorithm of that name.
        replace: whether it may replace an algorithm that was registered with the same name.

    Returns:
        The algorithm with its plans and its cost.

    Raises:
        UsageError: the file cannot be read, or is no schedule; the message names the place. Or the name is taken.
        PlanError: the schedule is wrong: the message names the rank, the step and the chunk, or the steps that wait for
            each other. Nothing is registered then.

    Example::

        allpairs = un.algorithm.load("allreduce_allpairs.xml")
        world.allreduce(x, algorithm=allpairs.name)
    """
    file = Path(path)
    try:
        loaded = proved(schedule_of(_contents_of(file)), name)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from None
    register(loaded, reference=f"the schedule {file.name}", replace=replace)
    return loaded


def _contents_of(file: Path) -> bytes:
    try:
        nbytes = file.stat().st_size
        if nbytes > _MOST_NBYTES:
            raise UsageError(f"the file has {nbytes:,} bytes, and a schedule has at most {_MOST_NBYTES:,}")
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"the file cannot be read: {error.strerror}") from None


class _Algorithm:
    """`un.algorithm`: a decorator that registers a builder, and a function that registers the schedule in a file."""

    __call__ = staticmethod(registration.algorithm)
    __wrapped__ = staticmethod(registration.algorithm)
    load = staticmethod(load_schedule)


algorithm = _Algorithm()
