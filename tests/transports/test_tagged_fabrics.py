"""Messages by UCX and by MPI. Their ranks pass the same tests as ranks over shared memory and TCP."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support import executor_contract as contract
from support.call_strategies import allreduce_cases
from support.deadlines import DEADLINE_S
from support.executor_contract import Case
from support.harness import message_algorithms
from support.mpi_ranks import MpiRanks, launcher
from support.programs import by_launcher
from support.ranks import Job, Ranks, ranks_fixture, require, start_ranks

import unisono as un

Say = Callable[[Any], None]

# The longest payload that lies in an envelope, and the length of a chunk.
SMALL_NBYTES, CHUNK_NBYTES = 3992, 256 << 10
LENGTHS = [0, 1, SMALL_NBYTES // 8, SMALL_NBYTES // 8 + 1, CHUNK_NBYTES // 4, CHUNK_NBYTES // 4 + 1, 100_003]


ranks = ranks_fixture((3, "ucx"), (3, "openmpi"), (3, "mpich"))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(case=allreduce_cases(message_algorithms("allreduce"), st.one_of(st.sampled_from(LENGTHS), st.integers(2, 200))))
def test_allreduce_is_exact(ranks: Ranks, case: Case) -> None:
    contract.check_allreduce(ranks, case)


@pytest.mark.parametrize("algorithm", ["ring", "direct", "rabenseifner"])
@pytest.mark.parametrize("segments", [1, 7])
def test_allreduce_of_megabytes_is_exact(ranks: Ranks, algorithm: str, segments: int) -> None:
    case = Case(algorithm=algorithm, dtype="bfloat16", count=1_400_009, segments=segments, in_place=True)
    contract.check_allreduce(ranks, case)


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_all_ranks_get_the_same_bits(ranks: Ranks, algorithm: str) -> None:
    contract.check_all_ranks_get_the_same_bits(ranks, algorithm, "float32", 3)


@pytest.mark.parametrize("count", [11, 50_001])
def test_traffic_is_what_the_plan_says(ranks: Ranks, count: int) -> None:
    contract.check_traffic_is_what_the_plan_says(ranks, Case(algorithm="ring", count=count, segments=4))


@pytest.mark.parametrize("count", [0, 1, 1000, 1_000_000])
def test_neighbours_exchange_messages(ranks: Ranks, count: int) -> None:
    contract.check_neighbours_exchange_messages(ranks, count)


@pytest.mark.parametrize(
    "check",
    [
        contract.check_barrier,
        contract.check_many_calls_in_a_row,
        contract.check_calls_may_be_awaited_in_any_order,
        contract.check_messages_are_matched_by_tag_and_in_order,
        contract.check_synchronous_sends_end_with_their_receive,
        contract.check_synchronous_sends_in_both_directions_end,
        contract.check_background_calls_end_without_a_waiter,
        contract.check_ends_are_counted,
        contract.check_a_late_rank_is_waited_for,
    ],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_ucx_and_mpi_ranks_keep_the_contract_of_executors(ranks: Ranks, check: Callable[[Any], None]) -> None:
    check(ranks)


def make_random_calls(world: un.Communicator, cases: int) -> dict[int, str]:
    un.testing.check_collectives(world, cases=cases, seed=8)
    return {peer: traffic.transport for peer, traffic in world.stats().items() if peer != world.rank}


def test_every_collective_over_ucx_or_mpi_equals_numpy(ranks: Ranks) -> None:
    for rank, carried in enumerate(ranks.run_calls(make_random_calls, 100)):
        assert carried == {peer: ranks.transport for peer in range(ranks.size) if peer != rank}


def inexact_results(world: un.Communicator) -> bytes:
    """Return the bits of sums that depend on the order of combination."""
    x = np.random.default_rng(world.rank).standard_normal(70_001).astype(np.float32)
    results = [world.allreduce(x, algorithm=algorithm) for algorithm in ("ring", "direct")]
    results += [world.reduce_scatter(x[:69_999]), world.scan(x), world.allreduce(x, reproducible=True)]
    return b"".join(result.tobytes() for result in results)


def test_results_over_ucx_or_mpi_have_the_bits_of_shm_and_tcp(ranks: Ranks) -> None:
    expected = [un.launch(inexact_results, 3, options=un.Options(transports=name)) for name in ("shm", "tcp")]
    assert expected[0] == expected[1] == ranks.run_calls(inexact_results)


def open_and_close(world: un.Communicator, times: int) -> tuple[int, int, int]:
    """Use `times` communicators.

    Return the growth of descriptors, threads and KiB of memory over the last 90 % of them.
    """
    for done in range(times):
        if done == times // 10:
            before = usage()
        other = world.dup()
        other.sendrecv(np.ones(1), (other.rank + 1) % other.size, np.zeros(1), (other.rank - 1) % other.size)
        other.barrier()
        other.close()
    after = usage()
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


def usage() -> tuple[int, int, int]:
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return len(os.listdir("/proc/self/fd")), threading.active_count(), kilobytes


@pytest.mark.parametrize("times", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_closed_communicators_over_ucx_or_mpi_free_their_resources(ranks: Ranks, times: int) -> None:
    for descriptors, threads, kilobytes in ranks.run_calls(open_and_close, times):
        assert descriptors < 100  # descriptors of connections that the peer has not closed yet
        assert threads == 0
        # A channel has about 70 KiB for envelopes.
        assert kilobytes < 4 << 10


def sum_till_the_end(world: un.Communicator, say: Say, count: int, algorithm: str) -> None:
    x = np.ones(count, np.float32)
    world.allreduce(x, algorithm=algorithm)
    say(os.getpid())
    say(error_of_sums(world, count, algorithm))
    say(error_of_sums(world, 1, algorithm))


def error_of_sums(world: un.Communicator, count: int, algorithm: str) -> tuple[str, str]:
    x = np.ones(count, np.float32)
    try:
        for _ in range(1_000_000):
            world.allreduce(x, out=x, op="max", algorithm=algorithm)
    except un.UnisonoError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(("count", "algorithm"), [(1, "direct"), (4_000_000, "ring"), (4_000_000, "direct")])
def test_rank_killed_during_a_ucx_transfer_is_a_lost_peer(tmp_path: Path, count: int, algorithm: str) -> None:
    require("ucx")
    with Job(sum_till_the_end, 3, tmp_path, count, algorithm, transports="ucx") as job:
        job.hear_all()
        time.sleep(0.2)
        job.signal(1, signal.SIGKILL)
        for kind, text in job.hear_all(but=1):
            assert (kind, "rank 1" in text) == ("PeerLostError", True), text
        assert [kind for kind, _ in job.hear_all(but=1)] == ["AbortedError"] * 2


# Without these options, the launchers end the whole job when a rank dies, and no rank is left to report the loss.
@pytest.mark.parametrize(
    ("library", "options"), [("openmpi", ("--with-ft", "ulfm")), ("mpich", ("-disable-auto-cleanup",))]
)
@pytest.mark.parametrize(("count", "algorithm"), [(1, "direct"), (4_000_000, "ring")])
def test_rank_killed_during_an_mpi_transfer_is_a_lost_peer(
    library: str, options: tuple[str, ...], count: int, algorithm: str
) -> None:
    ranks = MpiRanks(3, library, command=launcher(library, *options))
    with ranks.killed_at_end():
        ranks.start(error_of_sums, count, algorithm)
        time.sleep(0.5)
        os.kill(ranks.pids[1], signal.SIGKILL)
        for rank in (0, 2):
            try:
                kind, text = ranks.hear(rank, DEADLINE_S)
            except EOFError:  # MPICH ends a process whose peer has died in a transfer by shared memory
                assert library == "mpich"
            else:
                assert (kind, "rank 1" in text) == ("PeerLostError", True), text


MIXED = """
import os, sys
if os.environ["UNISONO_RANK"] == "1":
    sys.modules["ucxx"] = sys.modules["ucp"] = None
import json, numpy as np, unisono as un
with un.init(un.Options(transports={transports!r})) as world:
    try:
        found = int(world.allreduce(np.array([world.rank]))[0])
    except un.UnisonoError as error:
        found = f"{{type(error).__name__}}: {{error}}"
    used = {{peer: traffic.transport for peer, traffic in world.stats().items()}}
    print("result " + json.dumps([found, used]))
"""


def mixed_results(tmp_path: Path, transports: str) -> list[Any]:
    done = by_launcher(MIXED.format(transports=transports), tmp_path, ranks=3)
    results = [json.loads(line.partition("result ")[2]) for line in done.stdout.splitlines() if "result " in line]
    assert len(results) == 3, done.stderr
    return results


def test_the_first_transport_that_both_ranks_have_is_used(tmp_path: Path) -> None:
    require("ucx")
    results = mixed_results(tmp_path, "ucx,tcp")
    assert [total for total, _ in results] == [3] * 3
    used = [tuple(sorted(result.values())) for _, result in results]
    assert sorted(used) == [("tcp", "tcp"), ("tcp", "ucx"), ("tcp", "ucx")]


def test_transports_that_reach_no_peer_are_an_error_that_says_why(tmp_path: Path) -> None:
    for result, _ in mixed_results(tmp_path, "ucx"):
        assert result.startswith(
            "TransportUnavailableError: no transport of the option transports of the program = ucx reaches rank"
        )
        assert "cannot use ucx: UCX cannot be loaded" in result
        assert "pip install ucxx-cu13" in result


def test_mpi_transport_needs_a_rendezvous_through_mpi(tmp_path: Path) -> None:
    for result, _ in mixed_results(tmp_path, "mpi"):
        assert result.startswith("TransportUnavailableError")
        assert "start them with mpirun" in result


@pytest.mark.parametrize("library", ["openmpi", "mpich"])
def test_transports_are_tried_in_the_order_of_the_list(library: str) -> None:
    with MpiRanks(2, library, "shm,mpi") as ranks:
        assert ranks.run_calls(make_random_calls, 5) == [{1: "shm"}, {0: "shm"}]
    with MpiRanks(2, library, "mpi,shm") as ranks:
        assert ranks.run_calls(make_random_calls, 5) == [{1: "mpi"}, {0: "mpi"}]


@pytest.mark.parametrize("library", ["openmpi", "mpich"])
def test_mpi_transport_refuses_funneled_threads_with_advice(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_RC_THREAD_LEVEL", "funneled")
    with (
        start_ranks(2, library) as ranks,
        pytest.raises(un.TransportUnavailableError, match="MPI4PY_RC_THREAD_LEVEL=multiple"),
    ):
        ranks.run_calls(make_random_calls, 5)
