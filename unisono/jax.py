"""Unisono for JAX. Import this module before JAX, which looks for its libraries when it is imported."""

from unisono.frameworks.jax import mpi_library

mpi_library.announce()  # before the other imports, which import JAX

from unisono.frameworks.jax.xla import use_for_xla

__all__ = ["use_for_xla"]
