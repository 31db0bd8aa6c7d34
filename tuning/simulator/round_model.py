"""Simulates plans by rounds: all ranks at once as arrays, one round after the other.

Theory of operation
-------------------
Round w consists of group w of each lane. With S segments, it consists of group w - s of segment s, for all s. This is
the canonical order in which executors post. A rank starts a round when it has ended the one before, so different ranks
need not be in step. If a group waits for a group of another lane, it goes into a later round on all ranks. Without
segments and such waits, this is exactly the meaning of plans. With them, the result may be slower than that of
`event_model.py`, never faster.

A message is synchronous, as in proofs of plans: it starts at time t, when both ranks have started the round. On an
eager topology, t is when its sender has. A rank sends its messages one after the other. Message i has been sent at t
plus the work of i messages plus its part of the *transfer* of all of them. It arrives one latency later. The transfer
of a single message takes the time of the link's step minus latency and work.

Each resource is busy for the transfers of all messages that cross it in the round, divided by its capacity. The
transfers of a rank take as long as the most loaded resource on any of their paths, and its own port is one of these. A
rank ends the round when it has sent all its messages, has received all of its own, and has then combined and copied
them. Flags, and reads of a peer's memory, wait for no other rank.

A link may make a message to another rank than the one before cost the sender more work (`Link.other_peer_s`).

If a round equals the one before and has added the same time on every rank, all further equal rounds will do so too. So
a ring takes only as many rounds as it takes to see that, not twice the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unisono.tuning.machine.parameters import Curve
from unisono.tuning.machine.topology import NO_RESOURCE, Floats, Ranks, Topology
from unisono.tuning.simulator.step_table import COPY, FLAG, MAPPED, MESSAGE, REDUCE, Schedule

# Added times count as equal if they differ by at most this part of them, plus this part of the time that they add to.
_ALIKE, _ROUNDING = 1e-12, 1e-15


class SimulatedTraffic(NamedTuple):
    """The counters of a simulation.

    Attributes:
        finish_s: the time at which each rank ends.
        nbytes: the bytes over each level.
        messages: the number of messages and flags over each level.
        busy_s: the busy time of each resource.
    """

    finish_s: Floats
    nbytes: Floats
    messages: Ranks
    busy_s: Floats


class _Rows(NamedTuple):
    """Rows with rounds in place of groups: one row for each segment."""

    rank: Ranks
    kind: Ranks
    first: Ranks
    stride: Ranks
    times: Ranks
    peer: Ranks
    advance: Ranks
    nbytes: Floats


class _Steps(NamedTuple):
    """The steps of some ranks in a round, sorted by rank."""

    rank: Ranks
    kind: Ranks
    peer: Ranks
    nbytes: Floats


class _Round(NamedTuple):
    """One round of all ranks.

    Attributes:
        own_s: the time that each rank sends and reads.
        source, target, sent_s, arrives_s: for each message, its ranks, and the times from its start until it has been
            sent and has arrived.
        flags: for each message, whether it is a flag.
        work_s: the time that each rank combines and copies.
        nbytes, messages: the traffic over each level.
        busy_s: the busy time of each resource.
    """

    own_s: Floats
    source: Ranks
    target: Ranks
    sent_s: Floats
    arrives_s: Floats
    flags: npt.NDArray[np.bool_]
    work_s: Floats
    nbytes: Floats
    messages: Ranks
    busy_s: Floats


def run(steps: Schedule, topology: Topology, nbytes: float, segments: int) -> SimulatedTraffic:
    """Return the traffic of a schedule on vectors of `nbytes`, cut into `segments` segments.

    Raises:
        RecursionError: lanes wait for each other in both directions, so that there are no rounds.
    """
    rows = _in_segments(_by_round(steps), nbytes, segments)
    now = np.zeros(steps.size)
    level_nbytes, messages = np.zeros(len(topology.levels)), np.zeros(len(topology.levels), np.int64)
    busy_s = np.zeros(len(topology.capacities))
    last_peer = np.full(steps.size, -1, np.int64)
    for active, first, last in _intervals(rows):
        for round_, times in _rounds(rows, active, (first, last), topology, steps.ranks, last_peer):
            now = _repeated(round_, times, now, topology.is_eager)
            level_nbytes += times * round_.nbytes
            messages += times * round_.messages
            busy_s += times * round_.busy_s
    return SimulatedTraffic(now, level_nbytes, messages, busy_s)


def waves(steps: Schedule) -> list[Ranks]:
    """Return the round of each group of each lane: the first one after all groups for which the group waits.

    Raises:
        RecursionError: there is no such order, because lanes wait for each other in both directions.
    """
    waits: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for wait in steps.after:
        waits.setdefault((wait.lane, wait.group), set()).add((wait.other, wait.earlier))
    rounds = [np.full(groups, -1, np.int64) for groups in steps.groups]
    done = [0] * len(rounds)
    while any(done[lane] < len(rounds[lane]) for lane in range(len(rounds))):
        before = list(done)
        for lane, of_lane in enumerate(rounds):
            _advance(lane, of_lane, done, rounds, waits)
        if done == before:
            raise RecursionError("lanes wait for each other in both directions")
    return rounds


def _advance(
    lane: int, of_lane: Ranks, done: list[int], rounds: list[Ranks], waits: dict[tuple[int, int], set[tuple[int, int]]]
) -> None:
    """Number the groups of a lane up to the first that waits for a group without a number."""
    stops = sorted(group for own, group in waits if own == lane and group >= done[lane])
    while done[lane] < len(of_lane):
        at = done[lane]
        earlier = waits.get((lane, at), set())
        if any(done[other] <= group for other, group in earlier):
            return
        last = of_lane[at - 1] if at else -1
        start = max([last, *(rounds[other][group] for other, group in earlier)]) + 1
        stop = next((group for group in stops if group > at), len(of_lane))
        of_lane[at:stop] = start + np.arange(stop - at)
        done[lane] = stop


def _by_round(steps: Schedule) -> Schedule:
    """Return a schedule with rounds in place of groups; rows whose rounds are not evenly spaced are expanded."""
    if len(steps.groups) < 2 or not steps.after:
        return steps
    rounds = waves(steps)
    starts = np.cumsum([0, *map(len, rounds)])[steps.lane]
    every = np.concatenate(rounds)
    span = steps.stride * (steps.times - 1)
    first, last = every[starts + steps.first], every[starts + steps.first + span]
    even = last - first == span
    again = np.where(even, 1, steps.times)
    index = np.repeat(np.arange(len(again)), again)
    count = np.arange(len(index)) - np.repeat(np.cumsum(again) - again, again)
    columns = {name: getattr(steps, name)[index] for name in ("rank", "kind", "lane", "stride", "advance", "share")}
    at = starts[index] + steps.first[index] + count * columns["stride"]
    moved = _advanced(steps.peer[index], count * columns["advance"], steps.ranks)
    times = np.where(even[index], steps.times[index], 1)
    return steps._replace(first=every[at], times=times, peer=moved, **columns)


def _advanced(peer: Ranks, advance: Ranks, ranks: int) -> Ranks:
    """Return peers that have moved on around the ring of `ranks` ranks; nobody stays nobody."""
    return np.where(peer < 0, -1, peer - peer % ranks + (peer + advance) % ranks)


def _in_segments(steps: Schedule, nbytes: float, segments: int) -> _Rows:
    """Return the rows of all segments; with one segment, rows are not copied, because there may be many."""
    names = ("rank", "kind", "stride", "times", "peer", "advance")
    if segments == 1:
        return _Rows(first=steps.first, nbytes=steps.share * nbytes, **{name: getattr(steps, name) for name in names})
    columns = {name: np.tile(getattr(steps, name), segments) for name in names}
    first = np.tile(steps.first, segments) + np.repeat(np.arange(segments), len(steps.rank))
    return _Rows(first=first, nbytes=np.tile(steps.share * (nbytes / segments), segments), **columns)


def _chosen(rows: _Rows, index: Ranks) -> _Rows:
    return _Rows(*(column[index] for column in rows))  # type: ignore[arg-type]


def _steps(rows: _Rows, index: Ranks) -> _Steps:
    return _Steps(rows.rank[index], rows.kind[index], rows.peer[index], rows.nbytes[index])


def _intervals(rows: _Rows) -> Iterator[tuple[Ranks, int, int]]:
    """Yield runs of rounds, as (rows, first, after the last), with the rows that are in all of them, sorted by rank."""
    if not len(rows.rank):
        return
    end = rows.first + rows.stride * (rows.times - 1) + 1
    edges = np.flatnonzero(np.bincount(np.concatenate((rows.first, end))))
    is_once = rows.times == 1
    once, often = np.flatnonzero(is_once), np.flatnonzero(~is_once)
    once = once[np.argsort(rows.first[once], kind="stable")]
    bounds = np.searchsorted(rows.first[once], edges)
    for number, (first, last) in enumerate(pairwise(edges)):
        alone = once[bounds[number] : bounds[number + 1]]
        going_on = often[(rows.first[often] <= first) & (end[often] >= last)]
        active = np.concatenate((alone, going_on))
        if len(active):
            if len(going_on):
                active.sort(kind="stable")  # merges two sorted runs
            yield active[np.argsort(rows.rank[active], kind="stable")], int(first), int(last)


def _rounds(
    rows: _Rows, active: Ranks, run: tuple[int, int], topology: Topology, ranks: int, last_peer: Ranks
) -> Iterator[tuple[_Round, int]]:
    """Yield the rounds of a run, and how often each repeats.

    `ranks` is that of the schedule. `last_peer` has the peer of the last message of each rank, and is kept up to date.
    """
    first, last = run
    often = active[rows.times[active] > 1]
    if not ((rows.stride[often] > 1) | (rows.advance[often] != 0)).any():
        if last - first > 1 and any(level.link.other_peer_s for level in topology.levels):
            yield _round(_steps(rows, active), topology, last_peer), 1
            first += 1
        yield _round(_steps(rows, active), topology, last_peer), last - first
        return
    changing = _chosen(rows, active)
    for at in range(first, last):
        iteration, rest = np.divmod(at - changing.first, changing.stride)
        peer = _advanced(changing.peer, iteration * changing.advance, ranks)
        yield _round(_steps(changing._replace(peer=peer), np.flatnonzero(rest == 0)), topology, last_peer), 1


def _repeated(round_: _Round, times: int, now: Floats, is_eager: bool) -> Floats:
    """Return when each rank has ended `times` equal rounds, if it can start at `now`."""
    source, target = round_.source, round_.target
    for done in range(1, times + 1):
        start = now[source]
        if not is_eager:
            start = np.where(round_.flags, start, np.maximum(start, now[target]))
        after = now + round_.own_s
        np.maximum.at(after, source, start + round_.sent_s)
        np.maximum.at(after, target, start + round_.arrives_s)
        after += round_.work_s
        added = after - now
        now = after
        most_s = float(added.max(initial=0.0))
        if done < times and np.ptp(added) <= _ALIKE * most_s + _ROUNDING * float(now.max(initial=0.0)):
            return np.add(now, (times - done) * most_s)
    return now


def _round(rows: _Steps, topology: Topology, last_peer: Ranks) -> _Round:
    size = topology.size
    moves = (rows.kind == MESSAGE) | (rows.kind == FLAG) | (rows.kind == MAPPED)
    moving, working = np.flatnonzero(moves), np.flatnonzero(~moves)
    rank, peer, kind, nbytes = rows.rank[moving], rows.peer[moving], rows.kind[moving], rows.nbytes[moving]
    is_message, is_mapped = kind == MESSAGE, kind == MAPPED
    paths = topology.paths(np.where(is_mapped, peer, rank), np.where(is_mapped, rank, peer))
    links = [level.link for level in topology.levels]
    latency_s = np.array([link.latency_s for link in links])[paths.level] + paths.extra_s
    overhead_s = np.array([link.overhead_s for link in links])[paths.level]
    other_peer_s = np.array([link.other_peer_s for link in links])[paths.level]
    overhead_s = overhead_s + np.where(peer != _peers_before(rank, peer, last_peer), other_peer_s, 0.0)
    transfer_s = np.where(kind == FLAG, 0.0, transfers(topology, paths.level, nbytes))
    busy_s = loads(topology, paths.resources, transfer_s)
    on_the_way_s = np.append(busy_s, 0.0)[np.ascontiguousarray(paths.resources.T)]
    most_s = on_the_way_s.max(axis=0, initial=0.0)
    # Sums over the messages of a rank, which are adjacent.
    whole_s = np.zeros(size)
    np.maximum.at(whole_s, rank, most_s)
    total_s = _sums(rank, transfer_s, size)
    stretch = np.divide(whole_s, total_s, out=np.zeros(size), where=total_s > 0)
    working_s = np.where(is_message, overhead_s, 0.0)
    sent_s = _running(working_s, rank) + stretch[rank] * _running(transfer_s, rank)
    alone_s = np.where(kind == FLAG, overhead_s, 0.0)
    arrives = ~is_mapped
    return _Round(
        own_s=_sums(rank, working_s, size) + np.where(total_s > 0, whole_s, 0.0),
        source=rank[arrives],
        target=peer[arrives],
        sent_s=sent_s[arrives],
        arrives_s=(sent_s + alone_s + latency_s)[arrives],
        flags=(kind == FLAG)[arrives],
        work_s=_sums(rows.rank[working], work(topology, rows.kind[working], rows.nbytes[working]), size),
        nbytes=_sums(paths.level, nbytes, len(links)),
        messages=np.bincount(paths.level, minlength=len(links)),
        busy_s=busy_s,
    )


def _peers_before(rank: Ranks, peer: Ranks, last_peer: Ranks) -> Ranks:
    """Return, for each message of a round, the peer of the message before it; note the last peers of all ranks."""
    is_first = np.diff(rank, prepend=-1) != 0
    before: Ranks = np.where(is_first, last_peer[rank], np.roll(peer, 1))
    is_last = np.diff(rank, append=-1) != 0
    last_peer[rank[is_last]] = peer[is_last]
    return before


def transfers(topology: Topology, level: Ranks, nbytes: Floats) -> Floats:
    """Return the seconds of messages on the links of their levels, beyond latency and work."""
    seconds = np.empty(len(level))
    for at, topology_level in enumerate(topology.levels):
        of_level = level == at
        link = topology_level.link
        if link.step.nbytes:
            seconds[of_level] = np.maximum(0.0, at_all(link.step, nbytes[of_level]) - link.latency_s - link.overhead_s)
        else:
            seconds[of_level] = nbytes[of_level] * link.per_byte_s
    return seconds


def work(topology: Topology, kind: Ranks, nbytes: Floats) -> Floats:
    """Return the seconds of combining or copying `nbytes`."""
    rate = topology.levels[0].link.reduce_per_byte_s
    combining = at_all(topology.reduce, nbytes) if topology.reduce.nbytes else nbytes * rate
    copying = at_all(topology.copy, nbytes) if topology.copy.nbytes else np.zeros(len(nbytes))
    return np.where(kind == REDUCE, combining, np.where(kind == COPY, copying, 0.0))


def loads(topology: Topology, resources: Ranks, transfer_s: Floats) -> Floats:
    """Return the busy time of each resource."""
    numbers = resources.ravel() - NO_RESOURCE  # resources from 1 on; 0 is none
    used_s = _sums(numbers, np.repeat(transfer_s, resources.shape[1]), len(topology.capacities) + 1)
    return used_s[1:] / topology.capacities


def at_all(curve: Curve, nbytes: Floats) -> Floats:
    """Return the seconds of a curve at many numbers of bytes; `Curve.at` does so for one."""
    sizes, seconds = np.array(curve.nbytes, float), np.array(curve.seconds)
    clipped = np.maximum(nbytes, sizes[0])
    within: Floats = np.exp(np.interp(np.log(clipped), np.log(sizes), np.log(seconds)))
    beyond: Floats = seconds[-1] * nbytes / sizes[-1]
    return np.where(nbytes > sizes[-1], beyond, within)


def _sums(index: Ranks, values: Floats, count: int) -> Floats:
    return np.bincount(index, values, count).astype(float, copy=False)


def _running(values: Floats, rank: Ranks) -> Floats:
    """Return running sums over the messages of each rank, which are adjacent."""
    sums = np.cumsum(values)
    starts = np.flatnonzero(np.diff(rank, prepend=-1))
    before = (sums - values)[starts]
    less: Floats = np.repeat(before, np.diff(np.append(starts, len(rank))))
    return np.subtract(sums, less)
