"""Where the algorithms are from."""

from __future__ import annotations

BRUCK = (
    "Bruck et al.: Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems, TPDS 1997"
)
CHAN = "Chan, Heimlich, Purkayastha, van de Geijn: Collective Communication: Theory, Practice, and Experience, 2007"
CHEN = (
    "Chen, Zhang, Zhang, Yuan: Evaluation of Allgather Algorithms on Terascale Linux Cluster with Fast Ethernet, 2005"
)
HENSGEN = "Hensgen, Finkel, Manber: Two Algorithms for Barrier Synchronization, IJPP 17(1), 1988"
MELLOR_CRUMMEY = "Mellor-Crummey, Scott: Algorithms for Scalable Synchronization on Shared-Memory Multiprocessors, 1991"
PJESIVAC = "Pješivac-Grbović et al.: Performance Analysis of MPI Collective Operations, Cluster Computing 10(2), 2007"
SANDERS = "Sanders, Speck, Träff: Two-tree algorithms for full bandwidth broadcast, reduction and scan, ParCo 2009"
THAKUR = "Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA 2005"
TRAEFF = "Träff: Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms, arXiv 2410.14234"
WILKINS = "Wilkins et al.: Generalized Collective Algorithms for the Exascale Era, CLUSTER 2023"
