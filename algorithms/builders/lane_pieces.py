"""Pieces of lanes, which several builders share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from unisono.algorithms.ir.plan import (
    Copy,
    Group,
    Lane,
    Recv,
    Repeat,
    Send,
    Span,
    Step,
    input_block,
    output_block,
)


def distances(size: int, radix: int) -> Iterator[int]:
    """Yield 1, k, k², … below `size`, where k is the radix: the distances of an algorithm with logarithmic depth."""
    distance = 1
    while distance < size:
        yield distance
        distance *= radix


def empty_groups(groups: int) -> Lane:
    """Return `groups` empty groups, which keep the following groups' numbers equal to those of other ranks."""
    return (Repeat(groups, (Group(()),)),) if groups > 0 else ()


def single_rank_lane(blocks: int = 1) -> Lane:
    """Return the lane of a reduction with a single rank: its contribution, lowered, is the result."""
    return (Group((Copy(output_block(0, count=blocks), input_block(0, count=blocks), lower=True),)),)


def lane_from_steps(steps: Mapping[int, tuple[Step, ...]]) -> Lane:
    """Return the lane whose group number g has the steps `steps[g]`, and is empty if `steps` has no g."""
    return lane_from_groups({number: Group(of_group) for number, of_group in steps.items()})


def lane_from_groups(groups: Mapping[int, Group]) -> Lane:
    """Return the lane that has these groups at their numbers, and empty groups between them."""
    lane: Lane = ()
    following = 0
    for number, group in sorted(groups.items()):
        lane = (*lane, *empty_groups(number - following), group)
        following = number + 1
    return lane


def copy_own_block(rank: int) -> Group:
    """Return the group in which a rank copies its INPUT, one block, to its block of OUTPUT, as in an allgather."""
    return Group((Copy(output_block(rank), input_block()),))


def with_own_block(rank: int, lane: Lane) -> Lane:
    """Return the lane of an allgather, with a copy of the rank's own block to OUTPUT added to the first group.

    `lane` sends the rank's block of OUTPUT in its first group; this function makes that group send INPUT instead. The
    message then need not wait for the copy. Nor does it read the memory that the copy has just written, which for a
    large block is no longer in the cache.
    """
    if not lane:
        return (copy_own_block(rank),)
    first, *others = lane
    assert isinstance(first, Group)
    exchange = (Send(step.peer, input_block()) if isinstance(step, Send) else step for step in first.steps)
    return (Group((*exchange, *copy_own_block(rank).steps)), *others)


def in_windows(count: int, window: int, batch: Callable[[int, int], Group], start: int = 0) -> Lane:
    """Return the lane that runs exchanges `start` … `count` - 1, at most `window` of them at a time.

    `batch(first, number)` returns the group with the exchanges first … first + number - 1. From one window to the next,
    its peers and spans advance by `window` exchanges.
    """
    full, rest = divmod(count - start, window)
    lane: Lane = (Repeat(full, (batch(start, window),)),) if full else ()
    return (*lane, batch(start + full * window, rest)) if rest else lane


def exchange_with_all(
    size: int,
    rank: int,
    window: int,
    sent: Callable[[int], Span],
    received: Callable[[int], Span],
    own: tuple[Step, ...] = (),
) -> Lane:
    """Return the lane that exchanges messages with all other ranks, `window` of them at a time.

    A rank sends `sent(d)` to the rank d after it and receives `received(d)` from the rank d before it, modulo `size`.
    So no rank is the first destination of all others. The spans advance by `window` distances. The first group also has
    the steps `own`, which copy the rank's own blocks.
    """

    def batch(first: int, number: int) -> Group:
        steps: list[Step] = []
        for distance in range(first + 1, first + 1 + number):
            steps.append(Send((rank + distance) % size, sent(distance), peer_advance=window))
            steps.append(Recv((rank - distance) % size, received(distance), peer_advance=-window))
        return Group(tuple(steps))

    if not own:
        return in_windows(size - 1, window, batch)
    number = min(window, size - 1)
    first = Group((*batch(0, number).steps, *own))
    return (first, *in_windows(size - 1, window, batch, start=number))
