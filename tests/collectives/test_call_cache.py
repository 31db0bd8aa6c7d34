"""A repeated call takes the fast path of the call cache. A call that differs by one argument must not.

The cache first compares a call with the last one of the same collective and length. So each test makes a call twice,
and then a call that differs in one argument only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.ranks import Ranks, ranks_fixture

import unisono as un

SHAPE = (2, 3)


ranks = ranks_fixture((2, "shm"), (2, "tcp"))


def x_of(rank: int, dtype: str = "float64", order: Any = "C") -> Any:
    return np.array(np.arange(6).reshape(SHAPE) + 10 * rank, dtype, order=order)


def both(fn: Callable[[Any, Any], Any], dtype: str = "float64") -> Any:
    return fn(x_of(0, dtype), x_of(1, dtype))


def read_only() -> Any:
    out = np.zeros(SHAPE)
    out.flags.writeable = False
    return out


def allreduce_in_place(world: un.Communicator) -> Any:
    x = x_of(world.rank)
    return world.allreduce(x, "sum", out=x)


def allreduce_with_overlap(world: un.Communicator) -> Any:
    memory = np.zeros(8)
    return world.allreduce(memory[:6].reshape(SHAPE), "sum", out=memory[2:].reshape(SHAPE))


# Calls that differ in one argument from `repeated_allreduce`, and their results.
CHANGED_ALLREDUCES: dict[str, tuple[Callable[[un.Communicator], Any], Any]] = {
    "operation": (lambda world: world.allreduce(x_of(world.rank), "max", out=np.zeros(SHAPE)), both(np.maximum)),
    "average": (lambda world: world.allreduce(x_of(world.rank), "avg", out=np.zeros(SHAPE)), both(np.add) / 2),
    "dtype": (
        lambda world: world.allreduce(x_of(world.rank, "int64"), "sum", out=np.zeros(SHAPE, "int64")),
        both(np.add, "int64"),
    ),
    "shape": (
        lambda world: world.allreduce(x_of(world.rank).reshape(3, 2), "sum", out=np.zeros((3, 2))),
        both(np.add).reshape(3, 2),
    ),
    "order": (
        lambda world: world.allreduce(x_of(world.rank, order="F"), "sum", out=np.zeros(SHAPE, order="F")),
        both(np.add),
    ),
    "out in place": (allreduce_in_place, both(np.add)),
    "no out": (lambda world: world.allreduce(x_of(world.rank), "sum"), both(np.add)),
    "algorithm": (
        lambda world: world.allreduce(x_of(world.rank), "sum", out=np.zeros(SHAPE), algorithm="ring"),
        both(np.add),
    ),
    "collective": (lambda world: world.scan(x_of(world.rank), "sum", out=np.zeros(SHAPE)), None),
}

# Calls that differ in one argument and are refused.
REFUSED_ALLREDUCES: dict[str, tuple[Callable[[un.Communicator], Any], str]] = {
    "read-only out": (lambda world: world.allreduce(x_of(world.rank), "sum", out=read_only()), "read-only"),
    "overlap": (allreduce_with_overlap, "overlap"),
    "operation": (lambda world: world.allreduce(x_of(world.rank), "mean", out=np.zeros(SHAPE)), "mean"),
    "algorithm": (
        lambda world: world.allreduce(x_of(world.rank), "sum", out=np.zeros(SHAPE), algorithm="rign"),
        "rign",
    ),
    "dtype of out": (lambda world: world.allreduce(x_of(world.rank), "sum", out=np.zeros(SHAPE, "int64")), "int64"),
    "shape of out": (lambda world: world.allreduce(x_of(world.rank), "sum", out=np.zeros((3, 2))), r"\(3, 2\)"),
}


def repeated_allreduce(world: un.Communicator) -> None:
    for _ in range(2):
        result = world.allreduce(x_of(world.rank), "sum", out=np.zeros(SHAPE))
        np.testing.assert_array_equal(result, both(np.add))


def changed_allreduce(world: un.Communicator, argument: str) -> None:
    call, expected = CHANGED_ALLREDUCES[argument]
    if expected is None:
        expected = x_of(0) if world.rank == 0 else both(np.add)
    for _ in range(2):
        repeated_allreduce(world)
        result = call(world)
        np.testing.assert_array_equal(result, expected)
        assert result.dtype == expected.dtype


def refused_allreduce(world: un.Communicator, argument: str) -> None:
    call, message = REFUSED_ALLREDUCES[argument]
    repeated_allreduce(world)
    with pytest.raises(un.UnisonoError, match=message):
        call(world)
    repeated_allreduce(world)


def changed_root(world: un.Communicator) -> None:
    for root in (0, 0, 1, 0, 1, 1):
        np.testing.assert_array_equal(world.broadcast(x_of(world.rank), root, out=np.zeros(SHAPE)), x_of(root))


@pytest.mark.parametrize("argument", CHANGED_ALLREDUCES)
def test_repeated_call_with_another_argument_gives_its_own_result(ranks: Ranks, argument: str) -> None:
    ranks.run_calls(changed_allreduce, argument)


@pytest.mark.parametrize("argument", REFUSED_ALLREDUCES)
def test_repeated_call_with_a_wrong_argument_is_refused(ranks: Ranks, argument: str) -> None:
    ranks.run_calls(refused_allreduce, argument)


def test_repeated_broadcast_from_another_root_gives_its_elements(ranks: Ranks) -> None:
    ranks.run_calls(changed_root)


# CPython 3.11 runs 755. Most are the tuner's, which predicts the time of every algorithm.
MOST_FRAMES_OF_A_FIRST_CALL = 800


def frames_of_calls(world: un.Communicator) -> list[int]:
    """Return the number of Python frames of the first allreduce of a shape, and of a second one like it."""
    x, out, entered = np.ones(101, np.float32), np.ones(101, np.float32), list[str]()
    world.allreduce(np.ones(2, np.float32))  # imports what a first call needs
    ends = [0]
    for _ in range(2):
        sys.setprofile(lambda frame, event, _: entered.append(event) if event == "call" else None)
        try:
            world.allreduce(x, out=out)
        finally:
            sys.setprofile(None)
        ends.append(len(entered))
    return [end - begin for begin, end in pairwise(ends)]


def test_first_call_of_a_shape_runs_few_python_frames_and_the_second_runs_none(ranks: Ranks) -> None:
    for first, second in ranks.run_calls(frames_of_calls):
        assert 0 < first <= MOST_FRAMES_OF_A_FIRST_CALL
        assert second == 0
