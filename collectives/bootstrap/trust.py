"""Sentences that say who can join a job besides its ranks, by its launcher and the origin of its key.

Used by: `init`, which logs the sentence on rank 0, and ``unisono doctor``.
"""

from __future__ import annotations

from unisono.collectives.bootstrap.environment import ENV, MPI_WORLD, Launch

_BY_FILE = "This job's key comes from a file that only you can read; any process that reads it can join the job."
_BY_STORE = (
    "Rank 0 makes this job's key and hands it out in the store: a process that reaches the store before all ranks have "
    "met can join."
)
_BY_TORCH = _BY_STORE.replace("the store", "torch's store")
_BY_MPI = "Rank 0 makes this job's key and hands it out by MPI: a process that reads MPI's network can join."

# By launcher, for keys that come from no file. Launchers that are not listed name a store, as `_BY_STORE` says.
_TRUST = {
    "none": "No launcher. `unisono run` makes a key for each job and hands it to the ranks in a pipe.",
    "unisono": "The launcher made this job's key and handed it to this rank in a pipe; only the ranks have it.",
    "dask": "The client made this job's key and handed it to the workers through Dask's scheduler.",
    "ray": "The driver made this job's key and handed it to the actors through Ray.",
    "torchrun": _BY_TORCH,
    ENV: _BY_STORE,
    "a program with a store": _BY_TORCH,
}


def trust_of(launch: Launch) -> str:
    """Return a sentence that says who can join a job that was launched in this way."""
    if launch.store == MPI_WORLD:
        return _BY_MPI
    if launch.key is not None and launch.launcher != "unisono":
        return _BY_FILE
    return _TRUST.get(launch.launcher, _BY_STORE)
