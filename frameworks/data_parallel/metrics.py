"""Numbers about a model, such as a loss or an accuracy, as one of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from unisono import Communicator, UsageError
from unisono.frameworks.arrays import same_bits
from unisono.frameworks.data_parallel.parameters import check_names


@same_bits
def average_metrics(world: Communicator, metrics: Mapping[str, Any], samples: float = 1) -> dict[str, float]:
    """Return the mean of each number over the samples of all ranks, the same bits on every rank.

    Args:
        world: the ranks, all of which call it.
        metrics: numbers, or arrays of one element, by name; each the mean over this rank's samples. The same names on
            all ranks, in any order.
        samples: how many samples this rank has, 0 or more; where it is 0, the numbers do not count.

    Raises:
        UsageError: `metrics` or `samples` are no such numbers, and nothing has been sent; or no rank has a sample.
        MismatchError: the names differ; it says which.
        PeerLostError, CollectiveTimeoutError, AbortedError: as in any call.

    >>> import unisono as un
    >>> from unisono.data_parallel import average_metrics
    >>> un.launch(lambda world: average_metrics(world, {"loss": world.rank}, samples=1 + 2 * world.rank), 2)
    [{'loss': 0.75}, {'loss': 0.75}]
    """
    names = sorted(metrics)
    values = np.array([_number(metrics[name], name) for name in names])
    weight = _number(samples, "samples")
    if not 0 <= weight < np.inf:
        raise UsageError(f"samples must be a number, 0 or more, not {samples!r}")
    check_names(world, names)
    # What a rank without samples has computed may be NaN.
    sums = world.allreduce(np.append(values * weight if weight else np.zeros(len(names)), weight), reproducible=True)
    if sums[-1] == 0:
        raise UsageError("no rank has a sample: there is nothing to average")
    return dict(zip(names, (sums[:-1] / sums[-1]).tolist(), strict=True))


def _number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} must be a number, not {value!r}") from error
