"""Simulation by rounds: all ranks at once, one round after the other, as arrays.

Theory of operation
-------------------
Round w is what group w of each lane does; with S segments, it is group w - s of segment s, for all s: the canonical
order in which executors post. A rank starts a round when it has ended the one before. So ranks are not in step with
each other, only with themselves; what waits for a group of another lane is put into a later round than that on all
ranks. Without either, this is what plans mean; with them, it may be slower, never faster, than `tuning.events`.

A message is a rendezvous, as where plans are proved: it starts at t, when both ranks have started the round. A rank
sends its messages one after the other: message i has been sent at t plus the work for i messages plus its part of the
*transfer* of all of them, and has arrived a latency later. The transfer alone on its way takes what the link's step
costs beyond latency and work. Every resource is busy, for all messages of the round that cross it, as long as their
transfers take, divided by its capacity; the transfers of a rank take as long as the most loaded resource on any of
their ways, its own port at least. A rank ends the round when it has sent everything and all has arrived for it, and it
has then combined and copied what it has to. Flags, and reads of a peer's memory, wait for nobody.

Where a round is like the one before and has added the same to the time of every rank, it will go on doing so: a ring
takes as many rounds as it takes to see that, not twice the number of ranks.
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

# Rounds add the same where what they add differs by no more than this part of it, and of the time that it is added to.
_ALIKE, _ROUNDING = 1e-12, 1e-15


class Traffic(NamedTuple):
    """What a simulation counts.

    Attributes:
        finish_s: when each rank ends.
        nbytes: what went over each level.
        messages: how many messages and flags did.
        busy_s: how long each resource was busy.
    """

    finish_s: Floats
    nbytes: Floats
    messages: Ranks
    busy_s: Floats


class _Rows(NamedTuple):
    """Rows by round: a row for each segment, with the round in the place of the group."""

    rank: Ranks
    kind: Ranks
    first: Ranks
    stride: Ranks
    times: Ranks
    peer: Ranks
    advance: Ranks
    nbytes: Floats


class _Steps(NamedTuple):
    """What some ranks do in a round, by rank."""

    rank: Ranks
    kind: Ranks
    peer: Ranks
    nbytes: Floats


class _Round(NamedTuple):
    """One round of all ranks.

    Attributes:
        own_s: how long each rank sends and reads.
        source, target, sent_s, arrives_s: of each message: when it has been sent, and arrived, after it has started.
        flags: of each message, whether it is a flag.
        work_s: how long each rank combines and copies.
        nbytes, messages: over each level.
        busy_s: of each resource.
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


def run(found: Schedule, topology: Topology, nbytes: float, segments: int) -> Traffic:
    """Return what a schedule does on vectors of `nbytes` over so many segments.

    Raises:
        RecursionError: lanes wait for each other in both directions, so that there are no rounds.
    """
    rows = _in_segments(_by_round(found), nbytes, segments)
    now = np.zeros(found.size)
    level_nbytes, messages = np.zeros(len(topology.levels)), np.zeros(len(topology.levels), np.int64)
    busy_s = np.zeros(len(topology.capacities))
    for active, first, last in _intervals(rows):
        for round_, times in _rounds(rows, active, first, last, topology):
            now = _repeated(round_, times, now)
            level_nbytes += times * round_.nbytes
            messages += times * round_.messages
            busy_s += times * round_.busy_s
    return Traffic(now, level_nbytes, messages, busy_s)


def waves(found: Schedule) -> list[Ranks]:
    """Return, for each lane, the round of each of its groups: after the one before, and all that it waits for anywhere.

    Raises:
        RecursionError: there is no such order.
    """
    waits: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for each in found.after:
        waits.setdefault((each.lane, each.group), set()).add((each.other, each.earlier))
    rounds = [np.full(groups, -1, np.int64) for groups in found.groups]
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
    """Number the groups of a lane up to the first one that waits for one that has no number."""
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


def _by_round(found: Schedule) -> Schedule:
    """Return a schedule with rounds in the place of groups; rows that do not stay evenly spaced are written out."""
    if len(found.groups) < 2 or not found.after:
        return found
    rounds = waves(found)
    starts = np.cumsum([0, *map(len, rounds)])[found.lane]
    every = np.concatenate(rounds)
    span = found.stride * (found.times - 1)
    first, last = every[starts + found.first], every[starts + found.first + span]
    even = last - first == span
    again = np.where(even, 1, found.times)
    index = np.repeat(np.arange(len(again)), again)
    count = np.arange(len(index)) - np.repeat(np.cumsum(again) - again, again)
    columns = {name: getattr(found, name)[index] for name in ("rank", "kind", "lane", "stride", "advance", "share")}
    at = starts[index] + found.first[index] + count * columns["stride"]
    moved = np.where(found.peer[index] < 0, -1, (found.peer[index] + count * columns["advance"]) % found.size)
    times = np.where(even[index], found.times[index], 1)
    return found._replace(first=every[at], times=times, peer=moved, **columns)


def _in_segments(found: Schedule, nbytes: float, segments: int) -> _Rows:
    """Return the rows of all segments; those of one are not copied, as there may be many."""
    names = ("rank", "kind", "stride", "times", "peer", "advance")
    if segments == 1:
        return _Rows(first=found.first, nbytes=found.share * nbytes, **{name: getattr(found, name) for name in names})
    columns = {name: np.tile(getattr(found, name), segments) for name in names}
    first = np.tile(found.first, segments) + np.repeat(np.arange(segments), len(found.rank))
    return _Rows(first=first, nbytes=np.tile(found.share * (nbytes / segments), segments), **columns)


def _chosen(rows: _Rows, index: Ranks) -> _Rows:
    return _Rows(*(column[index] for column in rows))  # type: ignore[arg-type]


def _steps(rows: _Rows, index: Ranks) -> _Steps:
    return _Steps(rows.rank[index], rows.kind[index], rows.peer[index], rows.nbytes[index])


def _intervals(rows: _Rows) -> Iterator[tuple[Ranks, int, int]]:
    """Yield runs of rounds, as (rows, first, after the last), with the rows that take part in all of them, by rank."""
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
                active.sort(kind="stable")  # which only merges two runs that are in order
            yield active[np.argsort(rows.rank[active], kind="stable")], int(first), int(last)


def _rounds(rows: _Rows, active: Ranks, first: int, last: int, topology: Topology) -> Iterator[tuple[_Round, int]]:
    """Yield the rounds of a run, and how often each is repeated."""
    often = active[rows.times[active] > 1]
    if not ((rows.stride[often] > 1) | (rows.advance[often] != 0)).any():
        yield _round(_steps(rows, active), topology), last - first
        return
    changing = _chosen(rows, active)
    for at in range(first, last):
        iteration, rest = np.divmod(at - changing.first, changing.stride)
        peer = np.where(changing.peer < 0, -1, (changing.peer + iteration * changing.advance) % topology.size)
        yield _round(_steps(changing._replace(peer=peer), np.flatnonzero(rest == 0)), topology), 1


def _repeated(round_: _Round, times: int, now: Floats) -> Floats:
    """Return when each rank has ended so many rounds that are alike, if it can start at `now`."""
    source, target = round_.source, round_.target
    for done in range(1, times + 1):
        start = now[source]
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


def _round(rows: _Steps, topology: Topology) -> _Round:
    size = topology.size
    moves = (rows.kind == MESSAGE) | (rows.kind == FLAG) | (rows.kind == MAPPED)
    moving, working = np.flatnonzero(moves), np.flatnonzero(~moves)
    rank, peer, kind, nbytes = rows.rank[moving], rows.peer[moving], rows.kind[moving], rows.nbytes[moving]
    is_message, is_mapped = kind == MESSAGE, kind == MAPPED
    paths = topology.paths(np.where(is_mapped, peer, rank), np.where(is_mapped, rank, peer))
    links = [level.link for level in topology.levels]
    latency_s = np.array([link.latency_s for link in links])[paths.level] + paths.extra_s
    overhead_s = np.array([link.overhead_s for link in links])[paths.level]
    transfer_s = np.where(kind == FLAG, 0.0, transfers(topology, paths.level, nbytes))
    busy_s = loads(topology, paths.resources, transfer_s)
    on_the_way_s = np.append(busy_s, 0.0)[np.ascontiguousarray(paths.resources.T)]
    most_s = on_the_way_s.max(axis=0, initial=0.0)
    # Sums over the messages of a rank, which stand together.
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


def transfers(topology: Topology, level: Ranks, nbytes: Floats) -> Floats:
    """Return the seconds that messages of so many bytes take on the links of levels, beyond latency and work."""
    found = np.empty(len(level))
    for at, each in enumerate(topology.levels):
        of_level = level == at
        link = each.link
        if link.step.nbytes:
            found[of_level] = np.maximum(0.0, at_all(link.step, nbytes[of_level]) - link.latency_s - link.overhead_s)
        else:
            found[of_level] = nbytes[of_level] * link.per_byte_s
    return found


def work(topology: Topology, kind: Ranks, nbytes: Floats) -> Floats:
    """Return the seconds of combining or copying so many bytes."""
    rate = topology.levels[0].link.reduce_per_byte_s
    combining = at_all(topology.reduce, nbytes) if topology.reduce.nbytes else nbytes * rate
    copying = at_all(topology.copy, nbytes) if topology.copy.nbytes else np.zeros(len(nbytes))
    return np.where(kind == REDUCE, combining, np.where(kind == COPY, copying, 0.0))


def loads(topology: Topology, resources: Ranks, transfer_s: Floats) -> Floats:
    """Return how long each resource is busy with messages that cross it."""
    numbers = resources.ravel() - NO_RESOURCE  # from 1 on; 0 is none
    used_s = _sums(numbers, np.repeat(transfer_s, resources.shape[1]), len(topology.capacities) + 1)
    return used_s[1:] / topology.capacities


def at_all(curve: Curve, nbytes: Floats) -> Floats:
    """Return the seconds of a curve at many numbers of bytes, as `Curve.at` does at one."""
    sizes, seconds = np.array(curve.nbytes, float), np.array(curve.seconds)
    clipped = np.maximum(nbytes, sizes[0])
    within: Floats = np.exp(np.interp(np.log(clipped), np.log(sizes), np.log(seconds)))
    beyond: Floats = seconds[-1] * nbytes / sizes[-1]
    return np.where(nbytes > sizes[-1], beyond, within)


def _sums(index: Ranks, values: Floats, count: int) -> Floats:
    return np.bincount(index, values, count).astype(float, copy=False)


def _running(values: Floats, rank: Ranks) -> Floats:
    """Return running sums of values over the messages of each rank, which stand together."""
    sums = np.cumsum(values)
    starts = np.flatnonzero(np.diff(rank, prepend=-1))
    before = (sums - values)[starts]
    less: Floats = np.repeat(before, np.diff(np.append(starts, len(rank))))
    return np.subtract(sums, less)
