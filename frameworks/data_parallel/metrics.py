"""`average_metrics`: the mean of a loss, an accuracy or another number over the samples of all ranks."""

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
        metrics: by name, the mean over this rank's samples, as a number or an array of one element. All ranks pass the
            same names, in any order.
        samples: the number of samples of this rank, 0 or more. The numbers of a rank with 0 samples do not count.

    Raises:
        UsageError: a value is no number, and nothing has been sent; or no rank has a sample.
        MismatchError: the names differ between ranks; the message says which.
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
    # The numbers of a rank without samples may be NaN, so they are replaced by zeros.
    sums = world.allreduce(np.append(values * weight if weight else np.zeros(len(names)), weight), reproducible=True)
    if sums[-1] == 0:
        raise UsageError("no rank has a sample, so the average is not defined: let one rank pass samples above 0")
    return dict(zip(names, (sums[:-1] / sums[-1]).tolist(), strict=True))


def _number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} must be a number, not {value!r}") from error
