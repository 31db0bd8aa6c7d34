"""Predicted times of collectives: the alpha-beta-gamma (Hockney) model over the algorithms' closed-form costs.

A round costs a latency (alpha), and every message of the busiest rank some work; each byte that it sends costs beta,
and each byte that it combines gamma. Where ranks share cores, their work adds up, and a round takes a turn of each.
The constants below are priors, measured on one x86-64 server of 2025; they only have to order the algorithms rightly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from unisono.algorithms.algorithm import Algorithm, Cost


@dataclass(frozen=True, slots=True)
class Link:
    """What one kind of link between ranks costs.

    Attributes:
        name: "shm", "tcp" or "local".
        latency_s: of one message (alpha).
        per_message_s: of the work for one message, which adds up where a rank has several at a time.
        per_byte_s: of each byte sent (beta).
        reduce_per_byte_s: of each byte combined (gamma).
        segment_nbytes: how much of a block travels at once in a pipelined plan.
    """

    name: str
    latency_s: float
    per_message_s: float
    per_byte_s: float
    reduce_per_byte_s: float
    segment_nbytes: int


LINKS: dict[str, Link] = {
    "shm": Link("shm", 0.3e-6, 0.1e-6, 1 / 10e9, 1 / 20e9, 128 << 10),
    "tcp": Link("tcp", 10e-6, 2e-6, 1 / 2e9, 1 / 20e9, 256 << 10),
    "local": Link("local", 40e-6, 10e-6, 1 / 5e9, 1 / 2e9, 1 << 20),
}

# A rank that shares its core waits for a turn of each of the others, and then finds nothing of its own in the caches.
_TURN_S = 2.5e-6
_COLD = 4

_MOST_SEGMENTS = 4096


def predicted_s(cost: Cost, nbytes: int, link: Link, crowd: float = 1.0) -> float:
    """Return the predicted seconds of what costs so much on vectors of `nbytes`, not pipelined.

    `crowd` is the number of ranks for each core, and at least 1. A rank that sends whole vectors has as many messages;
    one that sends parts of them, one in each round.
    """
    messages = max(cost.rounds, cost.sent)
    per_byte_s = cost.sent * link.per_byte_s + cost.reduced * link.reduce_per_byte_s
    turn_s, cold = (crowd * _TURN_S, _COLD) if crowd > 1 else (0.0, 1)
    work_s = messages * cold * link.per_message_s + nbytes * per_byte_s
    return cost.rounds * (link.latency_s + turn_s) + crowd * work_s


def shown(predicted_s: float | None) -> str:
    """Return what people read about a prediction."""
    return "not predicted" if predicted_s is None else f"predicted {predicted_s * 1e6:.1f} us"


def segments(algorithm: Algorithm, cost: Cost | None, nbytes: int, segment_nbytes: int) -> int:
    """Return over how many segments to run `algorithm`, so that about `segment_nbytes` of a block travel at once."""
    if cost is None or cost.rounds == 0 or not algorithm.segmentable:
        return 1
    message_nbytes = min(nbytes, nbytes * cost.sent / cost.rounds)
    return max(1, min(_MOST_SEGMENTS, math.ceil(message_nbytes / segment_nbytes)))
