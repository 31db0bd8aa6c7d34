"""Writes plans as execution traces of Chakra, which ASTRA-sim runs.

Theory of operation. A trace has one file for each rank. A file is a sequence of protobuf messages, each behind its
length: first the version, and then one node for each step of the plan. A send or a receive is a communication node, and
a copy or a reduction is a computation. A `RecvReduce` is a receive and a computation behind it. A node depends on the
last nodes of the groups that must have ended before its group begins. The tag of a message numbers its lane and group.

Attributes that ASTRA-sim does not read name the step: ``step``, ``lane``, ``group``, and the blocks ``src`` and
``dst``, such as ``OUTPUT 1 2``. By these the plan can be read again.

The fields and their numbers are those of ``et_def.proto`` of MLCommons Chakra. They are few, so they are written
without the package of protobuf.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from unisono.algorithms.ir.binding import Shape, bounds
from unisono.algorithms.ir.plan import Buffer, Copy, Counts, Group, Plan, Recv, RecvReduce, Reduce, Send, Span, Step
from unisono.errors import UsageError

VERSION = "0.0.4"
# The kinds of nodes.
COMPUTE, SEND, RECEIVE = 4, 5, 6
# The fields of an attribute that hold its value.
_INT32, _INT64, _UINT64, _BOOL, _STRING = 7, 9, 13, 27, 29
_FIELDS = {
    **{"comm_size": _INT64, "comm_src": _INT32, "comm_dst": _INT32, "comm_tag": _INT32},
    **{"num_ops": _INT64, "tensor_size": _UINT64, "is_cpu_op": _BOOL},
    **{"lane": _INT32, "group": _INT32},
}
_FLAGS = ("received_first", "lower", "even_if_empty")


class _Node(NamedTuple):
    """A node: its name, its kind and its attributes."""

    name: str
    kind: int
    attributes: Mapping[str, Any]


def chakra_traces(plans: Sequence[Plan], count: int, itemsize: int) -> list[bytes]:
    """Return the trace of each rank, for a vector of `count` elements of `itemsize` bytes.

    Raises:
        UsageError: a plan uses the memory of a peer, or has shares of different lengths.
    """
    if {plans[0].input.counts, plans[0].output.counts} != {Counts.OWN}:
        raise UsageError("a trace of Chakra has no shares of different lengths")
    most = max(plan.group_count(lane) for plan in plans for lane in range(len(plan.lanes)))
    return [_Rank(plan, count, itemsize, most).trace() for plan in plans]


class _Rank:
    """The nodes of one rank."""

    def __init__(self, plan: Plan, count: int, itemsize: int, groups: int) -> None:
        self._plan, self._itemsize, self._groups = plan, itemsize, groups
        shape = Shape((_elements(plan, Buffer.INPUT, count), _elements(plan, Buffer.OUTPUT, count)), {})
        self._lengths = {buffer: [length for _, length in bounds(plan, buffer, shape)] for buffer in Buffer}
        self._count = 0
        # For each lane and group, the nodes that must have ended when it has.
        self._ends: dict[tuple[int, int], tuple[int, ...]] = {}

    def trace(self) -> bytes:
        """Return the file of the rank."""
        lanes = [list(self._plan.groups(lane)) for lane in range(len(self._plan.lanes))]
        groups = {(lane, at): group for lane, of_lane in enumerate(lanes) for at, group in enumerate(of_lane)}
        messages = [_text(1, VERSION)]
        while groups:
            place = next(each for each in groups if not _before(each, groups[each]) & groups.keys())
            messages += self._group(place, groups.pop(place))
        return b"".join(_varint(len(message)) + message for message in messages)

    def _group(self, place: tuple[int, int], group: Group) -> Iterator[bytes]:
        before = sorted({node for each in _before(place, group) for node in self._ends[each]})
        last = list[int]()
        for step in group.steps:
            waits: Sequence[int] = before
            for node in self._nodes(step, *place):
                yield _encoded(self._count, node, waits)
                waits = [self._count]
                self._count += 1
            last += waits
        self._ends[place] = tuple(last) or tuple(before)

    def _nodes(self, step: Step, lane: int, group: int) -> Iterator[_Node]:
        """Yield the nodes of a step. Each node depends on the node before."""
        flags = [flag for flag in _FLAGS if getattr(step, flag, False)]
        about = {"lane": lane, "group": group, "step": " ".join([type(step).__name__, *flags])}
        about |= {name: self._blocks([getattr(step, name)]) for name in ("src", "dst") if hasattr(step, name)}
        tag = {"comm_tag": lane * self._groups + group}
        if isinstance(step, Send):
            message = {"comm_size": self._nbytes(step.src), "comm_src": self._plan.rank, "comm_dst": step.peer}
            yield _Node("send", SEND, {**message, **tag, **about})
        elif isinstance(step, (Recv, RecvReduce)):
            message = {"comm_size": self._nbytes(step.dst), "comm_src": step.peer, "comm_dst": self._plan.rank}
            yield _Node("receive", RECEIVE, {**message, **tag, **about})
            if isinstance(step, RecvReduce):
                yield self._computation("reduce", step.dst, 1, {**about, "step": "received"})
        elif isinstance(step, Copy):
            yield self._computation("copy", step.dst, 0, about)
        elif isinstance(step, Reduce):
            about["src"] = self._blocks(step.sources)
            yield self._computation("reduce", step.dst, len(step.sources) - 1, about)
        else:
            raise UsageError(f"a trace of Chakra has no node like {type(step).__name__}, which uses a peer's memory")

    def _computation(self, name: str, span: Span, operations: int, about: Mapping[str, Any]) -> _Node:
        nbytes = self._nbytes(span)
        elements = nbytes // self._itemsize
        return _Node(name, COMPUTE, {"num_ops": operations * elements, "tensor_size": nbytes, "is_cpu_op": 0, **about})

    def _nbytes(self, span: Span) -> int:
        lengths = self._lengths[span.buffer]
        return sum(lengths[block] for block in self._plan.physical_blocks(span)) * self._itemsize

    def _blocks(self, spans: Sequence[Span]) -> str:
        """Return the blocks of some spans as text."""
        parts = [f"{span.buffer.name} {' '.join(map(str, self._plan.physical_blocks(span)))}" for span in spans]
        return ", ".join(parts)


def _elements(plan: Plan, buffer: Buffer, count: int) -> int:
    """Return the elements of a buffer if the longer one of INPUT and OUTPUT has `count`."""
    blocks = plan.partition(buffer).blocks
    return count * blocks // max(plan.input.blocks, plan.output.blocks, 1)


def _before(place: tuple[int, int], group: Group) -> set[tuple[int, int]]:
    """Return the groups that must have ended before a group begins."""
    lane, at = place
    return {*group.after, *([(lane, at - 1)] if at else [])}


def _encoded(number: int, node: _Node, before: Sequence[int]) -> bytes:
    """Return a node as a protobuf message."""
    message = _number(1, number) + _text(2, node.name) + _number(3, node.kind)
    message += b"".join(_number(5, each) for each in before)
    return message + b"".join(_bytes(10, _attribute(name, value)) for name, value in node.attributes.items())


def _attribute(name: str, value: Any) -> bytes:
    field = _FIELDS.get(name, _STRING)
    return _text(1, name) + (_text(field, value) if field == _STRING else _number(field, value))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Return a number in groups of 7 bits, the lowest first; all but the last have the highest bit set."""
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
