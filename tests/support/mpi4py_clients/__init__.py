"""Programs that use libraries on top of mpi4py. Each prints the same over every MPI.

pool: the pool of schwimmbad.
sampler: emcee, whose walkers are evaluated in that pool.
osu: a benchmark with few repetitions.
cluster: dask-mpi, whose scheduler and workers are ranks.
"""
