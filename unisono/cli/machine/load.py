"""The load of the machine before a measurement, and a warning if it is high."""

from __future__ import annotations

import os
from typing import NamedTuple

from unisono.cli.messages import tell

# If other processes keep more than this part of the usable cores busy, they disturb measurements.
_BUSY = 0.5
# If a time is off by more than this factor, something else used the cores or the link while it was measured. On
# machines at rest, short calibrations were off by up to 2.5.
MOST_OFF = 4.0


class Load(NamedTuple):
    """The load average of the last minute, and the number of cores that this process may use."""

    average: float
    cores: int

    def __str__(self) -> str:
        return f"load {self.average:.1f} on {self.cores} cores"

    def warn_if_busy(self) -> None:
        """Warn on standard error that times will be wrong, if other processes keep half of the cores busy."""
        if self.average > _BUSY * self.cores:
            tell(f"the machine is busy ({self}): measured times will be too long and will vary")


def load_now() -> Load:
    """Return the load of this machine now."""
    return Load(os.getloadavg()[0], len(os.sched_getaffinity(0)))
