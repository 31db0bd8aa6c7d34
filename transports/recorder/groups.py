"""The groups of plans in traces: when each group of each call began and ended (the option `trace_groups`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unisono.transports import _core
from unisono.transports.recorder.traces import add_source


class GroupTracks:
    """The tracks of the groups in the traces of a process: one for each communicator, lane and segment.

    Args:
        control: the native control of a session that records groups.
    """

    def __init__(self, control: _core.Control) -> None:
        self._control = control

    def trace_events(self) -> Iterator[dict[str, Any]]:
        """Yield the last 100,000 groups in Chrome's format, as transports/recorder/traces.py takes them."""
        tracks: dict[tuple[int, int, int], int] = {}
        for communicator, sequence, lane, group, segment, begun_ns, ended_ns in sorted(
            self._control.recorded_groups(), key=lambda record: record[5]
        ):
            key = communicator, lane, segment
            if key not in tracks:
                tracks[key] = len(tracks)
                name = f"groups of lane {lane}, segment {segment}"
                yield {"ph": "M", "name": "thread_name", "tid": tracks[key], "args": {"name": name}}
            yield {
                "ph": "X",
                "name": f"group {group}",
                "cat": "group",
                "tid": tracks[key],
                "ts": begun_ns / 1e3,
                "dur": (ended_ns - begun_ns) / 1e3,
                "args": {
                    "sequence": sequence,
                    "lane": lane,
                    "segment": segment,
                    "communicator": f"{communicator:016x}",
                },
            }


def traced_groups(control: _core.Control) -> GroupTracks:
    """Let a session record groups from now on. Traces of this process have them as long as the result exists."""
    control.record_groups()
    tracks = GroupTracks(control)
    add_source(tracks)
    return tracks
