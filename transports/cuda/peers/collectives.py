"""The `cuda_ipc` transport: collectives between ranks of one host that read each other's device memory.

Theory of operation
-------------------
Connecting. The ranks of a communicator exchange their device memory when it is first needed (`peer_exchange`), over the
communicator's own links.

Calls. A call runs a plan over mapped memory, by one of the algorithms that CPUs use too. It is *issued* to a stream. An
operation is done as soon as all its work is in the stream, long before the device has done it. The thread that polls
drives it. Calls are issued one after the other, in the order in which they were started.

Repeats. Over flags, the calls of the device that issue a segment are kept. A later call on the same arrays makes them
again without its plan, by native code if the device has it (`CudaDevice.compile`).

Graphs. Later uses of a persistent call are replays of a graph (`replays`), if all devices have graphs, the call has one
segment, and its contributions have no factor.

Slabs. Memory that is not exported is copied through slabs, which grow with the calls. The `Watch`, and later calls,
free smaller slabs when no rank uses them any more. A call that does not fit into a slab runs over segments, on
two channels alternately. Odd segments have a stream of their own, so that copies of one segment overlap with kernels of
another.

Failures. The communicator's links detect a rank that dies, and every poll asks them. Then nothing more is issued. Over
events, issued work ends by itself, because streams wait only for issued work. Over flags, streams may wait for a flag
that a dead rank should raise. So a `Watch` asks the links while the device works, and releases this rank's flags after
a failure.
"""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from unisono.algorithms.catalogue.on_devices import find_on_devices, mapped_names, usual_on_devices
from unisono.algorithms.ir.plan import Plan
from unisono.errors import (
    AbortedError,
    CollectiveTimeoutError,
    NoAlgorithmError,
    PlanError,
    UnisonoError,
    UsageError,
)
from unisono.transports.contracts.call import Extent, Signature
from unisono.transports.contracts.executor import Executor
from unisono.transports.contracts.transport import Traffic
from unisono.transports.cuda.device import Device, Stream, is_over
from unisono.transports.cuda.executors.executor import ABLE, BoundCall, RepeatedCalls, SegmentRun, bind, load_kernels
from unisono.transports.cuda.executors.replays import Replays
from unisono.transports.cuda.issued_calls import IssuedCall
from unisono.transports.cuda.memory.registered import registry_of
from unisono.transports.cuda.peers.channel import Channel
from unisono.transports.cuda.peers.peer_exchange import PeerExchange, exchange
from unisono.transports.cuda.peers.shown_arrays import Piece, Shown, ShownArrays
from unisono.transports.executors.plan_checks import check_plan, check_reads
from unisono.transports.executors.polling import pauses_of_polling, wait_by_polling

NAME = "cuda_ipc"
# Each segment of a call costs the host about as much as a small call, so long calls have few.
SLAB_NBYTES = 512 << 20
_FIRST_SLAB_NBYTES = 2 << 20
# The pause between two looks for failures while the device works.
_WATCH_S = 0.01
# The most repeats that are kept of a bound call.
_MOST_REPEATS = 64
# The most bound calls that are kept.
_MOST_BOUND = 256


class DeviceCollectives:
    """Collectives of the ranks of `executor` on their devices. Each rank creates it at the same point.

    Args:
        executor: the communicator's; its links carry the exchange and report failures.
        device: this rank's device.
        timeout_s: how long the exchange may take.
        slab_nbytes: the largest size of a slab; each rank has two.
        most_blocks: the most blocks of a kernel on the stream of this object; see `Device.new_stream`.

    Attributes:
        refusal: why these ranks cannot use it; None if they can. Equal on all of them.

    Raises:
        PeerLostError, CollectiveTimeoutError, AbortedError, MismatchError: the exchange failed.
    """

    def __init__(
        self,
        executor: Executor,
        device: Device,
        *,
        timeout_s: float,
        slab_nbytes: int = SLAB_NBYTES,
        most_blocks: int = 0,
    ) -> None:
        self.executor, self.device = executor, device
        self._slab_nbytes = slab_nbytes
        self._peers = PeerExchange(executor, device, min(slab_nbytes, _FIRST_SLAB_NBYTES), timeout_s)
        self.refusal = self._peers.refusal
        self.channels = self._peers.channels
        self._side = None if self.refusal else device.new_stream(most_blocks)
        self._fork = None if self.refusal else device.new_event()
        self._lock = threading.RLock()
        self._releasing = threading.Lock()  # held while flags are released or freed
        self._watch = Watch(self) if self._peers.by_flags else None
        self._plans: dict[tuple[str, str, int], Sequence[Plan]] = {}
        self._bound: dict[tuple[object, ...], BoundCall] = {}
        self._started: deque[DeviceOperation] = deque()
        self._traffic: dict[int, Traffic] = {}
        self._uncounted: dict[int, tuple[BoundCall, int]] = {}  # bound calls by identity, and how often each was made
        self._shown: list[ShownArrays] = []
        self._replays: list[Replays] = []
        self._failure: UnisonoError | None = None
        self._has_released = False
        self._is_closed = False
        self._is_over = False  # the device had done its work at the time of `close`

    def refuses(self, collective: str, algorithm: str | None = None) -> str | None:
        """Return the reason why `cuda_ipc` cannot run a call, as text; None if it can. It is equal on all ranks.

        Args:
            collective: the name of the collective.
            algorithm: the name that the user forced, if any.
        """
        if self.refusal is not None:
            return self.refusal
        names = mapped_names(collective) if algorithm is None else [algorithm]
        if not names:
            return f"there is no {collective} over mapped memory"
        try:
            self._plans_of(collective, names[0], 0)
        except (NoAlgorithmError, PlanError) as error:
            return error.message
        return None

    def start(
        self,
        signature: Signature,
        extent: Extent | None,
        source: int,
        target: int,
        stream: Stream,
        algorithm: str | None = None,
        shown: Shown | None = None,
        replays: Replays | None = None,
    ) -> DeviceOperation:
        """Start a call on flat contiguous arrays; does not block.

        The operation is done when the whole call has been issued to `stream`. The stream reads and writes the arrays
        later, so they must stay valid until then. Until the operation is done, nothing else may be issued to `stream`.

        Args:
            signature: what ranks must agree on: the collective, the root, and the user's other arguments.
            extent: elements of INPUT and OUTPUT, dtype and operation; None for a barrier.
            source: the address of INPUT; ignored if the call has none.
            target: the address of OUTPUT, which may be that of INPUT; ignored if the call has none.
            stream: the stream to issue to.
            algorithm: an algorithm over mapped memory; None: choose one.
            shown: the result of `agree` for these arrays; None if they are read by images.
            replays: from `new_replays`, for a persistent call on these arrays.

        Raises:
            UsageError: this object is closed, or the call is refused.
            MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: the communicator has failed.
        """
        with self._lock:
            if self._is_closed:
                raise UsageError("the communicator is closed", operation=str(signature))
            self.check(str(signature))
            self._tidy()
            bound = self._bind(signature, extent, algorithm, shown)
            replays = replays if replays is not None and replays.takes(bound) else None
            operation = DeviceOperation(self, bound, signature, (source, target), stream, replays)
            self._started.append(operation)
            if self._watch is not None:
                self._watch.begin()  # first, because the driver may hold up this thread while it issues
            self.progress()
            return operation

    def agree(self, calls: Sequence[tuple[Piece, Piece]], timeout_s: float) -> Sequence[Shown | None]:
        """Tell the other ranks the addresses of the arrays of some calls, if the arrays are in registered memory.

        All ranks call this at the same point. Ranks of one process read each other's arrays anyway.

        Args:
            calls: the address and bytes of INPUT and OUTPUT of each call. They stay valid until `close`.
            timeout_s: how long each of two exchanges may take.

        Returns:
            For each call the argument `shown` of `start`.

        Raises:
            PeerLostError, CollectiveTimeoutError, AbortedError, MismatchError: an exchange failed.
        """
        if self._peers.in_one_process:
            return [None] * len(calls)
        executor = self.executor
        shown = ShownArrays(executor.rank, registry_of(self.device), lambda mine: exchange(executor, mine, timeout_s))
        self._shown.append(shown)
        return shown.agree(calls)

    def new_replays(self) -> Replays | None:
        """Return the argument `replays` of `start` for a new persistent call; None if it has no graphs.

        All ranks call this in the same order.
        """
        flags = self._peers.graph_flags
        number = None if flags is None else flags.new_call()
        if flags is None or number is None:
            return None
        self._replays.append(Replays(flags, self.device, number))
        return self._replays[-1]

    def progress(self) -> None:
        """Issue all work of started calls that can be issued. On an error, end the communicator on all ranks."""
        with self._lock:
            if self._failure is not None:
                return
            try:
                while self._started:
                    self.executor.check(self._started[0].name)
                    if not self._started[0].advance():
                        return
                    bound = self._started.popleft().bound
                    _, times = self._uncounted.get(id(bound), (bound, 0))
                    self._uncounted[id(bound)] = bound, times + 1
                    if len(self._uncounted) > _MOST_REPEATS:
                        self._count()
            except UnisonoError as error:
                self.fail(error)

    def fail(self, error: UnisonoError) -> None:
        """End the communicator with `error` on all ranks."""
        with self._lock:
            if self._failure is None:
                self._failure = error
                self._stop_issuing()
                self.executor.fail(error)

    def watch(self) -> bool:
        """Look for failures while the device works, and release its flags after one; return whether it is idle."""
        if not self._lock.acquire(blocking=False):
            # The driver may hold up the thread that has the lock, until a stream has room for more work.
            if self.executor.has_failed():
                self._release_flags()
            return False
        try:
            has_failed = self._failure is not None or self.executor.has_failed()
            if not self._is_closed and has_failed:
                self._stop_issuing()
                self._release_flags()
            return not self._started and self._is_idle() and (self._is_closed or has_failed or self._tidy())
        finally:
            self._lock.release()

    def _tidy(self) -> bool:
        """Free slabs that larger ones have replaced, as far as no rank uses them; return whether all are freed."""
        return all(channel.tidy() for channel in self.channels)

    def is_intact(self) -> bool:
        """Return whether the results of calls are valid, because no flag has been set to end a wait."""
        return not self._has_released

    def _release_flags(self) -> None:
        with self._releasing:
            self._has_released = True
            for channel in self.channels:
                channel.release()
            if self._peers.graph_flags is not None:
                self._peers.graph_flags.release()

    def failure(self) -> UnisonoError | None:
        """Return the error that has ended the communicator, if any."""
        return copy.copy(self._failure)

    def check(self, operation: str) -> None:
        """Raise the error that prevents a new call, if any."""
        if self._failure is not None:
            raise AbortedError(f"this communicator had failed: {self._failure.message}", operation=operation)
        self.executor.check(operation)

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the counters of the issued work, by peer."""
        with self._lock:
            self._count()
            return dict(self._traffic)

    def streams(self, segments: int, stream: Stream) -> list[Stream]:
        """Return the stream of each channel for a call. Both run behind the work that is on `stream` now."""
        assert self._side is not None, "a refused object starts no call"
        assert self._fork is not None, "a refused object starts no call"
        if segments > 1:
            self.device.record(self._fork, stream)
            self.device.wait(self._side, self._fork)
        return [stream, self._side]

    def close(self, timeout_s: float = 1.0) -> bool:
        """Close this rank's part; return whether the device's work is done. Later calls of other ranks fail.

        It waits up to `timeout_s` for the work, and frees nothing if that is not done. It frees memory when all ranks
        have closed. Memory that a dead or late rank may still have open stays allocated until the process ends.
        """
        with self._lock:
            if self._is_closed:
                return self._is_over
            self._is_closed = True
            self._stop_issuing()
            has_failed = self._failure is not None or self.executor.has_failed()
            patience_s = 0.0 if has_failed else timeout_s  # a lost rank will not close
            self._failure = self._failure or AbortedError("this communicator is closed")
        if self._watch is not None:
            self._watch.end()
        # Ranks that are slow still raise their flags; those that have failed do not.
        self._is_over = self._until(self._is_idle, timeout_s if patience_s else 0.0)
        self._is_over = self._is_over or self._until(self._is_idle_when_released, timeout_s)
        if self.refusal is None and self._is_over:
            self._release(patience_s, timeout_s)
        return self._is_over

    def _release(self, patience_s: float, timeout_s: float) -> None:
        for replays in self._replays:
            replays.end()
        flags = self._peers.graph_flags
        for shared in (*self.channels, *self._shown, *(() if flags is None else (flags,))):
            shared.close_peers()
        if not self._until(self.device.has_released, timeout_s):
            return  # other work of this process goes on, and peers may not free what is still open here
        boards = self._peers.boards
        boards[self.executor.rank].leave()
        if self._until(lambda: all(board.has_left for board in boards), patience_s):
            self._free()

    def _stop_issuing(self) -> None:
        """Issue nothing more of the started calls."""
        for operation in self._started:
            operation.stop_issuing()
        self._started.clear()

    def _is_idle(self) -> bool:
        return all(is_over(self.device, channel.last) for channel in self.channels)

    def _is_idle_when_released(self) -> bool:
        self._release_flags()  # again and again, because ranks that live may still set flags back
        return self._is_idle()

    def _free(self) -> None:
        with self._releasing:
            flags = self._peers.graph_flags
            for shared in (*self.channels, *self._shown, *(() if flags is None else (flags,))):
                shared.free()
        for board in self._peers.boards:
            board.close()
        assert self._side is not None
        assert self._fork is not None
        self.device.end_stream(self._side)
        self.device.end_event(self._fork)

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a condition; return whether it has become true in time."""
        deadline = time.monotonic() + timeout_s
        for pause in pauses_of_polling():
            if condition():
                return True
            if time.monotonic() >= deadline:
                return False
            if pause is not None:
                time.sleep(pause)
        return False

    def _plans_of(self, collective: str, name: str, root: int) -> Sequence[Plan]:
        """Return the plans of all ranks; raises an error with the reason of `refuses`."""
        place = collective, name, root
        if place not in self._plans:
            size, algorithm = self.executor.size, find_on_devices(collective, name)
            algorithm.check_supports(size)
            plans = [algorithm.build(size, rank, root) for rank in range(size)]
            for rank, plan in enumerate(plans):
                if self._peers.by_flags and len(plan.lanes) > 1:
                    raise PlanError(f"{name} has several lanes, whose flags one stream cannot await in every order")
                check_plan(plan, rank, size, NAME, ABLE)
                check_reads(plan)
            self._plans[place] = plans
        return self._plans[place]

    def _bind(
        self, signature: Signature, extent: Extent | None, algorithm: str | None, shown: Shown | None
    ) -> BoundCall:
        """Return the call, bound to the memory of all ranks; raises `UsageError` if it is refused."""
        lifted = extent is not None and extent.op is not None and extent.op.factor is not None
        place = signature.collective, algorithm, signature.root, extent, lifted, shown
        bound = self._bound.get(place)
        if bound is None or lifted:
            if (reason := self.refuses(signature.collective, algorithm)) is not None:
                raise UsageError(reason, operation=str(signature))
            if len(self._bound) >= _MOST_BOUND:
                self._bound.clear()
            nbytes = 0 if extent is None else extent.elements[0] * extent.dtype.itemsize
            name = algorithm or usual_on_devices(signature.collective, nbytes, self.executor.size) or ""
            plans = self._plans_of(signature.collective, name, signature.root or 0)
            in_one_process = self._peers.in_one_process
            bound = bind(self.executor.rank, plans, extent, self._slab_nbytes, in_one_process, shown)
            self._bound[place] = bound
            load_kernels(self.device, bound)
        return bound

    def _count(self) -> None:
        while self._uncounted:
            _, (bound, times) = self._uncounted.popitem()
            for peer, once in bound.traffic.items():
                counts = (once.sent_messages, once.sent_nbytes, once.received_messages, once.received_nbytes)
                more = Traffic(NAME, *(times * count for count in counts))
                self._traffic[peer] = more + self._traffic.get(peer, Traffic(NAME))


class Watched(Protocol):
    """Calls on a device, whose streams would wait for ever for a lost rank if no thread looked for failures."""

    def watch(self) -> bool:
        """Look for failures, and end waiting work after one; return whether the device is idle."""


class Watch:
    """A thread that calls ``collectives.watch()`` while the device works. It does not keep `collectives` alive."""

    def __init__(self, collectives: Watched) -> None:
        self._collectives = weakref.ref(collectives)
        self._is_needed = threading.Event()
        self._is_ended = False
        self._thread: threading.Thread | None = None
        weakref.finalize(collectives, self.end).atexit = False

    def begin(self) -> None:
        """Watch until the device has done its work."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="unisono-gpu-watch", daemon=True)
            self._thread.start()
        if not self._is_needed.is_set():
            self._is_needed.set()

    def end(self) -> None:
        """Let the thread end."""
        self._is_ended = True
        self._is_needed.set()

    def _run(self) -> None:
        while self._is_needed.wait() and not self._is_ended:
            self._is_needed.clear()
            while not self._is_ended and not self._has_done():
                time.sleep(_WATCH_S)

    def _has_done(self) -> bool:
        collectives = self._collectives()
        return collectives is None or collectives.watch()


class DeviceOperation:
    """A started call; see `Operation`. It is done when all of it has been issued."""

    def __init__(
        self,
        owner: DeviceCollectives,
        bound: BoundCall,
        signature: Signature,
        operands: tuple[int, int],
        stream: Stream,
        replays: Replays | None = None,
    ) -> None:
        self.bound, self.name = bound, str(signature)
        self._replays = replays
        self._signature = signature
        self._owner = owner
        self._operands = operands
        self._stream = stream
        self._streams: list[Stream] = []
        self._keys: dict[int, tuple[object, ...]] = {}  # by channel, of the running segments
        self._next = 0  # the first segment that has not been begun
        self._running: dict[int, SegmentRun] = {}  # by channel
        self._finished = False
        self._timeout_s = 0.0

    def poll(self) -> bool:
        if not self._finished:
            self._owner.progress()
        if not self._finished and (error := self._owner.failure()) is not None:
            error.operation, error.buffers = self.name, "the contents of the output are undefined"
            raise error
        return self._finished

    def ended(self) -> bool:
        self._owner.progress()
        return self._finished or self._owner.failure() is not None

    def wait(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        wait_by_polling(self, timeout_s, lambda: self._owner.fail(self._timeout()))

    def run_in_background(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        threading.Thread(target=self._drive, name="unisono-device", daemon=True).start()

    def abort(self, reason: str) -> None:
        executor = self._owner.executor
        self._owner.fail(AbortedError(f"rank {executor.members[executor.rank]} aborted: {reason}"))

    def advance(self) -> bool:
        """Issue all work that can be issued now; return whether the whole call has been issued."""
        if not self._streams:
            self._streams = self._owner.streams(self.bound.segments, self._stream)
        while self._begin_segments() or self._end_segments():
            pass
        if self._running:
            return False
        self._rejoin()
        self._finished = True
        return True

    def stop_issuing(self) -> None:
        """Issue nothing more. The issued work is over when the stream of the call has finished."""
        with suppress(UnisonoError):  # of a device that has failed
            for run in self._running.values():
                run.stop_issuing()
            self._rejoin()

    def _rejoin(self) -> None:
        """Make the stream of the call wait for the work on the other stream."""
        if self._streams and self.bound.segments > 1:
            self._owner.device.wait(self._stream, self._owner.channels[1].last)

    def _begin_segments(self) -> bool:
        """Begin the next segment if its channel is free; return whether it was begun."""
        index = self._next % len(self._streams)
        if self._next == self.bound.segments or index in self._running:
            return False
        channel, stream = self._owner.channels[index], self._streams[index]
        key = self._next, self._operands, stream, channel.generation
        self._next += 1
        if (again := self._again(key, channel, stream)) is not None:
            self._issue_again(again, channel, stream)
            return True
        self._keys[index] = key
        self._running[index] = SegmentRun(
            self.bound,
            self._signature,
            self._next - 1,
            self._operands,
            self._owner.executor.members,
            None if self._replays is not None else self._owner.device,
            channel,
            stream,
        )
        return True

    def _again(self, key: tuple[object, ...], channel: Channel, stream: Stream) -> Callable[[], None] | None:
        """Return a function that repeats the calls of an earlier use of a segment; None if there are none."""
        if self._replays is not None:
            return partial(self._replays.replay, channel, stream) if self._replays.has(key) else None
        return self.bound.repeats.get(key) if channel.by_flags else None

    def _issue_again(self, again: Callable[[], None], channel: Channel, stream: Stream) -> None:
        try:
            again()
        except BaseException:
            with suppress(UnisonoError):
                self._owner.device.record(channel.last, stream)
            raise

    def _end_segments(self) -> bool:
        """Continue the running segments; return whether one has ended."""
        ended = [index for index, run in self._running.items() if run.advance()]
        for index in ended:
            key, issued = self._keys.pop(index), self._running.pop(index).issued
            if self._replays is None:
                self._keep(key, issued)
            else:
                self._replays.keep(key, issued)
                channel, stream = self._owner.channels[index], self._streams[index]
                self._issue_again(partial(self._replays.replay, channel, stream), channel, stream)
        return bool(ended)

    def _keep(self, key: tuple[object, ...], issued: Sequence[IssuedCall]) -> None:
        """Keep the calls that have issued a segment for the next call on the same arrays."""
        repeats = self.bound.repeats
        if self.bound.has_factor:
            return  # each call may have another one
        if len(repeats) >= _MOST_REPEATS:
            repeats.clear()
        repeats[key] = RepeatedCalls(self._owner.device, issued)

    def _drive(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        for pause in pauses_of_polling():
            if self.ended():
                return
            if time.monotonic() >= deadline:
                self._owner.fail(self._timeout())
            time.sleep(pause or 0.0)

    def _timeout(self) -> CollectiveTimeoutError:
        members = self._owner.executor.members
        awaited = sorted({members[peer] for run in self._running.values() for peer in run.waits_for()})
        ranks = f"rank{'s' if len(awaited) > 1 else ''} {', '.join(map(str, awaited))}"
        me = members[self._owner.executor.rank]
        peer = awaited[0] if awaited else None
        return CollectiveTimeoutError(f"rank {me} waited {self._timeout_s:g} s for {ranks} in {self.name}", peer=peer)
