"""Gradients of several dtypes in one reducer, of which compression makes only some smaller."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S

import unisono as un

DTYPES = ("float64", "bfloat16", "float32", "float16")


def reduce_mixed(world: un.Communicator, options: dict[str, Any]) -> list[str]:
    """Return what is wrong in many steps with small buckets; the numbers are few enough for every form to be exact."""
    wrong = []
    with un.GradientReducer(world, bucket_nbytes=64, **options) as reducer:
        for step in range(60):
            arrays = {
                f"{dtype} {index}": np.full(20, 127.0 * (step % 2 * 2 - 1) * (1 + world.rank)).astype(dtype)
                for index in range(3)
                for dtype in DTYPES
            }
            for name, array in arrays.items():
                reducer.ready(name, array)
            reducer.finish()
            expected = 127.0 * (step % 2 * 2 - 1) * 1.5
            # A mean in 8 bits of significand is off by as much as that; error feedback may double it.
            wrong += [name for name, x in arrays.items() if np.abs(x.astype(float) - expected).max() > 2.0]
    return wrong


@pytest.mark.parametrize("compression", [None, "bfloat16", "int8"])
@pytest.mark.parametrize("teams", [1, 3])
def test_gradients_of_mixed_dtypes_are_reduced_in_one_order_on_all_ranks(compression: str | None, teams: int) -> None:
    options = {"compression": compression, "teams": teams}
    assert un.launch(reduce_mixed, 2, options, timeout_s=DEADLINE_S) == [[], []]
