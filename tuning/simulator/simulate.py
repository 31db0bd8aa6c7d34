"""Simulates collectives: predicts the time of an algorithm on a described topology, at any number of ranks.

Two engines run the same schedule (`step_table.py`): `event_model.py` follows each message exactly, and `round_model.py`
computes all ranks at once. Plans with one lane and one segment use rounds: both engines agree on them where a rank has
one message at a time, and nearly agree elsewhere. All other plans use events, unless there are too many.

Not simulated: the sharing of a host's memory and cores, network cards that work beside a rank's core, the order in
which a network serves messages, adaptive routing, and other users of the network. Blocks are taken to be equally long
even where they cannot be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.verifier.lower_bounds import BOUNDS, least_rounds
from unisono.errors import UsageError
from unisono.tuning.machine.topology import Floats, Topology
from unisono.tuning.simulator import event_model, round_model
from unisono.tuning.simulator.step_table import Schedule, schedule

ENGINES = ("auto", "rounds", "events")

# Up to `_EASY` instances (rank, lane, group, segment), events are used even where rounds would do; never more than
# `_MOST`.
_EASY, _MOST = 200_000, 4_000_000
# The most steps as written, of all ranks and segments: their arrays take some GiB.
_MOST_ROWS = 20_000_000


class OfLevel(NamedTuple):
    """The traffic over one level of the topology."""

    name: str
    nbytes: float
    messages: int


class Simulation(NamedTuple):
    """The result of a simulation.

    Attributes:
        collective, algorithm, size, nbytes, segments: the simulated call.
        engine: "rounds" or "events".
        seconds: the time until the last rank ended.
        finish_s: the time at which each rank ended.
        levels: the traffic over each level, from the inside out.
        busiest: the name of the resource that was busy longest, and its busy seconds.
    """

    collective: str
    algorithm: str
    size: int
    nbytes: float
    segments: int
    engine: str
    seconds: float
    finish_s: Floats
    levels: tuple[OfLevel, ...]
    busiest: tuple[str, float]


def simulate(
    algorithm: Algorithm,
    nbytes: float,
    topology: Topology,
    *,
    segments: int = 1,
    root: int = 0,
    params: Mapping[str, Any] | None = None,
    engine: str = "auto",
) -> Simulation:
    """Return the simulation of a collective that all ranks of a topology call at once, on vectors of `nbytes`.

    The vector is that of `Cost`: the INPUT of a reduction or an alltoall, the blocks of all ranks at the root of a
    broadcast, gather or scatter, or the OUTPUT of an allgather. `params` go to the algorithm's builder.

    Raises:
        NoAlgorithmError, UsageError: the algorithm does not run on these ranks or with these parameters, or has too
            many instances to be simulated.
    """
    if nbytes < 0:
        raise UsageError(f"cannot simulate a vector of {nbytes} bytes: pass 0 bytes or more")
    if segments < 1:
        raise UsageError(f"cannot simulate {segments} segments, because a call has at least one: pass 1 or more")
    if engine not in ENGINES:
        raise UsageError(f"there is no engine {engine!r} of the simulator: pass one of {', '.join(ENGINES)}")
    steps = schedule(algorithm, topology.size, root, dict(params or {}))
    if segments * len(steps.rank) > _MOST_ROWS:
        problem = f"cannot simulate {segments} segments of {len(steps.rank)} steps: more than {_MOST_ROWS} in all"
        raise UsageError(problem)
    chosen = _engine(steps, segments) if engine == "auto" else engine
    traffic = (event_model.run if chosen == "events" else round_model.run)(steps, topology, nbytes, segments)
    busiest = int(np.argmax(traffic.busy_s))
    over = zip(topology.levels, traffic.nbytes, traffic.messages, strict=True)
    return Simulation(
        algorithm.collective,
        algorithm.name,
        topology.size,
        nbytes,
        segments,
        chosen,
        float(traffic.finish_s.max(initial=0.0)),
        traffic.finish_s,
        tuple(OfLevel(level.name, float(sent), int(messages)) for level, sent, messages in over),
        (topology.name_of(busiest), float(traffic.busy_s[busiest])),
    )


def least_s(collective: str, nbytes: float, topology: Topology) -> float:
    """Return the least seconds of any algorithm whose ranks send one message at a time: by rounds, or by bytes."""
    links = [level.link for level in topology.levels]
    fastest = min(links, key=lambda link: link.per_byte_s / link.ports)
    bound = BOUNDS[collective]
    latency_s = min(link.latency_s + link.overhead_s for link in links)
    sent_s = float(bound.sent(topology.size)) * nbytes * fastest.per_byte_s / fastest.ports
    return max(least_rounds(topology.size, topology.size) * latency_s, sent_s)


def _engine(steps: Schedule, segments: int) -> str:
    """Return the engine that is exact enough and fast enough for a schedule."""
    if segments == 1 and len(steps.groups) <= 1:
        return "rounds"
    number = event_model.instances(steps, segments)
    if number <= _EASY:
        return "events"
    try:
        round_model.waves(steps)
    except RecursionError:
        if number > _MOST:
            problem = f"cannot simulate {number} groups of ranks and segments: more than {_MOST}"
            raise UsageError(problem) from None
        return "events"
    return "rounds"
