"""Compares the dumps of all ranks and finds the culprit.

Theory of operation
-------------------
Each communicator is judged by itself. Its collectives are numbered, so the dumps of its ranks can be laid side by side:

    allreduce #5 on ranks 0 and 2, barrier #5 on rank 1    -> a mismatch; the minority is the culprit
    #5 runs on ranks 0 and 2, rank 1 has only made #4      -> rank 1 is the culprit: it is in user code, or elsewhere
    #5 runs on all ranks                                   -> the culprit is the rank for which the others wait

A rank that is in another call is not a culprit itself, because it waits too. So ranks that wait point to the ranks that
they wait for, and a cycle of such arrows is a deadlock: of messages, or of collectives on two communicators in another
order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from unisono.errors import RendezvousError
from unisono.foundation.records import record
from unisono.postmortem.loading import JobDumps
from unisono.transports.recorder.dumps import Dump
from unisono.transports.recorder.live_ranks import LiveRank
from unisono.transports.recorder.memory import RecordedCall

WORLD = 0
# A call that takes longer is not just one that its rank happened to be in.
_PATIENCE_NS = 1_000_000_000
# TCP keeps more than this under way only if its receiver gets it slower than the sender sends.
_MOST_UNDER_WAY_NBYTES = 64 << 10


@record
class Finding:
    """A fault of the job, with the ranks that it is about.

    Attributes:
        kind: "mismatch", "dead", "left", "no dump", "not met", "stopped", "user code", "behind", "deadlock", "slow",
            "slow link" or "elsewhere".
        ranks: the ranks that the finding is about, the culprits.
        text: a sentence about them.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str


@record
class CallOfRanks:
    """One collective of one communicator, on all its ranks.

    Attributes:
        communicator: its id; 0 is the one of all ranks.
        sequence: the number of the collective.
        text: the call of most ranks.
        by_rank: for each rank of the communicator, its call; None if its dump has none of this number.
        passed: the ranks without a call here that have made a later one, so their recorders have dropped this one.
    """

    communicator: int
    sequence: int
    text: str
    by_rank: Mapping[int, RecordedCall | None]
    passed: frozenset[int]

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks that have not made this call, as far as their dumps say."""
        return tuple(rank for rank, call in self.by_rank.items() if call is None and rank not in self.passed)


def live_findings(ranks: Sequence[LiveRank]) -> list[Finding]:
    """Return who makes the others wait in a job that runs, as far as its ranks on this host show it.

    The ranks are read one after the other, so calls that have run for a second or less prove nothing.
    """
    stopped = [
        Finding("stopped", (each.snapshot.rank,), f"rank {each.snapshot.rank} is stopped (SIGSTOP, or a debugger)")
        for each in ranks
        if each.is_stopped
    ]
    calls = [(each, call) for each in ranks for call in each.snapshot.calls if call.state == "running"]
    waiting = [(each, call) for each, call in calls if each.read_ns - call.called_ns > _PATIENCE_NS]
    if not waiting:
        return stopped
    by_rank = {each.snapshot.rank: Dump(each.snapshot, "live", each.read_ns, 0.0, None, {}) for each in ranks}
    dumps = JobDumps(ranks[0].job, ranks[0].snapshot.size, by_rank, ())
    findings = findings_of(dumps, rows_of(dumps), stopped)
    return findings or [*_elsewhere(dumps, [(each.snapshot.rank, call) for each, call in waiting])]


def members(dumps: JobDumps, communicator: int) -> tuple[int, ...]:
    """Return the ranks of a communicator."""
    for dump in dumps.by_rank.values():
        if communicator in dump.snapshot.communicators:
            return dump.snapshot.communicators[communicator]
    return tuple(range(dumps.size))


def current(dump: Dump) -> RecordedCall | None:
    """Return the call that a rank is in, or that failed with the job; None if the rank is in user code."""
    calls = [call for call in dump.snapshot.calls if call.state != "done"]
    return calls[-1] if calls else None


def place(dump: Dump) -> str:
    """Return where the main thread of a rank is in the program: "train.py:12 in step"; empty if unknown."""
    stack = dump.stack.get("MainThread") or next(iter(dump.stack.values()), [])
    return stack[-1] if stack else ""


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0 and 2", or "ranks 0, 1 and 2"."""
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def first_error(dumps: JobDumps) -> Mapping[str, Any] | None:
    """Return the error of the first rank that failed; None if the job has not failed."""
    errors = [(dump.written_s, dump.error) for dump in dumps.by_rank.values() if dump.error]
    return min(errors, key=lambda error: error[0])[1] if errors else None


def findings_of(dumps: JobDumps, rows: Sequence[CallOfRanks], known: Sequence[Finding]) -> list[Finding]:
    """Return `known` and the further findings. A rank that is blamed already gets no second finding."""
    findings = [*known, *_mismatches(rows), *_deadlocks(dumps, rows)]
    blamed = {rank for finding in findings for rank in finding.ranks}
    findings += [finding for finding in _behind(dumps, rows, blamed) if not blamed.issuperset(finding.ranks)]
    if findings or dumps.missing:
        return findings
    return list(_slow_links(dumps)) or list(_slow(rows))


def rows_of(dumps: JobDumps) -> list[CallOfRanks]:
    """Return the collectives of each communicator that at least one rank still has in its dump."""
    return [row for communicator in _communicators(dumps) for row in _rows(dumps, communicator)]


def _communicators(dumps: JobDumps) -> list[int]:
    used = {call.communicator for dump in dumps.by_rank.values() for call in dump.snapshot.calls if not call.is_message}
    return sorted(used)


def _rows(dumps: JobDumps, communicator: int) -> Iterator[CallOfRanks]:
    """Yield the collectives of a communicator that at least one rank still has in its dump."""
    by_rank: dict[int, dict[int, RecordedCall]] = {
        rank: {
            call.sequence: call
            for call in dump.snapshot.calls
            if not call.is_message and call.communicator == communicator
        }
        for rank, dump in dumps.by_rank.items()
    }
    callers = {rank for rank, calls in by_rank.items() if calls}
    ranks = sorted({*members(dumps, communicator), *callers})
    for sequence in sorted({sequence for calls in by_rank.values() for sequence in calls}):
        calls = {rank: by_rank.get(rank, {}).get(sequence) for rank in ranks}
        texts = Counter(call.text for call in calls.values() if call is not None)
        passed = frozenset(rank for rank, own in by_rank.items() if sequence < max(own, default=-1))
        yield CallOfRanks(communicator, sequence, texts.most_common(1)[0][0], calls, passed)


def dead(dumps: JobDumps) -> Iterator[Finding]:
    """Yield the ranks without a dump: dead ones, those that have left, and those of which nothing is known."""
    error = first_error(dumps) or {}
    if error.get("type") == RendezvousError.__name__:
        yield from _unmet(dumps)
        return
    lost = error["peer"] if error.get("type") == "PeerLostError" else None
    others = [rank for rank in dumps.missing if rank != lost]
    if lost is not None:
        left = " has left" in error["text"]
        yield Finding("left" if left else "dead", (lost,), f"rank {lost} {'left' if left else 'died'} first")
    silent = [rank for rank in others if f"rank {rank} does not answer" in error.get("text", "")]
    for rank in silent:
        yield Finding("stopped", (rank,), f"rank {rank} did not answer and wrote no dump: it, or its host, was stopped")
    unknown = [rank for rank in others if rank not in silent]
    if unknown:
        yield Finding(
            "no dump",
            tuple(unknown),
            f"{ranks_text(unknown)} wrote no dump: killed, or never started, or it could not write",
        )


def _unmet(dumps: JobDumps) -> Iterator[Finding]:
    """Yield the ranks that the others have not met at the start, and those that failed for another reason than most.

    A rank that has another store, for example, waits there for the others, as they wait for it.
    """
    if dumps.missing:
        absent = ranks_text(dumps.missing)
        yield Finding("not met", dumps.missing, f"{absent} wrote no dump, and so has not called un.init() to its end")
    reasons: defaultdict[str, list[int]] = defaultdict(list)
    for rank, dump in dumps.by_rank.items():
        if dump.error is not None:
            reasons[dump.error["text"]].append(rank)
    for reason, ranks in sorted(reasons.items(), key=lambda item: -len(item[1]))[1:]:
        yield Finding("not met", tuple(ranks), f"{ranks_text(ranks)} could not meet the others: {reason}")


def _mismatches(rows: Sequence[CallOfRanks]) -> Iterator[Finding]:
    """Yield the first row of each communicator in which ranks made different calls."""
    seen: set[int] = set()
    for row in rows:
        callers: defaultdict[int, list[int]] = defaultdict(list)
        for rank, call in row.by_rank.items():
            if call is not None:
                callers[call.digest].append(rank)
        if len(callers) < 2 or row.communicator in seen:
            continue
        seen.add(row.communicator)
        right = max(callers.values(), key=lambda ranks: (len(ranks), -ranks[0]))
        for wrong in callers.values():
            if wrong is not right:
                called, instead = row.by_rank[wrong[0]], row.by_rank[right[0]]
                text = (
                    f"call #{row.sequence} differs: {ranks_text(wrong)} called {_shown(called)}, "
                    f"where {ranks_text(right)} called {_shown(instead)}"
                )
                yield Finding("mismatch", tuple(wrong), text)


def _shown(call: RecordedCall | None) -> str:
    return "" if call is None else f"{call.text}{f' at {call.site}' if call.site else ''}"


def _behind(dumps: JobDumps, rows: Sequence[CallOfRanks], blamed: Collection[int]) -> Iterator[Finding]:
    """Yield the ranks that have not made a collective in which others wait. Ranks that are blamed wait rightly."""
    waiting: dict[int, CallOfRanks] = {}
    for row in rows:
        waits = [rank for rank, call in row.by_rank.items() if call is not None and call.state != "done"]
        if row.absent and not set(waits) <= set(blamed):
            waiting.setdefault(row.communicator, row)
    for row in waiting.values():
        for rank in row.absent:
            dump = dumps.by_rank.get(rank)
            if dump is None:
                continue
            call_now = current(dump)
            missed = f"rank {rank} has not called #{row.sequence} {row.text}, in which the others wait"
            if call_now is None:
                where = place(dump)
                yield Finding("user code", (rank,), f"{missed}: it is in user code{f', at {where}' if where else ''}")
            else:
                yield Finding("behind", (rank,), f"{missed}: it is in {_call_text(dumps, rank)}")


def _deadlocks(dumps: JobDumps, rows: Sequence[CallOfRanks]) -> Iterator[Finding]:
    """Yield each cycle of ranks that wait for each other in different calls."""
    arrows: dict[int, int] = {}
    for rank, dump in dumps.by_rank.items():
        call = current(dump)
        if call is None:
            continue
        if call.is_message and call.peer is not None:
            arrows[rank] = call.peer
        elif not call.is_message:
            row = next(row for row in rows if row.communicator == call.communicator and row.sequence == call.sequence)
            absent = [other for other in row.absent if other in dumps.by_rank]
            if absent:
                arrows[rank] = absent[0]
    seen: set[int] = set()
    for start in sorted(arrows):
        path: list[int] = []
        at: int | None = start
        while at is not None and at not in path and at not in seen:
            path.append(at)
            at = arrows.get(at)
        cycle = path[path.index(at) :] if at in path else []
        seen.update(path)
        if len(cycle) > 1:
            odd = _odd_in_order(dumps, cycle)
            steps = "; ".join(
                f"rank {rank} waits for rank {arrows[rank]} in {_call_text(dumps, rank)}" for rank in cycle
            )
            yield odd or Finding("deadlock", tuple(sorted(cycle)), f"these ranks wait for each other: {steps}")


def _odd_in_order(dumps: JobDumps, cycle: Sequence[int]) -> Finding | None:
    """Return the ranks of a cycle that use communicators in another order than most; None if it is no such cycle."""
    users: defaultdict[int, list[int]] = defaultdict(list)
    for rank, dump in dumps.by_rank.items():
        call = current(dump)
        if call is not None and not call.is_message:
            users[call.communicator].append(rank)
    groups = sorted(users.values(), key=len, reverse=True)
    if len(groups) < 2 or len(groups[0]) == len(groups[1]) or not set(cycle) <= set().union(*groups):
        return None
    most = groups[0]
    odd = [rank for rank in cycle if rank not in most]
    return Finding(
        "deadlock",
        tuple(odd),
        f"{ranks_text(odd)} used communicators in another order: it waits in {_call_text(dumps, odd[0])}, where "
        f"{ranks_text(most)} wait in {_call_text(dumps, most[0])}",
    )


def _call_text(dumps: JobDumps, rank: int) -> str:
    """Return the call that a rank is in, with its communicator."""
    call = current(dumps.by_rank[rank])
    assert call is not None
    return f"{call}{'' if call.communicator == WORLD else f' of {_communicator_text(dumps, call.communicator)}'}"


def _communicator_text(dumps: JobDumps, communicator: int) -> str:
    """Return the ranks of a communicator; of several with the same ranks, also its number among them."""
    ranks = members(dumps, communicator)
    known = dict.fromkeys(name for dump in dumps.by_rank.values() for name in dump.snapshot.communicators)
    alike = [name for name in known if members(dumps, name) == ranks]
    number = f"communicator {alike.index(communicator) + 1} of " if len(alike) > 1 else ""
    return f"{number}{ranks_text(ranks)}"


def _slow_links(dumps: JobDumps) -> Iterator[Finding]:
    """Yield the links with the most bytes under way, to ranks that wait.

    In a ring all ranks wait for their neighbours, so who waits for whom does not show which link is slow.
    """
    sent, received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for rank, dump in dumps.by_rank.items():
        for each in dump.snapshot.traffic:
            if each.transport != "shm":
                sent[rank, each.peer] += each.sent_nbytes
                received[each.peer, rank] += each.received_nbytes
    calls = {rank: current(dump) for rank, dump in dumps.by_rank.items()}
    waiting = {rank for rank, call in calls.items() if call is not None and _awaited(call) is not None}
    under_way = {link: sent[link] - received[link] for link in sent if link[1] in waiting}
    most = max(under_way.values(), default=0)
    for (sender, receiver), nbytes in sorted(under_way.items(), key=lambda item: -item[1]):
        if nbytes > _MOST_UNDER_WAY_NBYTES and nbytes > most / 2:
            text = f"the link from rank {sender} to rank {receiver} is slow: {nbytes / 1e6:.1f} MB are under way on it"
            yield Finding("slow link", (sender, receiver), text)


def _awaited(call: RecordedCall) -> int | None:
    return call.peer if call.is_message else call.waits_for


def _elsewhere(dumps: JobDumps, waiting: Sequence[tuple[int, RecordedCall]]) -> Iterator[Finding]:
    """Yield each rank of another host for which ranks of this host wait."""
    waits: defaultdict[int, list[int]] = defaultdict(list)
    for rank, call in waiting:
        other = _awaited(call)
        if other is not None and other not in dumps.by_rank:
            waits[other].append(rank)
    for other, ranks in waits.items():
        wait = f"{ranks_text(ranks)} wait{'s' if len(ranks) == 1 else ''}"
        yield Finding("elsewhere", (other,), f"{wait} for rank {other}, which does not run on this host")


def _slow(rows: Sequence[CallOfRanks]) -> Iterator[Finding]:
    """Yield the rank for which most ranks wait in a call that all have made."""
    waits = Counter(
        call.waits_for
        for row in rows
        for call in row.by_rank.values()
        if call is not None and call.state != "done" and call.waits_for is not None
    )
    if waits:
        rank, number = waits.most_common(1)[0]
        waiting = "one rank waits" if number == 1 else f"{number} ranks wait"
        text = f"all ranks are in the same call, and {waiting} for rank {rank}: it, or the link to it, is slow"
        yield Finding("slow", (rank,), text)
