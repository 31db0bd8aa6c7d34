"""Calls inside compiled programs: each is planned once, registered with the native core, and run there by its number.

Used by: `unisono.frameworks.jax`, whose programs make these calls without Python.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from math import prod
from typing import Any, TypeAlias

from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.collectives.calls.planning import CallPlanner, CallSpec
from unisono.collectives.calls.shapes import layout_of, layout_of_share
from unisono.dtypes import DTYPES, DType
from unisono.errors import UsageError
from unisono.operations import Op
from unisono.options import Options
from unisono.transports import _core
from unisono.transports.contracts.executor import Exchange, ProgramExecutor
from unisono.transports.host.bind_address import address_for

Shape: TypeAlias = "tuple[int, ...]"


class ProgramCalls:
    """The registered calls of a communicator. Any thread may use it.

    They run on an executor of their own, so that their order does not depend on the calls that the program makes
    directly.

    Args:
        executor: the executor of the registered calls.
        planner: the planner of the communicator.
        options: the options of the communicator, of which this uses `timeout_s` and `bind_address`.
        make_reversed: returns a new communicator of the same ranks in reverse order.
    """

    def __init__(
        self, executor: ProgramExecutor, planner: CallPlanner, options: Options, make_reversed: Callable[[], Any]
    ) -> None:
        self._executor = executor
        self._planner = planner
        self._timeout_s = options.timeout_s
        self._bind_address = options.bind_address
        self._lock = threading.Lock()
        self._numbers: dict[Hashable, int] = {}
        self._make_reversed = make_reversed
        self._reversed: Any = None
        self._is_closed = False

    def collective(
        self,
        name: str,
        shape: Shape,
        result: Shape,
        dtype: str,
        op: Op | None,
        root: int | None,
    ) -> int:
        """Return the number of a collective, which reads and writes contiguous arrays in C order.

        Args:
            name: the collective.
            shape: the shape of `x`. In a scatter, a rank other than the root passes the shape of its result.
            result: the shape of the array that the program has for the result. It is zero where the collective writes
                nothing.
            dtype: the name of the dtype.
            op: the operation; None if the collective has none.
            root: the root; None if the collective has none.

        Raises:
            UsageError: the call is wrong, or the communicator is closed.
            NoAlgorithmError: no algorithm carries it out.
        """
        spec = self._spec(name, shape, dtype, op, root)
        contract = CONTRACTS[name]
        writes = contract.output is None or (name != "exscan" and contract.has_output(self._executor.rank, root or 0))
        zeros = 0 if writes else _nbytes_of(result, dtype)
        with self._lock:
            self._check_open()
            if (spec, zeros) not in self._numbers:
                call = self._planner.find(spec)
                self._numbers[spec, zeros] = self._executor.register(call, self._timeout_s, zeros)
            return self._numbers[spec, zeros]

    def exchange(self, dtype: str, dest: int | None, source: int | None, sent: Shape, received: Shape, tag: int) -> int:
        """Return the number of an exchange of messages. Without a source, the result is zero.

        Args:
            dtype: the name of the dtype.
            dest: the rank to send to; None sends nothing.
            source: the rank to receive from; None receives nothing.
            sent: the shape of the array.
            received: the shape of the result.
            tag: the tag of both messages.

        Raises:
            UsageError: Unisono has no such dtype, or the communicator is closed.
        """
        exchange = Exchange(_dtype(dtype), dest, source, prod(sent), prod(received), tag)
        zeros = _nbytes_of(received, dtype) if source is None else 0
        with self._lock:
            self._check_open()
            if (exchange, zeros) not in self._numbers:
                number = self._executor.register_exchange(exchange, self._timeout_s, zeros)
                self._numbers[exchange, zeros] = number
            return self._numbers[exchange, zeros]

    def reversed(self) -> Any:
        """Return a communicator of the same ranks in reverse order, for the transpose of a scan. Nothing is sent."""
        with self._lock:
            if self._reversed is None:
                self._reversed = self._make_reversed()
            return self._reversed

    def address(self) -> str:
        """Return the numeric address of this machine at which other ranks reach a service of this rank.

        Raises:
            UsageError: the option `bind_address` means no address of this machine.
        """
        return address_for(self._bind_address)

    def close(self) -> None:
        """Forget all calls. Programs that run later get an error."""
        with self._lock:
            self._is_closed = True
            for number in self._numbers.values():
                self._executor.unregister(number)
            self._numbers.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("this communicator is closed: call unisono.init() for a new one")

    def _spec(self, name: str, shape: Shape, dtype: str, op: Op | None, root: int | None) -> CallSpec:
        contract = CONTRACTS[name]
        if contract.input is Cut.TOKEN:
            return CallSpec(name)
        size, rank = self._executor.size, self._executor.rank
        if contract.input is Cut.SHARES and not contract.has_input(rank, root or 0):
            layout = layout_of_share(shape, size=size, rank=rank)
        else:
            layout = layout_of(name, shape, size=size, rank=rank)
        return CallSpec(name, layout, _dtype(dtype), "C", op, root)


def _dtype(name: str) -> DType:
    if name not in DTYPES:
        raise UsageError(
            f"x has the dtype {name}, which Unisono does not move: convert it to one of {', '.join(DTYPES)}"
        )
    return DTYPES[name]


def _nbytes_of(shape: Shape, dtype: str) -> int:
    return prod(shape) * _dtype(dtype).itemsize


def distributes_rows(collective: str) -> bool:
    """Return whether a collective cuts the first axis of its array or of its result into the parts of the ranks."""
    return CONTRACTS[collective].input in (Cut.SHARE, Cut.SHARES)


def reduces(collective: str) -> bool:
    """Return whether a collective combines the arrays of the ranks, so that it has an op."""
    return CONTRACTS[collective].reduces


def xla_handler(minor_version: int) -> object:
    """Return the capsule of the handler that XLA calls on the CPU; a custom call names a registered call by number.

    Args:
        minor_version: the minor version of XLA's C interface in this process.
    """
    return _core.xla_handler(minor_version)


def xla_runner() -> int:
    """Return the address of the function by which the library that XLA takes for MPI runs registered calls."""
    return _core.xla_runner()


def xla_process() -> int:
    """Return the random number of this process, without which a custom call is refused."""
    return _core.xla_process()
