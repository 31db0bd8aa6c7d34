"""Calibration: computes the parameters of links and memory from the times of a few probes.

The module is pure, because the caller passes in the probes. A probe is a round between two ranks, or between several
pairs of ranks of two hosts at once, or work of one rank. Its time is the same on all ranks of the job.

The costs of rounds among all ranks of a job follow from whole collectives that differ in one respect each:

- the number of rounds,
- whether arriving data is combined,
- whether a rank sends to all others at once,
- whether messages are whole vectors,
- whether there is a root.

Whole calls of each algorithm, at a few sizes, then show how far it is from this model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import geometric_mean
from typing import NamedTuple, Protocol

from unisono.algorithms.catalogue import costs
from unisono.tuning.machine.parameters import PRIORS, UNBOUNDED, Curve, Link, Parameters, RoundCosts, at_level, curve
from unisono.tuning.measure.race import typical_s

# Bytes of messages, for the short form, which takes less than a second, and for the long one.
SHORT = tuple(8 << (3 * k) for k in range(7))
LONG = tuple(8 << k for k in range(20))
_MEMORY = (64 << 10, 1 << 20, 16 << 20)
_BURST = 16
# How often each size is visited, and how often algorithms take turns at each visit. Turns end early once the calls have
# taken this long on average.
_VISITS, _TURNS, _ENOUGH_S = 2, 3, 8e-3
# Lower bounds of measured times: of a byte in any memory or cache, and of any work.
_FASTEST_S = 1e-11
_SHORTEST_S = 1e-8
_SMALL, _LARGE = 8, 1 << 20
# Vectors of these sizes are measured with these segments.
_PIPELINED, _SEGMENTS = (1 << 20, 4 << 20, 16 << 20), (128 << 10, 256 << 10)
# Blocks are cut if that takes less than this part of the time. A smaller gain does not count, because the receiver
# cannot read the parts by reference.
_CLEARLY = 0.95
# Pairs share a link if together they take longer than one alone by more than this factor.
_ROOM = 1.25


class Probes(Protocol):
    """Measures single operations; all results are in seconds.

    Attributes:
        pairs: the number of pairs of ranks that can exchange messages at once between two hosts; 1 on one host.
    """

    pairs: int

    def exchange(self, nbytes: int) -> float:
        """Return the time of a round in which two ranks send a message to each other."""

    def together(self, nbytes: int, pairs: int) -> float:
        """Return the time of a round in which `pairs` pairs do so at once, including the common end."""

    def one_way(self, nbytes: int) -> float:
        """Return half the time of a message and an equal reply."""

    def burst(self, nbytes: int, messages: int) -> float:
        """Return the time of `messages` messages one after the other, and of one reply."""

    def around(self, nbytes: int, segment_nbytes: int) -> float:
        """Return the time of a ring allreduce between two ranks, with `segment_nbytes` of a block at once."""

    def reduce(self, dtype: str, nbytes: int) -> float:
        """Return the time of combining two vectors."""

    def copy(self, nbytes: int) -> float:
        """Return the time of copying a vector."""


class Calibration(NamedTuple):
    """The measured parameters: of the link, of combining by dtype, and of copying, by bytes."""

    link: Link
    reduce: dict[str, Curve]
    copy: Curve


def calibrate(probes: Probes, link: str, sizes: Sequence[int], dtypes: Sequence[str], level: str = "") -> Calibration:
    """Return the parameters of a link at a level for messages of `sizes`, and of reductions of `dtypes`."""
    prior = PRIORS.link(link, level)
    # Long messages come first, because TCP begins slowly on a connection that was idle.
    step = curve((nbytes, probes.exchange(nbytes)) for nbytes in reversed(sizes))
    overhead_s = max(0.0, (probes.burst(_SMALL, _BURST) - probes.burst(_SMALL, 1)) / (_BURST - 1))
    reduce = {dtype: _rate(partial(probes.reduce, dtype)) for dtype in dtypes}
    small_s, large_s = step.at(_SMALL), step.at(_LARGE)
    measured = prior._replace(
        name=at_level(link, level),
        # The latency is at most the time of a round, because a round includes one message. The rest is work.
        latency_s=min(probes.one_way(_SMALL), small_s),
        overhead_s=min(overhead_s, small_s),
        per_byte_s=(large_s - small_s) / _LARGE,
        reduce_per_byte_s=reduce[dtypes[0]].at(_LARGE) / _LARGE,
        step=step,
        pairs=pairs_at_once(probes),
    )
    return Calibration(with_segments(measured, probes), reduce, _rate(probes.copy))


def with_segments(link: Link, probes: Probes) -> Link:
    """Return the link with its fastest segments, if blocks can travel whole over such a link at all.

    Blocks travel whole up to half of the shortest block that is clearly faster in parts. Parts are still in caches when
    the next round reads them, but the receiver cannot fetch them by reference (decision 5).
    """
    if link.whole_nbytes <= link.segment_nbytes:
        return link
    # All sizes are measured before any decision, because the other rank has other times and might stop elsewhere.
    for nbytes, (*cut_s, whole_s) in [(each, _around(probes, each)) for each in _PIPELINED]:
        fastest = _SEGMENTS[cut_s.index(min(cut_s))]
        if min(cut_s) < _CLEARLY * whole_s:
            return link._replace(segment_nbytes=fastest, whole_nbytes=nbytes // 4)
    return link._replace(segment_nbytes=fastest)


def _around(probes: Probes, nbytes: int) -> list[float]:
    """Return the times of a vector around the ring, for each segment size and for whole blocks."""
    turns = [[probes.around(nbytes, each) for each in (*_SEGMENTS, nbytes // 2)] for _ in range(_TURNS)]
    return [typical_s(times) for times in zip(*turns, strict=True)]


def pairs_at_once(probes: Probes) -> float:
    """Return how many pairs of ranks can send at once at full bandwidth, by how much longer all pairs take than one.

    The time of short messages is subtracted, because it does not depend on bandwidth. The result is `UNBOUNDED` if all
    pairs together take at most `_ROOM` times as long.
    """
    if probes.pairs < 2:
        return UNBOUNDED

    def transfer_s(pairs: int) -> float:
        return max(_SHORTEST_S, probes.together(_LARGE, pairs) - probes.together(_SMALL, pairs))

    longer = transfer_s(probes.pairs) / transfer_s(1)
    return max(1.0, probes.pairs / longer) if longer > _ROOM else UNBOUNDED


def calibrate_rounds(
    time_s: Callable[[str, str, int], float], ranks: int, ranks_per_host: int, sizes: Sequence[int]
) -> RoundCosts:
    """Return the costs of rounds among the ranks, for messages of `sizes`.

    `time_s` measures a collective with an algorithm on a vector of some bytes.
    """
    least, others = sizes[0], ranks - 1
    vectors = [nbytes * ranks for nbytes in sizes]

    def shared(collective: str, algorithm: str) -> dict[int, float]:
        """Return the times of a collective; the key is the bytes of the share of one rank."""
        return {nbytes // ranks: time_s(collective, algorithm, nbytes) for nbytes in vectors}

    rings, at_once = shared("allgather", "ring"), shared("allgather", "direct")
    # A ring with twice as many rounds takes twice the time of the rounds, so the difference is the cost of a call.
    call_s = max(0.0, 2 * rings[least] - time_s("allreduce", "ring", least * ranks))
    step = _positive({n: (s - call_s) / others for n, s in rings.items()})
    reduce = _positive({n: (s - rings[n]) / others for n, s in shared("reduce_scatter", "ring").items()})
    apart = _positive({n: (s - at_once[n]) / others for n, s in shared("reduce_scatter", "direct").items()})
    further = _positive({n: (s - call_s - step.at(n)) / (ranks - 2) for n, s in at_once.items()}) if ranks > 2 else step
    butterfly = costs.allreduce_recursive_doubling(ranks)
    part = butterfly.sent / butterfly.rounds  # less than 1 where ranks are folded, and so wait in some of the rounds
    doubling = {n: time_s("allreduce", "recursive_doubling", n) for n in vectors}
    rounds = {round(n * part): (s - call_s) / butterfly.rounds for n, s in doubling.items()}
    whole = _positive({n: s - reduce.at(n) for n, s in rounds.items()})
    tree_s, deep = time_s("broadcast", "binomial", least), costs.broadcast_binomial(ranks).rounds
    rooted_call_s = max(0.0, tree_s - deep * step.at(least))
    return RoundCosts(ranks, ranks_per_host, call_s, rooted_call_s, step, whole, further, reduce, apart)


def calibrate_calls(
    time_s: Callable[[str, str, int], float], algorithms: Mapping[str, Sequence[str]], sizes: Sequence[int]
) -> dict[str, dict[str, Curve]]:
    """Return the seconds of whole calls on vectors of `sizes`, by collective and algorithm; see `calibrate_rounds`.

    Algorithms take turns and are compared by the ratios within a turn, so that a temporary slowdown of the machine hits
    all of them. Each size is visited more than once, so that a slowdown hits only some of its turns.
    """
    curves: dict[str, dict[str, Curve]] = {}
    for collective, names in algorithms.items():
        turns: dict[int, list[list[float]]] = {nbytes: [] for nbytes in sizes}
        for nbytes in [*sizes] * _VISITS:
            taken = turns[nbytes]
            for _ in range(_TURNS):
                if sum(map(sum, taken)) <= len(names) * _ENOUGH_S:
                    taken.append([time_s(collective, name, nbytes) for name in names])
        of_each = zip(*map(_by_ratios, turns.values()), strict=True)
        curves[collective] = {
            name: curve(zip(turns, times, strict=True)) for name, times in zip(names, of_each, strict=True)
        }
    return curves


def _by_ratios(turns: Sequence[Sequence[float]]) -> list[float]:
    """Return the typical time of each column: its typical ratio to the mean of a turn, times the typical mean.

    >>> _by_ratios([[1.0, 4.0], [10.0, 40.0], [10.0, 40.0]])
    [10.0, 40.0]
    """
    means = [geometric_mean(turn) for turn in turns]
    usual_s = typical_s(means)
    ratios = [[seconds / mean for seconds in turn] for turn, mean in zip(turns, means, strict=True)]
    return [usual_s * typical_s(column) for column in zip(*ratios, strict=True)]


def _positive(seconds: Mapping[int, float]) -> Curve:
    """Return a curve of differences of times. Noise can make a difference negative, so each has a lower bound."""
    return curve((nbytes, max(each, nbytes * _FASTEST_S, _SHORTEST_S)) for nbytes, each in seconds.items())


def _rate(work: Callable[[int], float]) -> Curve:
    """Return the curve of the time of work on memory, by bytes, without the constant cost of a call.

    Below the first size of `_MEMORY`, a byte takes as long as there, although the data may lie in a faster cache.
    """
    call_s = work(_SMALL)
    points = [(nbytes, max(work(nbytes) - call_s, nbytes * _FASTEST_S)) for nbytes in _MEMORY]
    (nbytes, seconds), *_ = points
    return curve([(_SMALL, seconds * _SMALL / nbytes), *points])


def updated(parameters: Parameters, calibration: Calibration) -> Parameters:
    """Return the parameters with those of a calibration in place of older ones."""
    return parameters._replace(
        links={**parameters.links, calibration.link.name: calibration.link},
        reduce={**parameters.reduce, **calibration.reduce},
        copy=calibration.copy,
    )


def with_rounds(parameters: Parameters, link: str, rounds: RoundCosts) -> Parameters:
    """Return the parameters with the costs of rounds in place of older ones among as many ranks."""
    others = [
        each
        for each in parameters.rounds.get(link, ())
        if (each.ranks, each.ranks_per_host) != (rounds.ranks, rounds.ranks_per_host)
    ]
    return parameters._replace(rounds={**parameters.rounds, link: (*others, rounds)})
