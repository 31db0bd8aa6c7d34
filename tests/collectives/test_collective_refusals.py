"""Wrong calls of collectives, plans and sendrecv are refused before a byte is sent, also after similar right calls."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from support.ranks import Ranks, ranks_fixture, start_ranks

import unisono as un

SIZE = 3
SIX = np.arange(6.0)
MEMORY = np.zeros(24)
BOTH = np.zeros((6, 2))


three = ranks_fixture((SIZE, "shm"), (SIZE, "tcp"))


# The last rank makes these wrong calls.
WRONG = {
    "rows that cannot be shared": lambda world: world.reduce_scatter(np.ones(7)),
    "no rows to share": lambda world: world.alltoall(np.array(1.0)),
    "a root that does not exist": lambda world: world.reduce(SIX, root=SIZE),
    "a root that is no number": lambda world: world.scatter(SIX, root="0"),
    "a scatter without x at the root": lambda world: world.scatter(None, root=2),
    "a scatter without out": lambda world: world.scatter(SIX, root=0),
    "an out for less than all": lambda world: world.allgather(SIX, out=np.zeros(12)),
    "an out for more than a share": lambda world: world.reduce_scatter(SIX, out=np.zeros(3)),
    "an out of another dtype": lambda world: world.gather(SIX, 2, out=np.zeros(18, "float32")),
    "an out whose rows are scattered": lambda world: world.allgather(BOTH, out=np.zeros((18, 2), order="F")),
    "a read-only out": lambda world: world.scan(SIX, out=np.frombuffer(bytes(48))),
    "another part of out": lambda world: world.allgather(MEMORY[0:8], out=MEMORY),
    "another part of x": lambda world: world.reduce_scatter(MEMORY, out=MEMORY[0:8]),
    "a part in the wrong place": lambda world: world.allgather(MEMORY[15:23], out=MEMORY),
    "an exchange in place": lambda world: world.alltoall(SIX, out=SIX),
    "an exchange of counts in place": lambda world: world.alltoallv(SIX, (2, 2, 2), (2, 2, 2), out=SIX),
    "an average of some": lambda world: world.scan(SIX, "avg"),
    "an average of those before": lambda world: world.exscan(SIX, "avg"),
    "an operation that is not defined for the type": lambda world: world.reduce(np.ones(3, bool)),
    "an algorithm of another collective": lambda world: world.gather(SIX, algorithm="ring"),
    "counts of other ranks": lambda world: world.allgatherv(SIX, (6, 6)),
    "counts that are not those of x": lambda world: world.allgatherv(SIX, (6, 6, 5)),
    "counts that do not sum up": lambda world: world.reduce_scatterv(SIX, (1, 2, 4)),
    "negative counts": lambda world: world.gatherv(SIX, (7, -1, 6)),
    "counts that are no numbers": lambda world: world.scatterv(SIX, (2.0, 2, 2), 2),
    "counts that are no sequence": lambda world: world.gatherv(SIX, 6),
    "counts of a size that cannot be": lambda world: world.gatherv(SIX, (1 << 62, 0, 6)),
    "a result that no memory holds": lambda world: world.gatherv(SIX, (1 << 45, 0, 6), root=2),
    "a result of more bytes than there are": lambda world: world.gatherv(
        np.ones((6, 99)), (1 << 57, 0, 6), root=2, counts_at_root=True
    ),
    "a result of all that no memory holds": lambda world: world.allgatherv(SIX, (1 << 45, 0, 6)),
    "a share that no memory holds": lambda world: world.alltoallv(SIX, (2, 2, 2), (1 << 45, 1 << 44, 2)),
    "a result of many shares": lambda world: world.allgather(np.broadcast_to(np.ones(()), (1 << 57,))),
    "rows to send that do not sum up": lambda world: world.alltoallv(SIX, (1, 1, 1), (1, 1, 1)),
    "rows to keep that are not those that it has": lambda world: world.alltoallv(SIX, (2, 2, 2), (2, 2, 1)),
    "rows to receive that are not those of out": lambda world: world.alltoallv(
        SIX, (2, 2, 2), (2, 2, 2), out=np.zeros(5)
    ),
    "counts of nothing": lambda world: world.allgatherv(np.array(1.0), (1, 1, 1)),
    "a plan of what does not exist": lambda world: world.plan("gossip", SIX),
    "a plan with an op too many": lambda world: world.plan("allgather", SIX, op="sum"),
    "a plan with a root too many": lambda world: world.plan("scan", SIX, root=0),
    "a plan with counts too many": lambda world: world.plan("allgather", SIX, counts=(6, 6, 6)),
    "a plan without its counts": lambda world: world.plan("alltoallv", SIX, counts=(6, 6, 6)),
    "a plan of what it would have to copy": lambda world: world.plan("allreduce", MEMORY[::2]),
    "a plan with a wrong timeout": lambda world: world.plan("barrier", timeout_s=0),
    "a message over itself": lambda world: world.sendrecv(SIX, 0, SIX, 1),
    "a message to itself of another length": lambda world: world.sendrecv(SIX, 2, np.zeros(5), 2),
}
OF_THE_TUNER = {"an algorithm of another collective"}


def sent(world: un.Communicator) -> int:
    return sum(peer.sent_messages for peer in world.stats().values())


def err_then_go_on(world: un.Communicator, what: str) -> tuple[str, bool, float]:
    kind, before = "", sent(world)
    if world.rank == SIZE - 1:
        try:
            WRONG[what](world)
        except un.UnisonoError as error:
            kind = type(error).__name__
    return kind, sent(world) == before, float(world.allreduce(np.ones(4))[3])


@pytest.mark.parametrize("what", WRONG)
def test_wrong_collective_is_refused_locally_and_later_calls_work(three: Ranks, what: str) -> None:
    *others, last = three.run_calls(err_then_go_on, what)
    assert others == [("", True, 3.0)] * 2
    assert last == ("NoAlgorithmError" if what in OF_THE_TUNER else "UsageError", True, 3.0)


# --- similar calls that the call cache must tell apart -------------------------------------------------------------


def gather_in_and_out_of_place(world: un.Communicator) -> list[Any]:
    """Make the same call with arrays in every position. An `out` that overlaps wrongly is refused each time."""
    memory = np.zeros(8 * SIZE)
    apart, own = np.full(8, float(world.rank)), memory[8 * world.rank : 8 * world.rank + 8]
    wrong = memory[4:12] if world.rank else memory[8:16]
    results: list[Any] = []
    for _ in range(2):
        own[...] = world.rank
        results.append(world.allgather(own, out=memory)[::8].tolist())
        memory[...] = -1
        results.append(world.allgather(apart, out=memory)[::8].tolist())
        with pytest.raises(un.UsageError, match="overlap"):
            world.allgather(wrong, out=memory)
    return results


def test_repeated_call_checks_overlap_of_its_arrays_again(three: Ranks) -> None:
    assert three.run_calls(gather_in_and_out_of_place) == [[[0.0, 1.0, 2.0]] * 4] * SIZE


def gather_in_other_orders(world: un.Communicator) -> list[Any]:
    rows = np.arange(6).reshape(2, 3) + 10 * world.rank
    layouts = [rows, np.array(rows, order="F"), np.repeat(rows, 2, axis=1)[:, ::2], rows.T.copy().T]
    return [world.allgather(x).tolist() for _ in range(2) for x in layouts]


def test_gather_accepts_any_memory_order(three: Ranks) -> None:
    expected = np.concatenate([np.arange(6).reshape(2, 3) + 10 * rank for rank in range(SIZE)]).tolist()
    assert three.run_calls(gather_in_other_orders) == [[expected] * 8] * SIZE


def permuted_axes(world: un.Communicator) -> Any:
    return world.allreduce(np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2))


def test_an_array_in_neither_order_is_reduced(three: Ranks) -> None:
    for result in three.run_calls(permuted_axes):
        assert result.tolist() == (SIZE * np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2)).tolist()


def leave_alone(world: un.Communicator) -> tuple[Any, Any, Any]:
    """Pass an `out` on every rank, although only the root has a result.

    The other ranks' arrays must stay as they are.
    """
    out, gathered = np.full(2, -1.0), np.full(2 * SIZE, -1.0)
    for _ in range(2):
        results = world.reduce(np.ones(2), root=1, out=out), world.gather(np.ones(2), root=1, out=gathered)
    assert [result is not None for result in results] == [world.rank == 1] * 2
    first = np.full(2, 9.0)
    world.exscan(np.ones(2), out=first)
    return out.tolist(), gathered.tolist(), first.tolist()


def test_out_stays_unchanged_on_ranks_without_a_result(three: Ranks) -> None:
    untouched = [-1.0] * 2, [-1.0] * 6
    assert three.run_calls(leave_alone) == [
        (*untouched, [9.0] * 2),
        ([3.0] * 2, [1.0] * 6, [1.0] * 2),
        (*untouched, [2.0] * 2),
    ]


# --- disagreement --------------------------------------------------------------------------------------------------


def gather_by_other_counts(world: un.Communicator) -> str:
    counts = (1, 2) if world.rank == 0 else (2, 2)
    try:
        world.allgatherv(np.ones(counts[world.rank]), counts)
    except un.MismatchError as error:
        return error.message
    return ""


def exchange_other_lengths(world: un.Communicator) -> str:
    try:
        world.alltoallv(np.ones(4), (2, 2), (2, 2) if world.rank == 0 else (1, 2))
        world.barrier()  # the next call of a rank that had ended its call before raises the error
    except un.MismatchError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("disagree", "expected"),
    [
        (gather_by_other_counts, "counts=[2, 2]"),
        (exchange_other_lengths, "rank 0 sent 16 bytes, where 8 are to be received"),
    ],
)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_mismatch_error_shows_counts_on_which_ranks_disagree(disagree: Any, expected: str, transport: str) -> None:
    with start_ranks(2, transport) as ranks:
        for message in ranks.run_calls(disagree):
            assert expected in message


# --- plans ---------------------------------------------------------------------------------------------------------


def mix_plans_and_methods(world: un.Communicator) -> list[float]:
    x = np.zeros(4)
    total, everything = world.plan("allreduce", x), world.plan("allgatherv", x, counts=(4,) * SIZE)
    meet = world.plan("barrier")
    results = []
    for value in (1.0, 2.0):
        x[...] = value
        assert meet() is None
        result = total()
        assert result is total()
        results += [float(result[0]), float(everything().sum()), float(world.allreduce(x)[0])]
    return results


def test_persistent_calls_read_current_data_and_mix_with_methods(three: Ranks) -> None:
    assert three.run_calls(mix_plans_and_methods) == [[3.0, 12.0, 3.0, 6.0, 24.0, 6.0]] * SIZE


def plan_beyond_the_end(world: un.Communicator) -> str:
    plan = world.plan("allreduce", np.ones(4))
    plan()
    world.barrier()
    world.close()
    with pytest.raises(un.UsageError) as caught:
        plan()
    return caught.value.message


def test_persistent_call_of_a_closed_communicator_is_refused() -> None:
    with start_ranks(2, "shm") as ranks:
        assert all("is closed" in text for text in ranks.run_calls(plan_beyond_the_end))


def plan_in_a_child(world: un.Communicator) -> tuple[str, float]:
    """Fork a child of the last rank.

    Its inherited plan refuses to run and the child ends; then all ranks run the plan.
    """
    plan, output = world.plan("allreduce", np.ones(4)), ""
    if world.rank == SIZE - 1:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                plan()
            except un.UsageError as error:
                os.write(writing, error.message.encode())
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        with open(reading) as pipe:
            output = pipe.read()
    return output, float(plan()[0])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_persistent_call_in_a_forked_child_is_refused(three: Ranks) -> None:
    *others, last = three.run_calls(plan_in_a_child)
    assert others == [("", 3.0)] * 2
    assert "forked" in last[0]
    assert last[1] == 3.0


# --- sendrecv ------------------------------------------------------------------------------------------------------


def shift(world: un.Communicator, count: int) -> list[bool]:
    x, results = np.full(count, world.rank, "uint8"), []
    for step in range(world.size):
        out, source = np.full(count, 255, "uint8"), (world.rank - step) % world.size
        assert world.sendrecv(x, (world.rank + step) % world.size, out, source, tag=step) is out
        results.append(bool((out == source).all()))
    return results


@pytest.mark.parametrize("count", [0, 1, 70_000, 8 << 20])
def test_sendrecv_shifts_messages_of_any_length(three: Ranks, count: int) -> None:
    assert three.run_calls(shift, count) == [[True] * SIZE] * SIZE


def call_by_name(world: un.Communicator) -> None:
    world.allreduce(SIX, algorithm=["direct", "ring"][world.rank])


def call_in_a_group(world: un.Communicator) -> None:
    if world.rank:
        with world.group():
            world.allreduce(SIX, wait=False)
            world.allreduce(SIX, wait=False)
    world.allreduce(SIX)


def mismatch_of(world: un.Communicator, call: Any) -> str:
    try:
        call(world)
        world.barrier()
    except un.MismatchError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (call_by_name, "rank 1 called allreduce(float64[6], op=sum, algorithm=ring) at "),
        (call_in_a_group, "rank 1 called allreduce([2 × (float64[6], op=sum)]) at "),
    ],
)
def test_mismatch_error_shows_difference_and_line_of_the_user_program(call: Any, expected: str) -> None:
    for message in un.launch(mismatch_of, 2, call):
        _, _, where = message.partition(expected)
        assert where.startswith(__file__), message
