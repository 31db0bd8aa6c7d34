"""The present activity of each rank, in words and numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from unisono.foundation.records import record
from unisono.transports.recorder.live_ranks import LiveRank, live_ranks
from unisono.transports.recorder.memory import RecordedCall

_MOST_LINES = 16


@record
class Activity:
    """The activity of a rank.

    Attributes:
        rank: the rank, as it was read last.
        call: the call that it is in; None in user code.
        since_s: for how many seconds it has been in the call, or in user code.
        waits_for: the rank for which the call waits, or None.
        last: the last call that has ended; None if there was none.
        calls_per_s: calls begun per second between two readings; None with one reading.
        nbytes_per_s: bytes sent and received per second, by transport.
        waiting: the share of the time between two readings in which calls waited for other ranks; None with one
            reading.
    """

    rank: LiveRank
    call: RecordedCall | None
    since_s: float
    waits_for: int | None
    last: RecordedCall | None
    calls_per_s: float | None
    nbytes_per_s: Mapping[str, float]
    waiting: float | None

    def __str__(self) -> str:
        """Return a sentence without the rank: "in #5 barrier() at train.py:12 for 3.2 s, waits for rank 1"."""
        stopped = "stopped (SIGSTOP, or a debugger); " if self.rank.is_stopped else ""
        if self.call is not None:
            waits = "" if self.waits_for is None else f", waits for rank {self.waits_for}"
            return f"{stopped}in {self.call} for {seconds_text(self.since_s)}{waits}"
        last = "it has made no call" if self.last is None else f"its last call was {self.last}"
        return f"{stopped}in user code for {seconds_text(self.since_s)}; {last}"


def activity(now: LiveRank, before: LiveRank | None = None) -> Activity:
    """Return the present activity of a rank, from one reading of its recorder or from two."""
    calls = now.snapshot.calls
    running = [call for call in calls if call.state == "running"]
    ended = [call for call in calls if call.state != "running"]
    call, last = (running[-1] if running else None), (ended[-1] if ended else None)
    began_ns = call.called_ns if call else last.ended_ns if last else now.read_ns
    waits_for = None if call is None else call.peer if call.is_message else call.waits_for
    elapsed_s = 0.0 if before is None else (now.read_ns - before.read_ns) / 1e9
    since_s = max(now.read_ns - began_ns, 0) / 1e9
    if before is None or elapsed_s <= 0:
        return Activity(now, call, since_s, waits_for, last, None, {}, None)
    made = now.snapshot.made - before.snapshot.made
    moved, waited_ns = _difference(now, before)
    rates = {transport: nbytes / elapsed_s for transport, nbytes in moved.items()}
    return Activity(now, call, since_s, waits_for, last, made / elapsed_s, rates, min(waited_ns / 1e9 / elapsed_s, 1.0))


def _difference(now: LiveRank, before: LiveRank) -> tuple[Mapping[str, int], int]:
    """Return the bytes that were moved between two readings, by transport, and the nanoseconds that calls waited."""
    earlier = {(each.slot, each.peer, each.transport): each for each in before.snapshot.traffic}
    moved: defaultdict[str, int] = defaultdict(int)
    waited_ns = 0
    for each in now.snapshot.traffic:
        then = earlier.get((each.slot, each.peer, each.transport))
        sent, received, waited = (0, 0, 0) if then is None else (then.sent_nbytes, then.received_nbytes, then.waited_ns)
        # Another channel may have got the slot meanwhile, and counts from 0.
        moved[each.transport] += max(each.sent_nbytes - sent, 0) + max(each.received_nbytes - received, 0)
        waited_ns += max(each.waited_ns - waited, 0)
    return moved, waited_ns


def where(job: str, expected: Collection[int] = ()) -> list[str]:
    """Return a sentence about each rank of a job of this host: its present call, or that it is not in the job.

    Args:
        job: the beginning of the id of the job.
        expected: the ranks that should be on this host, by the numbers that they were launched with.

    Returns:
        At most 17 sentences, the ranks outside of the job first; none if no rank is in the job.
    """
    # A rank that has shrunk its world may be in two epochs for a while; it acts in the later one.
    by_epoch = sorted(live_ranks(job), key=lambda rank: rank.snapshot.epoch)
    activities = {rank.snapshot.launch_rank: activity(rank) for rank in by_epoch}
    if not activities:
        return []
    absent = [f"rank {rank} has not joined the job, or has left" for rank in expected if rank not in activities]
    lines = absent + [f"rank {rank} is {activities[rank]}" for rank in sorted(activities)]
    more = len(lines) - _MOST_LINES
    return lines if more <= 1 else [*lines[:_MOST_LINES], f"and {more} more ranks: see `unisono top`"]


def seconds_text(seconds: float) -> str:
    """Return a time for people.

    >>> seconds_text(0.0123), seconds_text(3.21), seconds_text(75)
    ('12 ms', '3.2 s', '1 min 15 s')
    """
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"
