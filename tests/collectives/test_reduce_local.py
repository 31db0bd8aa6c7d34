"""`un.reduce_local`, and sums whose contributions are multiplied by a factor of each rank."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.executor_contract import assert_same_bits

import unisono as un
from unisono.testing.cases import REDUCTIONS
from unisono.testing.oracles import contributions, reduced

X = np.ones((2, 3))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(reduction=st.sampled_from(REDUCTIONS), arrays=st.integers(1, 7), count=st.sampled_from([0, 1, 7, 64, 1000]))
def test_reduce_local_reduces_into_the_first_array(reduction: tuple[str, str], arrays: int, count: int) -> None:
    dtype, op = reduction
    stack = contributions(dtype, op, arrays, count)
    expected, dst = reduced(op, stack), stack[0].copy()
    assert un.reduce_local(dst, *stack[1:], op=op) is dst
    assert_same_bits(dst, expected, f"{op} of {dtype}")


def test_reduce_local_accepts_any_layout_and_dst_as_a_source() -> None:
    x = np.arange(6.0).reshape(2, 3)
    wide = np.zeros((2, 6))
    wide[:, ::2] = x
    for order in ("C", "F"):
        dst = np.array(x, order=order)
        un.reduce_local(dst, np.asfortranarray(x), x, wide[:, ::2], dst)
        assert dst.tolist() == (5 * x).tolist()
    scalar = np.array(2)
    assert un.reduce_local(scalar, scalar, op="prod").tolist() == 4


READ_ONLY = np.frombuffer(bytes(48)).reshape(2, 3)
MEMORY = np.zeros(12)
REFUSED = {
    "dst is read-only": lambda: un.reduce_local(READ_ONLY, X),
    "dst must be an array": lambda: un.reduce_local([1.0], X),
    "dst is not contiguous": lambda: un.reduce_local(MEMORY[::2], MEMORY[:6]),
    r"sources\[1\] is float32 of shape": lambda: un.reduce_local(X.copy(), X, X.astype("float32")),
    r"sources\[0\] is float64 of shape \(3,\)": lambda: un.reduce_local(X.copy(), X[0]),
    r"sources\[0\] must be an array": lambda: un.reduce_local(X.copy(), 1.0),
    "overlap": lambda: un.reduce_local(MEMORY[:6], MEMORY[3:9]),
    "op must be one of": lambda: un.reduce_local(X.copy(), X, op="mean"),
    "is not defined for float64": lambda: un.reduce_local(X.copy(), X, op="band"),
    "has a factor for the array of one rank": lambda: un.reduce_local(X.copy(), X, op=un.Op.premul_sum(2)),
}


@pytest.mark.parametrize("text", REFUSED)
def test_reduce_local_refuses_wrong_arguments(text: str) -> None:
    with pytest.raises(un.UsageError, match=text):
        REFUSED[text]()


def multiplied(world: un.Communicator, dtype: str) -> list[Any]:
    x = np.arange(1, 5).astype(dtype)
    factors = [(world.rank + 1) * step for step in (1, 3)]
    results = [world.allreduce(x, un.Op.premul_sum(factor)).tolist() for factor in factors]
    op = un.Op.premul_sum(world.rank + 1)
    results.append(world.reduce_scatter(x, op).tolist())
    again = world.plan("allreduce", x, op=op, out=x)
    return [*results, again().tolist(), again().tolist()]


@pytest.mark.parametrize("dtype", ["int32", "float16", "complex64"])
def test_premultiplied_sum_uses_the_factor_of_each_rank(dtype: str) -> None:
    for rank, results in enumerate(un.launch(multiplied, 2, dtype)):
        part = [3, 6] if rank == 0 else [9, 12]
        assert results == [[3, 6, 9, 12], [9, 18, 27, 36], part, [3, 6, 9, 12], [9, 18, 27, 36]]
