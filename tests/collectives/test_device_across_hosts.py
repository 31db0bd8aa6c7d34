"""Allreduce of arrays on GPU doubles across hosts: results, faults in each phase, and reasons for staging."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st
from support.native_ranks import Job, NativeRanks
from support.outcomes import error_of

import unisono as un
from unisono.bench.gpu_stages.hosts import on_hosts
from unisono.collectives.device import across_hosts
from unisono.testing.device_arrays import DoubleArray, device_double, read
from unisono.testing.device_double import DeviceTrapError

pytestmark = pytest.mark.timeout(120)

TWO_HOSTS = ((0, 1), (2, 3))
MIXED_HOSTS = ((0, 3), (1, 2))
WAY = "cuda_ipc,shm"


@pytest.fixture(scope="module")
def ranks() -> Iterator[NativeRanks]:
    with NativeRanks(4, WAY) as started:
        yield started


def values_of(rank: int, count: int, dtype: str) -> Any:
    """Return elements whose sums and products are exact in each dtype, and different for each place and rank."""
    return ((np.arange(count) * 5 + rank * 3) % 4).astype(dtype)


Case = tuple[str, str, int, bool, tuple[tuple[int, ...], ...]]


def check_case(world: un.Communicator, case: Case, seed: int) -> None:
    op, dtype, count, in_place, hosts = case
    x = values_of(world.rank, count, dtype)
    expected = world.allreduce(x, op)
    across_hosts.SEGMENT_NBYTES = 64
    with device_double(seed * 10 + world.rank) as gpu, on_hosts(world, hosts) as comm:
        stream = gpu.device().new_stream()
        array = DoubleArray(gpu, x, stream)
        out = array if in_place else DoubleArray(gpu, np.full_like(x, 7), stream)
        comm.allreduce(array, op, out=out)
        found = read(gpu, out)
        assert found.tobytes() == expected.tobytes(), f"{case}: {found} instead of {expected}"
        assert "within each host" in comm.explain("allreduce", 100).on_device
        del array, out
        comm.close()
        gpu.device().end_stream(stream)


FLOATS = ["float32", "float64", "float16", "bfloat16"]
OPS = {
    **dict.fromkeys(FLOATS, ("sum", "prod", "min", "max", "avg")),
    "int32": ("sum", "avg", "bxor", "land"),
    "uint8": ("sum", "bor", "max"),
}


@settings(max_examples=20, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_allreduce_across_hosts_gives_the_results_of_the_host(ranks: NativeRanks, data: Any) -> None:
    dtype = data.draw(st.sampled_from(list(OPS)))
    op = data.draw(st.sampled_from(OPS[dtype]))
    count = data.draw(st.sampled_from([0, 1, 2, 3, 17, 200, 333]))
    hosts = data.draw(st.sampled_from([TWO_HOSTS, MIXED_HOSTS]))
    ranks.run_calls(check_case, (op, dtype, count, data.draw(st.booleans()), hosts), data.draw(st.integers(0, 99)))


def call_on_double(world: un.Communicator, hosts: Any, x: Any, arguments: Any, double: Any) -> tuple[bytes, str, Any]:
    """Make an allreduce; return the bits of the result, what `explain` says, and the statistics of GPU arrays."""
    with device_double(world.rank, **double) as gpu, on_hosts(world, hosts) as comm:
        stream = gpu.device().new_stream()
        array = DoubleArray(gpu, x, stream)
        result = comm.allreduce(array, **arguments)
        found = read(gpu, result).tobytes()
        way, stats = comm.explain("allreduce", x.nbytes).on_device, comm.stats().on_device
        del array, result
        comm.close()
        gpu.device().end_stream(stream)
    return found, way, stats


def scattered_floats(world: un.Communicator, op: str, dtype: str) -> tuple[bytes, Any]:
    across_hosts.SEGMENT_NBYTES = 1 << 14
    x = np.random.default_rng(world.rank).standard_normal(20_001).astype(dtype)
    found, _, stats = call_on_double(world, TWO_HOSTS, x, {"op": op}, {})
    expected = world.allreduce(x.astype(np.float64), op)
    np.testing.assert_allclose(np.frombuffer(found, dtype).astype(np.float64), expected, rtol=0.05, atol=0.1)
    assert set(stats.by_ipc) == {world.rank ^ 1}, "only ranks of this host use each other's memory"
    return found, (x.nbytes, stats.to_host_nbytes, stats.to_device_nbytes)


@pytest.mark.parametrize(("op", "dtype"), [("sum", "float32"), ("avg", "bfloat16")])
def test_all_ranks_have_the_same_bits_and_half_of_the_bytes_cross(ranks: NativeRanks, op: str, dtype: str) -> None:
    results = ranks.run_calls(scattered_floats, op, dtype)
    assert len({found for found, _ in results}) == 1
    for _, (nbytes, to_host, to_device) in results:
        assert to_host == to_device
        assert nbytes // 2 <= to_host < nbytes // 2 + 16


def premultiplied(world: un.Communicator) -> list[float]:
    x, op = np.ones(9), un.Op.premul_sum(world.rank + 1)
    return np.frombuffer(call_on_double(world, MIXED_HOSTS, x, {"op": op}, {})[0]).tolist()


def test_each_rank_multiplies_its_contribution_once(ranks: NativeRanks) -> None:
    assert ranks.run_calls(premultiplied) == [[10.0] * 9] * 4


# --- calls that are staged -------------------------------------------------------------------------------------------


def refused(world: un.Communicator, hosts: Any, arguments: Any, own_device: bool) -> tuple[bool, str, bool]:
    double = {"uuid": f"double-{world.rank}"} if own_device and world.rank == 3 else {}
    found, way, stats = call_on_double(world, hosts, np.ones(100), arguments, double)
    return bool((np.frombuffer(found) == world.size).all()), way, not stats.by_ipc


@pytest.mark.parametrize(
    ("hosts", "arguments", "own_device", "why"),
    [
        (((0, 1, 2), (3,)), {}, False, "the hosts have different numbers of ranks: 3, 1"),
        (((0,), (1,), (2,), (3,)), {}, False, "each host has one rank"),
        (TWO_HOSTS, {}, True, "on the host of rank 2, rank 0: device"),
        (TWO_HOSTS, {"reproducible": True}, False, "within each host"),
        (TWO_HOSTS, {"algorithm": "ring"}, False, "within each host"),
    ],
)
def test_what_cannot_reduce_within_hosts_is_staged(
    ranks: NativeRanks, hosts: Any, arguments: Any, own_device: bool, why: str
) -> None:
    for is_right, way, is_staged in ranks.run_calls(refused, hosts, arguments, own_device):
        assert is_right
        assert why in way
        assert is_staged, "nothing went over mapped memory"


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


def outcome_without(world: un.Communicator, rule: str) -> str:
    """Make a call that breaks a rule of the route; return "right", "wrong", or the class of the error."""
    across_hosts.SEGMENT_NBYTES = 512
    broken = {
        "": nullcontext(),
        "waits for phase 1": mock.patch.object(across_hosts, "await_event"),
        "waits for the slot": mock.patch.object(across_hosts.AcrossHosts, "_fetch", fetch_into_used_slots),
    }[rule]
    try:
        with broken:
            found, _, _ = call_on_double(world, TWO_HOSTS, np.arange(1000.0) + world.rank, {"op": "avg"}, {})
    except (DeviceTrapError, un.UnisonoError) as error:
        return type(error).__name__
    return "right" if (np.frombuffer(found) == np.arange(1000.0) + 1.5).all() else "wrong"


@pytest.mark.parametrize("rule", ["waits for phase 1", "waits for the slot"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_call_goes_wrong_without_a_rule_of_the_route(rule: str) -> None:
    with NativeRanks(4, WAY) as own:
        assert own.run_calls(outcome_without, "") == ["right"] * 4
        outcomes = set(own.run_calls(outcome_without, rule))
    assert outcomes <= {"wrong", "DeviceTrapError", "AbortedError"}


PHASES = {"within hosts": "_fetch", "between hosts": "_pass_on", "gathering": "_gather"}


def dies(world: un.Communicator, say: Callable[[Any], None], phase: str) -> None:
    """Let rank 1 be killed before it takes part in a phase of the second segment of the second call."""
    across_hosts.SEGMENT_NBYTES = 1 << 12
    whole, number = getattr(across_hosts.AcrossHosts, phase), [0]

    def counted(self: Any, *args: Any) -> Any:
        number[0] += 1
        if world.rank == 1 and number[0] == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, *args)

    with (
        mock.patch.object(across_hosts.AcrossHosts, phase, counted),
        device_double(world.rank) as gpu,
        on_hosts(world, TWO_HOSTS) as comm,
    ):
        stream = gpu.device().new_stream()
        x = DoubleArray(gpu, np.ones(4000), stream)
        error = error_of(lambda: [comm.allreduce(x, timeout_s=30.0) for _ in range(3)])
        comm.close()
        gpu.synchronize()
        say(error)
        os._exit(0)  # the memory that the lost rank has open is kept


@pytest.mark.parametrize("phase", PHASES.values(), ids=PHASES)
def test_death_of_a_rank_in_a_phase_ends_the_call_on_all_hosts(tmp_path: Path, phase: str) -> None:
    with Job(dies, 4, tmp_path, phase, transports=WAY) as job:
        assert job.exit_code(1) == -signal.SIGKILL
        for kind, message in job.hear_all(but=1):
            assert kind == "PeerLostError", message
            assert "rank 1" in message
