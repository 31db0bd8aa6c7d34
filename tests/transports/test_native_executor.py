"""The contract of executors, for the native executor over processes, shared memory and TCP, and tests of it alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support import executor_contract as contract
from support.call_strategies import allreduce_cases, broadcast_cases
from support.covering import pairwise
from support.executor_contract import DIVERGENT, FEW_ALLREDUCES, Case
from support.extents_contract import (
    SeveralArrays,
    check_several_arrays_are_broadcast,
    check_several_arrays_are_reduced,
    several_arrays,
)
from support.harness import message_algorithms
from support.ranks import LocalRanks, Ranks, ranks_fixture, start_ranks

from unisono.dtypes import DTYPES
from unisono.testing.cases import REDUCTIONS

ALLREDUCES = message_algorithms("allreduce")
# test_kernels.py tests the kernels of all dtypes.
FEW_FLOATS = ["bfloat16", "float32"]
bounded = settings(max_examples=15, deadline=None, derandomize=True)
SIZES, TRANSPORTS = (2, 3, 4, 7), ("shm", "tcp")

# A message in shared memory is cut into slots of 64 KiB.
SLOT_NBYTES = 64 << 10
counts = st.one_of(st.sampled_from([0, 1, 2, SLOT_NBYTES // 8, SLOT_NBYTES // 4 + 1, 100_003]), st.integers(3, 200))


ranks = ranks_fixture(*[(size, transport) for size in SIZES for transport in TRANSPORTS])


def selected(ranks: Ranks, *parameters: Sequence[Any]) -> list[Any]:
    """Return the values of the parameters to test on these ranks. A single parameter's values are not in tuples.

    All ranks together cover every pair of values: of two parameters, of a parameter and a number of ranks, and of a
    parameter and a transport.
    """
    rows = pairwise(SIZES, TRANSPORTS, *parameters)
    own = [row[2:] for row in rows if row[:2] == (ranks.size, ranks.transport)]
    return [row[0] for row in own] if len(parameters) == 1 else own


alone = ranks_fixture((1, "shm"))


# Start ranks for one test, which may end their communicator.
fresh_ranks = ranks_fixture((3, "shm"), (3, "tcp"), scope="function")


@bounded
@given(case=allreduce_cases(ALLREDUCES, counts))
def test_allreduce_is_exact(ranks: Ranks, case: Case) -> None:
    contract.check_allreduce(ranks, case)


@bounded
@given(call=several_arrays(allreduce_cases(["direct"], counts), ALLREDUCES))
def test_several_arrays_are_reduced_as_one(ranks: Ranks, call: SeveralArrays) -> None:
    check_several_arrays_are_reduced(ranks, call)


def test_several_arrays_are_broadcast_as_one(ranks: Ranks) -> None:
    for dtypes, segments in selected(ranks, [("int8", "float64", "bfloat16"), ("float32", "float32")], [1, 3]):
        cases = tuple(Case(dtype=dtype, op=None, count=5 + index) for index, dtype in enumerate(dtypes))
        check_several_arrays_are_broadcast(ranks, SeveralArrays(cases, "broadcast", "binomial", segments, root=1))


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@pytest.mark.parametrize("in_place", [(False,) * 3, (True,) * 3, (True, False, True)], ids=str)
def test_several_arrays_are_read_from_mapped_memory(algorithm: str, in_place: tuple[bool, ...]) -> None:
    kinds = (("int8", "max"), ("float64", "avg"), ("bfloat16", "sum"))
    cases = tuple(
        Case(dtype=dtype, op=op, count=count, in_place=array_in_place)
        for (dtype, op), count, array_in_place in zip(kinds, (1001, 30_000, 7), in_place, strict=True)
    )
    with start_ranks(3, "shm") as ranks:
        for segments in (1, 3):
            check_several_arrays_are_reduced(ranks, SeveralArrays(cases, algorithm=algorithm, segments=segments))


def test_allreduce_of_megabytes_is_exact(ranks: Ranks) -> None:
    case = Case(count=150_007, segments=7, in_place=True)
    for algorithm, dtype in selected(ranks, ALLREDUCES, ["bfloat16", "float64"]):
        contract.check_allreduce(ranks, replace(case, algorithm=algorithm, dtype=dtype))


@bounded
@given(root=st.integers(0, 6), case=broadcast_cases(counts))
def test_broadcast_carries_every_bit(ranks: Ranks, root: int, case: Case) -> None:
    contract.check_broadcast(ranks, replace(case, root=root % ranks.size))


def test_single_rank_allreduce_returns_its_own_elements(alone: Ranks) -> None:
    ops = [op for dtype, op in REDUCTIONS if dtype == "bfloat16"]
    for algorithm, op, in_place in pairwise(ALLREDUCES, ops, [True, False]):
        case = Case(algorithm=algorithm, op=op, dtype="bfloat16", count=99, in_place=in_place)
        contract.check_allreduce(alone, case)


def test_single_rank_broadcast_and_barrier_work(alone: Ranks) -> None:
    contract.check_broadcast(alone, Case("broadcast", "binomial", op=None, root=0, count=9, offset=1))
    contract.check_barrier(alone)


def test_narrow_floats_are_rounded_once_by_direct(ranks: Ranks) -> None:
    for dtype, op in selected(ranks, ["float16", "bfloat16"], ["sum", "avg"]):
        contract.check_narrow_floats_are_rounded_once(ranks, dtype, op)


def test_all_ranks_get_the_same_bits(ranks: Ranks) -> None:
    for algorithm, dtype in selected(ranks, ALLREDUCES, FEW_FLOATS):
        contract.check_all_ranks_get_the_same_bits(ranks, algorithm, dtype, segments=3)


def test_inexact_sums_have_the_bits_of_the_generic_executor(ranks: Ranks) -> None:
    for algorithm, dtype in selected(ranks, ALLREDUCES, FEW_FLOATS):
        case = Case(algorithm=algorithm, dtype=dtype, count=10_007, segments=4, offset=1)
        stack = np.random.default_rng(8).standard_normal((ranks.size, case.count)).astype(dtype)
        native = ranks.run(contract.run_case, case, stack)
        generic = LocalRanks(ranks.size, 1).run(contract.run_case, case, stack)
        for rank, (one, other) in enumerate(zip(native, generic, strict=True)):
            contract.assert_same_bits(one, other, f"rank {rank}, {case}")


# Of 0.0 and -0.0, which are equal, min returns the second operand. So the bits show the order of the operands.
def test_smallest_zero_has_the_bits_of_the_generic_executor(ranks: Ranks) -> None:
    for algorithm, dtype in selected(ranks, ALLREDUCES, FEW_FLOATS):
        case = Case(algorithm=algorithm, dtype=dtype, op="min", count=1_007, segments=4)
        stack = np.random.default_rng(8).choice([0.0, -0.0], (ranks.size, case.count)).astype(dtype)
        native = ranks.run(contract.run_case, case, stack)
        generic = LocalRanks(ranks.size, 1).run(contract.run_case, case, stack)
        for rank, (one, other) in enumerate(zip(native, generic, strict=True)):
            contract.assert_same_bits(one, other, f"rank {rank}, {case}")


def test_nan_and_infinity_are_propagated(ranks: Ranks) -> None:
    for algorithm, dtype in selected(ranks, ALLREDUCES, FEW_FLOATS):
        contract.check_nan_and_infinity_are_propagated(ranks, algorithm, dtype)


def test_no_rank_leaves_a_barrier_before_the_last_has_come(ranks: Ranks) -> None:
    contract.check_barrier(ranks)


def test_many_calls_in_a_row_do_not_mix(ranks: Ranks) -> None:
    contract.check_many_calls_in_a_row(ranks, 100)


def test_calls_may_be_awaited_in_any_order(ranks: Ranks) -> None:
    contract.check_calls_may_be_awaited_in_any_order(ranks)


def test_traffic_is_what_the_plan_says(ranks: Ranks) -> None:
    for algorithm, segments, count in selected(ranks, ["direct", "ring"], [1, 4], [11, 50_001]):
        contract.check_traffic_is_what_the_plan_says(ranks, Case(algorithm=algorithm, count=count, segments=segments))


def test_lanes_wait_for_each_other(ranks: Ranks) -> None:
    for segments in (1, 3):
        contract.check_lanes_wait_for_each_other(ranks, segments)


def test_spans_wrap_and_blocks_are_permuted(ranks: Ranks) -> None:
    for count, segments in selected(ranks, [1, 10, 30_000], [1, 3]):
        contract.check_spans_wrap_and_blocks_are_permuted(ranks, count, segments)


def test_shares_may_be_cut_into_parts(ranks: Ranks) -> None:
    for segments in (1, 3):
        contract.check_shares_may_be_cut_into_parts(ranks, segments)


def test_every_peer_may_have_its_own_count(ranks: Ranks) -> None:
    for segments in (1, 3):
        contract.check_every_peer_may_have_its_own_count(ranks, segments)


def test_wide_spans_are_reduced(ranks: Ranks) -> None:
    for count, segments in selected(ranks, [1, 9, 70_001], [1, 3]):
        contract.check_wide_spans_are_reduced(ranks, Case(dtype="float16", op="avg", count=count, segments=segments))


def test_neighbours_exchange_messages(ranks: Ranks) -> None:
    for count in selected(ranks, [0, 1, 1000, 1_000_000]):
        contract.check_neighbours_exchange_messages(ranks, count)


def test_messages_are_matched_by_tag_and_in_order(ranks: Ranks) -> None:
    contract.check_messages_are_matched_by_tag_and_in_order(ranks)


def test_synchronous_sends_end_with_their_receive(ranks: Ranks) -> None:
    contract.check_synchronous_sends_end_with_their_receive(ranks)
    contract.check_synchronous_sends_in_both_directions_end(ranks)


def test_arrays_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    contract.check_arrays_that_do_not_fit_are_refused(ranks)


def test_mapped_steps_without_a_flag_or_shared_memory_are_refused(ranks: Ranks) -> None:
    reason = "reads memory of rank" if ranks.transport == "shm" else "needs mapped memory"
    contract.check_mapped_steps_are_refused(ranks, reason)


def test_calls_go_on_with_nobody_waiting(ranks: Ranks) -> None:
    contract.check_background_calls_end_without_a_waiter(ranks)


def test_many_calls_may_be_in_flight(ranks: Ranks) -> None:
    contract.check_many_calls_may_be_in_flight(ranks, 200)


def test_the_ends_of_calls_are_counted(ranks: Ranks) -> None:
    contract.check_ends_are_counted(ranks)


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_a_call_that_nobody_waits_for_times_out(fresh_ranks: Ranks, algorithm: str, tmp_path: Path) -> None:
    contract.check_a_background_call_times_out(fresh_ranks, algorithm, tmp_path)


def test_closing_ends_calls_in_flight(fresh_ranks: Ranks) -> None:
    contract.check_closing_ends_calls_in_flight(fresh_ranks)


def test_a_late_rank_is_waited_for(ranks: Ranks) -> None:
    contract.check_a_late_rank_is_waited_for(ranks)


@pytest.mark.parametrize("algorithm", FEW_ALLREDUCES)
def test_a_missing_rank_is_named_by_a_timeout(fresh_ranks: Ranks, algorithm: str, tmp_path: Path) -> None:
    contract.check_a_missing_rank_is_named_by_a_timeout(fresh_ranks, algorithm, tmp_path)


@pytest.mark.parametrize("algorithm", FEW_ALLREDUCES)
def test_a_rank_that_leaves_is_lost(fresh_ranks: Ranks, algorithm: str) -> None:
    contract.check_a_rank_that_leaves_is_lost(fresh_ranks, algorithm)


@pytest.mark.parametrize("what", DIVERGENT)
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_mismatch_is_an_error_on_every_rank(fresh_ranks: Ranks, algorithm: str, what: str) -> None:
    contract.check_mismatch_is_an_error_on_every_rank(fresh_ranks, Case(algorithm=algorithm), DIVERGENT[what])


def test_two_roots_are_a_mismatch_on_every_rank(fresh_ranks: Ranks) -> None:
    roots = [Case("broadcast", "binomial", op=None, root=root) for root in range(2)]
    contract.check_mismatch_is_an_error_on_every_rank(fresh_ranks, *roots)


@pytest.mark.parametrize(("dtype", "count"), [("int32", 4), ("float32", 5)])
def test_mismatched_messages_are_an_error(fresh_ranks: Ranks, dtype: str, count: int) -> None:
    contract.check_mismatched_messages_are_an_error(fresh_ranks, dtype, count)


def test_abort_by_one_rank_ends_all(fresh_ranks: Ranks) -> None:
    contract.check_abort_by_one_rank_ends_all(fresh_ranks)


def test_a_closed_executor_refuses_calls(fresh_ranks: Ranks) -> None:
    contract.check_a_closed_executor_refuses_calls(fresh_ranks)


def test_subgroups_reduce_among_themselves(ranks: Ranks) -> None:
    for algorithm in selected(ranks, ["direct", "ring"]):
        contract.check_subgroups(ranks, algorithm)


def test_a_failure_in_a_subgroup_ends_the_job(fresh_ranks: Ranks) -> None:
    contract.check_that_a_failure_in_a_subgroup_ends_the_job(fresh_ranks)


def drop_a_call(executor: Any, name: str) -> str:
    """Rank 0 drops a call before the others make it; return the error of this rank's next call."""
    case, source = Case(algorithm="ring", count=100), np.ones(100, np.float32)
    if executor.rank == 0 and name == "allreduce":
        executor.start(case.call(0, executor.size), source, source)
    elif executor.rank == 0:
        executor.recv(source, DTYPES["float32"], 1, 7)
    return contract.attempt(executor, case)[1]


@pytest.mark.parametrize(("name", "text"), [("allreduce", "allreduce(float32[100], op=sum"), ("recv", "recv(source=1")])
def test_error_of_a_dropped_call_names_the_call_on_every_rank(fresh_ranks: Ranks, name: str, text: str) -> None:
    for error in fresh_ranks.run(drop_a_call, name):
        assert f"rank 0 dropped {text}" in error
        assert "before it had ended" in error
