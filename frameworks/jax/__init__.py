"""Collectives in JAX programs on CPUs: `unisono.jax`.

Calls of Unisono inside programs:

- `collectives.py`: the functions that users call.
- `calls.py`: calls as static parameters of primitives: their shapes, transposes, and numbers in the native core.
- `primitives.py`: the primitives, and their rules for evaluation, lowering, derivatives and batching.
- `installed.py`: whether there is a JAX that Unisono can use.
- `compatibility.py`: everything of these that depends on the version of JAX.

Training:

- `outer.py`: `DiLoCo`, `BlockMomentum` and `LocalSGD` for pytrees.

Calls of XLA:

- `xla.py`: XLA's own collectives between processes, carried out by Unisono.
- `groups.py`: XLA's communicators, made for groups of devices whose members are known.
- `replica_groups.py`: these groups, read from the text of compiled programs.
- `mpi_library.py`: the library that XLA takes for MPI, and the variables by which it finds it.
"""
