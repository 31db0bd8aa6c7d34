"""Ranks with device doubles, and the collectives that they call on arrays in device memory, for tests of `cuda_ipc`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.dtypes import DTYPES
from unisono.operations import Op, operation
from unisono.testing import oracles
from unisono.testing.device_double import GpuDouble
from unisono.transports.contracts.call import Extent, Signature
from unisono.transports.cuda.peers.collectives import DeviceCollectives

WAIT_S = 30.0
GUARD_NBYTES = 64


@dataclass(frozen=True)
class DeviceCall:
    """A collective on device arrays. `count` is the length of a vector, or of a share if the collective has shares."""

    collective: str = "allreduce"
    algorithm: str | None = None
    dtype: str = "float32"
    op: str | None = None
    count: int = 8
    root: int | None = None
    in_place: bool = False
    offset: int = 0

    @property
    def reduces(self) -> bool:
        return CONTRACTS[self.collective].reduces

    def lengths(self, size: int) -> tuple[int, int]:
        contract = CONTRACTS[self.collective]
        cuts = contract.input, contract.output
        return tuple(self.count * (size if cut is Cut.SHARES else 1) for cut in cuts)  # type: ignore[return-value]

    def operation(self, rank: int) -> Op | None:
        if not self.reduces:
            return None
        return Op.premul_sum(rank + 1) if self.op == "premul_sum" else operation(self.op or "sum")

    def inputs(self, size: int) -> Any:
        """Return the INPUT of each rank, as rows. Their reductions are exact in any order."""
        length = self.lengths(size)[0]
        if self.reduces:
            return oracles.contributions(self.dtype, self.op or "sum", size, length)
        values = np.arange(size * length).reshape(size, length) * 7 % (2 if self.dtype == "bool" else 120)
        return values.astype(self.dtype)

    def expected(self, size: int, rank: int) -> Any:
        """Return the expected OUTPUT of a rank; None if it has no OUTPUT."""
        contract, inputs, root = CONTRACTS[self.collective], self.inputs(size), self.root or 0
        if not contract.has_output(rank, root):
            return None
        if self.op == "premul_sum":
            factors = np.arange(1, size + 1).astype(self.dtype)[:, None]
            return oracles.reduced("sum", inputs * factors)
        if contract.reduces:
            whole = oracles.reduced(self.op or "sum", inputs)
            return whole.reshape(size, -1)[rank] if contract.output is Cut.SHARE else whole
        if self.collective == "broadcast":
            return inputs[root]
        if self.collective == "scatter":
            return inputs[root].reshape(size, -1)[rank]
        if self.collective == "alltoall":
            return inputs.reshape(size, size, -1)[:, rank].reshape(-1)
        return inputs.reshape(-1)


class DeviceRank:
    """One rank with its device. Closing it frees its arrays."""

    def __init__(self, executor: Any, gpu: GpuDouble, **options: Any) -> None:
        self.executor, self.gpu = executor, gpu
        self.rank, self.size = executor.rank, executor.size
        self.device = gpu.device()
        self.stream = self.device.new_stream()
        self.event = self.device.new_event()
        self.collectives = DeviceCollectives(executor, self.device, timeout_s=WAIT_S, **options)
        self._arrays: list[Any] = []

    def array(self, values: Any, offset: int = 0) -> int:
        """Return the device address of a copy of `values`, which lies between guard bytes."""
        values = np.ascontiguousarray(values)
        whole = self.gpu.memory(values.nbytes + 2 * GUARD_NBYTES + offset)
        self._arrays.append(whole)
        pointer = whole.pointer + GUARD_NBYTES + offset * values.itemsize
        self.gpu.view(whole.pointer, whole.nbytes)[:] = 0x5C
        self.gpu.view(pointer, values.nbytes)[:] = values.view(np.uint8).reshape(-1)
        return pointer

    def values(self, pointer: int, count: int, dtype: str) -> Any:
        """Wait for the stream, check the guard bytes around an array, and return its elements."""
        self.synchronize()
        nbytes = count * DTYPES[dtype].itemsize
        before, after = (self.gpu.view(at, GUARD_NBYTES // 2) for at in (pointer - GUARD_NBYTES // 2, pointer + nbytes))
        assert (before == 0x5C).all(), "bytes before the array were written"
        assert (after == 0x5C).all(), "bytes behind the array were written"
        return self.gpu.view(pointer, nbytes).copy().view(dtype)

    def synchronize(self) -> None:
        """Wait until the device has done all work that was issued to the stream."""
        self.device.record(self.event, self.stream)
        deadline = time.monotonic() + WAIT_S
        while not self.device.done(self.event):
            assert time.monotonic() < deadline, "the stream hangs"
            time.sleep(0.0002)

    def start(self, call: DeviceCall, source: int, target: int, replays: Any = None) -> Any:
        """Start `call` on the arrays at two device addresses; as a use of a persistent call if it has `replays`."""
        extent = None
        if call.collective != "barrier":
            extent = Extent(call.lengths(self.size), DTYPES[call.dtype], call.operation(self.rank))
        shape = None if extent is None else (call.count,)
        op = call.op or "sum" if call.reduces else None
        signature = Signature(call.collective, call.dtype, shape, "C", op, call.root, call.algorithm or "", 1)
        return self.collectives.start(signature, extent, source, target, self.stream, call.algorithm, replays=replays)

    def operands(self, call: DeviceCall) -> tuple[int, int]:
        """Return the device addresses of INPUT, with the elements of `call`, and of OUTPUT."""
        source = self.array(call.inputs(self.size)[self.rank], call.offset)
        lengths = call.lengths(self.size)
        if call.in_place:
            assert lengths[0] == lengths[1]
            return source, source
        return source, self.array(np.zeros(lengths[1], call.dtype), call.offset)

    def run(self, call: DeviceCall) -> Any:
        """Run `call`; return the elements of OUTPUT."""
        if call.collective == "barrier":
            self.start(call, 0, 0).wait(WAIT_S)
            return None
        source, target = self.operands(call)
        self.start(call, source, target).wait(WAIT_S)
        return self.values(target, call.lengths(self.size)[1], call.dtype)

    def check(self, call: DeviceCall) -> None:
        """Run `call`, and assert that its result is the one that numpy computes."""
        expected, result = call.expected(self.size, self.rank), self.run(call)
        if expected is not None and call.collective != "barrier":
            np.testing.assert_array_equal(result, expected, f"{call} on rank {self.rank} of {self.size}")

    def close(self) -> None:
        """Close the collectives, and free all memory."""
        self.synchronize()
        self.collectives.close(WAIT_S)
        for whole in self._arrays:
            self.device.free(whole)
        self.device.end_event(self.event)
        self.device.end_stream(self.stream)


@contextlib.contextmanager
def device_rank(executor: Any, seed: int, *, flags: bool = True, **options: Any) -> Iterator[DeviceRank]:
    """Yield a rank of this process with a device double, and assert at the end that the double has no leaks."""
    gpu = GpuDouble(seed * 100 + executor.rank, flags=flags)
    rank = DeviceRank(executor, gpu, **options)
    yield rank
    rank.close()
    assert gpu.leaks() == []
    gpu.close()


def check_calls(executor: Any, seed: int, calls: list[DeviceCall], options: Any, flags: bool = True) -> None:
    """Run calls on a rank of this process, each on its own arrays."""
    with device_rank(executor, seed, flags=flags, **options) as rank:
        for call in calls:
            rank.check(call)
