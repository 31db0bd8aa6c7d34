"""The names of mpi4py's module `MPI`: each is in `unisono.compat.mpi4py`, and the classes have the same attributes."""

from __future__ import annotations

import inspect
import json
import subprocess

import pytest
from support.deadlines import DEADLINE_S
from support.mpi_ranks import LIBRARIES, environment_of

from unisono.compat.mpi4py import MPI

# Attributes that only objects have, because they are set when one is made.
_OF_OBJECTS = {"Pickle.PROTOCOL", "buffer.obj", "memory.obj"}
_NAMES = """
import inspect, json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
def public(owner):
    return [name for name in dir(owner) if name[0] != "_"]
classes = [name for name in public(MPI) if inspect.isclass(getattr(MPI, name))]
print(json.dumps(public(MPI) + [f"{name}.{attribute}" for name in classes for attribute in public(getattr(MPI, name))]))
"""


@pytest.mark.parametrize("library", LIBRARIES)
def test_all_names_of_mpi4py_exist(library: str) -> None:
    python = environment_of(library) / "bin" / "python"
    program = [python, "-c", _NAMES]
    output = subprocess.run(program, capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout
    names = set(json.loads(output)) - _OF_OBJECTS
    assert len(names) > 1000
    missing = {name for name in names if not _exists(name)}
    assert missing == set()


def _exists(name: str) -> bool:
    owner, _, attribute = name.rpartition(".")
    place = getattr(MPI, owner, None) if owner else MPI
    return (not owner or inspect.isclass(place)) and hasattr(place, attribute)


def test_objects_have_the_attributes_that_their_classes_lack() -> None:
    assert MPI.pickle.PROTOCOL >= 4
    assert MPI.buffer.allocate(3).obj is not None
