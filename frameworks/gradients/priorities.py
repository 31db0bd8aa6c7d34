"""Priorities: where buckets wait for the link, the bucket that the next forward needs first goes first.

Theory of operation
-------------------
Backward computes the gradients of the last layers first, and the next forward needs those of the first layers first.
If the link is slower than backward, buckets queue for it, and the buckets of the first layers come last. So the start
order changes: whenever the link is free, the bucket goes next that became ready last, because it is needed first.

All ranks must start buckets in the same order, but each rank sees other times. So rank 0 computes the order once, from
the times of the measured steps, and broadcasts it together with the size of buckets (`replanning`). After that the
order is fixed: a bucket waits for those before it and not for a clock.

A result can be used before the others have arrived: see `Arriving`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from unisono import UsageError
from unisono.frameworks.gradients.layout import Filling
from unisono.frameworks.gradients.step_memory import StepMemory


def start_order_of(buckets: Sequence[Filling], backward_s: float, cost_s: Callable[[int], float]) -> tuple[int, ...]:
    """Return the indices of the buckets, in the order in which they should be started.

    Whenever the link is free, it takes the bucket that became ready last.

    Args:
        buckets: the buckets, in the order in which they become ready.
        backward_s: the time from the first gradient to the last, in seconds.
        cost_s: ``cost_s(nbytes)`` is the time of a bucket in seconds; buckets are reduced one after the other.
    """
    ready_s = [backward_s * bucket.share for bucket in buckets]
    order: list[int] = []
    waiting: list[int] = []
    link_free_s, upcoming = 0.0, 0
    while len(order) < len(buckets):
        if not waiting:
            link_free_s = max(link_free_s, ready_s[upcoming])
        while upcoming < len(buckets) and ready_s[upcoming] <= link_free_s:
            waiting.append(upcoming)
            upcoming += 1
        order.append(waiting.pop())
        link_free_s += cost_s(buckets[order[-1]].nbytes)
    return tuple(order)


class Arriving(Mapping[str, Any]):
    """The gradients of a training step by name. Some may still be on their way: a lookup waits for its gradient.

    Iteration follows the order in which the next forward needs the gradients. Each value is the array that the program
    passed in the step, overwritten when it is looked up. It is a new numpy array if that array cannot be written, or if
    the program passed none.

    Args:
        memory: the memory of the step.
        wait: ``wait(index)`` waits for a bucket, and raises the errors of `GradientReducer.finish`.
    """

    def __init__(self, memory: StepMemory, wait: Callable[[int], None]) -> None:
        self._memory, self._wait = memory, wait
        self._names = tuple(memory.present(memory.flat))[::-1]
        self._taken: dict[str, Any] = {}
        self._is_over = False

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Any:
        """Wait for a gradient and return it.

        Raises:
            KeyError: there is no gradient of this name.
            UsageError: the next step has begun.
            PeerLostError, CollectiveTimeoutError, AbortedError: a reduction failed.
        """
        if name not in self._taken:
            indices = self._memory.buckets_of[name]
            if name in self._memory.absent:
                raise KeyError(name)
            if self._is_over:
                raise UsageError(
                    f"the gradient of {name!r} was first read after the next step had begun: read each "
                    "gradient in its own step"
                )
            for index in indices:
                self._wait(index)
            self._taken[name] = self._memory.write_back(name, self._memory.shaped[name])
            self._memory.deliver()
        return self._taken[name]

    def arrived(self, names: Iterable[str]) -> list[str]:
        """Return the names in `names` whose gradients have arrived, so that looking them up does not wait."""
        ended = {index for index, work in self._memory.works.items() if work.done()}
        return [name for name in names if ended.issuperset(self._memory.buckets_of[name])]

    def end(self) -> None:
        """End access to the memory: gradients that have not been looked up are lost."""
        self._is_over = True
