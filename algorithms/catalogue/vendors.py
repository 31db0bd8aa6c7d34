"""Vendor algorithms: collectives that a library carries out by itself. They have no plan and no cost.

They run only if they are forced. The library decides how it works, so Unisono promises nothing about the order in which
it combines contributions.
"""

from __future__ import annotations

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.algorithms.ir.plan import Partition, Plan

MPI_NATIVE = "mpi.native"
NCCL_NATIVE = "nccl.native"
# NCCL within each host, and Unisono's links between hosts.
NCCL_WITHIN_HOSTS = "nccl.within_hosts"
BY_NCCL = frozenset({NCCL_NATIVE, NCCL_WITHIN_HOSTS})

_REFERENCES = {
    MPI_NATIVE: (
        "Message Passing Interface Forum, MPI: A Message-Passing Interface Standard, Version 4.1, 2023, sections 6.12 "
        "(nonblocking collective operations)"
    ),
    **dict.fromkeys(
        BY_NCCL,
        "NVIDIA, NVIDIA Collective Communications Library, https://docs.nvidia.com/deeplearning/nccl/user-guide",
    ),
}
# The needs of ranks that lack a library.
NEEDS = {
    MPI_NATIVE: "needs ranks that start by its library: see un.init(mpi_comm=)",
    NCCL_NATIVE: "needs arrays on a GPU",
    NCCL_WITHIN_HOSTS: "needs arrays on GPUs of several hosts",
}
# NCCL has no counts of rows.
_VARYING = {MPI_NATIVE}
# The collectives that a library lacks.
_LACKING = {
    MPI_NATIVE: frozenset[str](),
    NCCL_NATIVE: frozenset({"barrier", "scan", "exscan"}),
    NCCL_WITHIN_HOSTS: frozenset({"barrier", "scan", "exscan"}),
}


class Unplanned:
    """A builder of plans without steps, for executors that recognise the algorithm by its name."""

    def __init__(self, collective: str, name: str) -> None:
        self._collective = collective
        self._name = name

    def __call__(self, size: int, rank: int, root: int = 0, *, varying: bool = False) -> Plan:
        """Return a plan of `rank` without steps."""
        return Plan(self._collective, self._name, size, rank, root, Partition(0), Partition(0))


def _algorithm(collective: str, name: str) -> Algorithm:
    return Algorithm(
        collective=collective,
        name=name,
        build=Unplanned(collective, name),
        cost=None,
        reference=_REFERENCES[name],
        commutative_only=True,
        same_bits=False,
        segmentable=False,
        varying=name in _VARYING and CONTRACTS[collective].varying is not None,
        vendor=True,
    )


# Collective → name → algorithm, as in the registry.
VENDORS: dict[str, dict[str, Algorithm]] = {
    collective: {name: _algorithm(collective, name) for name in NEEDS if collective not in _LACKING[name]}
    for collective in CONTRACTS
}
