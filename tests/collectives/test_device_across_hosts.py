"""Allreduce of arrays on GPU doubles across hosts: results, faults in each phase, and reasons for staging."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st
from support import cuda_ucx
from support.hosts import Hosts, needs_namespaces
from support.outcomes import error_of
from support.ranks import Job, Ranks, ranks_fixture, require, start_ranks

import unisono as un
from unisono.algorithms.catalogue.registry import ALGORITHMS
from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.bench.gpu_stages.speeds.hosts import on_hosts
from unisono.bench.namespaces import network
from unisono.collectives.device import across_hosts
from unisono.collectives.device.host_phases import PHASES
from unisono.testing.device_arrays import DoubleArray, device_double, read
from unisono.testing.device_double import DeviceTrapError, GpuDouble
from unisono.transports.cuda.device import Stream

pytestmark = pytest.mark.timeout(120)

TWO_HOSTS = ((0, 1), (2, 3))
MIXED_HOSTS = ((0, 3), (1, 2))
UNEQUAL_HOSTS = ((0, 2, 3), (1,))
WAY = "cuda_ipc,shm"
REAL = "cuda_ipc,shm,tcp"


ranks = ranks_fixture((4, WAY))


def values_of(rank: int, count: int, dtype: str) -> Any:
    """Return elements whose sums and products are exact in each dtype, and different for each place and rank."""
    return ((np.arange(count) * 5 + rank * 3) % 4).astype(dtype)


class Case(NamedTuple):
    """A call: `count` is the length of a vector, or of a share if INPUT or OUTPUT has shares."""

    collective: str
    op: str | None
    dtype: str
    count: int
    is_in_place: bool
    root: int
    hosts: tuple[tuple[int, ...], ...]

    def arguments(self) -> dict[str, Any]:
        contract = CONTRACTS[self.collective]
        root = {"root": self.root} if contract.input_at_root or contract.output_at_root else {}
        return {**root, **({} if self.op is None else {"op": self.op})}

    def input(self, rank: int, size: int) -> Any:
        shares = size if CONTRACTS[self.collective].input is Cut.SHARES else 1
        return values_of(rank, self.count * shares, self.dtype)

    def memory(self, gpu: GpuDouble, x: Any, length: int, rank: int, stream: Stream) -> tuple[Any, Any]:
        """Return the arrays `x` and `out` of a rank, of which one is a part of the other if the call is in place."""
        contract = CONTRACTS[self.collective]
        has_both = contract.has_input(rank, self.root) and contract.has_output(rank, self.root)
        if not (self.is_in_place and has_both):
            return DoubleArray(gpu, x, stream), DoubleArray(gpu, np.full(length, 7, x.dtype), stream)
        whole = np.full(max(len(x), length), 7, x.dtype)
        start = rank * self.count if (contract.input is Cut.SHARE) != (contract.output is Cut.SHARE) else 0
        first = start if contract.input is Cut.SHARE else 0
        whole[first : first + len(x)] = x
        array = DoubleArray(gpu, whole, stream)
        return part_of(array, first, len(x)), part_of(array, start if length < len(x) else 0, length)


def part_of(array: DoubleArray, first: int, count: int) -> Any:
    """Return consecutive elements of an array, in the same memory."""
    interface = array.__cuda_array_interface__
    address = interface["data"][0] and interface["data"][0] + first * array.dtype.itemsize
    part = SimpleNamespace(dtype=array.dtype, owner=array)
    part.__cuda_array_interface__ = {**interface, "data": (address, False), "shape": (count,)}
    return part


def check_cases(world: un.Communicator, cases: list[Case], seed: int) -> None:
    """Make calls on GPU arrays, and compare the bits of their results with those of numpy arrays."""
    across_hosts.SEGMENT_NBYTES = 64
    for number, case in enumerate(cases):
        way = check_case(world, world, case, seed * 10 + number)
        assert way.startswith(
            "cuda_ipc within each host, and staged through the host between hosts, as the link between"
        )
        assert way.endswith("does not carry memory of a GPU: shm")


def check_case(world: un.Communicator, job: un.Communicator, case: Case, seed: int) -> str:
    """Check a call of `job` on a new double, whose ranks count as those of several hosts; return as `check_call`."""
    with device_double(seed * 10 + world.rank) as gpu, on_hosts(job, case.hosts) as comm:
        stream = gpu.device().new_stream()
        way = check_call(world, comm, case, gpu, stream)
        comm.close()
        gpu.device().end_stream(stream)
    return way


def check_call(world: un.Communicator, comm: un.Communicator, case: Case, gpu: GpuDouble, stream: Stream) -> str:
    """Make a call of `comm` on GPU arrays, and compare its bits with one of `world`; return what `explain` says."""
    x, arguments = case.input(world.rank, world.size), case.arguments()
    share = {"out": np.empty(case.count, x.dtype)} if case.collective == "scatter" else {}
    expected = getattr(world, case.collective)(x, **arguments, **share)
    length = len(x) if case.collective == "broadcast" else 0 if expected is None else len(expected)
    array, out = case.memory(gpu, x, length, world.rank, stream)
    result = getattr(comm, case.collective)(array, **arguments, out=out)
    assert (result is None) == (expected is None), case
    if expected is not None:
        actual = read(gpu, out)
        assert actual.tobytes() == expected.tobytes(), f"{case}: {actual} instead of {expected}"
    return comm.explain(case.collective, 100).on_device


FLOATS = ["float32", "float64", "float16", "bfloat16"]
OPS = {
    **dict.fromkeys(FLOATS, ("sum", "prod", "min", "max", "avg")),
    "int32": ("sum", "avg", "bxor", "land"),
    "uint8": ("sum", "bor", "max"),
}


@st.composite
def cases(draw: Any, collective: str) -> Case:
    dtype = draw(st.sampled_from(list(OPS)))
    op = draw(st.sampled_from(OPS[dtype])) if CONTRACTS[collective].reduces else None
    counts = [0, 1, 2, 3, 17, 200, 333] if CONTRACTS[collective].input is Cut.VECTOR else [0, 1, 2, 3, 17, 83]
    hosts = [TWO_HOSTS, MIXED_HOSTS, *([UNEQUAL_HOSTS] if CONTRACTS[collective].input is Cut.VECTOR else [])]
    may_be_in_place = any(algorithm.in_place for algorithm in ALGORITHMS[collective].values())
    place = may_be_in_place and draw(st.booleans()), draw(st.integers(0, 3)), draw(st.sampled_from(hosts))
    return Case(collective, op, dtype, draw(st.sampled_from(counts)), *place)


@pytest.mark.parametrize("collective", PHASES)
@settings(max_examples=2, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_collective_across_hosts_gives_the_results_of_the_host(ranks: Ranks, collective: str, data: Any) -> None:
    several = data.draw(st.lists(cases(collective), min_size=8, max_size=8))
    ranks.run_calls(check_cases, several, data.draw(st.integers(0, 99)))


def call_on_double(
    world: un.Communicator, hosts: Any, x: Any, arguments: Any, double: Any, collective: str = "allreduce"
) -> tuple[bytes, str, Any]:
    """Make a call; return the bits of the result, what `explain` says, and the statistics of GPU arrays."""
    with device_double(world.rank, **double) as gpu, on_hosts(world, hosts) as comm:
        stream = gpu.device().new_stream()
        array = DoubleArray(gpu, x, stream)
        result = getattr(comm, collective)(array, **arguments)
        actual = read(gpu, result).tobytes()
        way, stats = comm.explain(collective, x.nbytes).on_device, comm.stats().on_device
        del array, result
        comm.close()
        gpu.device().end_stream(stream)
    return actual, way, stats


def scattered_floats(world: un.Communicator, op: str, dtype: str) -> tuple[bytes, Any]:
    across_hosts.SEGMENT_NBYTES = 1 << 14
    x = np.random.default_rng(world.rank).standard_normal(20_001).astype(dtype)
    result, _, stats = call_on_double(world, TWO_HOSTS, x, {"op": op}, {})
    expected = world.allreduce(x.astype(np.float64), op)
    np.testing.assert_allclose(np.frombuffer(result, dtype).astype(np.float64), expected, rtol=0.05, atol=0.1)
    assert set(stats.by_ipc) == {world.rank ^ 1}, "only ranks of this host use each other's memory"
    return result, (x.nbytes, stats.to_host_nbytes, stats.to_device_nbytes)


@pytest.mark.parametrize(("op", "dtype"), [("sum", "float32"), ("avg", "bfloat16")])
def test_all_ranks_have_the_same_bits_and_half_of_the_bytes_cross(ranks: Ranks, op: str, dtype: str) -> None:
    results = ranks.run_calls(scattered_floats, op, dtype)
    assert len({result for result, _ in results}) == 1
    for _, (nbytes, to_host, to_device) in results:
        assert to_host == to_device
        assert nbytes // 2 <= to_host < nbytes // 2 + 16


def crossing_nbytes(world: un.Communicator, collective: str) -> tuple[int, int]:
    """Make a call with vectors or shares of 4 KiB, root 1; return the bytes sent to the other host and to others."""
    across_hosts.SEGMENT_NBYTES = 1 << 10
    case = Case(collective, "sum" if CONTRACTS[collective].reduces else None, "float64", 512, False, 1, TWO_HOSTS)
    arguments, x = case.arguments(), case.input(world.rank, world.size)
    with device_double(world.rank) as gpu, on_hosts(world, TWO_HOSTS) as comm:
        stream = gpu.device().new_stream()
        array, out = case.memory(gpu, x, len(x) * (4 if collective in ("allgather", "gather") else 1), 0, stream)
        share = part_of(out, 0, 512) if CONTRACTS[collective].output is Cut.SHARE else out
        read(gpu, array if getattr(comm, collective)(array, **arguments, out=share) is None else share)
        sent = {peer: traffic.sent_nbytes for peer, traffic in comm.stats().items()}
        del array, out, share
        comm.close()
        gpu.device().end_stream(stream)
    across = sent.pop(world.rank ^ 2, 0)
    return across, sum(sent.values())


# By rank, in KiB. An allreduce between two ranks exchanges the whole part.
CROSSING = {
    "allreduce": (2, 2, 2, 2),
    "reduce": (0, 0, 2, 2),
    "reduce_scatter": (4, 4, 4, 4),
    "broadcast": (2, 2, 0, 0),
    "scatter": (4, 4, 0, 0),
    "allgather": (4, 4, 4, 4),
    "gather": (0, 0, 4, 4),
    "alltoall": (8, 8, 8, 8),
}


@pytest.mark.parametrize("collective", PHASES)
def test_fewest_bytes_cross_and_each_on_its_rail(ranks: Ranks, collective: str) -> None:
    for (across, others), expected in zip(
        ranks.run_calls(crossing_nbytes, collective), CROSSING[collective], strict=True
    ):
        assert expected << 10 <= across < (expected << 10) + 64
        assert others < 64, "ranks of other rails and of this host get nothing but the announcement"


def premultiplied(world: un.Communicator) -> list[float]:
    x, op = np.ones(9), un.Op.premul_sum(world.rank + 1)
    return np.frombuffer(call_on_double(world, MIXED_HOSTS, x, {"op": op}, {})[0]).tolist()


def test_each_rank_multiplies_its_contribution_once(ranks: Ranks) -> None:
    assert ranks.run_calls(premultiplied) == [[10.0] * 9] * 4


# --- UCX with CUDA ----------------------------------------------------------------------------------------------------


def by_ucx(world: un.Communicator, store: str, cases: list[Case], least: int) -> list[tuple[str, int, str]]:
    """Make calls over a UCX that knows CUDA; return what `explain` says, and the bytes sent from the device."""
    across_hosts.SEGMENT_NBYTES, across_hosts.LEAST_DIRECT_NBYTES = 1 << 17, least
    results = []
    with cuda_ucx.cuda_support(), cuda_ucx.joined(world, store, "cuda_ipc,ucx") as job:
        for number, case in enumerate(cases):
            before = cuda_ucx.device_traffic()
            way = check_case(world, job, case, number)
            results.append((case.collective, cuda_ucx.device_traffic()[0] - before[0], way))
    return results


CASES_BY_UCX = [
    Case("allreduce", "avg", "float32", 50_003, True, 0, TWO_HOSTS),
    Case("allreduce", "land", "int32", 20_000, False, 0, MIXED_HOSTS),
    Case("reduce", "sum", "float64", 20_000, False, 3, TWO_HOSTS),
    Case("reduce_scatter", "max", "bfloat16", 20_000, True, 0, MIXED_HOSTS),
    Case("broadcast", None, "float32", 60_001, True, 2, TWO_HOSTS),
    Case("allreduce", "sum", "int32", 20_001, False, 0, UNEQUAL_HOSTS),
    Case("scatter", None, "int32", 9_999, False, 1, MIXED_HOSTS),
    Case("allgather", None, "float64", 9_999, True, 0, TWO_HOSTS),
    Case("gather", None, "uint8", 40_001, False, 2, MIXED_HOSTS),
    Case("alltoall", None, "float32", 9_999, False, 0, TWO_HOSTS),
]


@pytest.mark.parametrize("least", [16 << 10, 1])
def test_ranks_of_rails_exchange_memory_of_the_device_by_ucx(ranks: Ranks, tmp_path: Path, least: int) -> None:
    require("ucx")
    several = [case._replace(count=case.count if least > 1 else case.count // 100) for case in CASES_BY_UCX]
    results = ranks.run_calls(by_ucx, str(tmp_path / "store"), several, least)
    for of_rank in zip(*results, strict=True):
        assert all("cuda_ipc within each host, and ucx with cuda between hosts" in way for *_, way in of_rank)
        assert least == 1 or sum(sent for _, sent, _ in of_rank) > 9_999, of_rank[0]


# --- calls that are staged -------------------------------------------------------------------------------------------


def refused(world: un.Communicator, hosts: Any, arguments: Any, own_device: bool) -> tuple[bool, str, bool]:
    double = {"uuid": f"double-{world.rank}"} if own_device and world.rank == 3 else {}
    result, way, stats = call_on_double(world, hosts, np.ones(100), arguments, double)
    return bool((np.frombuffer(result) == world.size).all()), way, not stats.by_ipc


@pytest.mark.parametrize(
    ("hosts", "arguments", "own_device", "why"),
    [
        (((0,), (1,), (2,), (3,)), {}, False, "each host has one rank"),
        (TWO_HOSTS, {}, True, "on the host of rank 2, rank 0: device"),
        (TWO_HOSTS, {"reproducible": True}, False, "within each host"),
        (TWO_HOSTS, {"algorithm": "ring"}, False, "within each host"),
    ],
)
def test_what_cannot_reduce_within_hosts_is_staged(
    ranks: Ranks, hosts: Any, arguments: Any, own_device: bool, why: str
) -> None:
    for is_right, way, is_staged in ranks.run_calls(refused, hosts, arguments, own_device):
        assert is_right
        assert why in way
        assert is_staged, "nothing went over mapped memory"


def alltoall_on_unequal_hosts(world: un.Communicator) -> tuple[bool, str, bool]:
    x = np.arange(8.0) + world.rank
    actual, way, stats = call_on_double(world, UNEQUAL_HOSTS, x, {}, {}, "alltoall")
    return actual == world.alltoall(x).tobytes(), way, not stats.by_ipc


def test_shares_are_staged_among_hosts_with_different_numbers_of_ranks(ranks: Ranks) -> None:
    why = "staged through the host, as the hosts have different numbers of ranks: 3, 1"
    assert ranks.run_calls(alltoall_on_unequal_hosts) == [(True, why, True)] * 4


# --- faults -----------------------------------------------------------------------------------------------------------


whole_fetch = across_hosts.AcrossHosts._fetch


def fetch_into_used_slots(route: Any, index: int, *args: Any) -> None:
    """Fetch a segment without a wait for the last use of its slot."""
    slot, never = route._slots[index % 2], route._device.new_event()
    kept, slot.stored = slot.stored, never
    try:
        whole_fetch(route, index, *args)
    finally:
        slot.stored = kept
        route._device.end_event(never)


def outcome_without(world: un.Communicator, rule: str, collective: str) -> str:
    """Make a call that breaks a rule of the route; return "right", "wrong", or the class of the error."""
    across_hosts.SEGMENT_NBYTES = 512
    x = np.arange(1000.0) + world.rank
    expected = getattr(world, collective)(x)
    broken = {
        "": nullcontext(),
        "waits for phase 1": mock.patch.object(across_hosts, "await_event"),
        "waits for the slot": mock.patch.object(across_hosts.AcrossHosts, "_fetch", fetch_into_used_slots),
    }[rule]
    try:
        with broken:
            actual, _, _ = call_on_double(world, TWO_HOSTS, x, {}, {}, collective)
    except (DeviceTrapError, un.UnisonoError, AssertionError) as error:  # the last one: something was not released
        return type(error).__name__
    return "right" if actual == expected.tobytes() else "wrong"


@pytest.mark.parametrize(
    ("rule", "collective"),
    [("waits for phase 1", "allreduce"), ("waits for phase 1", "alltoall"), ("waits for the slot", "allgather")],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_call_goes_wrong_without_a_rule_of_the_route(rule: str, collective: str) -> None:
    with start_ranks(4, WAY) as own:
        assert own.run_calls(outcome_without, "", collective) == ["right"] * 4
        outcomes = set(own.run_calls(outcome_without, rule, collective))
    assert outcomes - {"right"} <= {"wrong", "DeviceTrapError", "AbortedError", "AssertionError"}
    assert outcomes != {"right"}


DEATHS = {
    "within hosts": ("_fetch", ("allreduce", "alltoall")),
    "between hosts": ("_exchange", ("broadcast", "reduce_scatter")),
    "between GPUs": ("_exchange_there", ("allreduce",)),
    "behind that": ("_arrive", ("allgather",)),
}


def dies(
    world: un.Communicator, say: Callable[[Any], None], collective: str, phase: str, store: str, number_of_signal: int
) -> None:
    """Let rank 1 get a signal before it takes part in a phase of a segment, when earlier segments are under way."""
    across_hosts.SEGMENT_NBYTES = 1 << 12
    across_hosts.LEAST_DIRECT_NBYTES = 1
    whole, number = getattr(across_hosts.AcrossHosts, phase), [0]
    limit_s = 30.0 if number_of_signal == signal.SIGKILL else 3.0

    def counted(self: Any, *args: Any) -> Any:
        number[0] += 1
        if world.rank == 1 and number[0] == 12:
            os.kill(os.getpid(), number_of_signal)
        return whole(self, *args)

    with (
        mock.patch.object(across_hosts.AcrossHosts, phase, counted),
        cuda_ucx.cuda_support() if store else nullcontext(),
        cuda_ucx.joined(world, store, "cuda_ipc,ucx") if store else nullcontext(world) as job,
        device_double(world.rank) as gpu,
        on_hosts(job, TWO_HOSTS) as comm,
    ):
        stream = gpu.device().new_stream()
        x = DoubleArray(gpu, np.ones(4000), stream)
        error = error_of(lambda: [getattr(comm, collective)(x, timeout_s=limit_s) for _ in range(3)])
        comm.close()
        gpu.synchronize()
        say(error)
        os._exit(0)  # the memory that the lost rank has open is kept


@pytest.mark.parametrize(("phase", "collective"), [(phase, name) for phase in DEATHS for name in DEATHS[phase][1]])
def test_death_of_a_rank_in_a_phase_ends_the_call_on_all_hosts(tmp_path: Path, phase: str, collective: str) -> None:
    is_by_ucx = phase == "between GPUs"
    if is_by_ucx:
        require("ucx")
    store = str(tmp_path / "inner") if is_by_ucx else ""
    with Job(dies, 4, tmp_path, collective, DEATHS[phase][0], store, signal.SIGKILL, transports=WAY) as job:
        assert job.exit_code(1) == -signal.SIGKILL
        for kind, message in job.hear_all(but=1):
            assert kind == "PeerLostError", message
            assert "rank 1" in message


def test_rank_that_stops_between_gpus_is_late_on_all_hosts(tmp_path: Path) -> None:
    require("ucx")
    arguments = "reduce_scatter", "_exchange_there", str(tmp_path / "inner"), signal.SIGSTOP
    with Job(dies, 4, tmp_path, *arguments, transports=WAY) as job:
        kinds = {kind for kind, _ in job.hear_all(but=1)}
        job.signal(1, signal.SIGKILL)
    assert kinds == {"CollectiveTimeoutError"}


# --- real links -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def namespaces() -> Iterator[list[str]]:
    with network(2) as names:
        yield names


def between_real_hosts(world: un.Communicator, say: Callable[[Any], None], cases: list[Case]) -> None:
    """Make calls between network namespaces; then rank 1 is killed in a broadcast from the other host."""
    across_hosts.SEGMENT_NBYTES = 1 << 12
    with device_double(world.rank) as gpu, world.dup() as comm:
        stream = gpu.device().new_stream()
        ways = {check_call(world, comm, case, gpu, stream) for case in cases}
        say(sorted(ways))
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x = DoubleArray(gpu, np.ones(400_000), stream)
        say(error_of(lambda: [comm.broadcast(x, root=2, timeout_s=30.0) for _ in range(100)]))
        os._exit(0)  # the memory that the lost rank has open is kept


@needs_namespaces
def test_calls_between_network_namespaces_are_right_and_a_lost_rank_is_named(
    namespaces: list[str], tmp_path: Path
) -> None:
    several = [case._replace(hosts=TWO_HOSTS) for case in CASES_BY_UCX]
    with Job(between_real_hosts, Hosts(namespaces, [2, 2]), tmp_path, several, transports=REAL) as job:
        ways = job.hear_all()
        assert all(len(of_rank) == 1 for of_rank in ways), ways
        assert "cuda_ipc within each host, and staged through the host between hosts" in ways[0][0]
        assert ways[0][0].endswith("does not carry memory of a GPU: tcp (another network namespace)"), ways[0][0]
        for kind, message in job.hear_all(but=1):
            assert kind == "PeerLostError", message
            assert "rank 1" in message
