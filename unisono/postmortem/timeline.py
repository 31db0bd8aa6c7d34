"""The calls of all ranks on one clock (transports/recorder/clocks.py)."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.foundation.records import record
from unisono.postmortem.loading import JobDumps
from unisono.transports.recorder.clocks import aligned, clock_of
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
    clocks = {rank: clock_of(dump.snapshot.about, _zero_ns(dump)) for rank, dump in dumps.by_rank.items()}
    zeros = aligned(clocks)
    bars = [bar for rank, dump in dumps.by_rank.items() for bar in _bars(rank, dump, last, zeros[rank])]
    end_s = max(((zeros[rank] + dump.written_ns) / 1e9 for rank, dump in dumps.by_rank.items()), default=0.0)
    return [Bar(bar.rank, bar.begin_s - end_s, bar.end_s - end_s, bar.call) for bar in bars]


def _zero_ns(dump: Dump) -> int:
    return int(dump.written_s * 1e9) - dump.written_ns


def _bars(rank: int, dump: Dump, last: int, zero_ns: int) -> list[Bar]:
    """Return bars in seconds since 1970."""
    return [
        Bar(rank, (zero_ns + call.called_ns) / 1e9, (zero_ns + (call.ended_ns or dump.written_ns)) / 1e9, call)
        for call in dump.snapshot.calls[-last:]
    ]
