"""NCCL through one of its bindings for Python: nccl4py, or CuPy's if nccl4py is not installed.

Both bindings take addresses, counts and the numbers of NCCL's enumerations, which `refusals` holds. A communicator is
*nonblocking*: a function of NCCL that would wait for other ranks returns at once, and `NcclComm.is_ready` says when the
communicator can be used again. So this rank can look at its links and its time limit meanwhile. CuPy's binding has no
such communicators. Its constructor runs in a thread of its own, which stays if the other ranks never come.

NCCL uses the device that is current in the calling thread, so a device is made current around each call.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, NoReturn, Protocol, TypeAlias

from unisono.errors import InternalError, TransportUnavailableError
from unisono.foundation.installing import install_command
from unisono.transports.cuda.device import Stream

_IN_PROGRESS = 7
Current: TypeAlias = Callable[[], AbstractContextManager[object]]


class NcclComm(Protocol):
    """This rank's part of a communicator of NCCL. One thread at a time uses it.

    The functions issue work to a stream. They return before NCCL has issued all of it: see `is_ready`. They raise
    `InternalError` with NCCL's text if NCCL refuses a call, or a rank has failed.
    """

    def is_ready(self) -> bool:
        """Return whether NCCL has finished its work on the host for the last call of this communicator."""

    def all_reduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: Stream, /) -> None: ...

    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: Stream, /) -> None:
        """Reduce to `root`; other ranks may pass 0 for `target`."""

    def reduce_scatter(self, source: int, target: int, count: int, dtype: int, op: int, stream: Stream, /) -> None:
        """Reduce; `count` is that of `target`."""

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: Stream, /) -> None: ...

    def all_gather(self, source: int, target: int, count: int, dtype: int, stream: Stream, /) -> None:
        """Gather; `count` is that of `source`."""

    def send(self, source: int, count: int, dtype: int, peer: int, stream: Stream, /) -> None: ...

    def recv(self, target: int, count: int, dtype: int, peer: int, stream: Stream, /) -> None: ...

    def group(self, calls: Callable[[], None], /) -> None:
        """Make the calls of a function as one, so that sends and receives do not wait for each other."""

    def abort(self) -> None:
        """End all work of the communicator on this rank, also that which waits for lost ranks, and free it."""

    def destroy(self) -> None:
        """Free the communicator, whose work has ended."""


class Library(Protocol):
    """NCCL, through one binding.

    Attributes:
        version: its version as a number, such as 23004 for 2.30.4.
    """

    version: int

    def unique_id(self) -> bytes:
        """Return a random id for a new communicator. One rank calls this, and the others get the id from it."""

    def join(self, unique_id: bytes, size: int, rank: int, current: Current) -> NcclComm:
        """Return this rank's part of a new communicator; `NcclComm.is_ready` says when all ranks have joined.

        ``current()`` is a with-block in which the device of this rank is current.
        """


def version_text(version: int) -> str:
    """Return a version as NCCL prints it.

    >>> version_text(23004), version_text(22809)
    ('2.30.4', '2.28.9')
    """
    return f"{version // 10000}.{version % 10000 // 100}.{version % 100}"


def loaded() -> Library:
    """Return NCCL through the first binding that works.

    Raises:
        TransportUnavailableError: none does; the message says why, and what to install.
    """
    reasons = []
    for module, wrap in _BINDINGS.items():
        try:
            return wrap(importlib.import_module(module))
        except Exception as error:  # noqa: BLE001  (bindings raise errors of their own if the library is missing)
            reasons.append(f"{module}: {error}")
    raise TransportUnavailableError(f"NCCL cannot be used ({'; '.join(reasons)}): {install_command('nccl')}")


def _refuse(error: Exception, function: str) -> NoReturn:
    raise InternalError(f"NCCL failed in {function}: {error}") from error


class _Nccl4py:
    """NCCL through nccl4py's low-level binding."""

    def __init__(self, binding: ModuleType) -> None:
        self._binding: Any = binding
        self.version = int(binding.get_version())

    def unique_id(self) -> bytes:
        return bytes(self._binding.get_unique_id())

    def join(self, unique_id: bytes, size: int, rank: int, current: Current) -> NcclComm:
        name = self._binding.UniqueId.from_buffer(bytearray(unique_id))
        config = self._binding.Config()
        config.blocking = 0
        try:
            with current():
                handle = self._binding.comm_init_rank_config(size, name.ptr, rank, config.ptr)
        except Exception as error:  # noqa: BLE001
            _refuse(error, "ncclCommInitRankConfig")
        return _Nccl4pyComm(self._binding, handle, current)


class _Nccl4pyComm:
    def __init__(self, binding: Any, handle: Any, current: Current) -> None:
        self._binding, self._handle, self._current = binding, handle, current

    def is_ready(self) -> bool:
        with self._current():
            state = self._binding.comm_get_async_error(self._handle)
        if state in (0, _IN_PROGRESS):
            return bool(state == 0)
        text = self._binding.get_last_error(self._handle) or self._binding.get_error_string(state)
        raise InternalError(f"NCCL failed: {text}")

    def all_reduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: Stream) -> None:
        self._call("all_reduce", source, target, count, dtype, op, self._handle, stream)

    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: Stream) -> None:
        self._call("reduce", source, target, count, dtype, op, root, self._handle, stream)

    def reduce_scatter(self, source: int, target: int, count: int, dtype: int, op: int, stream: Stream) -> None:
        self._call("reduce_scatter", source, target, count, dtype, op, self._handle, stream)

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: Stream) -> None:
        self._call("broadcast", source, target, count, dtype, root, self._handle, stream)

    def all_gather(self, source: int, target: int, count: int, dtype: int, stream: Stream) -> None:
        self._call("all_gather", source, target, count, dtype, self._handle, stream)

    def send(self, source: int, count: int, dtype: int, peer: int, stream: Stream) -> None:
        self._call("send", source, count, dtype, peer, self._handle, stream)

    def recv(self, target: int, count: int, dtype: int, peer: int, stream: Stream) -> None:
        self._call("recv", target, count, dtype, peer, self._handle, stream)

    def group(self, calls: Callable[[], None]) -> None:
        self._call("group_start")
        try:
            calls()
        finally:
            self._call("group_end")

    def abort(self) -> None:
        self._call("comm_abort", self._handle)

    def destroy(self) -> None:
        self._call("comm_destroy", self._handle)

    def _call(self, function: str, *arguments: Any) -> None:
        try:
            with self._current():
                getattr(self._binding, function)(*arguments)
        except self._binding.NCCLError as error:
            _refuse(error, function)


class _CupyNccl:
    """NCCL through CuPy 14 and later, whose communicators block."""

    def __init__(self, binding: ModuleType) -> None:
        if not binding.available:
            raise TransportUnavailableError("CuPy has been built without NCCL")
        self._binding: Any = binding
        self.version = int(binding.get_version())

    def unique_id(self) -> bytes:
        return bytes(self._binding.get_unique_id())

    def join(self, unique_id: bytes, size: int, rank: int, current: Current) -> NcclComm:
        return _CupyComm(self._binding, lambda: self._binding.NcclCommunicator(size, unique_id, rank), current)


class _CupyComm:
    def __init__(self, binding: Any, join: Callable[[], Any], current: Current) -> None:
        self._binding, self._current = binding, current
        self._handle: Any = None
        self._error: Exception | None = None
        self._joining = threading.Thread(target=self._join, args=[join], name="unisono-nccl", daemon=True)
        self._joining.start()

    def _join(self, join: Callable[[], Any]) -> None:
        try:
            with self._current():
                self._handle = join()
        except Exception as error:  # noqa: BLE001  (`is_ready` raises it)
            self._error = error

    def is_ready(self) -> bool:
        if self._joining.is_alive():
            return False
        if self._error is not None:
            _refuse(self._error, "ncclCommInitRank")
        self._call("check_async_error")
        return True

    def all_reduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: Stream) -> None:
        self._call("allReduce", source, target, count, dtype, op, stream)

    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: Stream) -> None:
        self._call("reduce", source, target, count, dtype, op, root, stream)

    def reduce_scatter(self, source: int, target: int, count: int, dtype: int, op: int, stream: Stream) -> None:
        self._call("reduceScatter", source, target, count, dtype, op, stream)

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: Stream) -> None:
        self._call("broadcast", source, target, count, dtype, root, stream)

    def all_gather(self, source: int, target: int, count: int, dtype: int, stream: Stream) -> None:
        self._call("allGather", source, target, count, dtype, stream)

    def send(self, source: int, count: int, dtype: int, peer: int, stream: Stream) -> None:
        self._call("send", source, count, dtype, peer, stream)

    def recv(self, target: int, count: int, dtype: int, peer: int, stream: Stream) -> None:
        self._call("recv", target, count, dtype, peer, stream)

    def group(self, calls: Callable[[], None]) -> None:
        with self._current():
            self._binding.groupStart()
            try:
                calls()
            finally:
                self._binding.groupEnd()

    def abort(self) -> None:
        if self._handle is not None:
            self._call("abort")

    def destroy(self) -> None:
        self._call("destroy")

    def _call(self, function: str, *arguments: Any) -> None:
        try:
            with self._current():
                getattr(self._handle, function)(*arguments)
        except self._binding.NcclError as error:
            _refuse(error, function)


# The module of each binding → its wrapper, in the order of preference.
_BINDINGS: dict[str, Callable[[ModuleType], Library]] = {
    "nccl.bindings.nccl": _Nccl4py,
    "cupy.cuda.nccl": _CupyNccl,
}
