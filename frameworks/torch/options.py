"""What users may set for a process group."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from unisono import Options as Settings, UsageError
from unisono.dtypes import DTYPES

# The types that are computed in another one, by which alone a sum may be accumulated in it.
_NARROW = {
    getattr(torch, name): dtype.accumulate for name, dtype in DTYPES.items() if dtype.kind in ("float", "float8")
}


class Options:
    """Settings of a process group: ``init_process_group("unisono", pg_options=Options(algorithm="ring"))``.

    Args:
        reproducible: whether the bits of every reduction depend on the contributions and their ranks alone.
        accumulate: "float32" to sum float16, bfloat16 and the 8-bit floats up in float32, and round once.
        timeout: how long a call may take; by default what `init_process_group` or `new_group` is given.
        settings: fields of `unisono.Options`, such as `transports`, `algorithm` and `bind_address`; by default those of
            the ``UNISONO_*`` variables. All ranks of the group adopt those of its rank 0 that must be equal.

    Raises:
        UsageError: there is no such setting, or it cannot have that value.
    """

    def __init__(
        self,
        *,
        reproducible: bool = False,
        accumulate: str | None = None,
        timeout: timedelta | None = None,
        **settings: Any,
    ) -> None:
        if accumulate not in (None, "float32"):
            raise UsageError(f"accumulate must be None or 'float32', not {accumulate!r}")
        if timeout is not None and not isinstance(timeout, timedelta):
            raise UsageError(f"timeout must be a datetime.timedelta, not {timeout!r}")
        self.reproducible = reproducible
        self.accumulate = accumulate
        self.timeout = timeout
        self._given = settings
        self.settings(timedelta(seconds=1))  # so that what is wrong is found here

    @property
    def _timeout(self) -> timedelta | None:
        """What a device mesh asks the options of its groups for."""
        return self.timeout

    def settings(self, timeout: timedelta) -> Settings:
        """Return the settings of the communicator of a group, which torch has given this timeout."""
        limit_s = (self.timeout or timeout).total_seconds()
        limits = {"timeout_s": limit_s, "rendezvous_timeout_s": limit_s}
        try:
            return Settings.from_environment(os.environ, **{**limits, **self._given})
        except TypeError as error:
            raise UsageError(f"Options of a process group cannot be: {error}") from None

    def rounding(self) -> Mapping[Any, Mapping[str, Any]]:
        """Return the arguments of reductions, by the dtype of the tensor; those that are not there have `{}`."""
        always: dict[str, Any] = {"reproducible": True} if self.reproducible else {}
        found: dict[Any, dict[str, Any]] = {}
        for name in DTYPES:
            dtype = getattr(torch, name)
            once = {"accumulate": self.accumulate} if _NARROW.get(dtype) == self.accumulate and self.accumulate else {}
            if always or once:
                found[dtype] = {**always, **once}
        return found
