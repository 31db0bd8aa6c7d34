"""The largest number of SCRATCH blocks that are live at a time, beside the number of declared blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Group,
    Plan,
    Read,
    RecvReduce,
    Reduce,
    Send,
    Signal,
    Wait,
    even,
    input_block,
    output_block,
    scratch_block,
    scratch_like,
)
from unisono.algorithms.verifier.verify import Report, verify_plans, verify_sizes


def proved(*lanes: Sequence[Group], blocks: int) -> tuple[int, int]:
    """Return the live and the declared blocks of SCRATCH of a proved allreduce of one rank with these lanes."""
    scratch = scratch_like(Buffer.INPUT, even(1), copies=blocks)
    plan = Plan("allreduce", "test", 1, 0, 0, even(1), even(1), scratch, tuple(map(tuple, lanes)))
    return live_and_declared(verify_plans([plan]))


def live_and_declared(report: Report) -> tuple[int, int]:
    return report.scratch_live, report.scratch_blocks


def fill(block: int) -> Group:
    return Group((Copy(scratch_block(block), input_block()),))


def move(to: int, of: int) -> Group:
    return Group((Copy(scratch_block(to), scratch_block(of)),))


def finish(block: int) -> Group:
    return Group((Copy(output_block(), scratch_block(block), lower=True),))


DIRECTLY = Group((Copy(output_block(), input_block(), lower=True),))


def test_unused_scratch_is_not_live() -> None:
    assert proved([DIRECTLY], blocks=3) == (0, 3)


def test_written_but_never_read_scratch_is_not_live() -> None:
    assert proved([fill(0), fill(1), DIRECTLY], blocks=2) == (0, 2)
    assert proved([fill(0), fill(1), fill(0), finish(1)], blocks=2) == (1, 2)


def test_scratch_block_is_live_from_its_write_to_its_last_read() -> None:
    assert proved([fill(0), Group(()), finish(0)], blocks=1) == (1, 1)
    # During a copy its source and its target are live. So a chain of copies through three blocks has two live blocks.
    assert proved([fill(0), move(1, 0), move(2, 1), finish(2)], blocks=3) == (2, 3)
    # In this lane, block 0 is read once more at the end.
    late = Group((Copy(scratch_block(2), scratch_block(0)), *finish(1).steps))
    assert proved([fill(0), move(1, 0), late], blocks=3) == (2, 3)


def test_reused_scratch_block_is_counted_once() -> None:
    assert proved([fill(0), move(1, 0), fill(0), move(1, 0), finish(1)], blocks=2) == (2, 2)
    assert proved([fill(0), move(1, 0), move(0, 1), move(1, 0), finish(1)], blocks=2) == (2, 2)


def test_scratch_block_combined_in_place_is_counted_once() -> None:
    def lane(rank: int) -> tuple[Group, ...]:
        peer = 1 - rank
        exchange = (Send(peer, input_block()), RecvReduce(peer, scratch_block(), scratch_block(), rank == 1))
        return (fill(0), Group(exchange), finish(0))

    scratch = scratch_like(Buffer.INPUT, even(1), copies=2)
    plans = [Plan("allreduce", "test", 2, rank, 0, even(1), even(1), scratch, (lane(rank),)) for rank in range(2)]
    assert live_and_declared(verify_plans(plans)) == (1, 2)


def test_scratch_block_is_not_live_between_last_read_and_next_write() -> None:
    first = [fill(0), move(1, 0), Group(()), Group(())]
    second = [move(2, 1), fill(0), move(1, 0), Group((Reduce(output_block(), (scratch_block(1),), lower=True),))]
    assert proved([*first, *second], blocks=3) == (2, 3)


def test_scratch_of_concurrent_lanes_is_live_at_the_same_time() -> None:
    def lane(first: int) -> list[Group]:
        return [fill(first), move(first + 1, first), move(first, first + 1), move(first + 1, first)]

    # OUTPUT may be INPUT. So this lane writes OUTPUT only after the other lane has read INPUT.
    last = replace(finish(1), after=((1, 0),))
    assert proved([*lane(0), last], lane(2), blocks=4) == (4, 4)
    behind = [replace(lane(2)[0], after=((0, 3),)), *lane(2)[1:]]
    assert proved([*lane(0), last], behind, blocks=4) == (3, 4)


def test_scratch_block_read_by_a_peer_is_live_until_the_read() -> None:
    def lane(rank: int, block: int) -> tuple[Group, ...]:
        peer = 1 - rank
        meet, rest = Group((Signal(peer), Wait(peer))), Group(())
        if rank == 0:
            return (fill(0), move(1, 0), move(2, 1), Group((Copy(output_block(), scratch_block(2)),)), meet, rest, meet)
        return (*[rest] * 4, meet, Group((Read(0, output_block(), scratch_block(block)),)), meet)

    def live(block: int) -> int:
        scratch = scratch_like(Buffer.OUTPUT, even(1), copies=3)
        facts = [("broadcast", "test", 2, rank, 0, even(1 - rank), even(1), scratch) for rank in range(2)]
        return verify_plans([Plan(*of_rank, (lane(of_rank[3], block),)) for of_rank in facts]).scratch_live

    assert [live(block) for block in range(3)] == [3, 2, 2]


@pytest.mark.parametrize(
    ("collective", "name", "live"),
    [
        ("allreduce", "ring", lambda size: 0),
        ("allreduce", "direct", lambda size: size - 1),
        ("reduce_scatter", "ring", lambda size: min(2, max(0, size - 2))),
        ("alltoall", "bruck", lambda size: 2 * (size // 2)),
        ("barrier", "dissemination", lambda size: 0),
    ],
)
def test_algorithm_has_the_expected_number_of_live_scratch_blocks(
    collective: str, name: str, live: Callable[[int], int]
) -> None:
    for size, report in verify_sizes(find(collective, name), range(1, 17)).items():
        assert report.scratch_live == live(size)
