"""The calls of all ranks on one clock.

Ranks on one host share CLOCK_MONOTONIC. Between hosts, the time of day at which each dump was written tells how far the
clocks are apart, as exactly as the hosts agree on the time of day.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.postmortem.loading import JobDumps
from unisono.records import record
from unisono.transports.recorder.dumps import Dump
from unisono.transports.recorder.memory import RecordedCall


@record
class Bar:
    """A call on the timeline.

    Attributes:
        rank: the rank.
        begin_s, end_s: its time, in seconds before the last dump, so both are negative or 0.
        call: the call. It reaches to the dump if it has not ended.
    """

    rank: int
    begin_s: float
    end_s: float
    call: RecordedCall


def timeline(dumps: JobDumps, last: int = 200) -> Sequence[Bar]:
    """Return the last calls of each rank, at most `last` of each, in the order of ranks."""
    bars = [bar for rank, dump in dumps.by_rank.items() for bar in _bars(rank, dump, last)]
    end_s = max((dump.written_s for dump in dumps.by_rank.values()), default=0.0)
    return [Bar(bar.rank, bar.begin_s - end_s, bar.end_s - end_s, bar.call) for bar in bars]


def _bars(rank: int, dump: Dump, last: int) -> list[Bar]:
    """Return bars in seconds since 1970."""

    def seconds(ns: int) -> float:
        return dump.written_s + (ns - dump.written_ns) / 1e9

    return [
        Bar(rank, seconds(call.called_ns), seconds(call.ended_ns) if call.ended_ns else dump.written_s, call)
        for call in dump.snapshot.calls[-last:]
    ]
