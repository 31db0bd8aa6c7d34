"""What goes first where buckets wait: the one that the next forward needs first.

Theory of operation. Backward makes the gradients of the last layers first, and the next forward needs those of the
first layers first. Where a link is slower than backward, buckets queue for it, and those of the first layers, which
come last, would wait behind all others. All ranks must start buckets in the same order, but each sees its own times; so
rank 0 works out the order once, from the times of the steps that are measured, and tells it to the others, as it does
with the size of buckets. From then on it is fixed: a bucket that is ready waits for those before it, not for a clock.

What is needed first is taken to be what becomes ready last. A result can be used before the others are there: that is
what `Arriving` is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from unisono import UsageError
from unisono.frameworks.gradients.layout import Filling
from unisono.frameworks.gradients.memory import Memory


def turns_of(buckets: Sequence[Filling], backward_s: float, cost_s: Callable[[int], float]) -> tuple[int, ...]:
    """Return the order in which buckets should be started, by their indices.

    Whenever the link is free, the next is, of the buckets that are ready, the one that is needed first: the last one.

    Args:
        buckets: in the order in which they become ready.
        backward_s: the time from the first gradient to the last.
        cost_s: seconds that a bucket of so many bytes takes; buckets are reduced one after the other.
    """
    ready_s = [backward_s * bucket.share for bucket in buckets]
    turns: list[int] = []
    waiting: list[int] = []
    free_s, coming = 0.0, 0
    while len(turns) < len(buckets):
        if not waiting:
            free_s = max(free_s, ready_s[coming])
        while coming < len(buckets) and ready_s[coming] <= free_s:
            waiting.append(coming)
            coming += 1
        turns.append(waiting.pop())
        free_s += cost_s(buckets[turns[-1]].nbytes)
    return tuple(turns)


class Arriving(Mapping[str, Any]):
    """The gradients of a step by name, those that are needed first coming first; to look one up is to wait for it.

    Each is the array that was given in the step, overwritten when it is looked up, or a new one of numpy where it
    cannot be written or none was given.

    Args:
        memory: of the step.
        wait: ``wait(index)`` waits for the bucket of this index, and raises what `GradientReducer.finish` does.
    """

    def __init__(self, memory: Memory, wait: Callable[[int], None]) -> None:
        self._memory, self._wait = memory, wait
        self._names = memory.names[::-1]
        self._taken: dict[str, Any] = {}
        self._is_over = False

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._memory.flat

    def __getitem__(self, name: str) -> Any:
        """Wait for a gradient, and return it.

        Raises:
            KeyError: there is none of this name.
            UsageError: the next step has begun.
            PeerLostError, CollectiveTimeoutError, AbortedError: a reduction failed.
        """
        if name not in self._taken:
            indices = self._memory.buckets_of[name]
            if self._is_over:
                raise UsageError(f"the gradient of {name!r} was not looked up before the next step began")
            for index in indices:
                self._wait(index)
            self._taken[name] = self._memory.write_back(name, self._memory.shaped[name])
        return self._taken[name]

    def arrived(self, names: Iterable[str]) -> list[str]:
        """Return those of some names whose gradients are there, so that looking them up does not wait."""
        ended = {index for index, work in self._memory.works.items() if work.done()}
        return [name for name in names if ended.issuperset(self._memory.buckets_of[name])]

    def end(self) -> None:
        """Let go of the memory: what has not been looked up is lost."""
        self._is_over = True
