"""The settings of a `GradientReducer` that must be the same on all ranks."""

from __future__ import annotations

from typing import NamedTuple

from unisono import UsageError
from unisono.frameworks.gradients.lag import Lag


class Settings(NamedTuple):
    """The arguments of a reducer on which the ranks agree when the first step ends.

    Attributes:
        bucket_communicators: how many of them the reducer has.
        memory: "host", or "device" for gradients on a GPU.
        verify_every: in how many steps each parameter is compared once; 0 if parameters are not compared.

    The other fields are the arguments of `GradientReducer` of the same names.
    """

    bucket_nbytes: int | None
    compression: str | None
    lag: Lag
    op: str
    missing: str
    bucket_communicators: int
    priorities: bool
    verify_every: int
    memory: str = "host"


def check_arguments(bucket_nbytes: int | None, op: str, missing: str) -> None:
    """Check arguments of a reducer.

    Raises:
        UsageError: one has a value that it cannot have.
    """
    if bucket_nbytes is not None and (not isinstance(bucket_nbytes, int) or bucket_nbytes < 1):
        raise UsageError(f"bucket_nbytes must be a positive number of bytes, not {bucket_nbytes!r}")
    choices = (
        ("op", op, ("avg", "sum")),
        ("missing", missing, ("error", "zero")),
    )
    for name, value, allowed in choices:
        if value not in allowed:
            raise UsageError(f"{name} must be {' or '.join(map(repr, allowed))}, not {value!r}")
