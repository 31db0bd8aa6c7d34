"""`SyncCheck`: a check in each step that some of the parameters are the same on all ranks.

Theory of operation
-------------------
In each step, each rank computes a checksum (CRC-32) of the next few parameters. The caller compares the checksums of
all ranks, which costs nothing if the checksum can join another message: `GradientReducer` does so. Only if they differ
do all ranks call `raise_difference`, which hashes all parameters and names the first that differs.

The first steps check all parameters, because most mistakes show there. Later steps check as many as are needed to check
each parameter once in `every` steps. For example, of 40 MB and 100 steps, each step reads 0.4 MB on average, which
takes 0.1 ms if a core computes checksums at 4 GB/s. A large parameter is read at once, and the next steps read none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono import Communicator, MismatchError, UsageError
from unisono.frameworks.arrays import checksum, flatten
from unisono.frameworks.data_parallel.parameters import verify_sync

_FIRST_STEPS = 3
# The fixed cost of a parameter, as the number of bytes that take equally long.
_OVERHEAD_NBYTES = 32 << 10


class SyncCheck:
    """Checksums of parameters; each step computes some of them.

    Args:
        parameters: arrays by name, with the same names in the same order on all ranks. They are read again in each
            step, so the program may replace arrays and add names.
        every: in how many steps each parameter is checked once, 1 or more.

    Raises:
        UsageError: `every` is no positive integer.
    """

    def __init__(self, parameters: Mapping[str, Any], every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"verify_every must be a number of steps, 0 or more, not {every!r}")
        self._parameters = parameters
        self._every = every
        self._names: tuple[str, ...] = ()
        self._due_nbytes = 0.0  # bytes to read in this step; below 0 after a large parameter
        self.restart()

    def checksum(self) -> int:
        """Return the checksum of the next parameters. It is the same on all ranks unless one of them differs.

        Raises:
            UsageError: a parameter is no array.
        """
        names = tuple(self._parameters)
        if names != self._names:
            self._names = names
            self.restart()
        if self._first_steps:
            self._first_steps -= 1
            return self._checksum_of_all()
        value = 0
        self._due_nbytes += self._total_nbytes / self._every
        while self._due_nbytes > 0:
            value = self._next(value)
        return value

    def restart(self) -> None:
        """Make the next steps check all parameters.

        Ranks that restart at different steps compare different parameters; then all call `raise_difference`, which
        restarts all of them.
        """
        self._first_steps = _FIRST_STEPS
        self._turn = 0
        self._total_nbytes = self._due_nbytes = 0.0

    def raise_difference(self, world: Communicator) -> None:
        """Raise an error that names the first parameter that differs, and the ranks. All ranks call it.

        It returns if all ranks hold the same parameters now.

        Raises:
            MismatchError: the parameters differ.
            PeerLostError, CollectiveTimeoutError, AbortedError: as in any call.
        """
        self.restart()  # so that all ranks check the same parameters again
        try:
            verify_sync(world, self._parameters)
        except MismatchError as error:
            error.message = (
                f"the parameters are no longer the same on all ranks: {error.message}. Perhaps one rank has changed "
                "them or its gradients by itself, for example by noise. Call broadcast_parameters to make them "
                "the same, or pass verify_every=0 to end this check"
            )
            raise

    def _checksum_of_all(self) -> int:
        value, self._due_nbytes = 0, 0.0
        for _ in self._names:
            value = self._next(value)
        self._total_nbytes, self._due_nbytes = -self._due_nbytes, 0.0
        return value

    def _next(self, before: int) -> int:
        name = self._names[self._turn]
        self._turn = (self._turn + 1) % len(self._names)
        flat = flatten(self._parameters[name], name).flat
        self._due_nbytes -= flat.nbytes + _OVERHEAD_NBYTES
        return checksum(flat, before)
