"""Arrays on a GPU double: every call takes them, returns arrays of their class, and keeps the order of streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st
from support.collective_calls import COLLECTIVES, cases
from support.ranks import Ranks, ranks_fixture

import unisono as un
from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.collectives.device import routes
from unisono.collectives.device.result_array import DeviceArray
from unisono.testing.cases import Case, arguments_of
from unisono.testing.device_arrays import DoubleArray, device_double, read
from unisono.testing.memory import laid_out
from unisono.testing.oracles import inputs, result_of

pytestmark = pytest.mark.timeout(120)


# Without cuda_ipc, all data is staged through the host.
WAYS = [(2, "shm"), (3, "tcp"), (3, "cuda_ipc,shm")]


ranks = ranks_fixture(*WAYS)


# --- every collective ----------------------------------------------------------------------------------------------


def call_on_device(world: un.Communicator, case: Case, seed: int, parts: int) -> None:
    """Make a call with numpy arrays and the same call on a device, and compare the results."""
    xs = inputs(case, world.size)
    reference = result_of(case, xs, world.rank)
    x, _ = laid_out(xs[world.rank], case.layout)
    arguments = arguments_of(case, world.size, world.rank)
    needs_out = case.name == "scatter" and world.rank != case.root % world.size
    given = {"out": np.zeros_like(reference)} if needs_out else {}
    expected = getattr(world, case.collective)(x, **arguments, **given)
    routes.PART_NBYTES = 1 + max(array.nbytes for array in xs) * world.size // parts
    with device_double(seed) as gpu, world.dup() as comm:
        stream = gpu.device().new_stream()
        has_out = expected is not None and (needs_out or case.way != "new")
        out = DoubleArray(gpu, np.full_like(expected, 7), stream) if has_out else None
        call = getattr(comm, case.collective)
        result = call(DoubleArray(gpu, x, stream), **arguments, wait=case.wait, **({"out": out} if has_out else {}))
        result = result if case.wait else result.wait()
        if expected is None:
            assert result is None
        else:
            assert result is out if has_out else type(result) is DeviceArray
            is_kept = case.name == "exscan" and world.rank == 0 and has_out
            right = np.full_like(expected, 7) if is_kept else expected
            actual = read(gpu, result)
            assert (actual.dtype, actual.shape, actual.tobytes()) == (right.dtype, right.shape, right.tobytes()), str(
                case
            )
        del out, result
        comm.close()
        gpu.device().end_stream(stream)


@settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_every_collective_gives_host_results_on_a_device(ranks: Ranks, data: Any) -> None:
    case = replace(data.draw(st.sampled_from(COLLECTIVES).flatmap(cases)), algorithm=None, offset=0)
    is_vector = CONTRACTS[case.name].input is Cut.VECTOR
    case = replace(case, layout=case.layout if is_vector and case.layout == "F" else "C")
    ranks.run_calls(call_on_device, case, data.draw(st.integers(0, 99)), data.draw(st.sampled_from([1, 3])))
