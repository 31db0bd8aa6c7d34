"""Measures the network between far hosts again, while a job runs.

Theory of operation. All ranks call `measured_again` on their world. Each opens its place for the connections of probes
before the first barrier, so no host dials another one too early. Two barriers last at least as long as the longest
round trip, because the others end the first one after a delay, and their second one arrives after another. From that,
rank 0 decides how long the hosts measure, or that they need not. The hosts then measure as they do when their ranks
meet (transports/links/network_probes.py). Rank 0 broadcasts the matrices, so all ranks have the same map and change
their choices between the same two calls.

Used by: `Communicator.measure_network`.
"""

from __future__ import annotations

import time

import numpy as np

from unisono.collectives.api.collectives import Collectives
from unisono.errors import UsageError
from unisono.transports.contracts.executor import Executor
from unisono.transports.executors.native import NativeExecutor
from unisono.transports.links.network_probes import Appointment, appointment
from unisono.tuning.decide.choice import TunerState
from unisono.tuning.machine.network_map import NetworkMap
from unisono.tuning.machine.parameters import NETWORK, at_level

# One barrier ends at once on a rank that is late.
_BARRIERS, _TRIALS = 2, 2
# The time for the broadcast after the measuring.
_GRACE_S = 5.0


def measured_again(world: Collectives, executor: Executor, hosts: int, link: str, limit_s: float) -> TunerState | None:
    """Return the tuner's state with the network of now, the same on all ranks; None if it is not measured.

    Args:
        world: the communicator of all ranks.
        executor: its executor.
        hosts: the number of hosts.
        link: the slowest kind of link between ranks.
        limit_s: the seconds for each call.

    Raises:
        UsageError: `world` has not all ranks of the job, or no TCP leads from host to host.
        PeerLostError, CollectiveTimeoutError, AbortedError: as in `allgather`.
    """
    if not isinstance(executor, NativeExecutor) or world.size != executor.session.identity.size:
        raise UsageError("only the communicator of all ranks can measure the network, over Unisono's own transports")
    if hosts > 1 and link != "tcp":
        raise UsageError(f"only TCP between hosts can be measured, not {link}")
    with executor.session.probing() as measure:
        round_trip_s = min(_barriers_s(world, limit_s) for _ in range(_TRIALS))
        longest_s = float(world.allreduce(np.array(round_trip_s), "max", timeout_s=limit_s))
        terms = appointment([longest_s], hosts, limit_s) if world.rank == 0 else None
        decided = np.array((0.0, 0.0) if terms is None else terms)
        agreed = Appointment(*world.broadcast(decided, timeout_s=limit_s).tolist())
        if not agreed.limit_s:
            return None
        network = measure(agreed)
    is_far = network is not None and network.is_far
    matrices = np.array(network) if is_far else np.zeros((2, hosts, hosts))
    shared = world.broadcast(matrices, timeout_s=limit_s + agreed.limit_s + _GRACE_S)
    if not shared.any():
        return None
    round_trips_s, per_byte_s = (tuple(map(tuple, matrix)) for matrix in shared.tolist())
    return world.tuner_state.over(NetworkMap.of(round_trips_s, per_byte_s), at_level("tcp", NETWORK))


def _barriers_s(world: Collectives, limit_s: float) -> float:
    began = time.monotonic()
    for _ in range(_BARRIERS):
        world.barrier(timeout_s=limit_s)
    return time.monotonic() - began
