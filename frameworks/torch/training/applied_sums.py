"""Sums that `step` has applied, with ``op="sum"``: they stay in ``.grad`` until the program resets the gradients.

An average may be averaged again, because the average of equal values is that value. A sum may not: each rank has the
same sum S, so it would count once for each rank. `is_applied` keeps the sum of a parameter that backward leaves alone
from being summed up again. If backward adds a gradient to S, the ranks sum up n S and their gradients, as Horovod and
hooks of DDP that sum up do. `warn_if_kept` tells the program.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any


def mark_applied(gradients: Iterable[Any]) -> None:
    """Mark sums that `step` has applied, as `is_applied` knows them until they change."""
    for gradient in gradients:
        if gradient is not None and not gradient.is_inference():  # which counts no writes
            gradient._unisono_applied = gradient._version


def is_applied(gradient: Any) -> bool:
    """Return whether a gradient is still the sum of an earlier step, so that it must not be summed up again.

    That is so if its parameter is frozen or was not used, and the program has not reset it.
    """
    version = getattr(gradient, "_unisono_applied", None)
    return version is not None and version == gradient._version


def warn_if_kept(name: str, parameter: Any) -> Any:
    """Warn once if backward is about to add a gradient to the sum that the last step has applied to a parameter.

    The elements decide in the end, because torch does not count writes through ``grad.data``.

    Returns:
        The hook, which has a method `remove`.
    """
    of_parameter = weakref.ref(parameter)

    def check(_: Any) -> None:
        parameter = of_parameter()
        if parameter is not None and is_applied(parameter.grad) and parameter.grad.any():
            hook.remove()
            warnings.warn(
                f"backward adds to the gradient of {name!r}, which is the sum that the last step() has applied: with "
                'op="sum" that sum counts again for each rank: call zero_grad() before backward',
                stacklevel=2,
            )

    hook = parameter.register_hook(check)
    return hook
