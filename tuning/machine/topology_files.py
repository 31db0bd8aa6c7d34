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
factor], …], `nics` and `rails`, and all fields of `Link` in `machine/parameters.py`. `machine/topology.py` explains
them. Instead of `pairs`, a level can have `taper`: a part has so many times less bandwidth up than inside, so `taper =
2` means 2:1. Reading computes `pairs` from it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unisono.errors import UsageError
from unisono.foundation.json_checks import parsed_json, text_of_file
from unisono.foundation.printable import brief, printable_values
from unisono.tuning.machine.parameters import (
    MOST,
    UNBOUNDED,
    UNMEASURED,
    Curve,
    curve_from_json,
    link_from_json,
    link_to_json,
)
from unisono.tuning.machine.placed_topology import PlacedTopology
from unisono.tuning.machine.topology import JOINS, Level, Topology

_OF_LEVEL = ("size", "join", "shape", "hop_s", "slow", "nics", "rails")
_ALSO = (*_OF_LEVEL, "taper")
_FIELDS = ("name", "levels", "reduce", "copy", "eager", "places")
# Machines have fewer of each, and files of other kinds are refused at once.
_MOST_NBYTES = 4 << 20
# The simulator has arrays of all ranks up to the last place.
MOST_RANKS = 1 << 20
_MOST_LEVELS, _MOST_DIMENSIONS, _MOST_NICS = 64, 16, 1024
_MOST_NAME, _LEAST_FACTOR = 80, 1e-6


class Description(NamedTuple):
    """The content of a topology file.

    Attributes:
        name: for people.
        levels: from the inside out.
        reduce, copy: seconds of combining and of copying, by bytes, if they are known.
        eager: whether a message is under way before its receiver waits for it, as over links to far hosts.
        places: the numbers of the hosts of a job on the machine, in the order of its ranks, if they are known
    """

    name: str
    levels: tuple[Level, ...]
    reduce: Curve = UNMEASURED
    copy: Curve = UNMEASURED
    eager: bool = False
    places: tuple[int, ...] = ()

    @property
    def ranks_at_place(self) -> int:
        """The number of ranks of a host; 1 if the machine has only one level."""
        return self.levels[0].size if len(self.levels) > 1 else 1

    def machine(self, size: int) -> Topology:
        """Return the topology of the ranks at the first places, `size` in all.

        Raises:
            UsageError: the levels have room for fewer ranks.
        """
        return Topology(size, self.levels, reduce=self.reduce, copy=self.copy, is_eager=self.eager)

    def over(self, size: int) -> Topology:
        """Return the topology of `size` ranks: of the first ones at `places`, or else of those at the first places.

        Raises:
            UsageError: the levels have room for fewer ranks.
        """
        ranks = self.ranks_at_place
        if size > len(self.places) * ranks:
            return self.machine(size)
        order = np.array(self.places)[:, None] * ranks + np.arange(ranks)
        return PlacedTopology(self.machine((max(self.places) + 1) * ranks), order.reshape(1, -1)[:, :size])


def load(path: Path) -> Description:
    """Return the description in a file: JSON if its name ends in .json, else TOML.

    Raises:
        UsageError: the file cannot be read or is not valid; names the file, and the line or the field.
    """
    try:
        return described(parsed(text_of_file(path, _MOST_NBYTES), is_json=path.suffix == ".json"))
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
        raise UsageError(f"expected fields by name, not {brief(content)}")
    if unknown := sorted(set(map(str, content)) - set(_FIELDS)):
        raise UsageError(f"there is no field {brief(unknown[0])}: there are {', '.join(_FIELDS)}")
    name, entries = content.get("name", ""), content.get("levels")
    if not isinstance(name, str) or len(name) > _MOST_NAME:
        raise UsageError(f"name: expected a text of at most {_MOST_NAME} characters, not {brief(name)}")
    if not isinstance(entries, list) or not entries:
        raise UsageError("levels: expected at least one")
    if len(entries) > _MOST_LEVELS:
        raise UsageError(f"levels: expected at most {_MOST_LEVELS}, not {len(entries)}")
    levels = list[Level]()
    for at, entry in enumerate(entries):
        levels.append(_level(entry, f"levels[{at}]", levels, at == len(entries) - 1))
    if len({level.name for level in levels}) < len(levels):
        raise UsageError("levels: two of them have the same name")
    rates = {rate: curve_from_json(content.get(rate, []), rate) for rate in ("reduce", "copy")}
    eager = content.get("eager", False)
    if not isinstance(eager, bool):
        raise UsageError(f"eager: expected true or false, not {brief(eager)}")
    return Description(name, tuple(levels), **rates, eager=eager, places=_places(content.get("places", []), levels))


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
    others = {**rates, "eager": description.eager, "places": list(description.places)}
    return {"name": description.name, "levels": levels, **{name: value for name, value in others.items() if value}}


def text_of(description: Description, *, is_json: bool, about: Sequence[str] = ()) -> str:
    """Return the text of a topology file. Comments `about` the machine are the first lines in TOML."""
    content = to_json(description)
    if is_json:
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    levels = content.pop("levels")
    blocks = [[f"# {line}" for line in about], _fields_of_toml(content)]
    blocks += [["[[levels]]", *_fields_of_toml(level)] for level in levels]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


def _fields_of_toml(fields: Mapping[str, Any]) -> list[str]:
    """Return the lines of fields. JSON is valid as a value of TOML, except for tables and DEL."""
    values = {name: json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") for name, value in fields.items()}
    return [f"{name} = {value}" for name, value in values.items()]


def parsed(text: str, *, is_json: bool) -> object:
    """Return the value in the text of a file of JSON or else of TOML; raises ValueError if it is neither."""
    if is_json:
        return parsed_json(text)
    # Python before 3.11 has no TOML module; there, the package `tomli` provides the same interface.
    loads = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads
    try:
        return printable_values(loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _level(entry: object, where: str, inside: Sequence[Level], is_outermost: bool) -> Level:
    """Return the level in an entry; `inside` holds the levels inside of it."""
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: expected fields by name, not {brief(entry)}")
    fields = dict(entry)
    of_level = {name: fields.pop(name) for name in _ALSO if name in fields}
    link = link_from_json(fields, where, also=_ALSO)
    if len(link.name) > _MOST_NAME:
        raise UsageError(f"{where}.name: expected at most {_MOST_NAME} characters, not {brief(link.name)}")
    shape = _shape(of_level.get("shape", []), f"{where}.shape")
    join = of_level.get("join", "torus" if shape else "switch")
    if join not in JOINS:
        raise UsageError(f"{where}.join: expected one of {', '.join(JOINS)}, not {brief(join)}")
    if (join == "torus") != bool(shape):
        raise UsageError(f"{where}.shape: a torus needs a shape, and other joins have none")
    size = of_level.get("size", prod(shape) if shape else 0)
    if not _is_whole(size, 0 if is_outermost else 1):
        raise UsageError(f"{where}.size: expected how many parts the level joins, not {brief(size)}")
    if shape and size != prod(shape):
        raise UsageError(f"{where}.size: the shape {list(shape)} has {prod(shape)} parts, not {size}")
    hop_s = of_level.get("hop_s", 0.0)
    if not isinstance(hop_s, (int, float)) or not 0 <= hop_s <= MOST:
        raise UsageError(f"{where}.hop_s: expected seconds, not {brief(hop_s)}")
    slow = _slow(of_level.get("slow", []), f"{where}.slow")
    level = Level(link.name, link, size, join, shape, hop_s, slow)
    if "nics" in of_level or "rails" in of_level:
        level = _with_nics(level, of_level, where, inside, is_outermost)
        level = level._replace(link=link._replace(pairs=fields.get("pairs", 1)))
    if inside and inside[-1].rails and (join != "switch" or level.nics > 1):
        raise UsageError(f"{where}: this level joins the switches of rails: it must be a switch without NICs")
    if "taper" not in of_level:
        return level
    if "pairs" in fields or "nics" in of_level:
        raise UsageError(f"{where}.taper: the bandwidth follows from pairs and nics already: omit either")
    return level._replace(link=link._replace(pairs=_tapered(level, of_level["taper"], f"{where}.taper", inside)))


def _places(value: object, levels: Sequence[Level]) -> tuple[int, ...]:
    """Return the places of hosts, each of which has as many ranks as the innermost of several levels joins."""
    ranks = levels[0].size if len(levels) > 1 else 1
    most = MOST_RANKS // ranks
    if not isinstance(value, list) or not all(_is_whole(each, 0, most - 1) for each in value):
        raise UsageError(f"places: expected numbers of hosts from 0 to {most - 1}, not {brief(value)}")
    if len(set(value)) < len(value):
        raise UsageError(f"places: expected each host once, not {brief(value)}")
    room = prod(level.size for level in levels) // ranks
    if levels[-1].size and value and max(value) >= room:
        raise UsageError(f"places: the levels have {room} places, and none has the number {max(value)}")
    return tuple(value)


def _with_nics(
    level: Level, fields: Mapping[str, Any], where: str, inside: Sequence[Level], is_outermost: bool
) -> Level:
    """Return the level with the NICs and rails of its fields."""
    nics, rails = fields.get("nics", 1), fields.get("rails", False)
    ranks = prod(each.size for each in inside)
    if not _is_whole(nics, 1, _MOST_NICS):
        raise UsageError(f"{where}.nics: expected a whole number from 1 to {_MOST_NICS}, not {brief(nics)}")
    if not inside or level.join != "switch":
        raise UsageError(f"{where}.nics: only parts with ranks of their own, joined by a switch, have NICs")
    if nics > ranks:
        raise UsageError(
            f"{where}.nics: each rank uses one NIC, and {nics} are more than the {ranks} ranks of a part: "
            "use pairs, and ports of the innermost level"
        )
    if not isinstance(rails, bool):
        raise UsageError(f"{where}.rails: expected true or false, not {brief(rails)}")
    if rails and (nics < 2 or is_outermost):
        raise UsageError(f"{where}.rails: rails need nics of 2 or more, and a level above that joins their switches")
    return level._replace(nics=nics, rails=rails)


def _tapered(level: Level, taper: object, where: str, inside: Sequence[Level]) -> float:
    """Return how many messages the way of a part carries if it has `taper` times less bandwidth than inside."""
    if isinstance(taper, bool) or not isinstance(taper, (int, float)) or not 1 <= taper <= MOST:
        raise UsageError(f"{where}: expected a number, at least 1, not {brief(taper)}")
    if not inside or level.join != "switch" or (len(inside) > 1 and inside[-1].join != "switch"):
        raise UsageError(f"{where}: only a switch above another switch has a taper")
    below = inside[-1]
    of_rails = inside[-2].nics if len(inside) > 1 and inside[-2].rails else 1
    ways = below.size * of_rails * (1 if below.rails else below.nics)
    messages = ways * (below.link.pairs if len(inside) > 1 else below.link.ports)
    if messages == UNBOUNDED or not (level.link.per_byte_s and below.link.per_byte_s):
        raise UsageError(f"{where}: the bandwidth inside is unknown: {below.name!r} needs pairs, both per_byte_s")
    pairs = float(messages * (level.link.per_byte_s / below.link.per_byte_s) / taper)
    if not 1 <= pairs <= MOST:
        raise UsageError(f"{where}: the way of a part carries {pairs:.3g} messages at full bandwidth, not at least 1")
    return pairs


def _is_whole(value: object, least: int, most: int = MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _shape(value: object, where: str) -> tuple[int, ...]:
    if (
        not isinstance(value, (list, tuple))
        or len(value) > _MOST_DIMENSIONS
        or not all(_is_whole(each, 1) for each in value)
    ):
        problem = f"expected up to {_MOST_DIMENSIONS} whole numbers, at least 1"
        raise UsageError(f"{where}: {problem}, not {brief(value)}")
    return tuple(value)


def _slow(value: object, where: str) -> tuple[tuple[int, float], ...]:
    problem = f"{where}: expected [[part, factor], …], with {_LEAST_FACTOR:g} ≤ factor ≤ 1, not {brief(value)}"
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(each, (list, tuple)) and len(each) == 2 for each in value
    ):
        raise UsageError(problem)
    for part, factor in value:
        if not _is_whole(part, 0) or not isinstance(factor, (int, float)) or not _LEAST_FACTOR <= factor <= 1:
            raise UsageError(problem)
    return tuple((part, float(factor)) for part, factor in value)
