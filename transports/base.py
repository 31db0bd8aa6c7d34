"""The contracts between collectives, executors and transports. Everything here is a shape; nothing runs.

An *executor* runs plans: ``start(call, arrays) → poll() → True when done; abort()``; it never blocks in `start` or
`poll`. `Operation.wait` is the one place that blocks, with a deadline, interruptible by Ctrl-C. A *message transport*
moves the messages of the generic executor, and a *mapped transport* lets its ranks use each other's memory; the native
executor has its links inside. Errors are raised by `poll` and `wait`, as the classes of `unisono.errors`; a rank that
has no call in progress gets the error from its next `start`. After that the executor is poisoned and every later
`start` raises `AbortedError`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, field, replace
from enum import IntEnum
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from unisono.algorithms.ir.binding import Shape
from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.algorithms.ir.plan import Buffer, Plan, Span
from unisono.dtypes import DType
from unisono.errors import UnisonoError
from unisono.operations import Op
from unisono.records import record

if TYPE_CHECKING:
    from numpy.typing import NDArray

AnyArray: TypeAlias = "NDArray[np.generic]"
# INPUT or OUTPUT of a call: flat C-contiguous arrays, one for each extent; one alone stands for a list of it, and None
# for what is not there.
Operand: TypeAlias = "AnyArray | Sequence[AnyArray | None] | None"

# Tags from this on are for messages inside calls, which no receive of any tag gets.
FIRST_RESERVED_TAG = 1 << 31

_MOST_SHOWN = 8


class MemoryType(IntEnum):
    """Where the memory of a message lies, numbered as in transports/native/core/memory_type.h."""

    HOST = 0
    CUDA = 1
    CUDA_MANAGED = 2


class Identity(NamedTuple):
    """What tells one message between two ranks of a communicator from another."""

    sequence: int
    lane: int
    group: int
    segment: int


class Argument(NamedTuple):
    """What all ranks must agree on about an array of a call.

    The `shape` is that of an array of which all ranks have a like one, or of a row where each rank has counts of its
    own.
    """

    dtype: str | None
    shape: tuple[int, ...] | None
    order: str
    op: str | None

    def __str__(self) -> str:
        """Return the argument as the user wrote it: ``float32[8], op=sum``."""
        shape = ",".join(str(extent) for extent in self.shape or ())
        array = f"{self.dtype}[{shape}]" if self.dtype else ""
        order = "order=F" if self.order == "F" else ""
        op = f"op={self.op}" if self.op else ""
        return ", ".join(part for part in (array, order, op) if part)


@record(slots=False)
class Signature:
    """What all ranks must agree on in a call. Compared by `digest` in the header of every message.

    The `shape` is that of an array of which all ranks have a like one, or of a row where each rank has `counts` of its
    own (in rows), as far as all ranks know them. Where there are several arrays in one call, `others` are those after
    the first. `reproducible` and `accumulate` are what the user asked for; so is `asked`, the name of an algorithm,
    which is only shown: ranks agree if their `algorithm` is the same. `memory` is where the arrays are, if that is not
    the host.
    """

    collective: str
    dtype: str | None
    shape: tuple[int, ...] | None
    order: str
    op: str | None
    root: int | None
    algorithm: str
    segments: int
    counts: tuple[int, ...] | None = None
    reproducible: bool = False
    accumulate: str | None = None
    others: tuple[Argument, ...] = ()
    memory: str = ""
    asked: str | None = field(default=None, compare=False)

    @cached_property
    def digest(self) -> int:
        """64 bits of SHA-256 over all fields but `asked`; equal on two ranks exactly if the signatures are."""
        facts = repr(astuple(replace(self, asked=None)))
        return int.from_bytes(hashlib.sha256(facts.encode()).digest()[:8], "little")

    def __str__(self) -> str:
        """Return the call as the user wrote it: ``allreduce(float32[8], op=sum)``.

        Of several arrays, like ones that follow each other are counted: ``allreduce([2 × (float32[8], op=sum)])``.
        """
        return self._text

    @cached_property
    def _text(self) -> str:
        first = Argument(self.dtype, self.shape, self.order, self.op)
        what = _shown(_runs((first, *self.others))) if self.others else str(first)
        root = f"root={self.root}" if self.root is not None else ""
        counts = f"counts={_shown([str(count) for count in self.counts])}" if self.counts is not None else ""
        reproducible = "reproducible" if self.reproducible else ""
        accumulate = f"accumulate={self.accumulate}" if self.accumulate else ""
        asked = f"algorithm={self.asked}" if self.asked else ""
        memory = f"on a {self.memory}" if self.memory else ""
        parts = (what, memory, root, counts, asked, reproducible, accumulate)
        return f"{self.collective}({', '.join(part for part in parts if part)})"


def _runs(arguments: Sequence[Argument]) -> list[str]:
    """Return like arguments that follow each other as one, with their number."""
    runs = [(argument, sum(1 for _ in equal)) for argument, equal in groupby(arguments)]
    return [f"{number} × ({argument})" if number > 1 else f"({argument})" for argument, number in runs]


def _shown(items: Sequence[str]) -> str:
    """Return the first items, which suffice to recognise a call."""
    return f"[{', '.join(items[:_MOST_SHOWN])}{', …' if len(items) > _MOST_SHOWN else ''}]"


@record
class Extent:
    """A part of INPUT and OUTPUT with elements of one type, which are reduced by one operation.

    Attributes:
        elements: how many there are in INPUT and in OUTPUT.
        dtype, op: their type and the operation; op is None where nothing is reduced.
    """

    elements: tuple[int, int]
    dtype: DType
    op: Op | None


@record
class Call:
    """A collective call, validated and chosen, without its arrays; built once and used for any number of calls.

    Attributes:
        signature: what the ranks must agree on.
        plan: this rank's plan.
        shape: element counts of INPUT and OUTPUT, which are those of all extents together.
        extents: what INPUT and OUTPUT consist of, an extent for each array; none for a barrier.
        segments: number of segments that the plan is run over, at least 1.
    """

    signature: Signature
    plan: Plan
    shape: Shape
    extents: tuple[Extent, ...]
    segments: int = 1

    def is_shared(self, buffer: Buffer) -> bool:
        """Return whether each extent of a buffer is cut into shares of the ranks, and a block is one of each extent.

        Otherwise blocks are cut out of the extents as they lie one after the other.
        """
        if len(self.extents) < 2:
            return False
        contract = CONTRACTS[self.plan.collective]
        return (contract.input if buffer is Buffer.INPUT else contract.output) is Cut.SHARES


@record
class Usage:
    """How often a call has been run, and the seconds of those of its runs that were timed."""

    calls: int
    timed: int
    seconds: float


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
class Traffic:
    """What one peer has been sent and has sent, over one transport.

    Memory that is read is sent by its owner, and memory that is written is received by its owner, as one message.
    """

    transport: str
    sent_messages: int = 0
    sent_nbytes: int = 0
    received_messages: int = 0
    received_nbytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        """Return both together, by the transport of the first."""
        return Traffic(
            self.transport,
            self.sent_messages + other.sent_messages,
            self.sent_nbytes + other.sent_nbytes,
            self.received_messages + other.received_messages,
            self.received_nbytes + other.received_nbytes,
        )


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


# Why a library does not carry out a call, (collective, bytes, what is reduced by what, arrays, ranks) → reason or None.
VendorRefusal: TypeAlias = Callable[[str, int, Sequence[tuple[DType, Op]], int, int], "str | None"]


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


class Request(Protocol):
    """A posted message of a message transport."""

    def done(self) -> bool:
        """Return whether the message has been sent, or received; never blocks. Raises the error that ended it."""


@record
class Capabilities:
    """What a transport can do.

    Attributes:
        kind: "message", "mapped" or "vendor".
        ordered: whether messages of one (lane, peer) arrive in the order in which they were sent.
        zero_copy: whether `post_send` reads the caller's memory until the request is done (it is frozen until then).
    """

    kind: str
    ordered: bool
    zero_copy: bool


class Published(Protocol):
    """The INPUT, OUTPUT and SCRATCH that a rank lets its peers use in one collective."""

    def bytes_to_read(self, span: Span, segment: int) -> list[memoryview]:
        """Return what `span` covers in `segment`, to be read: the memory of each block that is not empty."""

    def bytes_to_write(self, span: Span, segment: int) -> list[memoryview]:
        """Return what `span` covers in `segment`, to be written."""


class MappedTransport(Protocol):
    """Lets the ranks of one communicator use each other's memory. Every call is nonblocking.

    What a peer's memory holds is up to the flags: the plan orders every access, and the transport none.
    """

    def publish(self, sequence: int, memory: Published) -> None:
        """Let peers use `memory` in this rank's `sequence`-th collective, before any of its flags is raised."""

    def withdraw(self, sequence: int) -> None:
        """End what `publish` began. A later access to that memory raises `InternalError`, on every rank."""

    def read(self, peer: int, sequence: int, span: Span, segment: int, pieces: Sequence[memoryview]) -> Request:
        """Copy `span` of the memory of `peer` into `pieces` (contiguous, of bytes). Not called for zero bytes.

        A span of another length raises `MismatchError` from `Request.done`, and on every other rank.
        """

    def write(self, peer: int, sequence: int, span: Span, segment: int, pieces: Sequence[memoryview]) -> Request:
        """Copy `pieces` to `span` of the memory of `peer`; as `read`, the other way round."""

    def signal(self, peer: int, identity: Identity) -> Request:
        """Raise the flag of this identity at `peer`, which ends whether or not it is waited for."""

    def wait(self, peer: int, identity: Identity) -> Request:
        """Wait for `peer` to raise the flag of this identity."""


class MessageTransport(Protocol):
    """Moves messages between the ranks of one communicator, for the generic executor. Every call is nonblocking.

    Attributes:
        members: the number in the job of each rank.
        mapped: how the ranks use each other's memory, or None if they cannot. It is poisoned and closed with this.
    """

    name: str
    rank: int
    size: int
    capabilities: Capabilities
    mapped: MappedTransport | None
    members: tuple[int, ...]

    def subgroup(self, ranks: tuple[int, ...], number: int) -> MessageTransport:
        """Return the transport of a new communicator of these ranks, the `number`-th of the same ranks."""

    def announce(self, sequence: int, signature: Signature) -> None:
        """Tell what this rank calls as its `sequence`-th collective, before any message of that call is posted.

        A transport that learns that another rank calls something else there fails on every rank with `MismatchError`.
        """

    def absent(self, sequence: int) -> Collection[int]:
        """Return the ranks that are known not to have called their `sequence`-th collective yet, in ascending order."""

    def post_send(self, peer: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        """Send the concatenation of `pieces` (contiguous, of bytes) as one message.

        Messages of zero bytes are sent outside collectives only.
        """

    def post_recv(self, peer: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        """Receive the message of this identity from `peer` into `pieces` (contiguous, of bytes).

        A message of another signature (by its digest) or length under this identity raises `MismatchError` from
        `Request.done`, and on every other rank.
        """

    def arrived(self, peer: int, lane: int) -> Collection[tuple[Identity, Signature]]:
        """Return the messages of `peer` on a lane that can be received here, and that no receive was posted for."""

    def departed(self, peer: int) -> bool:
        """Return whether `peer` has left, so that nothing more will come from it than what has arrived."""

    def progress(self) -> None:
        """Move what can be moved. Raises the error that poisoned the transport."""

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the counters, by peer."""

    def abort(self, error: Exception) -> None:
        """Make every pending and later request of every rank fail with `error`."""

    def close(self) -> None:
        """Leave the communicator."""
