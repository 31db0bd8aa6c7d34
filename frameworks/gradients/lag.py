"""When gradients are applied: how many steps late, as a function of the step alone, and so the same on all ranks."""

from __future__ import annotations

from typing import NamedTuple

from unisono import UsageError


class Lag(NamedTuple):
    """Delayed synchronous gradients: step t applies those of step t − k, after a prompt warm-up.

    Attributes:
        steps: k; 0 for none.
        warmup: the number of steps in the beginning that are prompt.
        cooldown_from: the first of the steps in the end that are prompt again; None if there are none.
    """

    steps: int
    warmup: int = 0
    cooldown_from: int | None = None

    def at(self, step: int) -> int:
        """Return how many steps may be in flight after step `step`, from 0, has applied what it applies.

        It rises and falls by one a step, so that in the steps in which it rises nothing is applied, and in those in
        which it falls, two gradients are.
        """
        rising = max(0, step + 1 - self.warmup)
        falling = self.steps if self.cooldown_from is None else max(0, self.cooldown_from + self.steps - 1 - step)
        return min(self.steps, rising, falling)


def lag_of(steps: int, total_steps: int | None, warmup_fraction: float, cooldown_fraction: float) -> Lag:
    """Return the lag with those fractions of `total_steps` being prompt in the beginning and in the end.

    Raises:
        UsageError: that cannot be.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise UsageError(f"lag must be a number of steps, 0 or more, not {steps!r}")
    for name, fraction in (("warmup_fraction", warmup_fraction), ("cooldown_fraction", cooldown_fraction)):
        if not 0.0 <= fraction <= 1.0:
            raise UsageError(f"{name} must be from 0 to 1, not {fraction!r}")
    if total_steps is None:
        if warmup_fraction or cooldown_fraction:
            raise UsageError("a fraction of how many steps? pass total_steps as well")
        return Lag(steps)
    if isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps < 1:
        raise UsageError(f"total_steps must be a positive number, not {total_steps!r}")
    cooldown = round(cooldown_fraction * total_steps)
    return Lag(steps, round(warmup_fraction * total_steps), total_steps - cooldown if cooldown else None)
