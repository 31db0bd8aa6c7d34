"""Writes plans as schedules of MSCCL, in XML.

Theory of operation. A rank has a threadblock for each peer that it sends to on a lane, one for each peer that it
receives from, and one for copies and reductions on the lane. The channel is the lane. A group of a plan begins when the
group before it has ended. So the first step of a group in each threadblock waits for the last steps of earlier groups
in the other threadblocks. A step of MSCCL waits for one other step, so ``nop`` steps wait for the others. A step moves
chunks that lie one behind the other, so a span with another stride becomes several steps.

The schedule is not in place: it leaves the input unchanged. MSCCL has no flags and does not read memory of peers, so
plans that do are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Counts,
    Group,
    Plan,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    Step,
)
from unisono.errors import UsageError

_LETTERS = {Buffer.INPUT: "i", Buffer.OUTPUT: "o", Buffer.SCRATCH: "s"}
_NOT_WRITTEN = ("barrier", "scan", "exscan")


class _Part(NamedTuple):
    """A step of MSCCL: its type, the blocks of source and target, and the number of chunks."""

    kind: str
    source: tuple[Buffer, int]
    target: tuple[Buffer, int]
    length: int


class _Threadblock(NamedTuple):
    """A threadblock: its lane, the peer that it sends to and the peer that it receives from; -1 for none."""

    lane: int
    send: int = -1
    receive: int = -1


# A step of a threadblock, by its number among those that move data.
_Place = tuple[_Threadblock, int]


def msccl_xml(plans: Sequence[Plan]) -> str:
    """Return the plans of all ranks as an XML file of MSCCL.

    Raises:
        UsageError: MSCCL cannot express them; the message says why.
    """
    _check(plans[0])
    attributes = {
        "name": plans[0].algorithm,
        "proto": "Simple",
        "nchannels": str(max(len(plan.lanes) for plan in plans)),
        "nchunksperloop": str(max(max(plan.input.blocks, plan.output.blocks) for plan in plans)),
        "ngpus": str(len(plans)),
        "coll": plans[0].collective,
        "inplace": "0",
    }
    algo = Element("algo", attributes)
    groups = [[list(plan.groups(lane)) for lane in range(len(plan.lanes))] for plan in plans]
    for plan in plans:
        counts = {f"{_LETTERS[buffer]}_chunks": str(plan.partition(buffer).blocks) for buffer in Buffer}
        gpu = SubElement(algo, "gpu", {"id": str(plan.rank), **counts})
        _Rank(plans, groups, plan.rank).write(gpu)
    indent(algo)
    return tostring(algo, encoding="unicode") + "\n"


def _check(plan: Plan) -> None:
    if plan.collective in _NOT_WRITTEN or plan.collective not in CONTRACTS:
        raise UsageError(f"MSCCL has no collective {plan.collective}")
    if {plan.input.counts, plan.output.counts} != {Counts.OWN}:
        raise UsageError("MSCCL has no shares of different lengths")


class _Rank:
    """The threadblocks of one rank."""

    def __init__(self, plans: Sequence[Plan], groups: Sequence[Sequence[Sequence[Group]]], rank: int) -> None:
        self._plans, self._groups, self._plan = plans, groups, plans[rank]
        # For each threadblock, its steps; each with the steps of other threadblocks that come before it.
        self._steps: dict[_Threadblock, list[tuple[_Part, set[_Place]]]] = {}
        # For each lane and group, the steps that must have ended when it has.
        self._ends: dict[tuple[int, int], set[_Place]] = {}

    def write(self, gpu: Element) -> None:
        """Add the threadblocks to the element of the rank."""
        own = self._groups[self._plan.rank]
        pending = [(lane, number) for lane, groups in enumerate(own) for number in range(len(groups))]
        while pending:
            lane, number = next(at for at in pending if self._before(*at) <= self._ends.keys())
            pending.remove((lane, number))
            self._add_group(lane, number)
        numbers = {block: at for at, block in enumerate(self._steps)}
        places = self._numbered()
        waited_for = {place for steps in self._steps.values() for _, before in steps for place in before}
        for block, at in numbers.items():
            names = {"id": str(at), "send": str(block.send), "recv": str(block.receive), "chan": str(block.lane)}
            element = SubElement(gpu, "tb", names)
            for step, (part, before) in enumerate(self._steps[block]):
                waits = [(numbers[other], places[other, place]) for other, place in sorted(before)]
                has_waiting = (block, step) in waited_for
                self._write_step(element, part, waits, has_waiting=has_waiting)

    def _before(self, lane: int, number: int) -> set[tuple[int, int]]:
        """Return the groups that must have ended before a group begins."""
        previous = {(lane, number - 1)} if number else set()
        return previous | set(self._groups[self._plan.rank][lane][number].after)

    def _add_group(self, lane: int, number: int) -> None:
        before = {place for group in self._before(lane, number) for place in self._ends[group]}
        last: dict[_Threadblock, int] = {}
        for step in self._groups[self._plan.rank][lane][number].steps:
            block = _threadblock(step, lane)
            steps = self._steps.setdefault(block, [])
            for part in self._parts(step, lane, number):
                steps.append((part, set() if block in last else {place for place in before if place[0] != block}))
                last[block] = len(steps) - 1
        self._ends[lane, number] = set(last.items()) or before

    def _numbered(self) -> dict[_Place, int]:
        """Return the number of each step in the file, where ``nop`` steps come before some."""
        numbers = {}
        for block, steps in self._steps.items():
            number = -1
            for at, (_, before) in enumerate(steps):
                number += max(1, len(before))
                numbers[block, at] = number
        return numbers

    def _write_step(self, tb: Element, part: _Part, waits: Sequence[tuple[int, int]], *, has_waiting: bool) -> None:
        for wait in waits[:-1]:
            nop = _Part("nop", (Buffer.INPUT, -1), (Buffer.OUTPUT, -1), 0)
            SubElement(tb, "step", _attributes(len(tb), nop, wait, has_waiting=False))
        last = waits[-1] if waits else (-1, -1)
        SubElement(tb, "step", _attributes(len(tb), part, last, has_waiting=has_waiting))

    def _parts(self, step: Step, lane: int, number: int) -> Iterator[_Part]:
        """Yield the steps of MSCCL for one step of the plan."""
        if isinstance(step, Reduce):
            yield from self._reduction(step)
            return
        kind = {Send: "s", Recv: "r", RecvReduce: "rrc", Copy: "cpy"}[type(step)]
        spans = [getattr(step, name) for name in ("src", "dst") if hasattr(step, name)]
        columns = [self._plan.physical_blocks(span) for span in spans]
        for start, count in _runs([*columns, *self._other_end(step, lane, number)]):
            source, target = (
                (span.buffer, column[start]) for span, column in ((spans[0], columns[0]), (spans[-1], columns[-1]))
            )
            yield _Part(kind, source, target, count)

    def _reduction(self, step: Reduce) -> Iterator[_Part]:
        """Yield a copy of one operand to the target, unless one lies there, and a reduction for each other operand."""
        target, operands = self._plan.physical_blocks(step.dst), list(step.sources)
        same = [
            span for span in operands if span.buffer is step.dst.buffer and self._plan.physical_blocks(span) == target
        ]
        first = same[0] if same else operands[0]
        operands.remove(first)
        for kind, span in [*([] if same else [("cpy", first)]), *(("re", span) for span in operands)]:
            blocks = self._plan.physical_blocks(span)
            for start, count in _runs([blocks, target]):
                yield _Part(kind, (span.buffer, blocks[start]), (step.dst.buffer, target[start]), count)

    def _other_end(self, step: Step, lane: int, number: int) -> list[list[int]]:
        """Return the blocks at the other end of a message, for each span there."""
        if not isinstance(step, (Send, Recv, RecvReduce)):
            return []
        ends = (Recv, RecvReduce) if isinstance(step, Send) else (Send,)
        others = self._groups[step.peer][lane][number].steps
        other = next(end for end in others if isinstance(end, ends) and end.peer == self._plan.rank)
        spans = [getattr(other, name) for name in ("src", "dst") if hasattr(other, name)]
        return [self._plans[step.peer].physical_blocks(span) for span in spans]


def _threadblock(step: Step, lane: int) -> _Threadblock:
    if isinstance(step, Send):
        return _Threadblock(lane, send=step.peer)
    if isinstance(step, (Recv, RecvReduce)):
        return _Threadblock(lane, receive=step.peer)
    if isinstance(step, (Copy, Reduce)):
        return _Threadblock(lane)
    raise UsageError(f"MSCCL has no step like {type(step).__name__}, which uses the memory of a peer")


def _runs(columns: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield start and length of each run of chunks that lie one behind the other in all columns."""
    rows = list(zip(*columns, strict=True))
    starts = [at for at, row in enumerate(rows) if not at or row != tuple(block + 1 for block in rows[at - 1])]
    for start, end in pairwise([*starts, len(rows)]):
        yield start, end - start


def _attributes(number: int, part: _Part, wait: tuple[int, int], *, has_waiting: bool) -> dict[str, str]:
    (source, source_at), (target, target_at) = part.source, part.target
    values = {
        **{"s": number, "type": part.kind, "srcbuf": _LETTERS[source], "srcoff": source_at},
        **{"dstbuf": _LETTERS[target], "dstoff": target_at, "cnt": part.length},
        **{"depid": wait[0], "deps": wait[1], "hasdep": int(has_waiting)},
    }
    return {name: str(value) for name, value in values.items()}
