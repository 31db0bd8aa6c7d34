"""The lag of gradients: how many training steps late they are applied.

The lag depends only on the number of the training step, so all ranks have the same lag without a message.

Open questions
--------------
Not needed: an agreement of the ranks on the lag, because a function of the step number has the same value on all of
them.

Doubted: that training loses nothing. The only measurement is of scikit-learn's digits with `lag=1`, where the accuracy
was that of prompt steps (docs/measurements/gradients.md). A delayed feedback needs a smaller learning rate, in
particular with momentum, and no measurement says how much smaller.

This would change our mind: a larger model that needs more steps to the same loss than the hidden communication saves.
Then the lag must correct for the delay, or must go.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono import UsageError


class Lag(NamedTuple):
    """Delayed synchronous gradients: training step t applies those of step t − k. A *prompt* step applies its own.

    Attributes:
        steps: the lag k; 0 if all steps are prompt.
        warmup: the number of prompt steps at the beginning.
        cooldown_from: the first prompt step at the end; None if the end is not prompt.
    """

    steps: int
    warmup: int = 0
    cooldown_from: int | None = None

    def at(self, step: int) -> int:
        """Return how many training steps are still in flight when step `step`, counted from 0, has applied gradients.

        This number changes by at most one in a training step. A step in which it rises applies no gradients, and a step
        in which it falls applies those of two steps.
        """
        rising = max(0, step + 1 - self.warmup)
        falling = self.steps if self.cooldown_from is None else max(0, self.cooldown_from + self.steps - 1 - step)
        return min(self.steps, rising, falling)


def lag_of(steps: int, total_steps: int | None, warmup_fraction: float, cooldown_fraction: float) -> Lag:
    """Return the lag in which these fractions of `total_steps` are prompt at the beginning and at the end.

    Raises:
        UsageError: an argument has a value that it cannot have.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise UsageError(f"lag must be a number of steps, 0 or more, not {steps!r}")
    for name, fraction in (("warmup_fraction", warmup_fraction), ("cooldown_fraction", cooldown_fraction)):
        if not 0.0 <= fraction <= 1.0:
            raise UsageError(f"{name} must be from 0 to 1, not {fraction!r}")
    if total_steps is None:
        if warmup_fraction or cooldown_fraction:
            raise UsageError("warmup_fraction and cooldown_fraction are parts of total_steps: pass total_steps as well")
        return Lag(steps)
    if isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps < 1:
        raise UsageError(f"total_steps must be a positive number, not {total_steps!r}")
    cooldown = round(cooldown_fraction * total_steps)
    return Lag(steps, round(warmup_fraction * total_steps), total_steps - cooldown if cooldown else None)
