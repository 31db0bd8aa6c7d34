"""The variables ``HOROVOD_*`` that change the behaviour of this API. All others of Horovod have no effect."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from unisono.errors import UsageError


class Settings(NamedTuple):
    """The settings of a job, read once by `init`.

    Attributes:
        fusion_nbytes: the most bytes of small allreduces that run as one call (``HOROVOD_FUSION_THRESHOLD``).
        warn_s: seconds after which rank 0 logs which ranks have not used a name (``HOROVOD_STALL_CHECK_TIME_SECONDS``).
        stall_s: seconds after which the name is an error; 0 for the time limit of the communicator
            (``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``).
        is_checked: whether names are watched at all; not with ``HOROVOD_STALL_CHECK_DISABLE=1``.
        timeline: the file of the timeline; "" for none (``HOROVOD_TIMELINE``).
    """

    fusion_nbytes: int = 128 << 20
    warn_s: float = 60.0
    stall_s: float = 0.0
    is_checked: bool = True
    timeline: str = ""


_VARIABLES: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "fusion_nbytes": ("HOROVOD_FUSION_THRESHOLD", int),
    "warn_s": ("HOROVOD_STALL_CHECK_TIME_SECONDS", float),
    "stall_s": ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", float),
    "is_checked": ("HOROVOD_STALL_CHECK_DISABLE", lambda text: not int(text)),
    "timeline": ("HOROVOD_TIMELINE", lambda path: "" if path.upper() == "DYNAMIC" else path),
}


def read_settings() -> Settings:
    """Return the settings from the environment.

    Raises:
        UsageError: a variable is not the number that it must be.
    """
    values: dict[str, Any] = {}
    for field, (variable, parse) in _VARIABLES.items():
        text = os.environ.get(variable, "")
        if not text:
            continue
        try:
            values[field] = parse(text)
        except ValueError:
            raise UsageError(f"{variable} must be a number, not {text!r}") from None
    return Settings(**values)
