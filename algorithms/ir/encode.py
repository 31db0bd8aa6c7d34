"""Encodes a plan as an array of 64-bit integers, which the native core decodes and runs.

The array is a header of 22 words, followed by these tables::

    version size rank lanes items groups dependencies steps operands permutation
    input.blocks input.counts input.parts output.blocks output.counts output.parts
    scratch.blocks scratch.counts scratch.parts
    scratch.like (-1: counts of its own) scratch.copies scratch.block (-1: all)
    lane        first item, items
    item        times, first group, groups                       (a Group by itself is run once)
    group       first step, steps, first dependency, dependencies
    dependency  lane, group as run
    step        opcode, flags (1: received first, 2: lower, 4: even if empty), peer, peer advance, dst (operand or -1),
                first source, sources
    operand     peer (-1: own), buffer, start, count, stride, advance
    permutation one word per block

A table refers to another by the index of its first row and the number of rows. The decoder checks every index.
"""

from __future__ import annotations

from array import array

from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Group,
    Partition,
    Plan,
    Read,
    ReadReduce,
    Recv,
    RecvReduce,
    Reduce,
    Repeat,
    Send,
    Signal,
    Span,
    Step,
    Wait,
    Write,
    as_written,
)
from unisono.algorithms.ir.walk import reads

VERSION = 4

_FLAGS = {"received_first": 1, "lower": 2, "even_if_empty": 4}

_STEP_WORDS = 7
_OPERAND_WORDS = 6

OPCODES: dict[type[object], int] = {
    Send: 0,
    Recv: 1,
    RecvReduce: 2,
    Copy: 3,
    Reduce: 4,
    Read: 5,
    ReadReduce: 6,
    Write: 7,
    Signal: 8,
    Wait: 9,
}


class _Tables:
    def __init__(self) -> None:
        self.items: list[int] = []
        self.groups: list[int] = []
        self.dependencies: list[int] = []
        self.steps: list[int] = []
        self.operands: list[int] = []

    def add_item(self, item: Group | Repeat) -> None:
        times, groups = as_written(item)
        self.items += [times, len(self.groups) // 4, len(groups)]
        for group in groups:
            self._add_group(group)

    def _add_group(self, group: Group) -> None:
        self.groups += [len(self.steps) // _STEP_WORDS, len(group.steps), len(self.dependencies) // 2, len(group.after)]
        for lane, index in group.after:
            self.dependencies += [lane, index]
        for step in group.steps:
            self._add_step(step)

    def _add_step(self, step: Step) -> None:
        dst = getattr(step, "dst", None)
        dst_index = self._add_operand(-1, dst) if dst is not None else -1
        first_source = len(self.operands) // _OPERAND_WORDS
        sources = reads(step, -1)
        for peer, span in sources:
            self._add_operand(peer, span)
        flags = sum(bit for name, bit in _FLAGS.items() if getattr(step, name, False))
        peer, peer_advance = getattr(step, "peer", 0), getattr(step, "peer_advance", 0)
        self.steps += [OPCODES[type(step)], flags, peer, peer_advance, dst_index, first_source, len(sources)]

    def _add_operand(self, peer: int, span: Span) -> int:
        self.operands += [peer, int(span.buffer), span.start, span.count, span.stride, span.advance]
        return len(self.operands) // _OPERAND_WORDS - 1


def encode(plan: Plan) -> array[int]:
    """Return `plan` as an array of signed 64-bit integers, in the form described by this module."""
    tables = _Tables()
    lanes: list[int] = []
    for lane in plan.lanes:
        lanes += [len(tables.items) // 3, len(lane)]
        for item in lane:
            tables.add_item(item)
    header = [
        *(VERSION, plan.size, plan.rank, len(plan.lanes), len(tables.items) // 3, len(tables.groups) // 4),
        *(
            len(tables.dependencies) // 2,
            len(tables.steps) // _STEP_WORDS,
            len(tables.operands) // _OPERAND_WORDS,
            len(plan.permutation),
        ),
        *(word for buffer in Buffer for word in _cut(plan.partition(buffer))),
        *_scratch(plan.scratch),
    ]
    body = [*lanes, *tables.items, *tables.groups, *tables.dependencies, *tables.steps, *tables.operands]
    return array("q", [*header, *body, *plan.permutation])


def _cut(partition: Partition) -> tuple[int, ...]:
    return partition.blocks, int(partition.counts), partition.parts


def _scratch(partition: Partition) -> tuple[int, ...]:
    like = -1 if partition.like is None else int(partition.like)
    block = -1 if partition.block is None else partition.block
    return like, partition.copies, block
