"""Allreduces in compiled programs of JAX: by `unisono.jax`, mpi4jax, or `psum` over Gloo or Unisono.

A program makes several allreduces, because starting a program takes as long as a short call. Each allreduce gets the
mean of the result before it. The environment variable `PROGRAMS` names the library.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np

# The environment variable that names the library: a name in `_WORLDS`.
PROGRAMS = "BENCH_JAX_PROGRAMS"
_MOST_CALLS, _MOST_NBYTES = 500, 64 << 20


def calls_of(nbytes: int) -> int:
    """Return the number of allreduces of `nbytes` in a program."""
    return max(1, min(_MOST_CALLS, _MOST_NBYTES // max(1, nbytes)))


class Holder:
    """Holds an array of `nbytes` on this rank, because arrays of JAX cannot be overwritten."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.array: Any = None


class _Unisono:
    """The functions of `unisono.jax`."""

    def __init__(self) -> None:
        self._unisono = importlib.import_module("unisono")
        self.world = self._unisono.init()
        self._functions = importlib.import_module("unisono.jax")
        self.size, self.barrier, self.close = self.world.size, self.world.barrier, self.world.close
        self.version = f"Unisono {importlib.metadata.version('unisono')}"

    def sum(self, x: Any) -> Any:
        """Return the sum of the arrays of all ranks, in a program."""
        return self._functions.allreduce(x, comm=self.world)

    def mapped(self, program: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a program on the arrays of all ranks for a program on those of one."""
        return program

    def whole(self, x: Any) -> Any:
        """Return the argument of the program that stands for the arrays of all ranks, made of this rank's array."""
        return x

    def part(self, x: Any) -> Any:
        """Return the part of a result of the program that lies on this rank."""
        return x


class _Mpi4jax(_Unisono):
    """mpi4jax on the MPI library of its environment."""

    def __init__(self) -> None:
        mpi: Any = importlib.import_module("mpi4py.MPI")
        self._functions = importlib.import_module("mpi4jax")
        self.world, self._add = mpi.COMM_WORLD, mpi.SUM
        self.size, self.barrier, self.close = self.world.size, self.world.Barrier, mpi.Finalize
        first_line = mpi.Get_library_version().partition("\n")[0].partition(",")[0].strip("\0")
        self.version = f"mpi4jax {self._functions.__version__} on {' '.join(first_line.split())}"

    def sum(self, x: Any) -> Any:
        return self._functions.allreduce(x, op=self._add, comm=self.world)


class _Gloo(_Unisono):
    """XLA's own collectives by Gloo. Unisono starts the processes and is the barrier between programs."""

    name = "Gloo"

    def __init__(self) -> None:
        super().__init__()
        self._start()
        self._jax: Any = importlib.import_module("jax")
        sharding: Any = importlib.import_module("jax.sharding")
        self._mesh = sharding.Mesh(np.array(self._jax.devices()), ("ranks",))
        self._spec = sharding.PartitionSpec("ranks")
        self._sharding = sharding.NamedSharding(self._mesh, self._spec)
        self.version = f"{self.name} of jaxlib {importlib.metadata.version('jaxlib')}"

    def _start(self) -> None:
        jax: Any = importlib.import_module("jax")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = self.world.broadcast_object(f"127.0.0.1:{probe.getsockname()[1]}")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, self.world.size, self.world.rank)

    def sum(self, x: Any) -> Any:
        return self._jax.lax.pcast(self._jax.lax.psum(x, "ranks"), "ranks", to="varying")

    def mapped(self, program: Callable[[Any], Any]) -> Callable[[Any], Any]:
        mapped: Callable[[Any], Any] = self._jax.shard_map(
            program, mesh=self._mesh, in_specs=self._spec, out_specs=self._spec
        )
        return mapped

    def whole(self, x: Any) -> Any:
        shape = (self.size * x.shape[0], *x.shape[1:])
        return self._jax.make_array_from_single_device_arrays(shape, self._sharding, [x])

    def part(self, x: Any) -> Any:
        return x.addressable_data(0)


class _Xla(_Gloo):
    """XLA's own collectives by Unisono."""

    name = "Unisono"

    def _start(self) -> None:
        self._functions.use_for_xla(self.world)


_WORLDS: dict[str, Callable[[], Any]] = {"unisono": _Unisono, "mpi4jax": _Mpi4jax, "gloo": _Gloo, "xla": _Xla}


class JaxAdapter:
    """The adapter of compiled programs of JAX, whose collectives a library carries out.

    It is also the worker's memory: arrays are `Holder`s.
    """

    def __init__(self) -> None:
        self._world = _WORLDS[os.environ[PROGRAMS]]()
        self._jax: Any = importlib.import_module("jax")
        self.memory = self
        self.size, self.barrier = self._world.size, self._world.barrier
        self.version, self.close = self._world.version, self._world.close
        self._programs: dict[int, Any] = {}

    def call(self, collective: str, array: Any, out: Any) -> Callable[[], object]:
        """Return the call to measure: a program of `calls_of` allreduces."""
        if collective != "allreduce":
            raise NotImplementedError(f"programs of JAX are measured with allreduce only, not with {collective}")
        world, calls = self._world, calls_of(array.nbytes)
        if array.nbytes not in self._programs:

            def mean(_: int, x: Any) -> Any:
                return world.sum(x) / world.size

            def repeated(x: Any) -> Any:
                return world.sum(self._jax.lax.fori_loop(0, calls - 1, mean, x))

            self._programs[array.nbytes] = self._jax.jit(world.mapped(repeated))
        program = self._programs[array.nbytes]

        def run() -> None:
            out.array = program(array.array).block_until_ready()

        return run

    def empty(self, count: int, dtype: Any) -> Holder:
        """Return a holder for a flat array."""
        return Holder(count * np.dtype(dtype).itemsize)

    def place(self, array: Any) -> Any:
        """Return the content of a numpy array as an array of JAX."""
        return self._world.whole(self._jax.numpy.asarray(array))

    def fill(self, array: Holder, source: Any) -> None:
        """Let a holder hold an array."""
        array.array = source

    def fetch(self, array: Holder, part: slice) -> Any:
        """Return a part of the array of a holder as a numpy array."""
        return np.asarray(self._world.part(array.array))[part]

    def compared(self, count: int) -> list[slice]:
        """Return the parts that are compared: everything."""
        return [slice(0, count)]


connect = JaxAdapter
