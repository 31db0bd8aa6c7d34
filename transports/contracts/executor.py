"""The contract of an executor, which runs the plans of one rank.

`Executor.start` starts a call and never blocks. It returns an `Operation`. `Operation.poll` makes progress and never
blocks either. `Operation.wait` blocks until the call is done or its time limit has passed; Ctrl-C interrupts it.

`poll` and `wait` raise the errors of `unisono.errors`. A rank that has no call in progress gets the error from its next
`start`. After an error every later `start` raises `AbortedError`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from unisono.dtypes import DType, itemsize_of
from unisono.errors import UnisonoError
from unisono.foundation.records import record
from unisono.transports.contracts.call import AnyArray, Call, MemoryType, Operand, Usage, VendorRefusal
from unisono.transports.contracts.transport import Traffic
from unisono.transports.contracts.wildcards import NOBODY

if TYPE_CHECKING:
    from pathlib import Path

    from unisono.transports import _core


class Operation(Protocol):
    """A started call. Its arrays belong to the executor until the call is done.

    The caller keeps the operation until the call has ended, as `Works` does for programs. The native executor aborts
    the job if one is dropped before, because the memory of the call may end with it.
    """

    def poll(self) -> bool:
        """Make progress without blocking; return whether the call is done. Raises the error that ended the call."""

    def wait(self, timeout_s: float) -> None:
        """Block until the call is done.

        Raises:
            CollectiveTimeoutError: it is not done after `timeout_s` seconds.
            KeyboardInterrupt: Ctrl-C.
        """

    def run_in_background(self, timeout_s: float) -> None:
        """Let the call progress in the background, and fail after `timeout_s` seconds; returns at once."""

    def ended(self) -> bool:
        """Make progress without blocking; return whether the call has ended, with or without an error. Never raises."""

    def abort(self, reason: str) -> None:
        """End the call with `AbortedError`, on every rank; all later calls on the communicator raise it too."""


class _Ended:
    """A call that ended without an error while it was started."""

    def poll(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        pass

    def run_in_background(self, timeout_s: float) -> None:
        pass

    def ended(self) -> bool:
        return True

    def abort(self, reason: str) -> None:
        pass


# The operation of every call that ended so. It keeps nothing alive and need not be waited for.
ENDED: Operation = _Ended()


@record
class Exchange:
    """A message to one rank, a message from one rank, or both at once.

    Attributes:
        dtype: the dtype of both messages.
        dest, source: the ranks; None for no message.
        sent, received: the numbers of elements.
        tag: the tag of both messages.
    """

    dtype: DType
    dest: int | None
    source: int | None
    sent: int
    received: int
    tag: int


@record
class Message:
    """A message that can be received: its source, its tag, its dtype, and the count of its elements.

    The message of a receive from `NOBODY` has this source, tag 0, the dtype uint8 and a count of 0.
    """

    source: int
    tag: int
    dtype: str
    count: int

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return self.count * itemsize_of(self.dtype)


OF_NOBODY = Message(NOBODY, 0, "uint8", 0)


class Probe(Operation, Protocol):
    """A started probe for a message, or a started receive."""

    def message(self) -> Message | None:
        """Return the message that was found or received, once the probe is done; None if `once` found no message."""

    def host_copy(self) -> bytes | None:
        """Return the payload that a finished receive stored on the host, and not in the memory of the array.

        The payload of a message that a probe has taken is there, if it is not empty.

        None means that the payload is in the array. `Executor.recv` says when the two differ.
        """

    def acknowledge(self, timeout_s: float) -> None:
        """Let the sender of the message know that it is received, if it was sent so; for a message that was taken.

        Raises:
            PeerLostError, CollectiveTimeoutError, AbortedError: the sender cannot know it.
        """

    def fits(self, dtype: DType, count: int, shape: Sequence[int]) -> bool:
        """Return whether the message that was found may be received into an array of this dtype, count and shape."""


class CallCache(Protocol):
    """Earlier calls by the arguments of the user, to run an equal call again without checking or planning it.

    In a call on a list of arrays, `x` and `out` are lists, and `op` may be a tuple with an operation for each array.
    """

    def run(
        self, collective: str, x: Any, out: Any, op: Any, root: Any, algorithm: Any, timeout_s: float | None, /
    ) -> bool:
        """Run the earlier call of these arguments and return True. If there is none, do nothing and return False.

        Raises:
            MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: as `Executor.run` does.
        """

    def start(
        self, collective: str, x: Any, out: Any, op: Any, root: Any, algorithm: Any, timeout_s: float, /
    ) -> Operation | None:
        """Start the earlier call of these arguments and return it; None if there is none.

        The result is `ENDED` if the call has ended already, as a short call whose peers have come does.
        """

    def contains(self, collective: str, x: Any, out: Any, op: Any, root: Any, algorithm: Any) -> bool:
        """Return whether the cache holds a call of these arguments."""

    def forget(self) -> None:
        """Remove all calls."""


class _NoCache:
    """A cache that is always empty."""

    def run(
        self, collective: str, x: Any, out: Any, op: Any, root: Any, algorithm: Any, timeout_s: float | None, /
    ) -> bool:
        return False

    def start(
        self, collective: str, x: Any, out: Any, op: Any, root: Any, algorithm: Any, timeout_s: float, /
    ) -> Operation | None:
        return None

    def contains(self, collective: str, x: Any, out: Any, op: Any, root: Any, algorithm: Any) -> bool:
        return False

    def forget(self) -> None:
        pass


NO_CACHE: CallCache = _NoCache()


class MessageCalls(Protocol):
    """The fast path of messages of plain numpy arrays.

    It gets the arguments as the user passed them, and checks them itself. All but the common case is refused, and takes
    the slow path. The blocking `send` and `recv` are not here: the native core wraps these methods of a communicator as
    a whole.
    """

    def send_flat(self, x: Any, dest: Any, tag: Any, /) -> bool:
        """Send the elements of an array, whatever its shape; False if the arguments need the slow path."""

    def receive_up_to(self, out: Any, source: Any, tag: Any, /) -> tuple[int, int, int, int] | None:
        """Receive a message of at most the length of an array; None as for `start_receive`.

        The result is its source, its tag, the number of its dtype, and its size in bytes.
        """

    def exchange_up_to(
        self, x: Any, dest: Any, tag: Any, out: Any, source: Any, tag_received: Any, /
    ) -> tuple[int, int, int, int] | None:
        """Send the elements of an array, and receive a message as `receive_up_to` does, at the same time."""

    def start_send(self, x: Any, dest: Any, tag: Any, limit_s: float, /) -> Operation | None:
        """Start a send in the background and return it; None if the arguments need the checks of the slow path."""

    def start_receive(self, out: Any, source: Any, tag: Any, limit_s: float, /) -> Probe | None:
        """Start a receive in the background and return it; None if the arguments need the checks of the slow path."""

    def start_receive_up_to(self, out: Any, source: Any, tag: Any, limit_s: float, /) -> Probe | None:
        """Start a receive as `start_receive` does, of a message of at most the length of an array."""


class _NoMessages:
    """A fast path that sends every message to the slow path."""

    def send_flat(self, x: Any, dest: Any, tag: Any, /) -> bool:
        return False

    def receive_up_to(self, out: Any, source: Any, tag: Any, /) -> tuple[int, int, int, int] | None:
        return None

    def exchange_up_to(self, *_: Any) -> tuple[int, int, int, int] | None:
        return None

    def start_send(self, x: Any, dest: Any, tag: Any, limit_s: float, /) -> Operation | None:
        return None

    def start_receive(self, out: Any, source: Any, tag: Any, limit_s: float, /) -> Probe | None:
        return None

    start_receive_up_to = start_receive


NO_MESSAGES: MessageCalls = _NoMessages()


class Executor(Protocol):
    """Runs plans for one rank of one communicator.

    Attributes:
        rank, size: this rank in the communicator, and the number of ranks.
        members: the number in the job of each rank; errors name ranks by these numbers.
        vendors: by the name of each algorithm of a library, the function that says whether the library can carry out a
            call. It is the same on all ranks.
    """

    rank: int
    size: int
    members: tuple[int, ...]
    vendors: Mapping[str, VendorRefusal]

    def subgroup(self, ranks: Sequence[int]) -> Executor:
        """Return the executor of a new communicator of these ranks, in this order. Only these ranks call it.

        No message is sent: the members derive its id from the parent, `ranks`, and the number of communicators that the
        parent has made of these ranks before. The caller closes it. A failure of the job ends it too.
        """

    def authenticated(self) -> Executor:
        """Return an executor of the same ranks whose links are all authenticated: this one, if its links are.

        Both ends of each link have proved that they hold the job's key, and nobody else can send on it. No message is
        sent to make it, and ranks need not make it at the same time, or at all. Call it once; the caller closes it.
        """

    def for_programs(self) -> ProgramExecutor:
        """Return an executor of the same ranks for the calls of compiled programs, which have an order of their own.

        No message is sent to make it, and ranks need not make it at the same time. Call it once; the caller closes it.

        Raises:
            UsageError: this executor cannot run calls without Python.
        """

    def for_windows(self) -> WindowExecutor:
        """Return an executor of the same ranks for a window, whose links are all authenticated.

        No message is sent to make it. All ranks make their windows in the same order. The caller closes it.

        Raises:
            UsageError: this executor has no windows.
        """

    def start(self, call: Call, source: Operand, target: Operand) -> Operation:
        """Start `call` on flat C-contiguous arrays, without blocking; `poll` or `wait` of the result completes it.

        An operand is None if the call has none. An array of `source` may be the array of `target` at the same position.
        Otherwise no array that is written may overlap another.
        """

    def run(self, call: Call, source: Operand, target: Operand, timeout_s: float) -> None:
        """Start `call` and wait for it, faster than ``start(call, source, target).wait(timeout_s)``.

        The arrays must fit the call: `run` need not check them, and `start` does.
        """

    def call_cache(self, timeout_s: float) -> CallCache:
        """Return the call cache of this executor; `timeout_s` is the default time limit of its calls."""

    def cache(self, call: Call, collective: str, x: Any, out: Any, op: Any, root: Any, algorithm: Any) -> None:
        """Add `call` to the `call_cache` under these arguments; `x` holds INPUT and `out` holds OUTPUT."""

    def persistent(
        self,
        call: Call,
        source: Operand,
        target: Operand,
        timeout_s: float,
        result: Any,
        on_start: Callable[[Operation, Any], Any],
    ) -> Callable[..., Any]:
        """Return a function that runs `call` on these arrays, as `run` does, and returns `result`.

        Called with ``wait=False``, it starts the call and returns ``on_start(operation, result)``. The operation is
        `ENDED` if the call has ended already.
        """

    def sends_from(self, memory: MemoryType, dest: int, nbytes: int, timeout_s: float) -> bool:
        """Return whether `send` can send `nbytes` from `memory`, which is not host memory.

        It waits up to `timeout_s` seconds until the channel to `dest` is open, and returns False if it is not.
        """

    def receives_into(self, memory: MemoryType, source: int | None, nbytes: int) -> bool:
        """Return whether `recv` can receive `nbytes` into `memory`, as far as is known before the channel is open."""

    def send(
        self,
        array: AnyArray,
        dtype: DType,
        dest: int,
        tag: int,
        memory: MemoryType = MemoryType.HOST,
        shape: Sequence[int] = (),
        *,
        synchronous: bool = False,
    ) -> Operation:
        """Start sending the flat `array` to rank `dest`. Messages of one tag arrive in the order of their sends.

        With `synchronous` it does not end before a receive has got the message. If a probe has taken the message, it
        ends after `Probe.acknowledge`.

        `shape` is the shape of the user's array, whose elements `array` holds in C order. The receiver compares it with
        its own, without axes of length 1. Arrays with one axis or none fit every shape of as many elements.

        If `memory` is not host memory, only the address of `array` is used; ask `sends_from` first.
        """

    def recv(
        self,
        array: AnyArray,
        dtype: DType,
        source: int | None,
        tag: int | None,
        memory: MemoryType = MemoryType.HOST,
        shape: Sequence[int] = (),
        *,
        up_to: bool = False,
    ) -> Probe:
        """Start receiving the next message of `tag` from rank `source` into the flat `array`; `shape` is as in `send`.

        With `up_to` the message may have fewer bytes than `array`, which it then fills from its start; `Probe.message`
        has the count. Its dtype must be that of `array`, unless one of the two is uint8.

        None stands for any rank, and for any tag below `FIRST_RESERVED_TAG`. `ANY_OBJECT_TAG` stands for that of any
        object. If several receives accept a message, it goes to the one that was started first.

        If `memory` is not host memory, only the address of `array` is used; ask `receives_into` first. The payload
        stays on the host if the message was buffered before this receive, or if its link cannot write to `memory`. Then
        `Probe.host_copy` returns it.
        """

    def takes_from_itself(self, tag: int, nbytes: int) -> bool:
        """Return whether a message to this rank itself can be sent now without another receive.

        It can if it fits into the buffer for such messages (`OWN_BUFFER_NBYTES`), or if a receive is posted for it.
        """

    def probe(self, source: int | None, tag: int | None, *, once: bool, takes: bool = False) -> Probe:
        """Start looking for a message that `recv` would get, without receiving it; look only once if `once`.

        With `takes` the message is received, so that no other receive gets it, and `Probe.host_copy` returns it.
        """

    def message_calls(self, any_source: object, any_tag: object, timeout_s: float) -> MessageCalls:
        """Return the fast path of messages; `timeout_s` is their default time limit.

        `any_source` and `any_tag` are the values by which callers mean any rank and any tag.
        """

    def wait_for_end(self, seen: int, most_s: float) -> int:
        """Block until more than `seen` operations have ended, or for `most_s` seconds; return how many have ended."""

    def shares_memory_with(self, ranks: Sequence[int]) -> bool:
        """Return whether this rank and these ranks of its host exchange messages through shared memory.

        It is True if the transport does not say so, as those of packages do not.
        """

    def links(self) -> Mapping[int, str]:
        """Return, by peer, its transport and why it is not shared memory, such as "tcp (another machine)"."""

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the counters, by peer. Collectives send no messages of zero bytes, so none are counted."""

    def usage(self) -> Sequence[tuple[Call, Usage]]:
        """Return how often each call has run; an empty sequence if this executor does not count."""

    def check(self, operation: str) -> None:
        """Raise the error that has ended the communicator, if there is one, for `operation`; never blocks."""

    def has_failed(self) -> bool:
        """Return whether `check` would raise an error; never blocks. Unlike `check`, it tells nobody the error."""

    def fail(self, error: UnisonoError) -> None:
        """End the communicator on every rank with `error`, unless it has ended before."""

    def dump(self, directory: str | os.PathLike[str]) -> Path:
        """Write a dump of the last calls of this rank to a directory, and return its path.

        Raises:
            UsageError: the executor records no calls.
            OSError: the dump cannot be written.
        """

    def trace(self, path: str | os.PathLike[str]) -> Path:
        """Write a trace of the last calls of this rank to a file, and return its path; raises as `dump` does."""

    def abort(self, reason: str) -> None:
        """End the communicator on every rank with `AbortedError`."""

    def settle(self) -> None:
        """Wait, before `close`, until every other rank has made this rank's last call or has left.

        A rank may end its last call before the others make it, as the root of a broadcast does. The wait takes a few
        seconds at most.

        Raises:
            MismatchError: the ranks disagree on that call.
        """

    def close(self) -> None:
        """Leave the communicator. Peers that still need this rank get `PeerLostError`. May be called twice."""


class ProgramExecutor(Executor, Protocol):
    """An executor whose calls compiled programs make, without Python."""

    def register(self, call: Call, timeout_s: float, zeros: int) -> int:
        """Register `call` for the handler of XLA, which runs it without Python, and return its number.

        Args:
            call: the call.
            timeout_s: its time limit, each time it runs.
            zeros: how many bytes of the output are zero unless the plan writes them.
        """

    def register_exchange(self, exchange: Exchange, timeout_s: float, zeros: int) -> int:
        """Register an exchange of messages, as `register` does for a call."""

    def unregister(self, number: int) -> None:
        """Forget a registered call: a program that still runs it gets an error."""


class WindowExecutor(Executor, Protocol):
    """An executor whose ranks access memory of each other.

    Attributes:
        failed: the same as `has_failed`, without a frame of Python.
    """

    failed: Callable[[], bool]

    def part_of(self, memory: AnyArray, locks: AnyArray | memoryview, index: int, timeout_s: float) -> _core.WindowPart:
        """Return a part with memory that this rank maps, and with the lock of this index.

        Its operations wait for each other for at most `timeout_s` seconds.
        """

    def end_access(self, outcome: int, operation: str) -> None:
        """Raise the error of an operation on a mapped part that the native core has ended with `outcome`, not 0.

        Raises:
            CollectiveTimeoutError: another rank has been within an operation on the part for `timeout_s` seconds.
            PeerLostError, AbortedError: the job has failed.
        """

    def serve_part(self, part: _core.WindowPart) -> _core.WindowServer:
        """Start a thread that carries out the requests of other ranks on this rank's part, until `close`."""

    def lock_part(self, part: _core.WindowPart, exclusive: bool, timeout_s: float, operation: str) -> None:
        """Take the lock of a part that this rank maps, for `operation`.

        Raises:
            CollectiveTimeoutError: another rank has held it for `timeout_s` seconds.
            PeerLostError, AbortedError: the job has failed.
        """
