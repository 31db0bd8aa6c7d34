"""Measures what a rank of a large host holds: ``unisono bench footprint [--ranks 16,64,128] [--json]``.

Ranks of one host make more and more calls, and after each, every rank counts its own memory, its descriptors and the
messages that it has sent. Its own memory is anonymous memory and its share of shared memory, as the kernel's
``smaps_rollup`` counts them. That of a process that has only imported numpy is subtracted. Files that are mapped, such
as the libraries, are not counted, because all ranks of a host share them. The table has the median rank, and after a
slash the largest one, which is a judge.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import unisono as un
from unisono.foundation.processes import python_command
from unisono.foundation.program import begin

LIMIT_S = 600.0
_OWN = re.compile(r"^Pss_(?:Anon|Shmem): +(\d+) kB$", re.MULTILINE)


class Footprint(NamedTuple):
    """The own memory of a rank in KiB, its descriptors, and the messages that it has sent."""

    own_kib: int
    descriptors: int
    messages: int


def own_kib() -> int:
    """Return the anonymous memory of this process and its share of shared memory, in KiB."""
    return sum(map(int, _OWN.findall(Path("/proc/self/smaps_rollup").read_text())))


def main() -> None:
    """Measure the footprints, and print a row for each number of ranks and each call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[16, 64, 128])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [row for ranks in options.ranks for row in measure(ranks)]
    if options.json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    from rich.console import Console  # here, because ranks import this file too
    from rich.table import Table

    table = Table("ranks", "after", "own memory, KiB", "descriptors", "messages sent")
    for row in rows:
        pairs = zip(row["median"], row["largest"], strict=True)
        table.add_row(str(row["ranks"]), row["after"], *(f"{median:,.0f} / {most:,.0f}" for median, most in pairs))
    Console().print(table)


def measure(ranks: int) -> list[dict[str, Any]]:
    """Return a row for each call, with the median and the largest footprint among `ranks` ranks after it."""
    numpy_only = (_kib_of_numpy(), 0, 0)
    of_ranks = un.launch(_footprints, ranks, timeout_s=LIMIT_S, options=un.Options(rendezvous_timeout_s=LIMIT_S))
    rows = []
    for call in of_ranks[0]:
        footprints = np.array([footprints[call] for footprints in of_ranks]) - numpy_only
        of_call = {"median": np.median(footprints, axis=0).tolist(), "largest": footprints.max(axis=0).tolist()}
        rows.append({"ranks": ranks, "after": call, **of_call})
    return rows


def _kib_of_numpy() -> int:
    statement = (
        "import numpy, re; text = open('/proc/self/smaps_rollup').read(); "
        f"print(sum(map(int, re.findall({_OWN.pattern!r}, text, re.MULTILINE))))"
    )
    return int(subprocess.check_output(python_command(statement), text=True))


def _footprints(world: un.Communicator) -> dict[str, Footprint]:
    """Return the footprint of this rank after each call."""
    small, large = np.ones(2, np.float32), np.ones(1 << 18, np.float32)
    shares = np.ones(world.size * 2, np.float32)
    calls: dict[str, Callable[[], Any]] = {
        "init": lambda: None,
        "barrier": world.barrier,
        "allreduce of 8 B": lambda: world.allreduce(small),
        "allreduce of 1 MiB": lambda: world.allreduce(large),
        "alltoall of 8 B to each": lambda: world.alltoall(shares),
    }
    footprints = {}
    for name, call in calls.items():
        call()
        sent = sum(traffic.sent_messages for traffic in world.stats().values())
        footprints[name] = Footprint(own_kib(), len(os.listdir("/proc/self/fd")), sent)
    return footprints


if __name__ == "__main__":
    begin()
    main()
