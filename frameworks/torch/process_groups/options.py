"""The options of a process group."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from unisono import Options as Settings, UsageError
from unisono.dtypes import DTYPES

# By dtype, the wider dtype in which it is computed. Only these dtypes can be accumulated in a wider one.
_NARROW = {
    getattr(torch, name): dtype.accumulate for name, dtype in DTYPES.items() if dtype.kind in ("float", "float8")
}


class Options:
    """Settings of a process group: ``init_process_group("unisono", pg_options=Options(algorithm="ring"))``.

    Args:
        reproducible: whether the bits of every reduction depend only on the contributions and their ranks.
        accumulate: "float32" to sum up float16, bfloat16 and the 8-bit floats in float32, and round once.
        hooks: whether hooks of torch, such as its flight recorder, see the calls. Every call then goes through torch's
            dispatcher, which takes some microseconds, and its work has only `wait` and `get_future`. Before torch 2.14
            there are no such hooks.
        timeout: the time limit of a call; by default the timeout of `init_process_group` or `new_group`.
        settings: fields of `unisono.Options`, such as `transports`, `algorithm` and `bind_address`; by default those of
            the ``UNISONO_*`` variables. Some settings must be equal on all ranks: those of rank 0 of the group apply.

    Raises:
        UsageError: there is no such setting, or it has a value that it cannot have.
    """

    def __init__(
        self,
        *,
        reproducible: bool = False,
        accumulate: str | None = None,
        hooks: bool = False,
        timeout: timedelta | None = None,
        **settings: Any,
    ) -> None:
        if accumulate not in (None, "float32"):
            raise UsageError(f"accumulate must be None or 'float32', not {accumulate!r}")
        if timeout is not None and not isinstance(timeout, timedelta):
            raise UsageError(f"timeout must be a datetime.timedelta, not {timeout!r}")
        self.reproducible = reproducible
        self.accumulate = accumulate
        self.hooks = hooks
        self.timeout = timeout
        self._settings = settings
        self.settings(timedelta(seconds=1))  # raises now if a setting is wrong

    @property
    def _timeout(self) -> timedelta | None:
        """The timeout under the name by which a device mesh of torch reads it."""
        return self.timeout

    def settings(self, timeout: timedelta) -> Settings:
        """Return the settings of the communicator of a group; `timeout` is the one that torch passes for the group."""
        limit_s = (self.timeout or timeout).total_seconds()
        limits = {"timeout_s": limit_s, "rendezvous_timeout_s": limit_s}
        try:
            return Settings.from_environment(os.environ, **{**limits, **self._settings})
        except TypeError as error:
            raise UsageError(f"the options of a process group are wrong: {error}") from None

    def rounding(self) -> Mapping[Any, Mapping[str, Any]]:
        """Return by dtype the extra arguments of reductions; a dtype without any is missing."""
        always: dict[str, Any] = {"reproducible": True} if self.reproducible else {}
        arguments: dict[Any, dict[str, Any]] = {}
        for name in DTYPES:
            dtype = getattr(torch, name)
            once = {"accumulate": self.accumulate} if _NARROW.get(dtype) == self.accumulate and self.accumulate else {}
            if always or once:
                arguments[dtype] = {**always, **once}
        return arguments
