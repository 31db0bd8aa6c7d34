"""The contract of executors, for the generic executor over threads, and tests of it and its transport alone."""

from __future__ import annotations

import signal
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support import executor_contract as contract, handmade_plans
from support.call_strategies import allreduce_cases, broadcast_cases
from support.covering import pairwise
from support.deadlines import DEADLINE_S
from support.executor_contract import DIVERGENT, FEW_ALLREDUCES, FLOATS, Case
from support.extents_contract import (
    SeveralArrays,
    check_several_arrays_are_broadcast,
    check_several_arrays_are_reduced,
    several_arrays,
)
from support.harness import call_of, message_algorithms
from support.ranks import LocalRanks

from unisono.algorithms.catalogue.registry import ALGORITHMS
from unisono.algorithms.ir.plan import Counts
from unisono.dtypes import DTYPES
from unisono.errors import AbortedError, CollectiveTimeoutError, InternalError, PeerLostError, PlanError, UsageError
from unisono.transports.contracts.transport import Identity
from unisono.transports.executors.generic import GenericExecutor
from unisono.transports.links.failures import PEER_LOST
from unisono.transports.message.faulty import Faults
from unisono.transports.message.local import LocalNetwork, LocalTransport
from unisono.transports.message.supervised import SupervisedTransport

ALLREDUCES = list(ALGORITHMS["allreduce"])
bounded = settings(max_examples=60, deadline=None, derandomize=True)

sizes = st.integers(1, 7)
capacities = st.integers(0, 3)
SIZES_AND_CAPACITIES = [(2, 0), (5, 0), (4, 2)]
counts = st.one_of(st.sampled_from([0, 1, 2]), st.integers(3, 60))


@pytest.fixture(params=SIZES_AND_CAPACITIES, ids=lambda param: f"{param[0]} ranks, capacity {param[1]}")
def ranks(request: pytest.FixtureRequest) -> LocalRanks:
    return LocalRanks(*request.param)


def selected(ranks: LocalRanks, *parameters: Sequence[Any]) -> list[Any]:
    """Return the values to test on these ranks. All ranks together cover every pair of two parameters' values."""
    rows = pairwise(SIZES_AND_CAPACITIES, *parameters)
    return [row[1:] for row in rows if row[0] == (ranks.size, ranks.capacity)]


@bounded
@given(size=sizes, capacity=capacities, case=allreduce_cases(ALLREDUCES, counts))
def test_allreduce_is_exact(size: int, capacity: int, case: Case) -> None:
    contract.check_allreduce(LocalRanks(size, capacity), case)


@bounded
@given(size=sizes, capacity=capacities, seed=st.integers(0, 1000), case=allreduce_cases(ALLREDUCES, counts))
def test_allreduce_is_exact_when_messages_are_late_and_out_of_order(
    size: int, capacity: int, seed: int, case: Case
) -> None:
    contract.check_allreduce(LocalRanks(size, capacity, Faults(seed, delay=0.5)), case)


@bounded
@given(size=sizes, capacity=capacities, root=st.integers(0, 6), case=broadcast_cases(counts))
def test_broadcast_carries_every_bit(size: int, capacity: int, root: int, case: Case) -> None:
    contract.check_broadcast(LocalRanks(size, capacity), replace(case, root=root % size))


@bounded
@given(call=several_arrays(allreduce_cases(["direct"], counts), ALLREDUCES), size=sizes, capacity=capacities)
def test_several_arrays_are_reduced_as_one(size: int, capacity: int, call: SeveralArrays) -> None:
    check_several_arrays_are_reduced(LocalRanks(size, capacity), call)


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("dtypes", [("int8", "float64", "bfloat16"), ("float32", "float32")])
def test_several_arrays_are_broadcast_as_one(ranks: LocalRanks, dtypes: tuple[str, ...], segments: int) -> None:
    cases = tuple(Case(dtype=dtype, op=None, count=5 + index) for index, dtype in enumerate(dtypes))
    check_several_arrays_are_broadcast(ranks, SeveralArrays(cases, "broadcast", "binomial", segments, root=1))


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_floats_are_rounded_once_by_direct(ranks: LocalRanks, dtype: str, op: str) -> None:
    contract.check_narrow_floats_are_rounded_once(ranks, dtype, op)


def test_all_ranks_get_the_same_bits(ranks: LocalRanks) -> None:
    for algorithm, dtype in selected(ranks, ALLREDUCES, FLOATS):
        contract.check_all_ranks_get_the_same_bits(ranks, algorithm, dtype, segments=3)


def test_nan_and_infinity_are_propagated(ranks: LocalRanks) -> None:
    for algorithm, dtype in selected(ranks, ALLREDUCES, FLOATS):
        contract.check_nan_and_infinity_are_propagated(ranks, algorithm, dtype)


def test_no_rank_leaves_a_barrier_before_the_last_has_come(ranks: LocalRanks) -> None:
    contract.check_barrier(ranks)


def test_many_calls_in_a_row_do_not_mix(ranks: LocalRanks) -> None:
    contract.check_many_calls_in_a_row(ranks)


def test_calls_may_be_awaited_in_any_order(ranks: LocalRanks) -> None:
    contract.check_calls_may_be_awaited_in_any_order(ranks)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_traffic_is_what_the_plan_says(ranks: LocalRanks, algorithm: str, parts: int) -> None:
    contract.check_traffic_is_what_the_plan_says(ranks, Case(algorithm=algorithm, count=11, segments=parts))


@pytest.mark.parametrize("parts", [1, 3])
def test_lanes_wait_for_each_other(ranks: LocalRanks, parts: int) -> None:
    contract.check_lanes_wait_for_each_other(ranks, parts)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("count", [1, 10])
def test_spans_wrap_and_blocks_are_permuted(ranks: LocalRanks, count: int, parts: int) -> None:
    contract.check_spans_wrap_and_blocks_are_permuted(ranks, count, parts)


@pytest.mark.parametrize("parts", [1, 3])
def test_shares_may_be_cut_into_parts(ranks: LocalRanks, parts: int) -> None:
    contract.check_shares_may_be_cut_into_parts(ranks, parts)


@pytest.mark.parametrize("parts", [1, 3])
def test_every_peer_may_have_its_own_count(ranks: LocalRanks, parts: int) -> None:
    contract.check_every_peer_may_have_its_own_count(ranks, parts)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_wide_spans_are_reduced_and_lowered(ranks: LocalRanks, op: str, count: int, parts: int) -> None:
    contract.check_wide_spans_are_reduced(ranks, Case(op=op, count=count, segments=parts))


def test_messages_are_matched_by_tag_and_in_order(ranks: LocalRanks) -> None:
    contract.check_messages_are_matched_by_tag_and_in_order(ranks)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("capacity", [1, 64])
def test_synchronous_sends_end_with_their_receive(size: int, capacity: int) -> None:
    contract.check_synchronous_sends_end_with_their_receive(LocalRanks(size, capacity=capacity))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_synchronous_sends_in_both_directions_end(size: int) -> None:
    contract.check_synchronous_sends_in_both_directions_end(LocalRanks(size, capacity=1))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_neighbours_exchange_messages(size: int, count: int) -> None:
    contract.check_neighbours_exchange_messages(LocalRanks(size), count)


def test_calls_go_on_with_nobody_waiting(ranks: LocalRanks) -> None:
    contract.check_background_calls_end_without_a_waiter(ranks)


def test_many_calls_may_be_in_flight(ranks: LocalRanks) -> None:
    contract.check_many_calls_may_be_in_flight(ranks, 30)


def test_the_ends_of_calls_are_counted(ranks: LocalRanks) -> None:
    contract.check_ends_are_counted(ranks)


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_a_call_that_nobody_waits_for_times_out(ranks: LocalRanks, algorithm: str, tmp_path: Path) -> None:
    contract.check_a_background_call_times_out(ranks, algorithm, tmp_path)


def test_closing_ends_calls_in_flight(ranks: LocalRanks) -> None:
    contract.check_closing_ends_calls_in_flight(ranks)


def test_a_late_rank_is_waited_for(ranks: LocalRanks) -> None:
    contract.check_a_late_rank_is_waited_for(ranks)


@pytest.mark.parametrize("algorithm", FEW_ALLREDUCES)
def test_a_missing_rank_is_named_by_a_timeout(ranks: LocalRanks, algorithm: str, tmp_path: Path) -> None:
    contract.check_a_missing_rank_is_named_by_a_timeout(ranks, algorithm, tmp_path)


@pytest.mark.parametrize("algorithm", ALLREDUCES)
def test_a_rank_that_leaves_is_lost(ranks: LocalRanks, algorithm: str) -> None:
    contract.check_a_rank_that_leaves_is_lost(ranks, algorithm)


def test_mismatch_is_an_error_on_every_rank(ranks: LocalRanks) -> None:
    for algorithm, other in selected(ranks, ALLREDUCES, list(DIVERGENT.values())):
        contract.check_mismatch_is_an_error_on_every_rank(ranks, Case(algorithm=algorithm), other)


def test_two_roots_are_a_mismatch_on_every_rank(ranks: LocalRanks) -> None:
    roots = [Case("broadcast", "binomial", op=None, root=root) for root in range(2)]
    contract.check_mismatch_is_an_error_on_every_rank(ranks, *roots)


@pytest.mark.parametrize(("dtype", "count"), [("int32", 4), ("float32", 5)])
def test_mismatched_messages_are_an_error(ranks: LocalRanks, dtype: str, count: int) -> None:
    contract.check_mismatched_messages_are_an_error(ranks, dtype, count)


def test_abort_by_one_rank_ends_all(ranks: LocalRanks) -> None:
    contract.check_abort_by_one_rank_ends_all(ranks)


def test_a_closed_executor_refuses_calls(ranks: LocalRanks) -> None:
    contract.check_a_closed_executor_refuses_calls(ranks)


def test_arrays_that_do_not_fit_are_refused(ranks: LocalRanks) -> None:
    contract.check_arrays_that_do_not_fit_are_refused(ranks)


def test_a_dropped_message_ends_as_a_timeout() -> None:
    outcomes = LocalRanks(3, 0, Faults(seed=1, drop=1.0)).run(contract.attempt, Case(), contract.SHORT_S)
    assert [kind for kind, _, _ in outcomes] == [CollectiveTimeoutError.__name__] * 3


def test_a_repeated_message_is_refused_on_every_rank() -> None:
    outcomes = LocalRanks(3, 4, Faults(seed=1, duplicate=1.0)).run(contract.attempt, Case())
    assert [kind for kind, _, _ in outcomes] == [InternalError.__name__] * 3
    assert all("twice" in text for _, text, _ in outcomes)


def test_error_says_whether_the_output_was_touched(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("direct", "ring")]
    for folder in folders:
        folder.mkdir()
    direct = LocalRanks(2).run(contract.run_missing, Case(algorithm="direct"), folders[0])
    ring = LocalRanks(3, 1).run(contract.run_missing, Case(algorithm="ring"), folders[1])
    assert direct[0][0][2] == "output untouched"
    assert "output undefined" in {error[0][2] for error in ring}


class Recorder:
    """A transport for messages that records, by channel, the order in which sends and receives are posted."""

    def __init__(self, inner: LocalTransport) -> None:
        self.rank, self.size, self.name, self.mapped = inner.rank, inner.size, inner.name, None
        self.members = inner.members
        self.announce, self.progress, self.close = inner.announce, inner.progress, inner.close
        self.inner = inner
        self.sent: dict[tuple[int, int, int], list[Identity]] = defaultdict(list)
        self.expected: dict[tuple[int, int, int], list[Identity]] = defaultdict(list)

    def post_send(self, peer: int, identity: Identity, *message: Any) -> Any:
        self.sent[self.rank, peer, identity.lane].append(identity)
        return self.inner.post_send(peer, identity, *message)

    def post_recv(self, peer: int, identity: Identity, *message: Any) -> Any:
        self.expected[peer, self.rank, identity.lane].append(identity)
        return self.inner.post_recv(peer, identity, *message)


@pytest.mark.parametrize("algorithm", message_algorithms("allreduce"))
def test_both_ends_of_a_channel_post_in_the_same_order(algorithm: str) -> None:
    size, case = 5, Case(algorithm=algorithm, count=60, segments=4)
    recorders = [Recorder(transport) for transport in LocalNetwork(size).transports]
    executors = [GenericExecutor(recorder) for recorder in recorders]
    arrays = [np.ones(60, np.float32) for _ in range(size)]
    operations = [
        executor.start(case.call(executor.rank, size), arrays[executor.rank], arrays[executor.rank])
        for executor in executors
    ]
    # One thread polls the ranks in turn, so that the progress between two polls is always the same.
    for _ in range(1000):
        finished = [operation.poll() for operation in operations]
        if all(finished):
            break
    sent = {channel: order for recorder in recorders for channel, order in recorder.sent.items()}
    expected = {channel: order for recorder in recorders for channel, order in recorder.expected.items()}
    assert sent == expected
    assert any(len(order) > 1 for order in sent.values())
    assert all(array.tolist() == [5.0] * 60 for array in arrays)


def test_generic_executor_refuses_mapped_steps_over_messages() -> None:
    kind, text, _ = contract.run_mapped(GenericExecutor(Recorder(LocalNetwork(1).transports[0])))
    assert kind == PlanError.__name__
    assert "one_shot needs mapped memory, which transport 'local' does not offer" in text


class ControlLinks:
    """A double of the control links, which learn from the rank that has left that rank 2 was killed."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def failed(self) -> bool:
        return bool(self.asked)

    def failure(self) -> tuple[int, int, int, int, str]:
        return PEER_LOST, 1, 2, -1, "rank 2 was killed"

    def lose(self, peer: int, seen: str) -> None:
        self.asked.append(peer)

    def fail(self, kind: int, peer: int, text: str) -> None:
        assert self.asked, (kind, peer, text)


def test_the_error_about_a_rank_that_has_left_names_the_rank_because_of_which_it_has() -> None:
    links: Any = ControlLinks()
    transports = LocalNetwork(3).transports
    mine, other = GenericExecutor(SupervisedTransport(transports[0], links)), GenericExecutor(transports[1])
    operation = mine.recv(np.ones(4, np.float32), DTYPES["float32"], 1, 0)
    other.close()
    with pytest.raises(PeerLostError, match="rank 2 was killed") as caught:
        operation.wait(DEADLINE_S)
    assert (caught.value.peer, links.asked) == (2, [1])


def test_segment_waits_for_the_segment_before_it() -> None:
    # In a plan of one group, the order of posting alone does not keep two segments in order.
    lengths = {Counts.SEND: [4, 4], Counts.RECEIVE: [4, 4]}
    calls = [
        call_of(handmade_plans.alltoallv_direct(2, rank), "float32", (8, 8), segments=2, counts=lengths)
        for rank in range(2)
    ]
    recorders = [Recorder(transport) for transport in LocalNetwork(2).transports]
    mine, other = (GenericExecutor(recorder) for recorder in recorders)
    posted = recorders[0].sent[0, 1, 0]
    mine.start(calls[0], np.ones(8, np.float32), np.ones(8, np.float32))
    assert [identity.segment for identity in posted] == [0]
    other.start(calls[1], np.ones(8, np.float32), np.ones(8, np.float32))
    mine.progress()
    assert [identity.segment for identity in posted] == [0, 1]


def test_an_interrupt_while_waiting_aborts_the_communicator_on_every_rank() -> None:
    mine, other = (GenericExecutor(transport) for transport in LocalNetwork(2).transports)
    operation = mine.recv(np.ones(4, np.float32), DTYPES["float32"], 1, 0)
    threading.Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        operation.wait(DEADLINE_S)
    for executor in (mine, other):
        kind, text, _ = contract.attempt(executor, Case())
        assert kind == AbortedError.__name__
        assert "interrupted" in text


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_subgroups_reduce_among_themselves(ranks: LocalRanks, algorithm: str) -> None:
    contract.check_subgroups(ranks, algorithm)


def test_a_failure_in_a_subgroup_ends_the_job(ranks: LocalRanks) -> None:
    contract.check_that_a_failure_in_a_subgroup_ends_the_job(ranks)


def test_executor_without_the_native_core_refuses_calls_of_compiled_programs() -> None:
    def refuse(executor: GenericExecutor) -> None:
        with pytest.raises(UsageError, match="compiled programs need the native core"):
            executor.for_programs()

    LocalRanks(1).run(refuse)
