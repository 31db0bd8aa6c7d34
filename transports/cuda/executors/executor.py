"""The CUDA executor: issues a plan over mapped memory to a stream of a device. It never waits for the device.

Theory of operation
-------------------
One stream. The executor issues all work of a plan to one stream, in the order in which `Lane` lets the groups start. So
the dependencies of a group come before it. Lanes and segments share the stream, because they would share the memory's
bandwidth anyway. `Read` and `Copy` become copies, and `ReadReduce` and `Reduce` kernels.

Signals. Over flags (`channel`), `Signal` and `Wait` are issued like all other steps, so a plan is issued in one go.
Waits of a group come behind its signals, because all ranks would wait for each other otherwise. Over events, they take
time on the host: a `Signal` is posted until its event may be recorded, and a `Wait` until the peer's number was seen.

Images. The caller's arrays have the content that the plan says, at every moment. A block that other ranks read also has
an *image* in the slab, which is updated after each step that writes the block. At first it is a copy of INPUT. If all
ranks are in one process, they read each other's arrays, and only SCRATCH has images. Contributions that are multiplied
by a factor are lifted into their images, and their own rank reads them there too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from unisono.algorithms.ir.binding import Shape
from unisono.algorithms.ir.exposed_memory import exposed_blocks, readings
from unisono.algorithms.ir.plan import Buffer, Copy, Plan, Read, ReadReduce, Reduce, Signal, Span, Step, Wait
from unisono.algorithms.ir.walk import steps_as_run
from unisono.dtypes import DTYPES, DType
from unisono.errors import MismatchError, PeerLostError
from unisono.operations import Lower, Op
from unisono.transports.contracts.call import Call, Extent, Signature
from unisono.transports.contracts.transport import Traffic
from unisono.transports.cuda.device import Device, Stream
from unisono.transports.cuda.executors.layout import BlockPlace, Layout
from unisono.transports.cuda.issued_calls import IssuedCall, Method
from unisono.transports.cuda.peers.channel import Channel
from unisono.transports.cuda.peers.peer_board import mark_of
from unisono.transports.cuda.peers.shown_arrays import Shown
from unisono.transports.executors.lane import Lane, Posted

ABLE: tuple[type, ...] = (Copy, Reduce, Read, ReadReduce, Signal, Wait)

_TOKEN = Extent((1, 1), DTYPES["uint8"], None)


class RepeatedCalls:
    """Issues the same calls again. The device compiles them when that happens for the first time.

    Many calls are made only once, because programs often pass new arrays, and compiling takes longer than issuing.
    """

    def __init__(self, device: Device, calls: Sequence[IssuedCall]) -> None:
        self._compile: Callable[[], Callable[[], None]] = partial(device.compile, calls)
        self._issue: Callable[[], None] | None = None

    def __call__(self) -> None:
        """Issue the calls. Raises the errors of the methods of the device."""
        if self._issue is None:
            self._issue = self._compile()
        self._issue()


@dataclass(frozen=True)
class BoundCall:
    """A call, bound to the memory of all ranks. It is the same on all of them, except for `rank`.

    Attributes:
        rank: this rank.
        plans: the plans of all ranks.
        extent: elements, dtype and operation.
        segments: the number of segments, over which the plan runs one after the other.
        layouts: the memory of each rank.
        direct: whether ranks of one process read each other's arrays instead of images.
        shown: the addresses in this process of arrays that are read where they lie.
        repeats: issue segments again, by the facts that decide about them besides this object. Over flags, the same
            calls issue the same segment: with the same arrays, slabs and stream, only the numbers of flags differ.
    """

    rank: int
    plans: Sequence[Plan]
    extent: Extent
    segments: int
    layouts: Sequence[Layout]
    direct: bool
    shown: Shown | None = None
    repeats: dict[tuple[object, ...], RepeatedCalls] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of the slab that the call needs, equal on all ranks."""
        return max(layout.nbytes for layout in self.layouts)

    @property
    def has_factor(self) -> bool:
        """Whether contributions are multiplied by a factor, which each call may change."""
        return self.extent.op is not None and self.extent.op.factor is not None

    @cached_property
    def traffic(self) -> dict[int, Traffic]:
        """The messages and bytes between this rank and each other one."""
        traffic: dict[int, Traffic] = {}
        for reader, owner, span in readings(self.plans):
            if self.rank not in (reader, owner):
                continue
            places = [place for segment in range(self.segments) for place in self.layouts[owner].places(span, segment)]
            counts = len(places), sum(place.elements for place in places) * self.extent.dtype.itemsize
            peer, more = (owner, (0, 0, *counts)) if reader == self.rank else (reader, (*counts, 0, 0))
            traffic[peer] = Traffic("cuda_ipc", *more) + traffic.get(peer, Traffic("cuda_ipc"))
        return traffic


def bind(
    rank: int,
    plans: Sequence[Plan],
    extent: Extent | None,
    most_nbytes: int,
    in_one_process: bool,
    shown: Shown | None = None,
) -> BoundCall:
    """Return a call bound to memory. It has the fewest segments whose exposed blocks fit a slab of `most_nbytes`.

    A slab is the device memory of a rank that the other ranks can read.

    Args:
        rank: this rank.
        plans: the plans of all ranks.
        extent: elements of INPUT and OUTPUT, dtype and operation; None for a barrier.
        most_nbytes: the largest slab. It is exceeded only if one element of each block does not fit.
        in_one_process: whether all ranks are in this process.
        shown: the addresses of arrays of all ranks that are read where they lie. All ranks show the same ones.
    """
    extent = extent or _TOKEN
    lifted = extent.op is not None and extent.op.factor is not None
    direct = in_one_process and not lifted
    exposed = exposed_blocks(plans)

    def has_image(owner: int, buffer: Buffer, block: int) -> bool:
        if buffer is Buffer.SCRATCH or (buffer is Buffer.INPUT and lifted):
            return True
        is_shown = direct or (shown is not None and shown[owner][buffer])
        return not is_shown and (buffer, block) in exposed[owner]

    def layouts(segments: int) -> list[Layout]:
        shape = Shape(extent.elements, {})
        return [
            Layout(plan, shape, extent.dtype.itemsize, segments, lambda *at, owner=owner: has_image(owner, *at))
            for owner, plan in enumerate(plans)
        ]

    segments, of_ranks = 1, layouts(1)
    while (nbytes := max(layout.nbytes for layout in of_ranks)) > most_nbytes and segments < max(extent.elements):
        segments = min(max(segments + 1, -(-segments * nbytes // most_nbytes)), max(extent.elements))
        of_ranks = layouts(segments)
    return BoundCall(rank, plans, extent, segments, of_ranks, direct, shown)


def load_kernels(device: Device, bound: BoundCall) -> None:
    """Load the kernels of a call, before its streams wait for other ranks."""
    op, plan = bound.extent.op, bound.plans[bound.rank]
    if op is None:
        return
    steps = [step for _, _, step in steps_as_run(plan)]
    reductions = {(len(step.sources), step.lower) for step in steps if isinstance(step, (Reduce, ReadReduce))}
    reductions |= {(1, True) for step in steps if isinstance(step, Copy) and step.lower}
    for k, lower in reductions:
        device.load_reduction(k, bound.extent.dtype, op if lower else _unlowered(op))


class SegmentRun:
    """The run of a plan over one segment of a call, on one stream and one channel.

    Without a device, it issues nothing, and only `issued` is of use. That needs flags.

    Attributes:
        issued: the calls of the device that have issued it so far.
    """

    def __init__(
        self,
        bound: BoundCall,
        signature: Signature,
        segment: int,
        operands: tuple[int, int],
        members: Sequence[int],
        device: Device | None,
        channel: Channel,
        stream: Stream,
    ) -> None:
        self._bound = bound
        self._signature = signature
        self._segment = segment
        self._operands = operands
        self._members = members
        self._device = device
        self._channel = channel
        self._stream = stream
        self._plan = bound.plans[bound.rank]
        self._dtype: DType = bound.extent.dtype
        self._record: _Record | None = None
        self.issued: list[IssuedCall] = []
        channel.reserve(bound.nbytes, stream)
        channel.show_operands(*operands)
        self._issue("wait", stream, channel.last)  # the channel may have been used on another stream
        self._fill_images()
        call = Call(signature, self._plan, Shape(bound.extent.elements, {}), (bound.extent,))
        self._lanes = [Lane(index, call, self._post) for index in range(len(self._plan.lanes))]

    def advance(self) -> bool:
        """Issue all steps that can be issued now; return whether the whole segment has been issued.

        Raises:
            MismatchError: a peer is in another call.
            PeerLostError: a peer has left.
        """
        if self._channel.by_flags and (behind := self._channel.behind()):
            for peer in behind:
                self._require_present(peer)
            return False
        while any(lane.advance(self._lanes) for lane in self._lanes):
            pass
        if not all(lane.is_finished() for lane in self._lanes):
            return False
        self.stop_issuing()
        return True

    def stop_issuing(self) -> None:
        """Issue nothing more. The work issued so far is the channel's last use."""
        self._issue("record", self._channel.last, self._stream)

    def _issue(self, method: Method, *arguments: Any) -> None:
        call = IssuedCall(method, arguments)
        if self._device is not None:
            call.issue(self._device)
        self.issued.append(call)

    def waits_for(self) -> set[int]:
        """Return the peers whose flags this run waits for."""
        behind = self._channel.behind() if self._channel.by_flags else set[int]()
        return behind.union(posted.peer for lane in self._lanes for posted in lane.posted())

    def _fill_images(self) -> None:
        op = self._bound.extent.op
        for place in self._own.images(Buffer.INPUT, self._segment):
            own, image = self._operands[Buffer.INPUT] + place.offset, self._channel.slab(self._rank) + place.image
            if op is not None and op.factor is not None:
                self._issue("lift", image, own, place.elements, self._dtype, op, self._stream)
            else:
                self._issue("copy", image, own, place.elements * self._dtype.itemsize, self._stream)

    @property
    def _rank(self) -> int:
        return self._bound.rank

    @property
    def _own(self) -> Layout:
        return self._bound.layouts[self._rank]

    # Steps.

    def _post(self, step: Step, lane: int, group: int, segment: int) -> Posted | None:
        """Issue a step; return the request that the host must wait for, if any."""
        if not isinstance(step, Signal):
            # Later signals must come after this step, so they need a new record.
            self._record = None
        return _POST[type(step)](self, step)

    def post_copy(self, step: Copy) -> None:
        if step.lower:
            self._reduce(step.dst, [self._addresses(self._rank, step.src)], lower=True)
        else:
            self._copy(step.dst, self._addresses(self._rank, step.src))

    def post_read(self, step: Read) -> None:
        self._copy(step.dst, self._addresses(step.peer, step.src))

    def post_reduce(self, step: Reduce) -> None:
        self._reduce(step.dst, [self._addresses(self._rank, source) for source in step.sources], step.lower)

    def post_read_reduce(self, step: ReadReduce) -> None:
        self._reduce(step.dst, [self._addresses(peer, source) for peer, source in step.sources], step.lower)

    def post_signal(self, step: Signal) -> Posted | None:
        if self._channel.by_flags:
            self._issue("raise_flag", *self._channel.raised_flag(step.peer), self._stream)
            return None
        # All signals of a group share one record.
        if self._record is None:
            self._record = _Record(self._channel, self._stream)
        return Posted(step.peer, _Announcement(self._record, step.peer, self._signature.digest))

    def post_wait(self, step: Wait) -> Posted:
        return Posted(step.peer, _AwaitedSignal(self, step.peer))

    def follow(self, peer: int) -> bool:
        """Make the stream wait for the next signal of `peer`, if the host knows that it may; return whether it does.

        Raises:
            MismatchError: `peer` is in another call.
            PeerLostError: `peer` has left.
        """
        if self._channel.by_flags:
            self._issue("await_flag", *self._channel.awaited_flag(peer), self._stream)
            return True
        had_left = self._channel.has_left(peer)
        mark = self._channel.follow(peer, self._stream)
        me, other = self._members[self._rank], self._members[peer]
        if mark is None and had_left:
            self._require_present(peer)
        if mark is not None and mark != mark_of(self._signature.digest):
            raise MismatchError(f"rank {me} called {self._signature}, and rank {other} something else", peer=other)
        return mark is not None

    def _require_present(self, peer: int) -> None:
        if self._channel.has_left(peer):
            other = self._members[peer]
            raise PeerLostError(f"rank {other} has left, but {self._signature} waits for it", peer=other)

    # Memory.

    def _addresses(self, owner: int, span: Span) -> list[int]:
        """Return the addresses from which the parts of a span in a rank's memory are read."""
        return [self._address(owner, place) for place in self._bound.layouts[owner].places(span, self._segment)]

    def _address(self, owner: int, place: BlockPlace) -> int:
        if owner == self._rank and self._reads_own(place):
            return self._operands[place.buffer] + place.offset
        if place.image >= 0:
            return self._channel.slab(owner) + place.image
        operands = self._channel.operands(owner) if self._bound.shown is None else self._bound.shown[owner]
        return operands[place.buffer] + place.offset

    def _reads_own(self, place: BlockPlace) -> bool:
        """Return whether this rank reads a block from the caller's array."""
        op = self._bound.extent.op
        is_lifted = place.buffer is Buffer.INPUT and op is not None and op.factor is not None
        return place.buffer is not Buffer.SCRATCH and not is_lifted

    def _written(self, span: Span) -> Iterator[tuple[BlockPlace, int]]:
        """Yield the parts of a span that a step writes, with their addresses."""
        for place in self._own.places(span, self._segment):
            yield place, self._address(self._rank, place)

    def _copy(self, dst: Span, sources: Sequence[int]) -> None:
        for (place, target), source in zip(self._written(dst), sources, strict=True):
            if target != source:
                self._issue("copy", target, source, place.elements * self._dtype.itemsize, self._stream)
            self._update_image(place, target)

    def _reduce(self, dst: Span, sources: Sequence[Sequence[int]], lower: bool) -> None:
        op = self._bound.extent.op
        assert op is not None, "the verifier and the contracts of collectives ensure it"
        op = op if lower else _unlowered(op)
        for (place, target), *operands in zip(self._written(dst), *sources, strict=True):
            self._issue("reduce", target, operands, place.elements, self._dtype, op, self._plan.size, self._stream)
            self._update_image(place, target)

    def _update_image(self, place: BlockPlace, target: int) -> None:
        if place.image >= 0 and place.buffer is Buffer.OUTPUT:
            image = self._channel.slab(self._rank) + place.image
            self._issue("copy", image, target, place.elements * self._dtype.itemsize, self._stream)


class _Record:
    """A record on a stream. It is made once its event may be recorded."""

    def __init__(self, channel: Channel, stream: Stream) -> None:
        self.channel = channel
        self._stream = stream
        self._number: int | None = None

    def number(self) -> int | None:
        if self._number is None:
            self._number = self.channel.record(self._stream)
        return self._number


@dataclass(slots=True)
class _Announcement:
    """A request that is done once the record has been announced to `peer`."""

    record: _Record
    peer: int
    digest: int

    def done(self) -> bool:
        number = self.record.number()
        if number is None:
            return False
        self.record.channel.announce(self.peer, number, self.digest)
        return True


@dataclass(slots=True)
class _AwaitedSignal:
    """A request that is done once the stream waits for the next signal of `peer`."""

    run: SegmentRun
    peer: int

    def done(self) -> bool:
        return self.run.follow(self.peer)


def _unlowered(op: Op) -> Op:
    return replace(op, lower=Lower.IDENTITY)


# The method that issues each kind of step.
_POST: dict[type, Callable[[SegmentRun, Any], Posted | None]] = {
    Copy: SegmentRun.post_copy,
    Reduce: SegmentRun.post_reduce,
    Read: SegmentRun.post_read,
    ReadReduce: SegmentRun.post_read_reduce,
    Signal: SegmentRun.post_signal,
    Wait: SegmentRun.post_wait,
}
