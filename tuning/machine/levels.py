"""Levels of a machine, read from /sys: which processors share a core, a cache, a NUMA node or a socket.

It also reads the file `topology.conf` of Slurm, which says which hosts share a switch. Both are returned in the form
that compositions take: nested tuples of ranks, from the outermost level in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from unisono.algorithms.composition.host_levels import Hosts
from unisono.errors import UsageError

# For each level, from the outermost in: the file of a processor that lists the processors in its set.
SHARED = {
    "socket": "topology/package_cpus_list",
    "numa": "",
    "l3": "cache/index3/shared_cpu_list",
    "l2": "cache/index2/shared_cpu_list",
    "core": "topology/thread_siblings_list",
}


class Processors(NamedTuple):
    """The processors of a machine.

    Attributes:
        levels: by name, from the outermost in: the sets of processors that share something. A level is absent if it has
            only one set, or the same sets as the level outside it.
    """

    levels: Mapping[str, tuple[frozenset[int], ...]]

    def shared(self, first: int, second: int) -> str:
        """Return the innermost level that two processors share, or "host" if none."""
        inside = [
            name for name, sets in self.levels.items() if any(first in group and second in group for group in sets)
        ]
        return inside[-1] if inside else "host"


def processors(root: Path = Path("/sys/devices/system")) -> Processors:
    """Return the online processors of this machine; without levels if /sys does not describe them."""
    online = numbers(_text(root / "cpu/online") or "")
    nodes = [numbers(_text(path) or "") for path in sorted(root.glob("node/node[0-9]*/cpulist"))]
    levels: dict[str, tuple[frozenset[int], ...]] = {}
    outside: tuple[frozenset[int], ...] = (frozenset(online),)
    for name, file in SHARED.items():
        lists = [_text(root / f"cpu/cpu{cpu}" / file) for cpu in online] if file else []
        sets = [numbers(text) for text in lists if text] if file else nodes
        groups = tuple(sorted({frozenset(each) & frozenset(online) for each in sets}, key=sorted))
        if len(groups) > 1 and groups != outside and all(len(each) > 1 for each in groups):
            levels[name] = outside = groups
    return Processors(levels)


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers in a list in the notation of Linux.

    >>> numbers("0-2,8")
    (0, 1, 2, 8)
    """
    listed: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        listed += range(int(first), int(last or first) + 1)
    return tuple(listed)


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as a list in the notation of Linux.

    >>> ranges([0, 1, 2, 8])
    '0-2,8'
    """
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))


def switches(path: Path, host_of_rank: Sequence[str]) -> Hosts:
    """Return ranks by host, and hosts by switch, according to Slurm's `topology.conf`; `host_of_rank` names the hosts.

    A switch above switches makes a level. Hosts and switches without ranks are omitted.

    Raises:
        UsageError: the file cannot be read, has an invalid line, or does not name the host of a rank.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"the topology {path} cannot be read: {error}") from None
    below: dict[str, list[str]] = {}
    for at, line in enumerate(lines, start=1):
        if not (written := line.partition("#")[0].split()):
            continue
        fields = dict(part.split("=", 1) for part in written if "=" in part)
        fields = {name.lower(): value for name, value in fields.items()}
        if "switchname" not in fields or not ("nodes" in fields) ^ ("switches" in fields):
            raise UsageError(f"{path}, line {at}: expected SwitchName=… and Nodes=… or Switches=…")
        for name in names(fields["switchname"]):
            below[name] = names(fields.get("nodes") or fields["switches"])
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(host_of_rank):
        ranks.setdefault(host, []).append(rank)
    named = {name for parts in below.values() for name in parts}
    if lacking := [host for host in ranks if host not in named]:
        raise UsageError(f"{path} names no switch of the host {lacking[0]!r}")
    tops = [name for name in below if name not in named]
    if not tops:
        raise UsageError(f"{path} has no switch that is below no other")
    trees = tuple(part for name in tops if (part := _under(name, below, ranks, ())))
    return trees[0] if len(trees) == 1 else trees


def names(text: str) -> list[str]:
    """Return the names in a list in the notation of Slurm.

    >>> names("a[1-2,07],b")
    ['a1', 'a2', 'a07', 'b']
    """
    expanded: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        pieces = [
            _numbers(piece[1:-1]) if piece[:1] == "[" else [piece] for piece in re.findall(r"\[[^\]]*\]|[^\[]+", part)
        ]
        expanded += ["".join(choice) for choice in product(*pieces)]
    return expanded


def _numbers(text: str) -> list[str]:
    listed: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (not last or last.isdigit())):
            raise UsageError(f"{text!r} is not a list of numbers such as [0-7,12]")
        listed += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return listed


def _under(
    name: str, below: Mapping[str, Iterable[str]], ranks: Mapping[str, list[int]], path: tuple[str, ...]
) -> Hosts:
    """Return the ranks below a switch or on a host, in nested tuples."""
    if name in path:
        raise UsageError(f"the switch {name!r} is below itself")
    if name not in below:
        return tuple(ranks.get(name, ()))
    return tuple(part for each in below[name] if (part := _under(each, below, ranks, (*path, name))))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return None
