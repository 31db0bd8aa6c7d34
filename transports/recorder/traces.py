"""Traces: the recorded calls of a rank in the format of Chrome's tracing, which Perfetto (ui.perfetto.dev) shows.

The format is the "Trace Event Format" of Chromium. A rank is a process in it. Each communicator has a track for its
collectives and one for its messages, and more where calls overlap. Times are microseconds since 1970 by the host's
time of day. A merged trace has all times on one clock.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

from unisono.foundation.json_checks import checked, parsed_json
from unisono.transports.host.whole_file import whole_file
from unisono.transports.recorder.clocks import aligned, clock_of, measured
from unisono.transports.recorder.dumps import file_name as name_of_dump
from unisono.transports.recorder.memory import RecordedCall, Snapshot, check_place

FORMAT = "unisono-trace"
_SHAPE = {
    "traceEvents": [dict],
    "otherData": {"format": str, **dict.fromkeys(("rank", "size", "zero_ns", "calls_lost"), int)},
}
# The tracks of a source begin at a multiple of this number, above those of calls.
_TRACKS_OF_SOURCE = 1_000_000


class Source(Protocol):
    """Something that has events for the traces of this process, such as the timeline of training steps."""

    def trace_events(self) -> Iterable[dict[str, Any]]:
        """Return events of Chrome's format. Any thread may call this.

        `ts` is in microseconds of CLOCK_MONOTONIC, `tid` counts the tracks of this source from 0, and `pid` is absent.
        """


_sources: WeakSet[Source] = WeakSet()


def add_source(source: Source) -> None:
    """Add the events of a source to all traces that this process writes while the source exists."""
    _sources.add(source)


def file_name(job: str, rank: int, size: int) -> str:
    """Return the name of the trace of a rank, which is that of its dump with another ending."""
    return name_of_dump(job, rank, size).removesuffix(".json") + ".trace.json"


def write(snapshot: Snapshot, path: str | os.PathLike[str]) -> Path:
    """Write the trace of a rank to a file, whose directory is made if it is missing. An older file is replaced.

    Raises:
        OSError: the file cannot be written. No part of it stays.
    """
    zero_ns = time.time_ns() - time.monotonic_ns()
    events = [*_events(snapshot, zero_ns), *_events_of_sources(snapshot.rank, zero_ns)]
    return write_events(events, {"format": FORMAT, **_facts(snapshot, zero_ns)}, path)


def write_events(events: list[dict[str, Any]], facts: dict[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write events as a trace, with the facts `about` the rank. Raises as `write` does."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ns", "otherData": facts}, file)
    return target


def parsed(text: str) -> dict[str, Any]:
    """Return the trace of one rank in the text of a file.

    Raises:
        ValueError: the text is no trace of Unisono, or only a part of one.
    """
    trace = checked(parsed_json(text), _SHAPE)
    about = trace["otherData"]
    if about["format"] != FORMAT:
        raise ValueError(f"its format is {about['format']!r}")
    check_place(about["rank"], about["size"])
    measured(about)
    for event in trace["traceEvents"]:
        if "ts" in event:
            checked(event["ts"], (float, int), "ts")
    return dict(trace)


def merged(traces: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of the traces of several ranks, with all times on one clock (clocks.py)."""
    facts = {index: trace["otherData"] for index, trace in enumerate(traces)}
    zeros = aligned({index: clock_of(each, each["zero_ns"]) for index, each in facts.items()})
    return [
        {**event, "ts": event["ts"] + (zeros[index] - facts[index]["zero_ns"]) / 1e3} if "ts" in event else event
        for index, trace in enumerate(traces)
        for event in trace["traceEvents"]
    ]


def _facts(snapshot: Snapshot, zero_ns: int) -> dict[str, Any]:
    lost = snapshot.made - len(snapshot.calls)
    rest = {"calls_lost": lost, "zero_ns": zero_ns}
    return {"rank": snapshot.rank, "size": snapshot.size, **snapshot.about, **rest}


def _events(snapshot: Snapshot, zero_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the events of the rank: the names of its tracks, its calls, and the parts of calls that wait."""
    now_ns = time.monotonic_ns()
    rank, host = snapshot.rank, snapshot.about.get("host", "")
    yield _name("process_name", rank, 0, f"rank {rank} on {host}")
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    tracks = _Tracks()
    for call in snapshot.calls:
        end_ns = call.ended_ns or now_ns
        track, is_new = tracks.track_of(call, end_ns)
        if is_new:
            yield _name("thread_name", rank, track, _track_name(call, snapshot))
        parts = [(call.text, call.called_ns, end_ns)]
        if call.begun_ns > call.called_ns:
            parts.append(("queued", call.called_ns, call.begun_ns))
        if call.moved_ns:
            parts.append(("before the first message", call.begun_ns, call.moved_ns))
        for index, (name, begin_ns, until_ns) in enumerate(parts):
            yield {
                "ph": "X",
                "name": name,
                "cat": "message" if call.is_message else "collective",
                "pid": rank,
                "tid": track,
                "ts": (begin_ns + zero_ns) / 1e3,
                "dur": max(until_ns - begin_ns, 0) / 1e3,
                **({} if index else {"args": _arguments(call)}),
            }


def _events_of_sources(rank: int, zero_ns: int) -> Iterator[dict[str, Any]]:
    for number, source in enumerate(list(_sources), 1):
        for event in source.trace_events():
            times = {"ts": event["ts"] + zero_ns / 1e3} if "ts" in event else {}
            yield {**event, **times, "pid": rank, "tid": event["tid"] + number * _TRACKS_OF_SOURCE}


def _name(kind: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": name}}


def _track_name(call: RecordedCall, snapshot: Snapshot) -> str:
    ranks = snapshot.communicators.get(call.communicator)
    of = "all ranks" if ranks is None else f"ranks {', '.join(map(str, ranks))}"
    return f"{'messages' if call.is_message else 'collectives'} of {of}"


def _arguments(call: RecordedCall) -> dict[str, Any]:
    number = {} if call.is_message else {"sequence": call.sequence}
    return {**number, "site": call.site, "bytes": call.nbytes, "state": call.state, "peer": call.peer, **call.facts}


class _Tracks:
    """Numbers of tracks. Calls that overlap in time get different ones, because a viewer would nest them."""

    def __init__(self) -> None:
        self._ends: defaultdict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)  # track and end, in ns
        self._used = 0

    def track_of(self, call: RecordedCall, end_ns: int) -> tuple[int, bool]:
        """Return the track of a call that ends at `end_ns`, and whether it is new."""
        tracks = self._ends[call.communicator, call.is_message]
        for index, (track, free_ns) in enumerate(tracks):
            if free_ns <= call.called_ns:
                tracks[index] = track, end_ns
                return track, False
        self._used += 1
        tracks.append((self._used, end_ns))
        return self._used, True
