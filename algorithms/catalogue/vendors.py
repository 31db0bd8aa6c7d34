"""Vendor algorithms: collectives that a library carries out by itself. They have no plan and no cost.

They run only if they are forced. The library decides how it works, so Unisono promises nothing about the order in which
it combines contributions.
"""

from __future__ import annotations

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.algorithms.ir.plan import Partition, Plan

MPI_NATIVE = "mpi.native"

_MPI_STANDARD = (
    "Message Passing Interface Forum, MPI: A Message-Passing Interface Standard, Version 4.1, 2023, sections 6.12 "
    "(nonblocking collective operations)"
)


class Unplanned:
    """A builder of plans without steps, for executors that recognise the algorithm by its name."""

    def __init__(self, collective: str, name: str) -> None:
        self._collective = collective
        self._name = name

    def __call__(self, size: int, rank: int, root: int = 0, *, varying: bool = False) -> Plan:
        """Return a plan of `rank` without steps."""
        return Plan(self._collective, self._name, size, rank, root, Partition(0), Partition(0))


# Collective → name → algorithm, as in the registry.
VENDORS: dict[str, dict[str, Algorithm]] = {
    collective: {
        MPI_NATIVE: Algorithm(
            collective=collective,
            name=MPI_NATIVE,
            build=Unplanned(collective, MPI_NATIVE),
            cost=None,
            reference=_MPI_STANDARD,
            commutative_only=True,
            same_bits=False,
            segmentable=False,
            varying=CONTRACTS[collective].varying is not None,
            vendor=True,
        )
    }
    for collective in CONTRACTS
}
