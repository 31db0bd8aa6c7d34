"""Rank 0 draws samples of a normal distribution by emcee; the other ranks evaluate its logarithm."""

import sys

import emcee
import numpy as np
from schwimmbad import MPIPool


def logarithm(point: np.ndarray) -> float:
    """Return the logarithm of the density at a point, up to a constant."""
    return -0.5 * float(np.sum(point**2))


with MPIPool() as pool:
    if not pool.is_master():
        pool.wait()
        sys.exit(0)
    np.random.seed(7)
    sampler = emcee.EnsembleSampler(16, 3, logarithm, pool=pool)
    sampler.run_mcmc(np.random.randn(16, 3), 30)
    print(sampler.get_chain(flat=True).sum(axis=0).tolist(), sampler.acceptance_fraction.tolist())
