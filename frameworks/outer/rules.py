"""`OuterRule`: the rule by which an outer optimizer applies the average change of the parameters.

The *change* of a rank is its parameters minus the outer parameters, so the pseudo-gradient of DiLoCo is minus the
change. Every operation here is on single elements, so all ranks compute the same bits on every processor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from unisono import UsageError
from unisono.frameworks.arrays import Array, same_bits


class OuterRule(NamedTuple):
    """Stochastic gradient descent with momentum, as `torch.optim.SGD`, on minus the average change.

    With Nesterov's momentum it is also the Nesterov block momentum of Chen and Huo, whose block learning rate is `lr`.

    Attributes:
        lr: the factor of a change.
        momentum: the part of the velocity that stays in a step; None for 1 - 1/n if n changes are averaged.
        nesterov: whether the outer parameters move ahead by the next part of the velocity.
    """

    lr: float
    momentum: float | None
    nesterov: bool

    def among(self, count: int) -> OuterRule:
        """Return this rule with the momentum for the average of `count` changes."""
        return self if self.momentum is not None else self._replace(momentum=1 - 1 / count)

    @same_bits
    def apply(self, values: Array, velocity: Array | None, change: Array) -> None:
        """Add an average change to the outer parameters `values`. The momentum is a number.

        Args:
            values: the outer parameters, flat; changed in place.
            velocity: the sum of earlier changes, of the same shape and dtype, changed in place. It may be None if the
                momentum is 0.
            change: the average change; overwritten.
        """
        lr, momentum = change.dtype.type(self.lr), change.dtype.type(self.momentum or 0)
        if velocity is not None:
            velocity *= momentum
            velocity += change
            if self.nesterov:
                change += momentum * velocity
            else:
                change[...] = velocity
        change *= lr
        values += change


def check_rule(rule: OuterRule) -> None:
    """Check the numbers of a rule.

    Raises:
        UsageError: one has a value that it cannot have.
    """
    if not (_is_real(rule.lr) and 0 < rule.lr < math.inf):
        raise UsageError(f"the outer lr must be a positive number, not {rule.lr!r}")
    if rule.momentum is not None and not (_is_real(rule.momentum) and 0 <= rule.momentum < 1):
        raise UsageError(f"the outer momentum must be from 0 to below 1, not {rule.momentum!r}")


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
