"""The encoded form of plans, and the refusals of the native decoder."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support import handmade_plans

from unisono.algorithms.catalogue.registry import ALGORITHMS
from unisono.algorithms.ir.encode import OPCODES, VERSION, encode
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Counts,
    Group,
    Partition,
    Plan,
    Recv,
    RecvReduce,
    Reduce,
    Repeat,
    Send,
    Write,
    even,
    input_block,
    output_block,
    scratch_block,
    scratch_like,
    scratch_like_block,
)
from unisono.transports import _core

OUT_OF_RANGE = (-2, 1 << 40, -(1 << 62), (1 << 63) - 1)
HEADER_WORDS = 22


def small_plan() -> Plan:
    receive = RecvReduce(1, output_block(0, advance=1), input_block(0), received_first=True, lower=True, peer_advance=2)
    exchange = Group((Send(1, input_block(1, 2, -1)), receive))
    keep = Group((Reduce(output_block(1), (scratch_block(3), input_block(1))),), after=((0, 4),))
    scratch = scratch_like(Buffer.OUTPUT, even(2), 2)
    lanes = ((Repeat(3, (exchange, Group(()))),), (keep,))
    return Plan("allreduce", "made", 4, 2, 0, even(2), even(2), scratch, lanes, permutation=(1, 0))


def test_a_small_plan_is_encoded_as_the_format_says() -> None:
    header = [VERSION, 4, 2, 2, 2, 3, 1, 3, 6, 2, 2, 0, 1, 2, 0, 1, 4, 0, 1, int(Buffer.OUTPUT), 2, -1]
    lanes = [0, 1, 1, 1]
    items = [3, 0, 2, 1, 2, 1]
    groups = [0, 2, 0, 0, 2, 0, 0, 0, 2, 1, 0, 1]
    dependencies = [0, 4]
    steps = [
        *(OPCODES[Send], 0, 1, 0, -1, 0, 1),
        *(OPCODES[RecvReduce], 3, 1, 2, 1, 2, 1),
        *(OPCODES[Reduce], 0, 0, 0, 3, 4, 2),
    ]
    operands = [
        *(-1, Buffer.INPUT, 1, 2, -1, 0),
        *(-1, Buffer.OUTPUT, 0, 1, 1, 1),
        *(-1, Buffer.INPUT, 0, 1, 1, 0),
        *(-1, Buffer.OUTPUT, 1, 1, 1, 0),
        *(-1, Buffer.SCRATCH, 3, 1, 1, 0),
        *(-1, Buffer.INPUT, 1, 1, 1, 0),
    ]
    expected = [*header, *lanes, *items, *groups, *dependencies, *steps, *operands, 1, 0]
    assert encode(small_plan()).tolist() == expected


def registered_plans() -> list[Plan]:
    return [
        algorithm.build(size, rank, 0, **params)
        for algorithms in ALGORITHMS.values()
        for algorithm in algorithms.values()
        for params in ({}, {"varying": True})[: 1 + algorithm.varying]
        for size in (1, 2, 3, 8)
        for rank in range(size)
        if algorithm.supports(size) is None
    ]


HANDMADE = [
    small_plan(),
    handmade_plans.shift_in_two_lanes(3, 1),
    handmade_plans.allgather_bruck(5, 2, (4, 3, 2, 1, 0)),
    handmade_plans.alltoallv_direct(4, 3),
    handmade_plans.reduce_chain_of_wide_blocks(4, 2),
    handmade_plans.allreduce_one_shot(2, 0),
]


def test_native_decoder_accepts_every_plan() -> None:
    for plan in registered_plans() + HANDMADE:
        _core.Plan(encode(plan))


def test_the_native_decoder_refuses_to_write_memory_of_peers() -> None:
    plan = handmade_plans.allreduce_one_shot(2, 0)
    lane = ((*plan.lanes[0], Group((Write(1, output_block(), input_block()),))),)
    with pytest.raises(ValueError, match="peers' memory can only be read"):
        _core.Plan(encode(replace(plan, lanes=lane)))


def test_decoder_refuses_truncated_plan() -> None:
    words = encode(small_plan())
    for length in range(len(words)):
        with pytest.raises(ValueError, match="invalid plan"):
            _core.Plan(words[:length])


def test_decoder_refuses_plan_with_extra_words() -> None:
    with pytest.raises(ValueError, match="left over"):
        _core.Plan(encode(small_plan()) + array("q", [0]))


def test_plan_of_another_version_asks_for_an_installation_of_both_parts() -> None:
    words = encode(small_plan())
    words[0] += 1
    with pytest.raises(ValueError, match=r"invalid plan: .* reads plans of version .*; install Unisono again"):
        _core.Plan(words)


@pytest.mark.parametrize("value", OUT_OF_RANGE)
def test_every_word_of_the_header_is_checked(value: int) -> None:
    for index in range(HEADER_WORDS):
        words = encode(small_plan())
        words[index] = value
        with pytest.raises(ValueError, match="invalid plan"):
            _core.Plan(words)


def changed(step: int, word: int, value: int) -> array[int]:
    """Return the small plan with one word of one step changed."""
    words = encode(small_plan())
    words[HEADER_WORDS + 4 + 6 + 12 + 2 + 7 * step + word] = value
    return words


@pytest.mark.parametrize(
    ("step", "word", "value", "complaint"),
    [
        (0, 0, 10, "operation"),
        (0, 2, 4, "peer"),
        (0, 4, 0, "destination"),
        (0, 5, 6, "sources"),
        (0, 6, 2, "number of sources"),
        (1, 4, 0, "writes INPUT"),
        (1, 4, 6, "destination"),
        (2, 6, 0, "number of sources"),
        (2, 6, 3, "sources"),
    ],
)
def test_decoder_refuses_invalid_step(step: int, word: int, value: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        _core.Plan(changed(step, word, value))


def with_scratch(scratch: Partition) -> Plan:
    return Plan("x", "x", 2, 0, 0, even(2), even(2), scratch)


def test_scratch_partition_is_encoded_in_all_three_forms() -> None:
    scratches = {
        Partition(3, Counts.RANKS): [3, int(Counts.RANKS), 1, -1, 1, -1],
        scratch_like(Buffer.OUTPUT, even(2), 2): [4, 0, 1, int(Buffer.OUTPUT), 2, -1],
        scratch_like_block(Buffer.INPUT, even(2), block=1, copies=5): [5, 0, 1, int(Buffer.INPUT), 5, 1],
    }
    for scratch, words in scratches.items():
        encoded = encode(with_scratch(scratch))
        assert encoded[16:HEADER_WORDS].tolist() == words
        _core.Plan(encoded)


@pytest.mark.parametrize(
    ("scratch", "complaint"),
    [
        (Partition(3), "scratch has no counts"),
        (Partition(4, Counts.RANKS, parts=2), "scratch is cut into parts"),
        (Partition(4, Counts.RANKS, copies=2), "copies of scratch by counts of its own"),
        (Partition(3, like=Buffer.INPUT, copies=2), "does not have the blocks of its copies"),
        (Partition(2, like=Buffer.INPUT, copies=3, block=1), "does not have the blocks of its copies"),
        (Partition(3, like=Buffer.INPUT, copies=3, block=2), "block that scratch is like"),
    ],
)
def test_decoder_refuses_invalid_partition_of_scratch(scratch: Partition, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        _core.Plan(encode(with_scratch(scratch)))


@pytest.mark.parametrize("parts", [0, 3, 5])
def test_decoder_refuses_shares_without_their_number_of_parts(parts: int) -> None:
    plan = Plan("x", "x", 2, 0, 0, even(2), replace(even(4), parts=parts))
    with pytest.raises(ValueError, match="parts"):
        _core.Plan(encode(plan))


def test_a_span_longer_than_its_buffer_is_refused() -> None:
    plan = Plan("x", "x", 1, 0, 0, even(1), even(1), lanes=((Group((Copy(output_block(0, 2), input_block(0, 2)),)),),))
    with pytest.raises(ValueError, match="longer than its buffer"):
        _core.Plan(encode(plan))


def test_decoder_refuses_dependency_on_a_group_that_never_runs() -> None:
    group = Group((Recv(1, output_block()),), after=((1, 1),))
    plan = Plan("x", "x", 2, 0, 0, even(1), even(1), lanes=((group,), (Group(()),)))
    with pytest.raises(ValueError, match="group of a dependency"):
        _core.Plan(encode(plan))


interesting = st.one_of(st.sampled_from([-1, 0, 1, 2, 3, 7, *OUT_OF_RANGE]), st.integers(-(1 << 63), (1 << 63) - 1))


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    plan=st.sampled_from(HANDMADE),
    flips=st.lists(st.tuples(st.integers(0, 10**6), interesting), min_size=1, max_size=4),
)
def test_corrupted_words_are_refused_or_harmless(plan: Plan, flips: list[tuple[int, int]]) -> None:
    words = encode(plan)
    for index, value in flips:
        words[index % len(words)] = value
    try:
        decoded = _core.Plan(words)
    except ValueError as error:
        assert "invalid plan" in str(error)  # noqa: PT017
        return
    bind(decoded)


def bind(plan: _core.Plan) -> None:
    """Cut buffers by a decoded plan with random partitions. Counts that do not fit the partitions are refused."""
    try:
        _core.Call(plan, [(12, 0, 0, 1)], [(12, 0, 0, 1)], [[], [1, 2], [1, 2], [1, 2]], 3, 0, "")
    except ValueError as error:
        complaints = ("one count for each share", "blocks of different lengths", "read into one block")
        assert any(complaint in str(error) for complaint in complaints)  # noqa: PT017


def test_decoder_refuses_words_that_are_not_8_bytes_long() -> None:
    with pytest.raises(ValueError, match="invalid plan"):
        _core.Plan(np.frombuffer(encode(small_plan()).tobytes()[:-4], np.uint8))
