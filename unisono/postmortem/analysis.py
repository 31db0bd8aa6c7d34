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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unisono.postmortem.loading import JobDumps
from unisono.records import record
from unisono.transports.recorder.dumps import Dump
from unisono.transports.recorder.memory import RecordedCall

WORLD = 0


@record
class Finding:
    """Something that is wrong with the job.

    Attributes:
        kind: "mismatch", "dead", "left", "no dump", "user code", "behind", "deadlock" or "slow".
        ranks: the ranks that the finding is about, the culprits.
        text: a sentence about them.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str


@record
class Row:
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


@record
class Report:
    """What the dumps of a job say.

    Attributes:
        dumps: the dumps.
        findings: what is wrong, the most certain first.
        rows: the last collectives of each communicator, in the order of their numbers.
    """

    dumps: JobDumps
    findings: tuple[Finding, ...]
    rows: tuple[Row, ...]

    @property
    def summary(self) -> str:
        """One paragraph: what happened, and who did what wrong."""
        job = self.dumps
        ranks = f"{job.size} rank{'s' if job.size != 1 else ''}"
        first = f"Job {job.job} of {ranks}; {_all_or_some(job)}."
        error = _first_error(job)
        happened = f"It failed with {error['type']}: {_sentence(error['text'])}" if error else "It has not failed."
        known = error["text"] if error else ""
        found = [_sentence(finding.text) for finding in self.findings if finding.kind not in ("mismatch",) or not known]
        if not found and not error:
            found = ["No rank waits for another one."]
        return " ".join((first, happened, *found))

    def to_json(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        return {
            "job": self.dumps.job,
            "size": self.dumps.size,
            "missing": list(self.dumps.missing),
            "error": _first_error(self.dumps),
            "summary": self.summary,
            "findings": [
                {"kind": finding.kind, "ranks": list(finding.ranks), "text": finding.text} for finding in self.findings
            ],
            "rows": [
                {
                    "communicator": f"{row.communicator:016x}",
                    "sequence": row.sequence,
                    "call": row.text,
                    "ranks": {
                        str(rank): None if call is None else {"call": call.text, "state": call.state, "site": call.site}
                        for rank, call in row.by_rank.items()
                    },
                }
                for row in self.rows
            ],
            "notes": list(self.dumps.notes),
        }


def analyse(dumps: JobDumps, most_rows: int = 12) -> Report:
    """Return what the dumps of a job say.

    Args:
        dumps: the dumps.
        most_rows: how many of the last collectives of each communicator the report shows.
    """
    rows = [row for communicator in _communicators(dumps) for row in _rows(dumps, communicator)]
    findings = [*_dead(dumps), *_mismatches(rows), *_deadlocks(dumps, rows)]
    blamed = {rank for finding in findings for rank in finding.ranks}
    findings += [finding for finding in _behind(dumps, rows) if not blamed.issuperset(finding.ranks)]
    if not findings:
        findings = list(_slow(dumps, rows))
    shown: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        shown[row.communicator].append(row)
    return Report(dumps, tuple(findings), tuple(row for own in shown.values() for row in own[-most_rows:]))


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


def _all_or_some(dumps: JobDumps) -> str:
    if not dumps.missing:
        return "every rank wrote a dump" if dumps.size > 1 else "it wrote a dump"
    return f"no dump of {ranks_text(dumps.missing)}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def _first_error(dumps: JobDumps) -> Mapping[str, Any] | None:
    errors = [(dump.written_s, dump.error) for dump in dumps.by_rank.values() if dump.error]
    return min(errors, key=lambda error: error[0])[1] if errors else None


def _communicators(dumps: JobDumps) -> list[int]:
    used = {call.communicator for dump in dumps.by_rank.values() for call in dump.snapshot.calls if not call.is_message}
    return sorted(used)


def _rows(dumps: JobDumps, communicator: int) -> Iterator[Row]:
    """Yield the collectives of a communicator that at least one rank still has in its dump."""
    by_rank: dict[int, dict[int, RecordedCall]] = {
        rank: {
            call.sequence: call
            for call in dump.snapshot.calls
            if not call.is_message and call.communicator == communicator
        }
        for rank, dump in dumps.by_rank.items()
    }
    ranks = members(dumps, communicator)
    for sequence in sorted({sequence for calls in by_rank.values() for sequence in calls}):
        calls = {rank: by_rank.get(rank, {}).get(sequence) for rank in ranks}
        texts = Counter(call.text for call in calls.values() if call is not None)
        passed = frozenset(rank for rank, own in by_rank.items() if sequence < max(own, default=-1))
        yield Row(communicator, sequence, texts.most_common(1)[0][0], calls, passed)


def _dead(dumps: JobDumps) -> Iterator[Finding]:
    """Yield the ranks without a dump: dead ones, those that have left, and those of which nothing is known."""
    error = _first_error(dumps) or {}
    lost = error["peer"] if error.get("type") == "PeerLostError" else None
    others = [rank for rank in dumps.missing if rank != lost]
    if lost is not None:
        left = " has left" in error["text"]
        yield Finding("left" if left else "dead", (lost,), f"rank {lost} {'left' if left else 'died'} first")
    if others:
        yield Finding("no dump", tuple(others), f"{ranks_text(others)} wrote no dump: killed, stopped or never started")


def _mismatches(rows: Sequence[Row]) -> Iterator[Finding]:
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


def _behind(dumps: JobDumps, rows: Sequence[Row]) -> Iterator[Finding]:
    """Yield the ranks that have not made a collective in which others wait."""
    waiting: dict[int, Row] = {}
    for row in rows:
        if row.absent and any(call is not None and call.state != "done" for call in row.by_rank.values()):
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
                yield Finding("behind", (rank,), f"{missed}: it is in {call_now}")


def _deadlocks(dumps: JobDumps, rows: Sequence[Row]) -> Iterator[Finding]:
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
            steps = "; ".join(
                f"rank {rank} waits for rank {arrows[rank]} in {current(dumps.by_rank[rank])}" for rank in cycle
            )
            yield Finding("deadlock", tuple(sorted(cycle)), f"these ranks wait for each other: {steps}")


def _slow(dumps: JobDumps, rows: Sequence[Row]) -> Iterator[Finding]:
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
