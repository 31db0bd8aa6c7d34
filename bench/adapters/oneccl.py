"""Intel oneCCL on host memory through its C interface, because it has no Python interface.

Its ranks are processes of Intel MPI, on which it runs; mpi4py distributes the identifier of the communicator. The C
interface has no barrier, so the barrier between calls is Intel MPI's.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

UNIQUE_ID_NBYTES = 4096
SUM = 0
ROOT = 0

# The enumeration onecclDataType_t.
DATATYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}

Pointer = ctypes.c_void_p


class UniqueId(ctypes.Structure):
    """onecclUniqueId, which is passed by value."""

    _fields_ = [("data", ctypes.c_byte * UNIQUE_ID_NBYTES)]


# For each collective, the function, and its arguments between the element type and the communicator.
COLLECTIVES: dict[str, tuple[str, tuple[int, ...]]] = {
    "allreduce": ("onecclAllReduce", (SUM,)),
    "reduce": ("onecclReduce", (SUM, ROOT)),
    "broadcast": ("onecclBroadcast", (ROOT,)),
    "allgather": ("onecclAllGather", ()),
    "reduce_scatter": ("onecclReduceScatter", (SUM,)),
    "alltoall": ("onecclAllToAll", ()),
}

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "onecclGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "onecclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "onecclCommInitRank": (ctypes.POINTER(Pointer), ctypes.c_size_t, UniqueId, ctypes.c_int),
    "onecclCommDestroy": (Pointer,),
    **{
        name: (Pointer, Pointer, ctypes.c_size_t, ctypes.c_int, *[ctypes.c_int] * len(more), Pointer, Pointer)
        for name, more in COLLECTIVES.values()
    },
}


class OneCclAdapter:
    """A oneCCL communicator over all ranks of MPI's world."""

    def __init__(self) -> None:
        self._mpi = importlib.import_module("mpi4py.MPI")
        world = self._mpi.COMM_WORLD
        self._ccl = ctypes.CDLL(str(Path(sys.prefix, "lib", "libccl.so.2")))
        for name, arguments in SIGNATURES.items():
            function = getattr(self._ccl, name)
            function.argtypes = arguments
            function.restype = _success
        self._communicator = Pointer()
        self._ccl.onecclCommInitRank(self._communicator, world.size, self._unique_id(world), world.rank)
        self.size = world.size
        self.version = f"oneCCL {self._version()}"
        self.barrier = world.Barrier

    def call(self, collective: str, array: Any, out: Any) -> Callable[[], object]:
        """Return the call to measure. Without a stream, a call on host memory returns when it is complete."""
        if collective not in COLLECTIVES:
            raise NotImplementedError(f"oneCCL's C interface has no {collective}")
        if array.dtype.name not in DATATYPES:
            raise NotImplementedError(f"oneCCL does not reduce {array.dtype}")
        name, more = COLLECTIVES[collective]
        # For collectives with shares, the count is that of one share.
        count = array.size // self.size if collective == "alltoall" else min(array.size, out.size)
        addresses, datatype = (array.ctypes.data, out.ctypes.data), DATATYPES[array.dtype.name]
        return partial(getattr(self._ccl, name), *addresses, count, datatype, *more, self._communicator, None)

    def close(self) -> None:
        """Destroy the communicator and finalise MPI."""
        self._ccl.onecclCommDestroy(self._communicator)
        self._mpi.Finalize()

    def _unique_id(self, world: Any) -> UniqueId:
        unique_id = UniqueId()
        if world.rank == 0:
            self._ccl.onecclGetUniqueId(unique_id)
        world.Bcast([unique_id, UNIQUE_ID_NBYTES, self._mpi.BYTE], 0)
        return unique_id

    def _version(self) -> str:
        code = ctypes.c_int()
        self._ccl.onecclGetVersion(code)
        return f"{code.value // 10000}.{code.value // 100 % 100}"


def _success(code: int) -> int:
    if code:
        raise RuntimeError(f"oneCCL returned error {code}")
    return code


connect = OneCclAdapter
