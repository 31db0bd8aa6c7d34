"""The contract of an executor, which runs plans.

An executor starts a call with `start`, which never blocks. The returned `Operation` makes progress with `poll`, which
never blocks either. `Operation.wait` is the one method that blocks: it takes a deadline, and Ctrl-C interrupts it.
`poll` and `wait` raise the errors of `unisono.errors`. A rank that has no call in progress gets the error from its
next `start`. After an error the executor is poisoned: each later `start` raises `AbortedError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from unisono.dtypes import DType
from unisono.errors import UnisonoError
from unisono.records import record
from unisono.transports.contracts.call import AnyArray, Call, MemoryType, Operand, Usage, VendorRefusal
from unisono.transports.contracts.transport import Traffic

if TYPE_CHECKING:
    pass


class Operation(Protocol):
    """A started call. The arrays belong to the executor until it is done."""

    def poll(self) -> bool:
        """Make progress without blocking; return True when done. Raises the error that ended the call."""

    def wait(self, timeout_s: float) -> None:
        """Block until done. Raises `CollectiveTimeoutError` after `timeout_s`, KeyboardInterrupt on Ctrl-C."""

    def go_on(self, timeout_s: float) -> None:
        """Let the call make progress without being polled, and fail `timeout_s` seconds from now; does not block."""

    def ended(self) -> bool:
        """Make progress without blocking; return whether the call has ended, well or not. Raises nothing."""

    def abort(self, reason: str) -> None:
        """End the call; this and all later calls on the communicator raise `AbortedError`, on every rank."""


@record
class Message:
    """A message that can be received here: from which rank, with which tag, and how many elements of which dtype."""

    source: int
    tag: int
    dtype: str
    count: int


class Probe(Operation, Protocol):
    """A started look for a message, or a receive of one."""

    def found(self) -> Message | None:
        """Return the message that was found or received, once this is done; None if it was to look only once."""

    def aside(self) -> bytes | None:
        """Return what a receive that is done has left on the host instead of where it was to go: see `Executor.recv`.

        None if all is where it belongs.
        """


class CallCache(Protocol):
    """Calls that have been made before, by their arguments as the user gave them, to be run again without a look.

    Of a call on a list of arrays, `x` and `out` are lists, and `op` may be a tuple with an operation for each.
    """

    def run(
        self, collective: str, x: Any, out: Any, op: Any, root: Any, algorithm: Any, timeout_s: float | None, /
    ) -> bool:
        """Run the call that these arguments made before, and return True; return False, with nothing done, if unknown.

        Raises:
            MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: as `Executor.run` does.
        """

    def start(
        self, collective: str, x: Any, out: Any, op: Any, root: Any, algorithm: Any, timeout_s: float, /
    ) -> Operation | None:
        """Start the call that these arguments made before, let it go on by itself, and return it; None if unknown."""

    def knows(self, collective: str, x: Any, out: Any, op: Any, root: Any, algorithm: Any) -> bool:
        """Return whether these arguments have made a call before."""

    def forget(self) -> None:
        """Know nothing any more."""


class _NoCache:
    """A cache that knows nothing."""

    def run(
        self, collective: str, x: Any, out: Any, op: Any, root: Any, algorithm: Any, timeout_s: float | None, /
    ) -> bool:
        return False

    def start(
        self, collective: str, x: Any, out: Any, op: Any, root: Any, algorithm: Any, timeout_s: float, /
    ) -> Operation | None:
        return None

    def knows(self, collective: str, x: Any, out: Any, op: Any, root: Any, algorithm: Any) -> bool:
        return False

    def forget(self) -> None:
        pass


NO_CACHE: CallCache = _NoCache()


class MessageCalls(Protocol):
    """Messages of numpy's arrays that are passed on without a closer look, by their arguments as the user gave them.

    What is to be waited for is asked for by the methods of a communicator themselves, if this is the native core's.
    """

    def start_send(self, x: Any, dest: Any, tag: Any, limit_s: float, /) -> Operation | None:
        """Start what `Executor.send` does, let it go on by itself, and return it; None if it takes a closer look."""

    def start_receive(self, out: Any, source: Any, tag: Any, limit_s: float, /) -> Probe | None:
        """The same for `Executor.recv`."""


class _NoMessages:
    """Messages all of which take a closer look."""

    def start_send(self, x: Any, dest: Any, tag: Any, limit_s: float, /) -> Operation | None:
        return None

    def start_receive(self, out: Any, source: Any, tag: Any, limit_s: float, /) -> Probe | None:
        return None


NO_MESSAGES: MessageCalls = _NoMessages()


class Executor(Protocol):
    """Runs plans for one rank of one communicator.

    Attributes:
        rank, size: this rank in the communicator, and the number of ranks.
        members: the number in the job of each rank; errors name ranks by it.
        vendors: what it can have carried out by a library, by the name of the algorithm; the same on all ranks.
    """

    rank: int
    size: int
    members: tuple[int, ...]
    vendors: Mapping[str, VendorRefusal]

    def subgroup(self, ranks: Sequence[int]) -> Executor:
        """Return the executor of a new communicator of these ranks, in this order; only they call it.

        Nothing is sent: the members know the new one by its parent, `ranks`, and how many have been made of the same
        ranks before. It is closed by itself, and fails with all others of the job.
        """

    def authenticated(self) -> Executor:
        """Return the executor of a communicator of the same ranks whose links are all authenticated; or this one.

        Both ends of each link have proved that they hold the job's key, and only they send on it. Nothing is sent to
        make it, and ranks need not make it at the same time, or at all. It is made once, and closed by itself.
        """

    def start(self, call: Call, source: Operand, target: Operand) -> Operation:
        """Start `call` on C-contiguous flat arrays (or None where the call has none); does not block.

        An array of `source` may be that of `target` in its place; apart from that, what is written is in no other
        array. Returns an `Operation`, whose `poll` or `wait` completes it.
        """

    def run(self, call: Call, source: Operand, target: Operand, timeout_s: float) -> None:
        """Start `call` and wait for it: the same as ``start(call, source, target).wait(timeout_s)``, but quicker.

        The caller vouches for the arrays, which `start` checks.
        """

    def call_cache(self, timeout_s: float) -> CallCache:
        """Return this executor's cache of calls, whose default time limit is `timeout_s`."""

    def cache(self, call: Call, collective: str, x: Any, out: Any, op: Any, root: Any, algorithm: Any) -> None:
        """Let the `call_cache` run `call` for these arguments; INPUT is in `x` and OUTPUT in `out`, if it has them."""

    def persistent(
        self,
        call: Call,
        source: Operand,
        target: Operand,
        timeout_s: float,
        result: Any,
        on_start: Callable[[Operation, Any], Any],
    ) -> Callable[..., Any]:
        """Return what runs `call` on these arrays, each time it is called, as `run` does, and returns `result`.

        Called with ``wait=False``, it starts the call, lets it go on by itself, and returns what `on_start` makes of
        the operation and `result`.
        """

    def sends_from(self, memory: MemoryType, dest: int, nbytes: int, timeout_s: float) -> bool:
        """Return whether `send` takes `nbytes` in this memory, which is not the host's.

        It waits up to `timeout_s` seconds for the link to `dest` to be opened, and answers False without it.
        """

    def receives_into(self, memory: MemoryType, source: int | None, nbytes: int) -> bool:
        """Return whether `recv` takes `nbytes` in such memory, and expects to receive them there."""

    def send(
        self, array: AnyArray, dtype: DType, dest: int, tag: int, memory: MemoryType = MemoryType.HOST
    ) -> Operation:
        """Start sending the flat `array` to rank `dest`, matched there by (this rank, tag), in order per tag.

        Of an array in other `memory` than the host's only the address is used; see `sends_from`.
        """

    def recv(
        self,
        array: AnyArray,
        dtype: DType,
        source: int | None,
        tag: int | None,
        memory: MemoryType = MemoryType.HOST,
    ) -> Probe:
        """Start receiving into the flat `array` from rank `source` the next message of that tag.

        None stands for any other rank, and for any tag below `FIRST_RESERVED_TAG`. A message that several receives
        expect goes to the one that was started first.

        Of an array in other `memory` than the host's only the address is used; see `receives_into`. A message that had
        been put aside before it was asked for, or comes by a link that does not reach this memory, is left on the host:
        `Probe.aside`.
        """

    def probe(self, source: int | None, tag: int | None, *, once: bool) -> Probe:
        """Start looking for a message that `recv` would get, without receiving it: until there is one, or `once`."""

    def message_calls(self, any_source: object, any_tag: object, timeout_s: float) -> MessageCalls:
        """Return what passes plain messages on, whose default time limit is `timeout_s`.

        `any_source` and `any_tag` are what callers give for any other rank and for any tag.
        """

    def wait_for_end(self, seen: int, most_s: float) -> int:
        """Block until more than `seen` operations have ended, or `most_s` seconds have passed; return how many have."""

    def links(self) -> Mapping[int, str]:
        """Return by peer which transport its messages take, and why not shared memory: "tcp (another machine)"."""

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the counters, by peer. Zero-byte messages do not exist and are not counted."""

    def usage(self) -> Sequence[tuple[Call, Usage]]:
        """Return how often each call has been run; nothing, if this executor does not count."""

    def check(self, operation: str) -> None:
        """Raise the error that has ended the communicator, if there is one, as that of `operation`; never blocks."""

    def fail(self, error: UnisonoError) -> None:
        """End the communicator on every rank with `error`, unless it has ended before."""

    def abort(self, reason: str) -> None:
        """Poison the communicator on every rank with `AbortedError`."""

    def settle(self) -> None:
        """Wait, before `close`, until every other rank has made this rank's last call, or has left; seconds at most.

        A rank may end its last call before others make theirs, as the root of a broadcast does.

        Raises:
            MismatchError: the ranks disagree on that call.
        """

    def close(self) -> None:
        """Leave: release everything; peers that still need this rank get `PeerLostError`. May be called twice."""
