"""Compiles calls of a `CudaDevice` to programs of driver calls, which native code issues (`cuda_program.h`).

The definition is `issued_calls.issue`, which makes the same calls by Python. A test compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from unisono.dtypes import DType
from unisono.operations import Op
from unisono.transports import _core
from unisono.transports.cuda.device import Event, Flags, Stream
from unisono.transports.cuda.driver_api.errors import Driver
from unisono.transports.cuda.issued_calls import IssuedCall, NextNumber
from unisono.transports.cuda.kernels.catalogue import MOST_SOURCES
from unisono.transports.cuda.kernels.launcher import Launcher, as_pointers, packed, reduction_launch


class NativePrograms:
    """Compiles calls of one device.

    Args:
        driver: the driver.
        context: the context of the device.
        launcher: launches the kernels of the device. Its context must be current in `compiled`.
        address_of: returns the address on the device of a flag, by its index.
        error_of: returns the error for a call of the driver that failed, by its name and its result. An empty name
            means that the device was aborted.

    Raises:
        RuntimeError: the driver lacks a function.
    """

    def __init__(
        self,
        driver: Driver,
        context: Any,
        launcher: Launcher,
        address_of: Callable[[Flags, int], int],
        error_of: Callable[[str, int], Exception],
    ) -> None:
        self._issuer = _core.CudaIssuer(driver.number_of(context))
        self._launcher = launcher
        self._address_of = address_of
        self._error_of = error_of
        self._add: dict[str, Callable[..., None]] = {
            "copy": self._add_copy,
            "reduce": self._add_reduction,
            "record": _add_record,
            "wait": _add_wait,
            "raise_flag": self._add_raise,
            "await_flag": self._add_await,
        }

    def takes(self, calls: Sequence[IssuedCall]) -> bool:
        """Return whether programs can make all of the calls.

        They make no reductions of more arrays than `MOST_SOURCES`, whose addresses are in tables that change.
        """
        return all(call.method in self._add and not _has_table(call) for call in calls)

    def compiled(self, calls: Sequence[IssuedCall]) -> Callable[[], None]:
        """Return a function that makes the calls again; see `Device.compile`."""
        program = _core.CudaProgram(self._issuer)
        for call in calls:
            self._add[call.method](program, *call.arguments)
        return partial(self._issue, program)

    def abort(self) -> None:
        """Let all programs fail, also those that are being issued."""
        self._issuer.abort()

    def _issue(self, program: _core.CudaProgram) -> None:
        failure = program.issue()
        if failure is not None:
            raise self._error_of(*failure)

    def _add_copy(self, program: _core.CudaProgram, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        if nbytes:
            program.copy(dst, src, nbytes, stream)

    def _add_reduction(
        self,
        program: _core.CudaProgram,
        dst: int,
        sources: Sequence[int],
        count: int,
        dtype: DType,
        op: Op,
        divisor: int,
        stream: Stream,
    ) -> None:
        launch = reduction_launch(dst, (as_pointers(sources),), len(sources), count, dtype, op, divisor)
        if launch.units:
            function, blocks, threads = self._launcher.prepared(launch, stream)
            program.launch(function, blocks, threads, list(map(packed, launch.parameters)), stream)

    def _add_raise(
        self, program: _core.CudaProgram, flags: Flags, index: int, number: NextNumber, stream: Stream
    ) -> None:
        program.raise_flag(self._address_of(flags, index), number.counters.numbers, number.index, stream)

    def _add_await(
        self, program: _core.CudaProgram, flags: Flags, index: int, number: NextNumber, stream: Stream
    ) -> None:
        program.await_flag(self._address_of(flags, index), number.counters.numbers, number.index, stream)


def _add_record(program: _core.CudaProgram, event: Event, stream: Stream) -> None:
    program.record(event.handle, stream)


def _add_wait(program: _core.CudaProgram, stream: Stream, event: Event) -> None:
    program.wait(stream, event.handle)


def _has_table(call: IssuedCall) -> bool:
    return call.method == "reduce" and len(call.arguments[1]) > MOST_SOURCES
