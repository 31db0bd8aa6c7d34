"""The publications that algorithms and their costs are taken from."""

from __future__ import annotations

ARTEAGA = "Arteaga, Fuhrer, Hoefler: Designing Bit-Reproducible Portable High-Performance Applications, IPDPS 2014"
BINE = "De Sensi et al.: Bine Trees: Enhancing Collective Operations by Optimizing Communication Locality, SC 2025"
BRUCK = (
    "Bruck et al.: Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems, TPDS 1997"
)
CHAN = "Chan, Heimlich, Purkayastha, van de Geijn: Collective Communication: Theory, Practice, and Experience, 2007"
CHEN = (
    "Chen, Zhang, Zhang, Yuan: Evaluation of Allgather Algorithms on Terascale Linux Cluster with Fast Ethernet, 2005"
)
GRAHAM = (
    "Graham, Shipman: MPI Support for Multi-core Architectures: Optimized Shared Memory Collectives, EuroPVM/MPI 2008"
)
HENSGEN = "Hensgen, Finkel, Manber: Two Algorithms for Barrier Synchronization, IJPP 17(1), 1988"
HILLIS = "Hillis, Steele: Data Parallel Algorithms, CACM 29(12), 1986"
JAIN = "Jain, Sabharwal: Optimal Bucket Algorithms for Large MPI Collectives on Torus Interconnects, ICS 2010"
JEAUGEY = "Jeaugey: PAT: a new algorithm for all-gather and reduce-scatter operations at scale, arXiv 2506.20252"
LUO = "Luo et al.: HAN: a Hierarchical AutotuNed Collective Communication Framework, CLUSTER 2020"
MELLOR_CRUMMEY = "Mellor-Crummey, Scott: Algorithms for Scalable Synchronization on Shared-Memory Multiprocessors, 1991"
MULTI_LANE = "Träff, Hunold: Decomposing MPI Collectives for Exploiting Multi-lane Communication, CLUSTER 2020"
PJESIVAC = "Pješivac-Grbović et al.: Performance Analysis of MPI Collective Operations, Cluster Computing 10(2), 2007"
RABENSEIFNER = "Rabenseifner: Optimization of Collective Reduction Operations, ICCS 2004"
RUEFENACHT = (
    "Ruefenacht, Bull, Booth: Generalisation of recursive doubling for AllReduce: now with simulation, ParCo 69, 2017"
)
SANDERS = "Sanders, Speck, Träff: Two-tree algorithms for full bandwidth broadcast, reduction and scan, ParCo 2009"
SCAN_OF_MPI = "Sanders, Träff: Parallel Prefix (Scan) Algorithms for MPI, EuroPVM/MPI 2006"
SHAH = (
    "Shah et al.: MSCCL++: Rethinking GPU Communication Abstractions for Cutting-edge AI Applications, arXiv 2504.09014"
)
SWING = "De Sensi, Bonato, Saam, Hoefler: Swing: Short-cutting Rings for Higher Bandwidth Allreduce, NSDI 2024"
THAKUR = "Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA 2005"
TRAEFF_ROUGIER = "Träff, Rougier: MPI Collectives and Datatypes for Hierarchical All-to-all Communication, EuroMPI 2014"
TRAEFF = "Träff: Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms, arXiv 2410.14234"
TRAEFF_BLOCKS = (
    "Träff: (Poly)Logarithmic Time Construction of Round-optimal n-Block Broadcast Schedules, arXiv 2205.10072; and "
    "Round-optimal n-Block Broadcast Schedules in Logarithmic Time, arXiv 2312.11236"
)
WILKINS = "Wilkins et al.: Generalized Collective Algorithms for the Exascale Era, CLUSTER 2023"
