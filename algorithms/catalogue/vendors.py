"""What libraries carry out by themselves, as algorithms that can be named: they have no plan and no known cost.

How a library does it is its own affair: nothing is promised of the order in which it combines.
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
    """Builds plans without steps, for whoever knows by the name of the algorithm what is to be done."""

    def __init__(self, collective: str, name: str) -> None:
        self._collective = collective
        self._name = name

    def __call__(self, size: int, rank: int, root: int = 0, *, varying: bool = False) -> Plan:
        """Return the plan of `rank`, in which there is nothing."""
        return Plan(self._collective, self._name, size, rank, root, Partition(0), Partition(0))


# By collective, as in the registry.
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
