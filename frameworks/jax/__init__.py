"""Collectives in JAX programs on CPUs: `unisono.jax`.

- `xla.py`: XLA's own collectives between processes, carried out by Unisono.
- `mpi_library.py`: the library that XLA takes for MPI, and the variables by which it finds it.
"""
