"""Execution traces of Chakra: by the schema of the format they are the plans again, and right in every order."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Group,
    Plan,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    Span,
    Step,
)
from unisono.algorithms.schedules.chakra import chakra_traces
from unisono.algorithms.verifier.verify import verify_plans
from unisono.cli.main import unisono
from unisono.errors import UsageError

pytest.importorskip("google.protobuf")
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal.decoder import _DecodeVarint32  # type: ignore[attr-defined]

# The fields of the schema's messages that traces here may use, by their numbers.
_TYPES = descriptor_pb2.FieldDescriptorProto
_MESSAGES: dict[str, list[tuple[int, str, int, bool]]] = {
    "GlobalMetadata": [(1, "version", _TYPES.TYPE_STRING, False)],
    "AttributeProto": [
        (1, "name", _TYPES.TYPE_STRING, False),
        (7, "int32_val", _TYPES.TYPE_INT32, False),
        (9, "int64_val", _TYPES.TYPE_INT64, False),
        (13, "uint64_val", _TYPES.TYPE_UINT64, False),
        (27, "bool_val", _TYPES.TYPE_BOOL, False),
        (29, "string_val", _TYPES.TYPE_STRING, False),
    ],
    "Node": [
        (1, "id", _TYPES.TYPE_UINT64, False),
        (2, "name", _TYPES.TYPE_STRING, False),
        (3, "type", _TYPES.TYPE_INT32, False),
        (5, "data_deps", _TYPES.TYPE_UINT64, True),
        (10, "attr", _TYPES.TYPE_MESSAGE, True),
    ],
}
COMPUTE, SEND, RECEIVE = 4, 5, 6


def schema() -> dict[str, Any]:
    """Return the classes of the messages."""
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")
        for number, field, kind, repeated in fields:
            new = message.field.add(name=field, number=number, type=kind, label=3 if repeated else 1)
            if kind == _TYPES.TYPE_MESSAGE:
                new.type_name = ".ChakraProtoMsg.AttributeProto"
            if name == "AttributeProto" and number > 1:
                new.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in _MESSAGES
    }


SCHEMA = schema()


class Node(NamedTuple):
    """A node of a trace."""

    id: int
    kind: int
    before: tuple[int, ...]
    attributes: dict[str, Any]


def nodes_of(trace: bytes) -> list[Node]:
    messages, at = [], 0
    while at < len(trace):
        length, at = _DecodeVarint32(trace, at)
        messages.append(trace[at : at + length])
        at += length
    assert SCHEMA["GlobalMetadata"].FromString(messages[0]).version == "0.0.4"
    nodes = []
    for message in messages[1:]:
        node = SCHEMA["Node"].FromString(message)
        attributes = {each.name: getattr(each, each.WhichOneof("value")) for each in node.attr}
        nodes.append(Node(node.id, node.type, tuple(node.data_deps), attributes))
    return nodes


def spans(text: str) -> list[tuple[Buffer, list[int]]]:
    parts = [part.split() for part in text.split(", ")]
    return [(Buffer[name], list(map(int, blocks))) for name, *blocks in parts]


def span_of(buffer: Buffer, places: list[int], plan: Plan) -> Span:
    """Return the blocks at these places in memory as a span; they must be equally far apart."""
    total = plan.partition(buffer).blocks
    blocks = [plan.permutation.index(each) for each in places] if len(plan.permutation) == total else places
    stride = (blocks[1] - blocks[0]) % total if len(blocks) > 1 else 1
    span = Span(buffer, blocks[0], len(blocks), stride)
    assert span.blocks(total) == blocks
    return span


def step_of(node: Node, plan: Plan) -> Step:
    kind, *flags = node.attributes["step"].split()
    given: dict[str, Any] = dict.fromkeys(flags, True)
    ends = {
        name: [span_of(buffer, blocks, plan) for buffer, blocks in spans(node.attributes[name])]
        for name in ("src", "dst")
        if name in node.attributes
    }
    if kind == "Reduce":
        return Reduce(ends["dst"][0], tuple(ends["src"]), **given)
    given |= {name: each[0] for name, each in ends.items()}
    if kind == "Copy":
        return Copy(**given)
    peer = node.attributes["comm_dst" if kind == "Send" else "comm_src"]
    return {"Send": Send, "Recv": Recv, "RecvReduce": RecvReduce}[kind](peer, **given)


def read(plan: Plan, trace: bytes) -> Plan:
    """Return the plan that a trace describes; only partitions and the root come from the original."""
    nodes = nodes_of(trace)
    place = {node.id: (node.attributes["lane"], node.attributes["group"]) for node in nodes}
    steps, after = defaultdict[tuple[int, int], list[Step]](list), defaultdict[tuple[int, int], set[Any]](set)
    for node in nodes:
        if node.attributes["step"] != "received":
            steps[place[node.id]].append(step_of(node, plan))
            after[place[node.id]] |= {place[each] for each in node.before if place[each][0] != place[node.id][0]}
    lanes = []
    for lane in range(len(plan.lanes)):
        numbers = [at for number, at in steps if number == lane]
        lanes.append(
            tuple(
                Group(tuple(steps[lane, at]), tuple(sorted(after[lane, at])))
                for at in range(max(numbers, default=-1) + 1)
            )
        )
    return Plan(
        *(plan.collective, plan.algorithm, plan.size, plan.rank, plan.root),
        *(plan.input, plan.output, plan.scratch, tuple(lanes), plan.permutation),
    )


def written() -> list[tuple[Algorithm, int]]:
    """Return the algorithms that a trace can express, with numbers of ranks."""
    return [
        (algorithm, size)
        for collective, by_name in ALGORITHMS.items()
        for algorithm, size in product(by_name.values(), (2, 3, 4, 8))
        if collective not in ("barrier", "scan", "exscan")
        if not (algorithm.vendor or algorithm.mapped or algorithm.supports(size))
    ]


@pytest.mark.parametrize(("algorithm", "size"), written(), ids=lambda each: getattr(each, "name", each))
def test_trace_is_the_plan_again(algorithm: Algorithm, size: int) -> None:
    plans = [algorithm.build(size, rank, 0) for rank in range(size)]
    traces = chakra_traces(plans, 840, 4)
    again = verify_plans(
        [read(plan, trace) for plan, trace in zip(plans, traces, strict=True)], in_place=algorithm.in_place
    )
    before = verify_plans(plans, in_place=algorithm.in_place)
    assert (again.rounds, again.sent, again.reduced) == (before.rounds, before.sent, before.reduced)


@pytest.mark.parametrize("name", ["ring", "rabenseifner", "swing", "multi_lane_ring", "chain"])
def test_trace_is_right_in_every_order_that_its_dependencies_allow(name: str) -> None:
    size = 4
    plans = [find("allreduce", name).build(size, rank, 0) for rank in range(size)]
    traces = [nodes_of(trace) for trace in chakra_traces(plans, 840, 4)]
    for seed in range(5):
        memories = run(plans, traces, random.Random(seed))
        for plan, memory in zip(plans, memories, strict=True):
            for block in range(plan.output.blocks):
                assert memory[Buffer.OUTPUT, block] == dict.fromkeys(range(size), 1), (plan.rank, block)


def run(plans: list[Plan], traces: list[list[Node]], order: random.Random) -> list[dict[Any, Any]]:
    """Run nodes one by one in a random order; a block holds how often each rank's contribution is in it."""
    memories: list[dict[Any, Any]] = [
        {(Buffer.INPUT, block): {plan.rank: 1} for block in range(plan.input.blocks)} for plan in plans
    ]
    messages: dict[Any, Any] = {}
    ended: list[set[int]] = [set() for _ in plans]
    received: list[dict[int, Any]] = [{} for _ in plans]
    while any(len(done) < len(nodes) for done, nodes in zip(ended, traces, strict=True)):
        ready = [
            (rank, node)
            for rank, nodes in enumerate(traces)
            for node in nodes
            if node.id not in ended[rank] and set(node.before) <= ended[rank]
            if node.kind != RECEIVE or message_of(node) in messages
        ]
        rank, node = order.choice(ready)
        run_node(node, memories[rank], messages, received[rank])
        ended[rank].add(node.id)
    return memories


def message_of(node: Node) -> tuple[int, ...]:
    return tuple(node.attributes[f"comm_{name}"] for name in ("src", "dst", "tag", "size"))


def run_node(node: Node, memory: dict[Any, Any], messages: dict[Any, Any], received: dict[int, Any]) -> None:
    sources = [[(buffer, block) for block in blocks] for buffer, blocks in spans(node.attributes.get("src", "INPUT"))]
    targets = [(buffer, block) for buffer, blocks in spans(node.attributes.get("dst", "INPUT")) for block in blocks]
    if node.kind == SEND:
        messages[message_of(node)] = [memory[place] for place in sources[0]]
        return
    if node.kind == RECEIVE:
        values = messages.pop(message_of(node))
        if node.attributes["step"].startswith("RecvReduce"):
            received[node.id] = values
        else:
            memory.update(zip(targets, values, strict=True))
        return
    operands = [[memory[place] for place in column] for column in sources]
    if node.attributes["step"] == "received":
        operands.append(received[node.before[0]])
    memory.update(zip(targets, map(joined, zip(*operands, strict=True)), strict=True))


def joined(values: tuple[dict[int, int], ...]) -> dict[int, int]:
    ranks = {rank for value in values for rank in value}
    return {rank: sum(value.get(rank, 0) for value in values) for rank in ranks}


def test_command_writes_a_file_for_each_rank(tmp_path: Path) -> None:
    arguments = ["export", "allreduce", "ring", "-n", "3", "--to", "chakra", "--size", "12K"]
    result = CliRunner().invoke(unisono, [*arguments, "--out", str(tmp_path / "ring")])
    assert result.exit_code == 0
    for rank in range(3):
        nodes = nodes_of((tmp_path / f"ring.{rank}.et").read_bytes())
        assert sum(node.attributes["comm_size"] for node in nodes if node.kind == SEND) == 4 * 4096


def test_command_refuses_several_sizes(tmp_path: Path) -> None:
    arguments = ["export", "allreduce", "ring", "--to", "chakra", "--size", "1K,2K", "--out", str(tmp_path / "ring")]
    result = CliRunner().invoke(unisono, arguments)
    assert result.exit_code == 2
    assert "'1K,2K' is not" in result.stderr
    assert not list(tmp_path.iterdir())


def test_reads_of_peers_memory_are_refused() -> None:
    plans = [find("allreduce", "one_shot").build(2, rank, 0) for rank in range(2)]
    with pytest.raises(UsageError, match="peer's memory"):
        chakra_traces(plans, 8, 4)
