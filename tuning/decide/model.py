"""Predicted times of collectives: the alpha-beta-gamma (Hockney) model over the algorithms' closed-form costs.

A round costs a latency (alpha), and every message of the busiest rank some work; each byte that it sends costs beta,
and each byte that it combines gamma. Where ranks share cores, their work adds up, and a round takes a turn of each.
Where more ranks of a host send to other hosts at once than the link carries pairs, the most loaded resource of a round
is not a rank's own port but the way out of its host: their messages take as long as one of all their bytes.
Where whole rounds were measured, by the bytes of a message, they take the place of constants (PLogP): between two ranks
or, which knows best what ranks that share cores cost each other, among as many as there are. Algorithms of the same
closed form still differ, by the order in which their ranks wait for each other; so where whole calls of an algorithm
were measured too, at a few sizes, they say by which factor it is off, and the rounds what is between. What a link costs
is in `tuning.parameters`; the simulator (`tuning.simulate`) knows more, and takes longer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable

from unisono.algorithms.catalogue.algorithm import Algorithm, Cost
from unisono.algorithms.catalogue.host_crossing import Crossing
from unisono.tuning.machine.parameters import UNMEASURED, Curve, Link, RoundCosts, between

# A rank that shares its core waits for a turn of each of the others, and then finds nothing of its own in the caches.
# So do they, and the less the more there are: a turn takes so much for each of them.
_TURN_S = 0.6e-6
_COLD = 4

# Bytes of the cache that is nearest to a core.
_NEAREST_CACHE = 32 << 10

_MOST_SEGMENTS = 4096

# Of parts of rounds: what logarithms may be off by.
_ROUNDING = 1e-9


def predicted_s(
    cost: Cost, nbytes: int, link: Link, crowd: float = 1.0, reduce: Curve = UNMEASURED, at_once: int = 1
) -> float:
    """Return the predicted seconds of what costs so much on vectors of `nbytes`, not pipelined.

    `crowd` is the number of ranks for each core, and at least 1; `reduce` is the measured time of combining, by bytes;
    without knots, the link's own rate holds. `at_once` ranks of a host send to other hosts at once. A rank that sends
    whole vectors has as many messages; one that sends parts of them, one in each round. All of them are taken to be
    equally long. What is stored on the way, and no first-level cache holds, takes as long to write and read again as to
    combine.
    """
    messages, message_nbytes = _messages(cost, nbytes)
    if not messages:
        return nbytes * cost.reduced * link.reduce_per_byte_s
    stored = nbytes * (cost.stored or 0)
    worked = nbytes * cost.reduced + (stored if stored > _NEAREST_CACHE else 0)
    turn_s, cold = (crowd * crowd * _TURN_S, _COLD) if crowd > 1 else (0.0, 1)
    message_s = max(0.0, link.step_s(message_nbytes) - link.latency_s) + (cold - 1) * link.overhead_s
    work_s = messages * message_s + worked * reduce_per_byte_s(link, message_nbytes, reduce)
    alone_s, shared_s = (_transfer_s(link, message_nbytes * share) for share in (1.0, max(1.0, at_once / link.pairs)))
    # Who shares a core with others sends after them, and so does who shares a link: not twice.
    waits_s = messages * max(0.0, shared_s - crowd * alone_s)
    return cost.rounds * (link.latency_s + turn_s) + crowd * work_s + waits_s


def _transfer_s(link: Link, nbytes: float) -> float:
    """Return the seconds that a message takes beyond latency and work."""
    return max(0.0, link.step_s(nbytes) - link.latency_s - link.overhead_s)


def split(cost: Cost, crossing: Crossing) -> tuple[Cost, Cost]:
    """Return what a cost is inside hosts, and between them; together they are the whole."""
    across = Cost(
        rounds=math.ceil(cost.rounds * crossing.rounds - _ROUNDING),
        sent=cost.sent * crossing.sent,
        reduced=cost.reduced * crossing.sent,
        most_messages=round(cost.most_messages * crossing.sent),
        stored=(cost.stored or 0) * crossing.sent,
    )
    inside = Cost(
        rounds=cost.rounds - across.rounds,
        sent=cost.sent - across.sent,
        reduced=cost.reduced - across.reduced,
        most_messages=cost.most_messages - across.most_messages,
        stored=(cost.stored or 0) - (across.stored or 0),
    )
    return inside, across


def predicted_by_rounds_s(
    cost: Cost, nbytes: int, rounds: RoundCosts, *, is_rooted: bool, crowd: float = 1.0, slower: float = 1.0
) -> float:
    """Return the predicted seconds of what costs so much on vectors of `nbytes`, by measured rounds of these ranks.

    In a rooted collective the ranks send one vector on average, or less. So where the busiest sends more than that, it
    has cores to itself that ranks share (`crowd`) where all are as busy. Combining takes `slower` times as long as
    where it was measured.
    """
    messages, message_nbytes = _messages(cost, nbytes)
    if not messages:
        return rounds.rooted_call_s if is_rooted else rounds.call_s
    latency_s = rounds.step.seconds[0]
    moved_s = cost.rounds * (rounds.step_s(message_nbytes, nbytes) - latency_s)
    moved_s += (messages - cost.rounds) * rounds.further.at(message_nbytes)
    combined = nbytes * cost.reduced / message_nbytes if message_nbytes else 0.0
    reduce = rounds.reduce if messages <= cost.rounds else rounds.reduce_apart
    work_s = moved_s + slower * combined * reduce.at(message_nbytes)
    if is_rooted:
        return rounds.rooted_call_s + cost.rounds * latency_s + work_s / min(crowd, max(1.0, cost.sent))
    return rounds.call_s + cost.rounds * latency_s + work_s


def factor_at(measured: Curve, predicted_s: Callable[[int], float], nbytes: int) -> float:
    """Return how many times as long as predicted calls on so many bytes take, by the measured sizes around.

    Between two of them it is on the line through both, on logarithmic axes; beyond the outermost, as there.
    """
    after = bisect_right(measured.nbytes, nbytes)
    around = measured.nbytes[max(0, after - 1) : after + 1]
    low, high = around[0], around[-1]
    below, above = (measured.at(each) / predicted_s(each) for each in (low, high))
    return between(nbytes, (low, below), (high, above)) if low < nbytes < high else below


def _messages(cost: Cost, nbytes: int) -> tuple[float, float]:
    """Return how many messages the busiest rank sends, and the bytes of each."""
    messages = max(cost.rounds, cost.sent, cost.most_messages)
    return messages, nbytes * cost.sent / messages if messages else 0.0


def reduce_per_byte_s(link: Link, nbytes: float, reduce: Curve = UNMEASURED) -> float:
    """Return the seconds that each byte takes to combine, in messages of so many bytes."""
    return reduce.at(nbytes) / nbytes if reduce.nbytes and nbytes else link.reduce_per_byte_s


def shown(predicted_s: float | None) -> str:
    """Return what people read about a prediction."""
    return "not predicted" if predicted_s is None else f"predicted {predicted_s * 1e6:.1f} us"


def segments(algorithm: Algorithm, cost: Cost | None, nbytes: int, segment_nbytes: int) -> int:
    """Return over how many segments to run `algorithm`, so that about `segment_nbytes` of a block travel at once.

    Where there is one round, there is nothing that the next one could begin with before all has come.
    """
    if cost is None or cost.rounds <= 1 or not algorithm.segmentable:
        return 1
    return max(1, min(_MOST_SEGMENTS, math.ceil(_block_nbytes(cost, nbytes) / segment_nbytes)))


def usual_segment_nbytes(algorithm: Algorithm, cost: Cost | None, nbytes: int, link: Link) -> int:
    """Return how much of a block travels at once by a link, where nobody has said."""
    is_whole = algorithm.steady and cost is not None and _block_nbytes(cost, nbytes) <= link.whole_nbytes
    return link.whole_nbytes if is_whole else link.segment_nbytes


def _block_nbytes(cost: Cost, nbytes: int) -> float:
    return min(nbytes, nbytes * cost.sent / max(1, cost.rounds))
