"""Topology files: TOML or JSON that describes the levels of a network.

    name = "16 hosts of 4 ranks, with half of the bandwidth between them"

    [[levels]]                  # from the inside out
    name = "host"
    size = 4                    # parts that the level joins; here ranks
    latency_s = 0.4e-6
    overhead_s = 0.1e-6
    per_byte_s = 1e-10

    [[levels]]
    name = "network"            # no size: as many hosts as the ranks need
    latency_s = 2e-6
    overhead_s = 0.5e-6
    per_byte_s = 8e-11
    pairs = 2                   # messages at full bandwidth that the link of a host carries at once

A level can also have `join` ("switch", "all_to_all" or "torus"), `shape` and `hop_s` for a torus, `slow` as [[part,
factor], …], and all fields of `Link` in `machine/parameters.py`. `machine/topology.py` explains them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from unisono.errors import UsageError
from unisono.foundation.json_checks import parsed_json
from unisono.tuning.machine.parameters import MOST, UNMEASURED, Curve, curve_from_json, link_from_json, link_to_json
from unisono.tuning.machine.topology import JOINS, Level, Topology

_OF_LEVEL = ("size", "join", "shape", "hop_s", "slow")
_FIELDS = ("name", "levels", "reduce", "copy")


class Description(NamedTuple):
    """The content of a topology file.

    Attributes:
        name: for people.
        levels: from the inside out.
        reduce, copy: seconds of combining and of copying, by bytes, if they are known.
    """

    name: str
    levels: tuple[Level, ...]
    reduce: Curve = UNMEASURED
    copy: Curve = UNMEASURED

    def over(self, size: int) -> Topology:
        """Return the topology of the first `size` ranks.

        Raises:
            UsageError: the levels have room for fewer ranks.
        """
        return Topology(size, self.levels, reduce=self.reduce, copy=self.copy)


def load(path: Path) -> Description:
    """Return the description in a file: JSON if its name ends in .json, else TOML.

    Raises:
        UsageError: the file cannot be read or is not valid; names the file, and the line or the field.
    """
    try:
        return described(parsed(path.read_text(encoding="utf-8"), is_json=path.suffix == ".json"))
    except OSError as error:
        raise UsageError(f"the topology {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # UsageError is a ValueError, as are the errors of TOML, JSON and UTF-8
        raise UsageError(f"the topology {path}: {error}") from None


def described(content: object) -> Description:
    """Return the description in a value that was read from TOML or JSON.

    Raises:
        UsageError: a field is not valid; names the field.
    """
    if not isinstance(content, dict):
        raise UsageError(f"expected fields by name, not {content!r}")
    if unknown := sorted(set(map(str, content)) - set(_FIELDS)):
        raise UsageError(f"there is no field {unknown[0]!r}: there are {', '.join(_FIELDS)}")
    entries = content.get("levels")
    if not isinstance(entries, list) or not entries:
        raise UsageError("levels: expected at least one")
    levels = tuple(_level(entry, f"levels[{at}]", at == len(entries) - 1) for at, entry in enumerate(entries))
    if len({level.name for level in levels}) < len(levels):
        raise UsageError("levels: two of them have the same name")
    rates = {name: curve_from_json(content.get(name, []), name) for name in ("reduce", "copy")}
    return Description(str(content.get("name", "")), levels, **rates)


def to_json(description: Description) -> dict[str, Any]:
    """Return a description in its JSON form, without fields that have their default."""
    levels = []
    for level in description.levels:
        fields = {name: getattr(level, name) for name in _OF_LEVEL}
        usual = Level._field_defaults
        levels.append(
            {**link_to_json(level.link), **{name: value for name, value in fields.items() if value != usual[name]}}
        )
    rates = {
        name: [list(knot) for knot in zip(*getattr(description, name), strict=True)] for name in ("reduce", "copy")
    }
    return {"name": description.name, "levels": levels, **{name: knots for name, knots in rates.items() if knots}}


def parsed(text: str, *, is_json: bool) -> object:
    """Return the value in the text of a file of JSON or else of TOML; raises ValueError if it is neither."""
    if is_json:
        return parsed_json(text)
    # Python before 3.11 has no TOML module; there, the package `tomli` provides the same interface.
    return import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(text)


def _level(entry: object, where: str, is_outermost: bool) -> Level:
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: expected fields by name, not {entry!r}")
    fields = dict(entry)
    level_fields = {name: fields.pop(name) for name in _OF_LEVEL if name in fields}
    link = link_from_json(fields, where, also=_OF_LEVEL)
    shape = tuple(_whole(level_fields.pop("shape", []), f"{where}.shape"))
    join = level_fields.pop("join", "torus" if shape else "switch")
    if join not in JOINS:
        raise UsageError(f"{where}.join: expected one of {', '.join(JOINS)}, not {join!r}")
    if (join == "torus") != bool(shape):
        raise UsageError(f"{where}.shape: a torus needs a shape, and other joins have none")
    size = level_fields.pop("size", prod(shape) if shape else 0)
    if not isinstance(size, int) or isinstance(size, bool) or size < 0 or (size == 0 and not is_outermost):
        raise UsageError(f"{where}.size: expected how many parts the level joins, not {size!r}")
    if shape and size != prod(shape):
        raise UsageError(f"{where}.size: the shape {list(shape)} has {prod(shape)} parts, not {size}")
    hop_s = level_fields.pop("hop_s", 0.0)
    if not isinstance(hop_s, (int, float)) or not 0 <= hop_s <= MOST:
        raise UsageError(f"{where}.hop_s: expected seconds, not {hop_s!r}")
    return Level(link.name, link, size, join, shape, hop_s, _slow(level_fields.pop("slow", []), f"{where}.slow"))


def _whole(value: object, where: str) -> list[int]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, int) and each >= 1 for each in value):
        raise UsageError(f"{where}: expected whole numbers, at least 1, not {value!r}")
    return list(value)


def _slow(value: object, where: str) -> tuple[tuple[int, float], ...]:
    problem = f"{where}: expected [[part, factor], …], with 0 < factor ≤ 1, not {value!r}"
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(each, (list, tuple)) and len(each) == 2 for each in value
    ):
        raise UsageError(problem)
    for part, factor in value:
        if not isinstance(part, int) or part < 0 or not isinstance(factor, (int, float)) or not 0 < factor <= 1:
            raise UsageError(problem)
    return tuple((part, float(factor)) for part, factor in value)
