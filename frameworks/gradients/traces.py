"""Files of the timeline: a trace for chrome://tracing and Perfetto, and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from unisono import UsageError
from unisono.foundation.installing import install_command
from unisono.frameworks.gradients.timeline import BucketSpan, Step, Timeline

_PROGRAM, _WAITING, _BUCKETS = 0, 1, 2  # the first rows of a trace; each bucket has a row
_MOST_DRAWN = 3


class Tracks:
    """The tracks of a timeline in the traces of the rank: the gradients, the waits of the program, and each bucket."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def trace_events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the last steps in Chrome's format, as transports/recorder/traces.py takes them."""
        return _events(self._timeline.ended())


def _events(steps: Sequence[Step]) -> Iterator[dict[str, Any]]:
    rows = [(_PROGRAM, "gradients become ready"), (_WAITING, "the program waits")]
    rows += [
        (_BUCKETS + index, f"bucket {index}") for index in range(max((len(step.spans) for step in steps), default=0))
    ]
    for row, name in rows:
        yield {"ph": "M", "name": "thread_name", "tid": row, "args": {"name": name}}
    for step in steps:
        yield _event(f"step {step.number}", _PROGRAM, step.begin_s, step.ready_s, {})
        for begin_s, end_s in step.waits:
            yield _event("exposed", _WAITING, begin_s, end_s, {"step": step.number})
        for index, span in enumerate(step.spans):
            facts = {"bytes": span.bucket.nbytes, "algorithm": span.algorithm, "gradients": list(span.bucket.names)}
            ready_s = span.ready_s or span.start_s  # 0 for a bucket that lacked a gradient
            yield _event("queued", _BUCKETS + index, ready_s, span.start_s, {"step": step.number})
            yield _event("reduce", _BUCKETS + index, span.start_s, span.end_s, {"step": step.number, **facts})


def _event(name: str, row: int, begin_s: float, end_s: float, facts: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": 1e6 * begin_s, "dur": 1e6 * max(0.0, end_s - begin_s)}
    return {"ph": "X", "name": name, "cat": "gradients", "tid": row, **times, "args": facts}


def draw(steps: Sequence[Step], path: str | Path) -> None:
    """Draw the last three steps: when gradients became ready, when buckets were reduced, and when the program waited.

    Raises:
        UsageError: matplotlib is not installed, or there are no steps.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(f"drawing needs matplotlib: {install_command('report')}") from None
    if not steps:
        raise UsageError("no step has ended: call finish() before draw()")
    drawn = steps[-_MOST_DRAWN:]
    origin_s = drawn[0].begin_s
    rows = max(len(step.spans) for step in drawn)
    figure = Figure(figsize=(10, 1.5 + 0.3 * (rows + 2)), layout="constrained")
    axes = figure.subplots()
    for step in drawn:
        bars = [(0, step.begin_s, step.ready_s, "tab:blue")]
        bars += [(1, begin_s, end_s, "tab:red") for begin_s, end_s in step.waits]
        bars += [bar for index, span in enumerate(step.spans) for bar in _bars(2 + index, span)]
        for row, begin_s, end_s, colour in bars:
            axes.barh(row, 1e3 * (end_s - begin_s), left=1e3 * (begin_s - origin_s), color=colour)
    sizes = [f"bucket {index}: {span.bucket.nbytes:,} B" for index, span in enumerate(drawn[-1].spans)]
    axes.set_yticks(range(2 + len(sizes)), ["gradients become ready", "exposed", *sizes])
    axes.invert_yaxis()
    axes.set_xlabel("ms; of a bucket, grey: ready and not started, green: being reduced")
    figure.savefig(path)


def _bars(row: int, span: BucketSpan) -> list[tuple[int, float, float, str]]:
    ready_s = span.ready_s or span.start_s
    return [(row, ready_s, span.start_s, "lightgrey"), (row, span.start_s, span.end_s, "tab:green")]
