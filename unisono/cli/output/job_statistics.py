"""The summary of a job at its end: what each rank has called, what it has moved, and for whom it has waited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.box import ROUNDED
from rich.table import Table

from unisono.foundation.json_checks import checked, parsed_json, text_of_file
from unisono.foundation.records import record
from unisono.transports.recorder.activity import seconds_text

# A rank is a straggler if the others have waited for it, net, for this share of all waiting, and if waiting took this
# share of the time in calls.
_SHARE_OF_WAITING = 0.25
_SHARE_OF_TIME = 0.1
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SHAPE_OF_LINE = {"calls": int, "seconds": (float, int), "peers": [list]}
_SHAPE_OF_PEER = {0: int, 1: int, 2: int, 3: (float, int)}
# More peers make a cell too long.
_MOST_PEERS = 3


@record
class RankStatistics:
    """The counters of a rank over all its communicators.

    Attributes:
        calls: the number of collectives.
        seconds: the time that they took.
        sent_nbytes, received_nbytes: the bytes of all its messages.
        waited_s: by rank, the seconds for which calls have waited for it.
    """

    calls: int
    seconds: float
    sent_nbytes: int
    received_nbytes: int
    waited_s: Counter[int]


def read(directory: Path, ranks: Iterable[int]) -> dict[int, RankStatistics | None]:
    """Return the counters of each rank from its file; None for a rank that was killed before it could write them."""
    return {rank: _read(directory / f"rank-{rank}.jsonl") for rank in ranks}


def _read(path: Path) -> RankStatistics | None:
    try:
        return parsed(text_of_file(path))
    except (OSError, ValueError):  # the rank was killed before it wrote a line, or while it did
        return None


def parsed(text: str) -> RankStatistics:
    """Return the counters in a rank's file, with a line for each communicator; raises ValueError if it is wrong."""
    lines = [checked(parsed_json(line), _SHAPE_OF_LINE) for line in text.splitlines()]
    for line in lines:
        for peer in line["peers"]:
            checked(dict(enumerate(peer)), _SHAPE_OF_PEER, "peer")
    waited_s = Counter[int]()
    for each in (peer for line in lines for peer in line["peers"]):
        waited_s[each[0]] += each[3]
    return RankStatistics(
        sum(line["calls"] for line in lines),
        sum(line["seconds"] for line in lines),
        sum(peer[1] for line in lines for peer in line["peers"]),
        sum(peer[2] for line in lines for peer in line["peers"]),
        waited_s,
    )


def straggler(ranks: Mapping[int, RankStatistics | None]) -> str:
    """Return a sentence about the rank for which the others have waited; empty if there is no such rank.

    In a ring a rank also waits for a neighbour that waits itself. So the time in which a rank has waited counts for it.
    """
    known = {rank: each for rank, each in ranks.items() if each is not None}
    waited_for = sum((each.waited_s for each in known.values()), Counter[int]())
    if not waited_for:
        return ""
    own = {rank: each.waited_s.total() for rank, each in known.items()}
    net = {rank: seconds - own.get(rank, 0.0) for rank, seconds in waited_for.items()}
    rank = max(net, key=lambda each: net[each])
    total = waited_for.total()
    in_calls = sum(each.seconds for each in known.values())
    if net[rank] < _SHARE_OF_WAITING * total or total < _SHARE_OF_TIME * in_calls:
        return ""
    waited = f"the others waited {seconds_text(waited_for[rank])} for it"
    return f"rank {rank} is the straggler: {waited}, and it waited {seconds_text(own.get(rank, 0.0))} for others"


def summary(ranks: Mapping[int, RankStatistics | None]) -> Table:
    """Return the table of the job."""
    table = Table(box=ROUNDED, title="What the ranks have called", title_justify="left")
    for heading in ("rank", "calls", "in calls", "sent", "received", "waited", "for"):
        table.add_column(heading, justify="left" if heading == "for" else "right")
    for rank, each in ranks.items():
        table.add_row(
            str(rank), *(_cells(each) if each is not None else ("", "", "", "", "", "ended without a report"))
        )
    return table


def _cells(each: RankStatistics) -> tuple[str, ...]:
    peers = [
        f"rank {peer} {seconds_text(seconds)}" for peer, seconds in each.waited_s.most_common(_MOST_PEERS) if seconds
    ]
    return (
        f"{each.calls:,}",
        seconds_text(each.seconds),
        _size(each.sent_nbytes),
        _size(each.received_nbytes),
        seconds_text(each.waited_s.total()),
        ", ".join(peers),
    )


def _size(nbytes: int) -> str:
    for unit, name in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} B"
