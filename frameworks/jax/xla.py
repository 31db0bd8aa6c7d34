"""`use_for_xla`: XLA's own collectives between processes, such as `psum`, carried out by Unisono.

Theory of operation
-------------------
On CPUs, XLA carries out collectives between processes by Gloo or by MPI. It reaches MPI through a table of functions
that it fills from a library. That library is ours (`transports/native/mpi_for_xla.cpp`). It passes calls to
`handle` here. The first time that XLA makes a collective on arrays of some length, `handle` plans it and registers it
with the native core. After that, the library lets the core run it, without Python::

    psum over a mesh axis  →  MPI_Allreduce  →  handle(ALLREDUCE, …) → number    (the first time)
                                             →  the registered call of this number, in the native core

For each group of devices, XLA makes a communicator once, by MPI_Comm_split, and keeps it. `groups.py` knows its
members.

An exception cannot pass through XLA. So `handle` hands its text to the library and returns 0, and XLA raises it in the
program as a `JaxRuntimeError`.
"""

from __future__ import annotations

import atexit
import ctypes
import enum
import itertools
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from unisono import Communicator, init
from unisono.errors import UnisonoError, UsageError
from unisono.frameworks.jax import mpi_library
from unisono.frameworks.jax.compatibility import (
    drop_coordination,
    is_distributed,
    is_in_use,
    leave_sigterm_alone,
    process_number,
)
from unisono.frameworks.jax.groups import DeviceGroups
from unisono.operations import operation
from unisono.xla_programs import xla_runner

# Numbered from 1, as in mpi_for_xla.cpp.
_DTYPES = (
    *("uint8", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float32", "float64", "complex64", "complex128"),
)
_OPS = ("sum", "prod", "min", "max")
_WORLD = 1  # MPI_COMM_WORLD
_ARGUMENTS = 6
_LEFT_OUT = -1  # the number of a call that the library does not make, as in mpi_for_xla.cpp

Shape: TypeAlias = "tuple[int, ...]"


class MpiFunction(enum.IntEnum):
    """The functions of MPI that XLA calls, numbered as in mpi_for_xla.cpp."""

    SPLIT = 0
    FREE = 1
    RANK = 2
    SIZE = 3
    ALLREDUCE = 4
    ALLGATHER = 5
    REDUCE_SCATTER = 6
    SEND = 7
    RECEIVE = 8
    WAIT = 9
    EXCHANGE = 10
    FINALIZE = 11


def use_for_xla(world: Communicator | None = None) -> Communicator:
    """Let XLA carry out its collectives between processes by Unisono, and return the communicator of all processes.

    Every process of the job calls this before JAX is used. If `jax.distributed` has not been initialised, this does so,
    with the ranks of `world` as the processes. Afterwards all collectives of JAX programs on CPUs use Unisono: `psum`,
    `all_gather`, `psum_scatter`, `ppermute` and `all_to_all`, and those that XLA adds to programs on sharded arrays.
    They have the time limit of `world`. The loss of a process is an error on all others, which JAX raises as a
    `JaxRuntimeError` with the text of our error.

    XLA reduces no 8- and 16-bit floats by MPI. It refuses such programs, or converts the elements to float32.

    Args:
        world: the communicator to use; by default that of `unisono.init()`. It stays open until the process ends.

    Raises:
        UsageError: XLA has chosen other collectives already, because JAX has been used before or was imported before
            `unisono.jax`; or `jax.distributed` was initialised with other processes than those of `world`.
    """
    if obstacle := mpi_library.obstacle():
        raise UsageError(obstacle)
    if is_in_use():
        raise UsageError("JAX has already been used in this process: call use_for_xla() before any other call of JAX")
    world = init() if world is None else world
    if world.size == 1:
        return world
    distributed_here = not is_distributed()
    if distributed_here:
        leave_sigterm_alone()
        address = _coordinator(world)
        jax.distributed.initialize(address, world.size, world.rank, coordinator_bind_address=address)
    library = _serve(_Calls(world, DeviceGroups(world, _ranks_of_processes(world))))
    jax.config.update("jax_cpu_collectives_implementation", "mpi")
    if distributed_here:
        atexit.register(_disconnect_after_failure, library)
    return world


def _ranks_of_processes(world: Communicator) -> list[int]:
    """Return the rank of each process of JAX.

    Raises:
        UsageError: the processes of `jax.distributed` are not the ranks of `world`.
    """
    processes = [int(each) for each in world.allgather(np.array([process_number()]))]
    if sorted(processes) != [*range(world.size)]:
        raise UsageError(
            f"the ranks of Unisono have the numbers {processes} in jax.distributed, and must have 0 to "
            f"{world.size - 1}: start both with the same processes, or leave jax.distributed to use_for_xla()"
        )
    return [processes.index(process) for process in range(world.size)]


def _disconnect_after_failure(library: ctypes.CDLL) -> None:
    """Let this process end at once after a failure: JAX would wait minutes for the processes that are lost."""
    if library.unisono_has_failed() or getattr(sys, "last_value", None) is not None:
        drop_coordination()


def _coordinator(world: Communicator) -> str:
    """Return the address of the coordination service of JAX, which rank 0 serves on a free port.

    Its host is that of the option `bind_address`.
    """
    address = ""
    if world.rank == 0:
        host = world.program_calls().address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as probe:
            port = probe.getsockname()[1]
        address = f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
    return str(world.broadcast_object(address))


# --- the calls of XLA ------------------------------------------------------------------------------------------------

# The handler, which lives as long as the process, because XLA calls it from threads of its own.
_served: list[Any] = []


def _serve(calls: _Calls) -> ctypes.CDLL:
    """Load the library that XLA takes for MPI, let it make its calls by `calls`, and return it."""
    library = ctypes.CDLL(mpi_library.path())
    library.unisono_set_error.argtypes = [ctypes.c_char_p]

    def handle(function: int, *arguments: int) -> int:
        try:
            return calls.make(function, arguments)
        except BaseException as error:  # noqa: BLE001  (no exception can pass through XLA)
            library.unisono_set_error(f"{type(error).__name__}: {error}".encode())
            return 0

    handler = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * (_ARGUMENTS + 1))(handle)
    library.unisono_set_handler(handler)
    library.unisono_set_runner(ctypes.c_void_p(xla_runner()))
    _served.append(handler)
    # XLA frees its communicators after the interpreter has ended. Registered first, so that it runs last.
    atexit.register(library.unisono_set_handler, None)
    return library


class _Calls:
    """Makes the calls of XLA, and plans its collectives. A call returns a number other than 0, or raises."""

    def __init__(self, world: Communicator, groups: DeviceGroups) -> None:
        self._world = world
        self._groups = groups
        self._numbers = itertools.count(_WORLD + 1)
        self._communicators: dict[int, Communicator | BaseException] = {_WORLD: world}
        self._requests: dict[int, Any] = {}
        self._by_function: dict[int, Callable[..., int]] = {
            MpiFunction.SPLIT: self._split,
            MpiFunction.FREE: self._free,
            MpiFunction.RANK: self._rank,
            MpiFunction.SIZE: self._size,
            MpiFunction.ALLREDUCE: self._allreduce,
            MpiFunction.ALLGATHER: self._allgather,
            MpiFunction.REDUCE_SCATTER: self._reduce_scatter,
            MpiFunction.SEND: self._send,
            MpiFunction.RECEIVE: self._receive,
            MpiFunction.WAIT: self._wait,
            MpiFunction.EXCHANGE: self._exchange,
            MpiFunction.FINALIZE: self._finalize,
        }

    def make(self, function: int, arguments: Sequence[int]) -> int:
        """Make a call of XLA."""
        return self._by_function[function](*arguments)

    def _communicator(self, number: int) -> Communicator:
        communicator = self._communicators[number]
        if isinstance(communicator, BaseException):
            raise communicator
        return communicator

    def _split(self, _parent: int, color: int, key: int, *_: int) -> int:
        number = next(self._numbers)
        try:
            self._communicators[number] = self._groups.split(number, color, key)
        except UnisonoError as error:  # XLA ignores the error of this call, so the calls on the communicator raise it
            self._communicators[number] = error
        return number

    def _free(self, number: int, *_: int) -> int:
        communicator = self._communicators.pop(number, None)
        if isinstance(communicator, Communicator) and communicator is not self._world:
            communicator.close()
        return 1

    def _rank(self, number: int, *_: int) -> int:
        communicator = self._communicators[number]
        return communicator.rank if isinstance(communicator, Communicator) else 0

    def _size(self, number: int, *_: int) -> int:
        communicator = self._communicators[number]
        return communicator.size if isinstance(communicator, Communicator) else 1

    def _allreduce(self, number: int, count: int, dtype: int, op: int, *_: int) -> int:
        if self._groups.is_rehearsed(number):
            self._communicator(number)  # raises its error, if it has one
            return _LEFT_OUT
        return self._registered(number, "allreduce", (count,), (count,), dtype, _OPS[op - 1])

    def _allgather(self, number: int, count: int, dtype: int, *_: int) -> int:
        size = self._communicator(number).size
        return self._registered(number, "allgather", (1, count), (size, count), dtype)

    def _reduce_scatter(self, number: int, count: int, dtype: int, op: int, *_: int) -> int:
        size = self._communicator(number).size
        return self._registered(number, "reduce_scatter", (size, count), (1, count), dtype, _OPS[op - 1])

    def _registered(
        self, number: int, name: str, shape: Shape, result: Shape, dtype: int, op: str | None = None
    ) -> int:
        """Plan a collective and register it with the native core; return its number there."""
        calls = self._communicator(number).program_calls()
        return calls.collective(name, shape, result, _DTYPES[dtype - 1], None if op is None else operation(op), None)

    def _exchange(self, number: int, nbytes: int, dest: int, source: int, *_: int) -> int:
        calls = self._communicator(number).program_calls()
        return calls.exchange("uint8", dest, source, (nbytes,), (nbytes,), 0)

    def _send(self, number: int, data: int, count: int, dtype: int, dest: int, tag: int) -> int:
        return self._keep(self._communicator(number).send(_array(data, count, dtype), dest, tag, wait=False))

    def _receive(self, number: int, data: int, count: int, dtype: int, source: int, tag: int) -> int:
        return self._keep(self._communicator(number).recv(_array(data, count, dtype), source, tag, wait=False))

    def _keep(self, work: Any) -> int:
        number = next(self._numbers)
        self._requests[number] = work
        return number

    def _wait(self, request: int, *_: int) -> int:
        self._requests.pop(request).wait()
        return 1

    def _finalize(self, *_: int) -> int:
        self._world.close()
        return 1


def _array(address: int, count: int, dtype: int) -> Any:
    """Return the array of `count` elements at an address in the memory of XLA."""
    element = np.dtype(_DTYPES[dtype - 1])
    if not count:
        return np.empty(0, element)
    memory: Any = (ctypes.c_byte * (count * element.itemsize)).from_address(address)
    return np.frombuffer(memory, element)
