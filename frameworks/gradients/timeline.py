"""When what happened in the last steps: when buckets were ready, started and reduced; how long steps have waited."""

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
class Span:
    """The times of a bucket, by `time.perf_counter`; of one that is not reduced yet, `end_s` is 0.

    `end_s` is when the reduction had ended, or, where nobody waited for it, when that was noticed.
    """

    bucket: Bucket
    algorithm: str
    ready_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0

    def note_end(self) -> None:
        """Let now be the end, if there is none yet."""
        self.end_s = self.end_s or now()


@dataclass(slots=True)
class Step:
    """The times of a step.

    Attributes:
        number: of the step, from 0.
        begin_s: when the first gradient was ready.
        ready_s: when the last one was.
        waits: from when to when the program has waited in `finish`.
        spans: of its buckets, which may end in a later step.
    """

    number: int
    begin_s: float = 0.0
    ready_s: float = 0.0
    waits: list[tuple[float, float]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @property
    def exposed_s(self) -> float:
        """For how long the program has waited."""
        return sum(end - begin for begin, end in self.waits)

    @property
    def communication_s(self) -> float:
        """For how long anything was being reduced; 0 where nothing has been yet."""
        return sum(end - start for start, end in _union([(span.start_s, span.end_s) for span in self.spans]))


class Timeline:
    """The last steps, the youngest last."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque(maxlen=_MOST_STEPS)

    def begin(self, number: int) -> Step:
        """Return the record of a new step, instead of one of this number that nothing has become of."""
        if self.steps and self.steps[-1].number == number:
            self.steps.pop()
        self.steps.append(Step(number))
        return self.steps[-1]

    def of(self, numbers: Container[int], buckets: Sequence[Bucket]) -> list[Step]:
        """Return those of the steps of these numbers and buckets that have ended."""
        return [
            step
            for step in self.ended()
            if step.number in numbers and [span.bucket for span in step.spans] == list(buckets)
        ]

    def ended(self) -> list[Step]:
        """Return the steps all of whose buckets have been reduced."""
        return [step for step in self.steps if step.spans and all(span.end_s for span in step.spans)]


@dataclass(frozen=True, slots=True)
class Report:
    """What the last steps took, as medians; print it for a table.

    Attributes:
        steps: how many there were.
        step_s: from the first gradient of one step to that of the next.
        backward_s: from the first gradient to the last.
        communication_s: for how long anything was being reduced.
        exposed_s: for how long the program has waited for it.
        nbytes: size of the gradients of a step.
        sent_nbytes: what this rank has sent for them, by the counters of its communicators, on average.
        buckets: of a step: the number, bytes, gradients and algorithm of each, with the medians of when it was ready,
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
    """Return what steps took; those with other buckets than the youngest are left out."""
    shape = [span.bucket for span in steps[-1].spans] if steps else []
    alike = [step for step in steps if [span.bucket for span in step.spans] == shape]
    rows = [
        BucketRow(
            index,
            bucket.nbytes,
            len(bucket.names),
            alike[-1].spans[index].algorithm,
            *(
                median(getattr(step.spans[index], moment) - step.begin_s for step in alike)
                for moment in ("ready_s", "start_s", "end_s")
            ),
        )
        for index, bucket in enumerate(shape)
    ]
    apart = [after.begin_s - step.begin_s for step, after in pairwise(alike) if after.number == step.number + 1]
    return Report(
        len(alike),
        median(apart or [0.0]),
        median([step.ready_s - step.begin_s for step in alike] or [0.0]),
        median([step.communication_s for step in alike] or [0.0]),
        median([step.exposed_s for step in alike] or [0.0]),
        sum(bucket.nbytes for bucket in shape),
        sent_nbytes,
        rows,
    )


def _union(intervals: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the intervals of which some cover each other as ones that do not."""
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
