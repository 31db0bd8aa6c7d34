"""Ranks with `CudaDevice`, on the GPU of this machine or on the driver's double, and their collectives."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from support import fake_cuda
from support.device_contract import Bench
from support.device_ranks import WAIT_S, DeviceCall

import unisono as un
from unisono.algorithms.catalogue.registry import ALGORITHMS
from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS
from unisono.transports.contracts.call import Extent, Signature
from unisono.transports.cuda.kernels import launcher
from unisono.transports.cuda.peers.collectives import DeviceCollectives

MAPPED = [
    (collective, name)
    for collective, by_name in ALGORITHMS.items()
    for name, algorithm in by_name.items()
    if algorithm.mapped
]
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def use_driver() -> None:
    """Let this rank use the GPU, or else the driver's double with the kernels that the test has compiled for it."""
    if not fake_cuda.has_gpu():
        ctypes.CDLL(str(fake_cuda.folder() / fake_cuda.NAME), ctypes.RTLD_GLOBAL)
        launcher.built = lambda kernel, target, folder: b"\x7fELF"


@contextlib.contextmanager
def cuda_bench(*, native: bool = True) -> Iterator[Bench]:
    """Yield a bench over a `CudaDevice`."""
    use_driver()
    from unisono.transports.cuda.driver_api.cuda_device import CudaDevice

    bench = Bench(CudaDevice(native=native))
    yield bench
    bench.close()


def calls_of_all(dtypes: Sequence[str], ops: Sequence[str], counts: Sequence[int]) -> list[DeviceCall]:
    """Return calls of each mapped collective with each dtype, and of each reduction with each operation, too."""
    calls = []
    for collective, name in MAPPED:
        for dtype in dtypes:
            call = DeviceCall(collective, name, dtype, root=1 if collective in ROOTED else None)
            of_dtype = [op for op in ops if DTYPES[dtype].kind in OPERATIONS[op].kinds] if call.reduces else [None]
            calls += [DeviceCall(collective, name, dtype, op, count, call.root) for op in of_dtype for count in counts]
    return calls


def run_call(bench: Bench, collectives: DeviceCollectives, call: DeviceCall, rank: int, size: int) -> str:
    """Make a call, and return the difference from numpy's result, or ""."""
    lengths, expected = call.lengths(size), call.expected(size, rank)
    inputs = call.inputs(size)[rank]
    source, like = bench.memory(inputs), np.zeros(lengths[1], call.dtype)
    target = bench.memory(like)
    op = call.operation(rank)
    extent = None if call.collective == "barrier" else Extent(lengths, DTYPES[call.dtype], op)
    named = None if op is None else op.name
    signature = Signature(call.collective, call.dtype, (call.count,), "C", named, call.root, call.algorithm or "", 1)
    collectives.start(signature, extent, source, target, bench.stream, call.algorithm).wait(WAIT_S)
    if expected is None or extent is None:
        bench.finish(bench.stream)
        return ""
    result = bench.values(target, like)
    wrong = np.flatnonzero(result != expected)
    return f"{call}: element {wrong[0]} is {result[wrong[0]]}, not {expected[wrong[0]]}" if wrong.size else ""


def check_calls(world: un.Communicator, calls: Sequence[DeviceCall]) -> list[str]:
    """Make calls on the devices of all ranks; return the differences from numpy's results."""
    with cuda_bench() as bench:
        collectives = DeviceCollectives(world._executor, bench.device, timeout_s=WAIT_S)
        if collectives.refusal:
            return [collectives.refusal]
        results = [run_call(bench, collectives, call, world.rank, world.size) for call in calls]
        collectives.close(WAIT_S)
    return [difference for difference in results if difference]


class InterfaceArray:
    """An array in the memory of a bench, with `__cuda_array_interface__`, used on one stream."""

    def __init__(self, bench: Bench, values: Any, stream: int) -> None:
        self.values = np.ascontiguousarray(values)
        self.pointer = bench.memory(self.values)
        self.__cuda_array_interface__ = {
            "data": (self.pointer, False),
            "shape": self.values.shape,
            "typestr": self.values.dtype.str,
            "stream": stream,
            "version": 3,
        }
