"""Predicts times of collectives by the alpha-beta-gamma (Hockney) model over closed-form costs of algorithms.

Theory of operation
-------------------
A round costs a latency (alpha), and each message of the busiest rank costs some work. Each byte that this rank sends
costs beta, and each byte that it combines costs gamma.

Ranks that share a core add up their work, and a round takes a turn of each of them.

Suppose that more ranks of a host send to other hosts at once than the link carries at full bandwidth. Then the busiest
resource of a round is the link of the host, not a rank's own port. The messages of these ranks take as long as one
message with all their bytes.

Whole rounds that were measured, by the bytes of a message, replace the constants, as in PLogP. They were measured
between two ranks or among all ranks of a job. Measurements among all ranks show best how much ranks on shared cores
slow each other down.

Algorithms of the same closed form still differ, because their ranks wait for each other in different orders. So if
whole calls of an algorithm were measured at a few sizes, they give the factor by which the prediction is off. Rounds
give the times between these sizes.

Between hosts, the model adds two terms. Several senders to one host share its line, while other lines are idle
(incast); `decide/senders.py` counts them. A path from rank to rank fills segment by segment (filling). Once it is full,
the rest takes as long as the busiest rank sends.

Segments form a pipeline. So while some segments cross the lines between hosts, ranks copy and combine others inside
hosts, and the longer of these two parts hides all but one segment of the shorter one.

`machine/parameters.py` holds the costs of links. The simulator (`simulator/`) is more exact and takes longer.

Open questions
--------------
Tried: interpolation between the tables of other numbers of ranks, without a calibration. Its regret was 1.08 to 1.16,
and up to 2.3 at a point, where the calibrated model had 1.00 to 1.04. Corrections interpolated between other numbers of
ranks were no better than the model alone. A calibration of one second was no better than the priors (decision 15).

Doubted: a closed form counts the data that the busiest rank sends. Only broadcasts, reduces and scans along chains
and in trees declare the path from rank to rank. Circulant distances and Bruck's algorithm are up to 21 % off the
simulator. The 15 % of incast were measured between four hosts of one rank each, on one machine whose links between them
were shaped (docs/measurements/many-hosts.md).
The factor of an algorithm is used at numbers of ranks at which nobody has measured it. On one host it was measured for
two to four ranks on two cores only (docs/measurements/tuning.md).

This would change our mind: a regret above that of fixed thresholds on a machine with many cores or real links. Then the
simulator, which follows each message, should rank the candidates, if it becomes fast enough for a first call.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from unisono.algorithms.catalogue.algorithm import Algorithm, Cost
from unisono.algorithms.catalogue.host_crossing import Crossing
from unisono.tuning.machine.parameters import UNMEASURED, Curve, Link, RoundCosts, between

# A rank that shares its core waits for a turn of each of the others, and then has lost its data from the caches. The
# others have lost theirs as well, so each turn takes this time for each rank on the core.
_TURN_S = 0.6e-6
_COLD = 4  # the factor of a message's overhead, because the caches are cold
# Where more than two ranks share a core, the messages of a round arrive in several turns. A rank that waits for all of
# them wakes when some have arrived, and then waits again. With many ranks on a core, each message costs this time more.
_WAKE_S = 3e-6

# The size of the cache nearest to a core, in bytes.
_NEAREST_CACHE = 32 << 10

_MOST_SEGMENTS = 4096
# Shorter messages over TCP are copied twice by the receiver.
_LEAST_SEGMENT_NBYTES = 16 << 10
_LEAST_MESSAGE_S = 1e-9

# The rounding error of logarithms, where a number of rounds is a part of another.
_ROUNDING = 1e-9


def predicted_s(
    cost: Cost,
    nbytes: int,
    link: Link,
    crowd: float = 1.0,
    reduce: Curve = UNMEASURED,
    at_once: int = 1,
    is_rooted: bool = False,
    senders: float = 1,
) -> float:
    """Return the predicted seconds of a call with this cost on vectors of `nbytes`, without pipelining.

    A rank that sends whole vectors sends as many messages; one that sends parts of them sends one message a round. All
    messages are taken to be equally long. Intermediate results that exceed the first-level cache take as long to write
    and read again as to combine.

    Args:
        cost: the closed form.
        nbytes: bytes of a vector.
        link: the link that all messages take.
        crowd: the number of ranks for each core, at least 1.
        reduce: the measured time of combining, by bytes; without knots, the rate of the link holds.
        at_once: the number of ranks of a host that send to other hosts at once.
        is_rooted: whether the collective has a root. Then few ranks wait for several messages at once, so a message
            costs no additional wake-up.
        senders: the number of hosts that send to one host at once.
    """
    messages, message_nbytes = _messages(cost, nbytes)
    if not messages:
        return nbytes * cost.reduced * link.reduce_per_byte_s
    stored = nbytes * (cost.stored or 0)
    worked = nbytes * cost.reduced + (stored if stored > _NEAREST_CACHE else 0)
    turn_s, waiting_s = (crowd * crowd * _TURN_S, _waiting_s(crowd, link, is_rooted)) if crowd > 1 else (0.0, 0.0)
    message_s = max(0.0, link.step_s(message_nbytes) - link.latency_s) + waiting_s
    work_s = messages * message_s + worked * reduce_per_byte_s(link, message_nbytes, reduce)
    alone_s = cost.rounds * (link.latency_s + turn_s) + crowd * work_s
    share = at_once / link.pairs
    if senders > 1:
        alone_s += messages * incast_s(link, message_nbytes * max(1, share), senders)
    if share <= 1:
        return alone_s
    # Ranks that share a core send one after another, and so do ranks that share a link: the wait counts only once.
    shared_s = _transfer_s(link, message_nbytes * share) - crowd * _transfer_s(link, message_nbytes)
    return alone_s + messages * max(0.0, shared_s)


def _waiting_s(crowd: float, link: Link, is_rooted: bool) -> float:
    """Return the seconds that a message costs in addition if `crowd` ranks share each core."""
    return max((_COLD - 1) * link.overhead_s, 0.0 if is_rooted else (1 - 2 / crowd) * _WAKE_S)


def _transfer_s(link: Link, nbytes: float) -> float:
    """Return the seconds that the bytes of a message take: its time without the latency and overhead of the link."""
    return max(0.0, link.step_s(nbytes) - link.latency_s - link.overhead_s)


def incast_s(link: Link, nbytes: float, senders: float) -> float:
    """Return the additional seconds of bytes that several hosts send to one host at once."""
    return link.incast * (1 - 1 / senders) * _transfer_s(link, nbytes)


def over_lines(cost: Cost) -> Cost:
    """Return a cost between hosts in which the busiest rank sends at least as much as the busiest one receives.

    The line of a host is as busy with received data as with sent data. A rank that reduces receives all elements that
    it combines.
    """
    return replace(cost, sent=max(cost.sent, cost.reduced))


def filling_s(cost: Cost, nbytes: int, link: Link, segments: int) -> float:
    """Return the seconds by which a path from rank to rank takes longer than the busiest rank, with segments."""
    if cost.path is None:
        return 0.0
    return _transfer_s(link, nbytes * max(0, cost.path - cost.sent)) / segments + (segments - 1) * link.overhead_s


def overlapped_s(
    inside_s: Callable[[int], float], across_s: Callable[[int], float], nbytes: int, segments: int
) -> float:
    """Return the seconds of a call whose messages inside hosts and between hosts overlap, because it has segments.

    Segments form a pipeline, so ranks copy and combine some segments while others cross the lines between hosts. Only
    one segment, the first or the last one, takes the shorter part of its way while the other part is idle. With one
    segment, the two parts add up.

    Args:
        inside_s: the seconds of the messages inside hosts alone, as a function of the bytes of a vector.
        across_s: the same for messages between hosts.
        nbytes: bytes of a vector.
        segments: the number of segments.
    """
    shorter_s, longer_s = sorted((inside_s, across_s), key=lambda part_s: part_s(nbytes))
    return longer_s(nbytes) + shorter_s(nbytes // segments)


def split(cost: Cost, crossing: Crossing) -> tuple[Cost, Cost]:
    """Return the part of a cost inside hosts and the part between them, whose sum is the cost."""
    across = Cost(
        rounds=math.ceil(cost.rounds * crossing.rounds - _ROUNDING),
        sent=cost.sent * crossing.sent,
        reduced=cost.reduced * crossing.sent,
        most_messages=round(cost.most_messages * crossing.sent),
        stored=(cost.stored or 0) * crossing.sent,
        path=None if cost.path is None else cost.path * crossing.sent,
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
    """Return the predicted seconds of a call with this cost on vectors of `nbytes`, by measured rounds of these ranks.

    In a rooted collective, the ranks send one vector on average, or less. So where ranks share cores (`crowd`), a rank
    that sends more than that has a core to itself while it does so. `slower` is the ratio of the time of combining to
    the time where rounds were measured.
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
    """Return the ratio of measured to predicted time at `nbytes`, by the measured sizes on both sides.

    Between two sizes, the ratio is on the line through both, on logarithmic axes. Beyond the outermost size, it is the
    ratio at that size.
    """
    after = bisect_right(measured.nbytes, nbytes)
    around = measured.nbytes[max(0, after - 1) : after + 1]
    low, high = around[0], around[-1]
    below, above = (measured.at(each) / predicted_s(each) for each in (low, high))
    return between(nbytes, (low, below), (high, above)) if low < nbytes < high else below


def _messages(cost: Cost, nbytes: int) -> tuple[float, float]:
    """Return the number of messages that the busiest rank sends, and the bytes of each."""
    messages = max(cost.rounds, cost.sent, cost.most_messages)
    return messages, nbytes * cost.sent / messages if messages else 0.0


def reduce_per_byte_s(link: Link, nbytes: float, reduce: Curve = UNMEASURED) -> float:
    """Return the seconds of combining one byte, in messages of `nbytes`."""
    return reduce.at(nbytes) / nbytes if reduce.nbytes and nbytes else link.reduce_per_byte_s


def shown(predicted_s: float | None) -> str:
    """Return a prediction as text for people."""
    return "not predicted" if predicted_s is None else f"predicted {predicted_s * 1e6:.1f} us"


def segments(algorithm: Algorithm, cost: Cost | None, nbytes: int, segment_nbytes: int) -> int:
    """Return the number of segments of `algorithm` if about `segment_nbytes` of a block travel at once.

    For an algorithm in blocks, this is the number of blocks. With only one round the number is 1, because no next round
    could begin before the first has ended.
    """
    if algorithm.in_blocks:
        cut_nbytes: float = nbytes
    elif cost is None or cost.rounds <= 1 or not algorithm.segmentable:
        return 1
    else:
        cut_nbytes = _block_nbytes(cost, nbytes)
    return max(1, min(_MOST_SEGMENTS, math.ceil(cut_nbytes / segment_nbytes)))


def usual_blocks(size: int, nbytes: int, link: Link) -> int:
    """Return the number of blocks with which an algorithm in blocks takes least time over a link.

    Its n − 1 + L rounds, L = ⌈log2 p⌉, take (n − 1 + L)·(a + t / n): a is the latency and overhead of a message, and t
    the time of the bytes of the vector. The least is at n = √((L − 1)·t / a).
    """
    message_s = max(_LEAST_MESSAGE_S, link.latency_s + link.overhead_s)
    least = math.sqrt(max(0, (size - 1).bit_length() - 1) * _transfer_s(link, nbytes) / message_s)
    return max(1, min(_MOST_SEGMENTS, round(least)))


def usual_path_segments(cost: Cost, nbytes: int, link: Link) -> int:
    """Return the number of segments with which the path of a cost takes the least time over a link.

    With s segments, the path takes f / s + (s − 1)·o longer than the busiest rank. f is the time of the part of the
    path that the busiest rank does not send, and o the overhead of a message. The least integer s with
    s·(s + 1) ≥ f / o takes the least time.
    """
    longer_s = filling_s(cost, nbytes, link, 1)
    least = math.ceil(math.sqrt(longer_s / max(_LEAST_MESSAGE_S, link.overhead_s) + 0.25) - 0.5)
    return max(1, min(_MOST_SEGMENTS, nbytes // _LEAST_SEGMENT_NBYTES, least))


def usual_segment_nbytes(algorithm: Algorithm, cost: Cost | None, nbytes: int, link: Link) -> int:
    """Return how many bytes of a block travel at once over a link, if the caller has not set this number."""
    is_whole = algorithm.steady and cost is not None and _block_nbytes(cost, nbytes) <= link.whole_nbytes
    return link.whole_nbytes if is_whole else link.segment_nbytes


def _block_nbytes(cost: Cost, nbytes: int) -> float:
    return min(nbytes, nbytes * cost.sent / max(1, cost.rounds))
