"""How busy the machine is before something is measured on it."""

from __future__ import annotations

import os
from typing import NamedTuple

from unisono.cli.messages import tell

# Of the cores that this process may use, the part that others may keep busy without disturbing measurements much.
_BUSY = 0.5


class Load(NamedTuple):
    """The load average of the last minute, and the cores that this process may use."""

    average: float
    cores: int

    def __str__(self) -> str:
        return f"load {self.average:.1f} on {self.cores} cores"

    def warn_if_busy(self) -> None:
        """Say on stderr that measurements will be wrong, if other processes keep half of the cores busy."""
        if self.average > _BUSY * self.cores:
            tell(f"the machine is busy ({self}): times will be too long, and differ")


def load_now() -> Load:
    """Return the load of this machine now."""
    return Load(os.getloadavg()[0], len(os.sched_getaffinity(0)))
