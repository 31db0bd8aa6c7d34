"""Simulating collectives: how long an algorithm takes on a described topology, at any number of ranks, and why.

Two engines carry out the same schedule (`tuning.schedule`): `tuning.events` to the letter, and `tuning.rounds` for all
ranks at once. Plans of one lane and one segment are simulated by rounds: both say the same of them where a rank has one
message at a time, and nearly so elsewhere. All others are simulated by events, as long as there are not too many.

What is left out: the sharing of a host's memory and cores, the order in which a network serves messages, its adaptive
routing and its other users. Blocks are taken to be equally long, also where they cannot be.
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

# Instances (rank, lane, group, segment) that are simulated one by one where rounds would do, and at most.
_EASY, _MOST = 200_000, 4_000_000


class OfLevel(NamedTuple):
    """What went over one level of the topology."""

    name: str
    nbytes: float
    messages: int


class Simulation(NamedTuple):
    """What a collective did.

    Attributes:
        collective, algorithm, size, nbytes, segments: what was simulated.
        engine: "rounds" or "events".
        seconds: until the last rank ended.
        finish_s: when each rank ended.
        levels: from the inside out.
        busiest: the resource that was busy longest, and for how many seconds.
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
    """Return what happens when all ranks of a topology call a collective at once, on vectors of `nbytes`.

    The vector is that of `Cost`: the INPUT of a reduction or an alltoall, what the root of a broadcast, gather or
    scatter has of all ranks, or the OUTPUT of an allgather. `params` are those of the algorithm's builder.

    Raises:
        NoAlgorithmError, UsageError: the algorithm does not run so; or it has more instances than are simulated.
    """
    if nbytes < 0 or segments < 1 or engine not in ENGINES:
        raise UsageError(f"cannot simulate {nbytes} bytes in {segments} segments by engine {engine!r}")
    found = schedule(algorithm, topology.size, root, dict(params or {}))
    used = _engine(found, segments) if engine == "auto" else engine
    traffic = (event_model.run if used == "events" else round_model.run)(found, topology, nbytes, segments)
    busiest = int(np.argmax(traffic.busy_s))
    over = zip(topology.levels, traffic.nbytes, traffic.messages, strict=True)
    return Simulation(
        algorithm.collective,
        algorithm.name,
        topology.size,
        nbytes,
        segments,
        used,
        float(traffic.finish_s.max(initial=0.0)),
        traffic.finish_s,
        tuple(OfLevel(level.name, float(sent), int(messages)) for level, sent, messages in over),
        (topology.name_of(busiest), float(traffic.busy_s[busiest])),
    )


def least_s(collective: str, nbytes: float, topology: Topology) -> float:
    """Return what no algorithm takes less than, if ranks send one message at a time: of rounds, or of bytes."""
    links = [level.link for level in topology.levels]
    fastest = min(links, key=lambda link: link.per_byte_s / link.ports)
    bound = BOUNDS[collective]
    latency_s = min(link.latency_s + link.overhead_s for link in links)
    sent_s = float(bound.sent(topology.size)) * nbytes * fastest.per_byte_s / fastest.ports
    return max(least_rounds(topology.size, topology.size) * latency_s, sent_s)


def _engine(found: Schedule, segments: int) -> str:
    """Return the engine that is right for a schedule, and fast enough."""
    if segments == 1 and len(found.groups) <= 1:
        return "rounds"
    number = event_model.instances(found, segments)
    if number <= _EASY:
        return "events"
    try:
        round_model.waves(found)
    except RecursionError:
        if number > _MOST:
            said = f"{number} groups of ranks and segments are more than the {_MOST} that are simulated"
            raise UsageError(said) from None
        return "events"
    return "rounds"
