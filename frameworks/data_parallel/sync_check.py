"""A running check that parameters are the same on all ranks, a part of them in each step.

Theory of operation. Each rank computes a checksum (CRC-32) of the next few parameters in each step. The caller lets the
ranks compare their checksums, which costs nothing where it can join another message: `GradientReducer` does so. Only
if they differ do all ranks call `raise_difference`, which hashes all parameters and names the first that differs.

The first steps check all parameters, because most mistakes show there. Later steps check as much as it takes to come
through all parameters in `every` steps. For example, of 40 MB and 100 steps, each step reads 0.4 MB on average, which
takes 0.1 ms where a core computes checksums of 4 GB/s. A large parameter is read at once; the next steps read none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono import Communicator, MismatchError, UsageError
from unisono.frameworks.arrays import checksum, flatten
from unisono.frameworks.data_parallel.parameters import verify_sync

_FIRST_STEPS = 3
# What each parameter costs beside its bytes, as the number of bytes that take as long.
_OVERHEAD_NBYTES = 32 << 10


class SyncCheck:
    """Checksums of parameters, of which each step computes some.

    Args:
        parameters: arrays by name, the same names in the same order on all ranks. They are read again in each step, so
            the mapping may get other arrays and more names.
        every: in how many steps each parameter is checked once, 1 or more.

    Raises:
        UsageError: `every` is no such number.
    """

    def __init__(self, parameters: Mapping[str, Any], every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"verify_every must be a number of steps, 0 or more, not {every!r}")
        self._parameters = parameters
        self._every = every
        self._names: tuple[str, ...] = ()
        self._due_nbytes = 0.0  # how many bytes are to be read; below 0 after a large parameter
        self.restart()

    def checksum(self) -> int:
        """Return the checksum of the next parameters; it is the same on all ranks unless one of these differs.

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
        """Let the next steps check all parameters. Ranks may do so apart: `raise_difference` brings them together."""
        self._first_steps = _FIRST_STEPS
        self._turn = 0
        self._total_nbytes = self._due_nbytes = 0.0

    def raise_difference(self, world: Communicator) -> None:
        """Raise an error that names the first parameter that differs, and the ranks. All ranks call it.

        It returns if all ranks hold the same by now.

        Raises:
            MismatchError: the parameters differ.
            PeerLostError, CollectiveTimeoutError, AbortedError: as in any call.
        """
        self.restart()  # also on a rank that has counted other bytes than the others
        try:
            verify_sync(world, self._parameters)
        except MismatchError as error:
            error.message = (
                f"the parameters are no longer the same on all ranks: {error.message}. Perhaps one rank has changed "
                "them, or its gradients before these were averaged. broadcast_parameters makes them the same again, "
                "and verify_every=0 ends this check"
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
