"""The groups of devices between which a compiled program of XLA makes collectives, read from the text of the program.

Each collective of the text has the attribute `replica_groups`, in one of four forms. They mean numbers of logical
devices, which the device assignment of the program maps to devices::

    replica_groups={}                              one group of all
    replica_groups={{0,1},{2,3}}                   a list
    replica_groups=[2,2]<=[2,2]T(1,0)              0, 1, 2, 3 in the shape (2, 2), transposed: {0,2}, {1,3}
    replica_groups=mesh['a'=2,'b'=2] {'a'}         all that differ in the axis 'a' only: {0,2}, {1,3}
    replica_groups=mesh['a'=8] {'a':(2)2}          the axis split into 2, 2 and 2; all that differ in the second part

`collective-permute` has `source_target_pairs` instead, and one group of all.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

Groups: TypeAlias = "list[list[int]]"

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(.*?"
    r", (?:replica_groups=(?P<groups>\{\}|\{\{[\d,{}]*\}\}|\[.*?\]<=\[[\d,]*\](?:T\([\d,]*\))?|mesh\[[^{]*\{[^}]*\})"
    r"|source_target_pairs=)(?P<rest>.*)"
)
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<ids>.*)\))? \{(?P<grouped>[^}]*)\}")
_SUBAXIS = re.compile(r"(.*):\((\d+)\)(\d+)")


def groups_of(program: str, assignment: np.ndarray) -> list[tuple[int, ...]]:
    """Return the groups of device numbers of all collectives in a program, each once, with their members in order.

    A collective is left out if its groups have a form that the docstring of this module does not describe.

    Args:
        program: the optimised program as text.
        assignment: the numbers of the devices, of the shape (replicas, partitions).
    """
    groups: dict[tuple[int, ...], None] = {}
    for line in program.splitlines():
        if collective := _COLLECTIVE.search(line):
            listed = _listed(collective["groups"] or "{}")
            groups.update(dict.fromkeys(_devices(collective[1], line, listed, assignment)))
    return list(groups)


def _devices(collective: str, line: str, listed: Groups, assignment: np.ndarray) -> Iterator[tuple[int, ...]]:
    """Yield groups of devices for groups of numbers, which mean replicas, partitions or both, as XLA defines it."""
    if "channel_id=" not in line:
        rows = assignment.T  # numbers of replicas, for each partition
    elif "use_global_device_ids=true" in line:
        rows = assignment.reshape(1, -1)
    elif collective in ("all-to-all", "collective-permute"):
        rows = assignment  # numbers of partitions, for each replica
    else:
        for group in listed or [list(range(len(assignment)))]:
            yield tuple(assignment[group].ravel().tolist())  # numbers of replicas, each with all partitions
        return
    for row in rows:
        for group in listed or [list(range(len(row)))]:
            yield tuple(row[group].tolist())


def _listed(text: str) -> Groups:
    """Return the groups of numbers that an attribute means; an empty list means one group of all."""
    if text.startswith("{"):
        return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text)]
    if iota := _IOTA.fullmatch(text):
        shape, dimensions, order = (_numbers(each or "") for each in iota.groups())
        return _rows(np.arange(math.prod(dimensions)).reshape(dimensions).transpose(order or None), shape[-1])
    mesh = _MESH.fullmatch(text)
    return [] if mesh is None else _of_mesh(mesh)


def _of_mesh(mesh: re.Match[str]) -> Groups:
    """Return the groups of numbers that differ in some axes of a mesh only."""
    sizes = {name: int(size) for name, size in (axis.rsplit("=", 1) for axis in mesh["axes"].split(","))}
    grouped = [_part(axis) for axis in mesh["grouped"].split(",")]
    # Each axis is split where a grouped part of it begins or ends.
    parts = [
        (name, before, after // before) for name, size in sizes.items() for before, after in _cuts(name, size, grouped)
    ]
    of_groups = [parts.index((name, before, size or sizes[name])) for name, before, size in grouped]
    order = [axis for axis in range(len(parts)) if axis not in of_groups] + of_groups
    numbers = np.array(_numbers(mesh["ids"])) if mesh["ids"] else np.arange(math.prod(sizes.values()))
    lengths = [size for _, _, size in parts]
    return _rows(numbers.reshape(lengths).transpose(order), math.prod(lengths[axis] for axis in of_groups))


def _part(axis: str) -> tuple[str, int, int]:
    """Return an axis, the product of the sizes of its parts before this one, and the size of this one; 0 for all."""
    part = _SUBAXIS.fullmatch(axis)
    return (part[1], int(part[2]), int(part[3])) if part else (axis, 1, 0)


def _cuts(name: str, size: int, grouped: Sequence[tuple[str, int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the products of sizes before and after each part of an axis."""
    of_axis = [(before, length or size) for other, before, length in grouped if other == name]
    cuts = sorted({1, size, *(before for before, _ in of_axis), *(before * length for before, length in of_axis)})
    yield from itertools.pairwise(cuts) if size > 1 else [(1, 1)]


def _rows(numbers: np.ndarray, length: int) -> Groups:
    rows: Groups = numbers.reshape(-1, length).tolist()
    return rows


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
