"""The times of the last training steps: when buckets were ready, started and reduced, and how long `finish` waited."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from unisono.frameworks.gradients.layout import Bucket

_MOST_STEPS = 200
now = time.perf_counter


@dataclass(slots=True)
class BucketSpan:
    """The times of a bucket in a training step, by `time.perf_counter`.

    Attributes:
        bucket: the bucket.
        algorithm: the algorithm that reduces it.
        ready_s: when it was full.
        start_s: when its reduction was started.
        end_s: when this rank noticed that the reduction had ended; 0 until then.
    """

    bucket: Bucket
    algorithm: str
    ready_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0

    def note_end(self) -> None:
        """Set `end_s`, the end of the reduction, to the present time. A second call changes nothing."""
        self.end_s = self.end_s or now()


@dataclass(slots=True)
class Step:
    """The times of a training step.

    Attributes:
        number: the number of the training step, from 0.
        begin_s: when the first gradient was ready.
        ready_s: when the last gradient was ready.
        waits: the intervals, as (begin, end), in which the program waited in `finish`.
        spans: the times of its buckets. With a lag, their reductions may end in a later training step.
    """

    number: int
    begin_s: float = 0.0
    ready_s: float = 0.0
    waits: list[tuple[float, float]] = field(default_factory=list)
    spans: list[BucketSpan] = field(default_factory=list)

    @property
    def exposed_s(self) -> float:
        """How long the program has waited in `finish` for reductions, in seconds."""
        return sum(end - begin for begin, end in self.waits)

    @property
    def communication_s(self) -> float:
        """How long at least one bucket was being reduced, in seconds."""
        return sum(end - start for start, end in _union([(span.start_s, span.end_s) for span in self.spans]))


class Timeline:
    """The times of the last 200 training steps, in their order."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque(maxlen=_MOST_STEPS)

    def begin(self, number: int) -> Step:
        """Return a new record for training step `number`. It replaces that of a failed step of the same number."""
        if self.steps and self.steps[-1].number == number:
            self.steps.pop()
        self.steps.append(Step(number))
        return self.steps[-1]

    def of(self, numbers: Container[int], buckets: Sequence[Bucket]) -> list[Step]:
        """Return the training steps with all buckets reduced, a number in `numbers`, and exactly these buckets."""
        return [
            step
            for step in self.ended()
            if step.number in numbers and [span.bucket for span in step.spans] == list(buckets)
        ]

    def ended(self) -> list[Step]:
        """Return the training steps whose buckets have all been reduced."""
        return [step for step in list(self.steps) if step.spans and all(span.end_s for span in step.spans)]


@dataclass(frozen=True, slots=True)
class Report:
    """The median times of the last training steps. Its text is a table.

    Attributes:
        steps: the number of training steps.
        step_s: the time from the first gradient of a step to the first gradient of the next step.
        backward_s: the time from the first gradient of a step to the last.
        communication_s: how long at least one bucket was being reduced.
        exposed_s: how long the program waited for reductions.
        nbytes: the size of the gradients of a step.
        sent_nbytes: the bytes that this rank sent per step, on average, by the counters of its communicators.
        buckets: for each bucket its number, bytes, gradients and algorithm, and the median times at which it was ready,
            started and reduced, in seconds since the first gradient.
    """

    steps: int
    step_s: float
    backward_s: float
    communication_s: float
    exposed_s: float
    nbytes: int
    sent_nbytes: float
    buckets: Sequence[BucketRow]

    def __str__(self) -> str:
        times = (
            ("step", self.step_s),
            ("backward", self.backward_s),
            ("communication", self.communication_s),
            ("exposed", self.exposed_s),
        )
        lines = [f"{self.steps} steps, medians: " + ", ".join(f"{name} {1e3 * t:.3f} ms" for name, t in times)]
        lines.append(
            f"gradients {self.nbytes:,} B in {len(self.buckets)} buckets; sent {self.sent_nbytes:,.0f} B a step"
        )
        lines.append(
            f"{'bucket':>6} {'bytes':>12} {'gradients':>9} {'ready ms':>9} {'start ms':>9} {'end ms':>9}  algorithm"
        )
        lines += [
            f"{row.index:>6} {row.nbytes:>12,} {row.gradients:>9} {1e3 * row.ready_s:>9.3f} {1e3 * row.start_s:>9.3f} "
            f"{1e3 * row.end_s:>9.3f}  {row.algorithm}"
            for row in self.buckets
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class BucketRow:
    """A bucket in a `Report`."""

    index: int
    nbytes: int
    gradients: int
    algorithm: str
    ready_s: float
    start_s: float
    end_s: float


def report_of(steps: Sequence[Step], sent_nbytes: float) -> Report:
    """Return the report of those training steps that have the same buckets as the latest one."""
    buckets = [span.bucket for span in steps[-1].spans] if steps else []
    comparable = [step for step in steps if [span.bucket for span in step.spans] == buckets]
    rows = [
        BucketRow(
            index,
            bucket.nbytes,
            len(bucket.names),
            comparable[-1].spans[index].algorithm,
            *(
                median(getattr(step.spans[index], moment) - step.begin_s for step in comparable)
                for moment in ("ready_s", "start_s", "end_s")
            ),
        )
        for index, bucket in enumerate(buckets)
    ]
    pairs = [(first, second) for first, second in pairwise(comparable) if second.number == first.number + 1]
    return Report(
        len(comparable),
        median([second.begin_s - first.begin_s for first, second in pairs] or [0.0]),
        median([step.ready_s - step.begin_s for step in comparable] or [0.0]),
        median([step.communication_s for step in comparable] or [0.0]),
        median([step.exposed_s for step in comparable] or [0.0]),
        sum(bucket.nbytes for bucket in buckets),
        sent_nbytes,
        rows,
    )


def _union(intervals: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the union of intervals as intervals that do not overlap, in order."""
    last: tuple[float, float] | None = None
    for start, end in sorted(intervals):
        if last is not None and start <= last[1]:
            last = last[0], max(last[1], end)
            continue
        if last is not None:
            yield last
        last = start, end
    if last is not None:
        yield last
