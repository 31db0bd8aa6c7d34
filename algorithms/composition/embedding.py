"""Embeds the plans of phases in one plan, the *whole plan*: a phase is carried out by some ranks, on some blocks.

The plan of a phase is an ordinary plan of some builder. It numbers the ranks of the phase from 0, and has buffers of
its own. To *embed* it is to rename: its ranks become ranks of the whole plan, and its blocks become blocks of the whole
plan, as a `BlockWindow` says. The phases of a rank stand one after the other, in separate lanes. The first groups of a
phase wait for the last groups of the phase before. Because every phase has its own lanes, both ends of a message always
have the same group number, even if the two ranks did different things in earlier phases. Over several segments the
phases overlap.

A phase does not choose a transport. A channel belongs to a pair of ranks, and a phase inside hosts has other pairs of
ranks than a phase across hosts. So each level of hosts uses its own transport.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Group,
    Lane,
    Plan,
    Recv,
    RecvReduce,
    Reduce,
    Repeat,
    Send,
    Span,
    Step,
    as_written,
)
from unisono.errors import UsageError


class BlockWindow(NamedTuple):
    """The blocks of the whole vector on which a phase works.

    Block i of the phase is `width` blocks of `buffer`, `stride` apart, from block start + i·step on. For example,
    `BlockWindow(INPUT, 4, 2, 2)` makes blocks 4 and 5 of INPUT block 0 of the phase, and blocks 6 and 7 block 1. If
    `edges` is not empty, the blocks are runs of different widths: block i of the phase is blocks edges[i] to
    edges[i + 1] - 1.
    """

    buffer: Buffer
    start: int
    width: int
    step: int
    stride: int = 1
    edges: tuple[int, ...] = ()


def run_of_blocks(buffer: Buffer, start: int, width: int) -> BlockWindow:
    """Return the window whose blocks are consecutive runs of `width` consecutive blocks, the first one at `start`."""
    return BlockWindow(buffer, start, width, width)


def runs_between(buffer: Buffer, edges: tuple[int, ...]) -> BlockWindow:
    """Return the window whose block i is the blocks from `edges[i]` to before `edges[i + 1]`; `edges` ascend."""
    widths = {after - before for before, after in pairwise(edges)}
    if len(widths) == 1:
        return run_of_blocks(buffer, edges[0], widths.pop())
    return BlockWindow(buffer, edges[0], 0, 0, edges=edges)


@dataclass(frozen=True, slots=True)
class Phase:
    """A plan that some ranks carry out, as a phase of the whole plan.

    Attributes:
        plan: the plan of this rank in the phase.
        ranks: the ranks of the phase, in the order in which `plan` numbers them.
        input, output: the windows in which the plan's INPUT and OUTPUT lie.
        lower: whether the phase turns states into final results, as the division by the number of ranks does for
            "avg". If not, its results remain states.
    """

    plan: Plan
    ranks: tuple[int, ...]
    input: BlockWindow
    output: BlockWindow
    lower: bool = False

    @property
    def scratch_copies(self) -> int:
        """Return how many copies of the vector the phase needs as SCRATCH."""
        return self.plan.scratch.copies if self.plan.scratch.blocks else 0


class Stage(NamedTuple):
    """The work of one rank in one phase of a composition.

    Attributes:
        width: the number of lanes of the whole plan that the stage occupies, which is the same on all ranks.
        work: a `Phase` to embed; or one group of local steps; or None if the rank does nothing in this phase.
    """

    width: int
    work: Phase | Group | None


@dataclass(frozen=True, slots=True)
class VectorMemory:
    """The memory of the whole plan: a vector of `blocks` blocks, and `copies` copies of it in SCRATCH.

    The first `kept` copies hold values that outlive a phase. All phases use the other copies, one phase after the
    other.
    """

    blocks: int
    copies: int = 0
    kept: int = 0

    def size_of(self, buffer: Buffer) -> int:
        """Return the number of blocks of a buffer."""
        return self.blocks * self.copies if buffer is Buffer.SCRATCH else self.blocks


def scratch_copies(stages: Sequence[Stage], kept: int = 0) -> int:
    """Return how many copies of the vector all stages need as SCRATCH, including the `kept` ones."""
    return kept + max((stage.work.scratch_copies for stage in stages if isinstance(stage.work, Phase)), default=0)


def in_sequence(stages: Sequence[Stage], memory: VectorMemory) -> tuple[Lane, ...]:
    """Return the lanes that carry out `stages` one after the other.

    Raises:
        UsageError: a phase uses blocks that no span of the whole vector can name.
    """
    lanes: list[Lane] = []
    ended: tuple[tuple[int, int], ...] = ()
    for width, work in stages:
        first = len(lanes)
        embedded: tuple[Lane, ...] = ((work,),) if isinstance(work, Group) else embed(work, memory) if work else ()
        lanes += [_behind(lane, ended, first) for lane in embedded] + [()] * (width - len(embedded))
        ended = tuple((first + index, _groups(lane) - 1) for index, lane in enumerate(embedded) if lane) or ended
    return tuple(lanes)


def _behind(lane: Lane, ended: tuple[tuple[int, int], ...], first_lane: int) -> Lane:
    """Return `lane` with the addition that its first group waits for the groups `ended`.

    `first_lane` is the number that the first lane of the same phase has in the whole plan.
    """

    def moved(group: Group, before: tuple[tuple[int, int], ...]) -> Group:
        return Group(group.steps, (*before, *((first_lane + other, number) for other, number in group.after)))

    items: list[Group | Repeat] = []
    for item in lane:
        before = () if items else ended
        if isinstance(item, Group):
            items.append(moved(item, before))
        else:
            groups = (moved(item.groups[0], before), *(moved(group, ()) for group in item.groups[1:]))
            items.append(Repeat(item.times, groups))
    return tuple(items)


def _groups(lane: Lane) -> int:
    return sum(times * len(groups) for times, groups in map(as_written, lane))


def embed(phase: Phase, memory: VectorMemory) -> tuple[Lane, ...]:
    """Return the lanes of a phase with its ranks, blocks and buffers renamed to those of the whole plan.

    A `Repeat` stays a `Repeat` as long as its peers and spans advance evenly in the whole plan, too.

    Raises:
        UsageError: the phase uses blocks that no span of the whole vector can name, or its blocks are permuted.
    """
    if phase.plan.permutation:
        raise UsageError(f"{_named(phase.plan)} cannot be a phase, because its blocks are permuted in memory")
    renaming = _Renaming(phase, _frames(phase, memory))
    return tuple(tuple(item for written in lane for item in renaming.items(written)) for lane in phase.plan.lanes)


class _Frame(NamedTuple):
    """The place of one buffer of a phase in the whole plan.

    The buffer is `copies` copies of `blocks` blocks in a window. The copies begin `pitch` blocks of the whole plan
    apart.
    """

    window: BlockWindow
    blocks: int
    copies: int
    pitch: int
    is_cyclic: bool

    @property
    def period(self) -> int:
        """The number of successive blocks of the buffer that lie at equal distances in the whole plan.

        It is 1 if the window has edges; all blocks, if the copies follow each other without a gap; or else the blocks
        of one copy.
        """
        if self.window.edges:
            return 1
        return self.blocks * (self.copies if self.pitch == self.blocks * self.window.step else 1)

    def placed(self, span: Span) -> Span | None:
        """Return the span of the whole plan that names the blocks of `span`; None if no single span can."""
        window, first = self.window, span.start % (self.blocks * self.copies)
        copy, block = divmod(first, self.blocks)
        if window.edges:
            return self._between_edges(span, copy, block)
        start = window.start + copy * self.pitch + block * window.step
        at = Span(window.buffer, start, advance=span.advance * window.step)
        if span.count == 1:
            return replace(at, count=window.width, stride=window.stride)
        is_straight = first // self.period == (first + (span.count - 1) * span.stride) // self.period
        if window.width == 1 and is_straight:
            return replace(at, count=span.count, stride=span.stride * window.step)
        if span.stride == window.stride == 1 and window.step == window.width and (is_straight or self.is_cyclic):
            return replace(at, count=span.count * window.width)
        return None

    def _between_edges(self, span: Span, copy: int, block: int) -> Span | None:
        """Return `placed` for a window with edges, whose blocks have different numbers of blocks of the whole plan.

        `span` begins at block `block` of copy `copy`.
        """
        edges, end = self.window.edges, block + span.count
        if span.count > 1 and (span.stride != 1 or (end > self.blocks and not self.is_cyclic)):
            return None
        wrapped = edges[end - self.blocks] - edges[0] if end > self.blocks else 0
        count = edges[min(end, self.blocks)] - edges[block] + wrapped
        return Span(self.window.buffer, edges[block] + copy * self.pitch, count)


def _frames(phase: Phase, memory: VectorMemory) -> dict[Buffer, _Frame]:
    """Return the frame of each buffer of a phase.

    The SCRATCH of the phase lies in the SCRATCH of the whole plan, which consists of copies of the vector. There it has
    the same blocks of a copy that the INPUT or OUTPUT of the phase has in the vector.
    """
    windows, scratch = {Buffer.INPUT: phase.input, Buffer.OUTPUT: phase.output}, phase.plan.scratch
    frames: dict[Buffer, _Frame] = {}
    for buffer, window in windows.items():
        blocks = phase.plan.partition(buffer).blocks
        frames[buffer] = _Frame(window, blocks, 1, blocks * window.step, _is_whole(window, blocks, memory))
    if scratch.blocks:
        blocks = scratch.blocks // scratch.copies
        like = _shared(phase.plan) if scratch.like is None else scratch.like
        window = _in_scratch(windows[like], scratch.block, memory)
        is_whole = _is_whole(window, scratch.blocks, memory)
        frames[Buffer.SCRATCH] = _Frame(window, blocks, scratch.copies, memory.blocks, is_whole)
    return frames


def _is_whole(window: BlockWindow, blocks: int, memory: VectorMemory) -> bool:
    length = window.edges[-1] - window.edges[0] if window.edges else blocks * window.width
    return length == memory.size_of(window.buffer)


def _shared(plan: Plan) -> Buffer:
    """Return the buffer with the shares of all ranks, which cut SCRATCH alike. This rank may have no such buffer."""
    return Buffer.INPUT if plan.input.blocks in (0, plan.scratch.blocks) else Buffer.OUTPUT


def _in_scratch(window: BlockWindow, block: int | None, memory: VectorMemory) -> BlockWindow:
    """Return `window`, or only its block `block`, moved to the first SCRATCH copy that phases use."""
    if block is not None and window.edges:
        window = run_of_blocks(window.buffer, window.edges[block], window.edges[block + 1] - window.edges[block])
    elif block is not None:
        window = window._replace(start=window.start + block * window.step)
    moved = memory.kept * memory.blocks + window.start % memory.blocks - window.start
    edges = tuple(edge + moved for edge in window.edges)
    return window._replace(buffer=Buffer.SCRATCH, start=window.start + moved, edges=edges)


class _Advance(NamedTuple):
    """A peer or block number in a step of a `Repeat`. It begins at `first` and changes by `step` in each iteration.

    In the plan of the phase it advances evenly. In the whole plan it jumps after each `period` of numbers.
    """

    first: int
    step: int
    period: int

    def iterations_until_jump(self, iteration: int) -> int:
        """Return how many iterations, from `iteration` on, have their number in the same period."""
        position = (self.first + iteration * self.step) % self.period
        return -(-(self.period - position) // self.step) if self.step > 0 else position // -self.step + 1


class _Renaming:
    """Translates the ranks and blocks of a phase to those of the whole plan."""

    def __init__(self, phase: Phase, frames: dict[Buffer, _Frame]) -> None:
        self._phase = phase
        self._frames = frames
        ranks = phase.ranks
        distance = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        # The distance from each rank of the phase to the next, or 0 if these ranks are not evenly spaced.
        self._distance = distance if all(b - a == distance for a, b in pairwise(ranks)) else 0

    def items(self, written: Group | Repeat) -> Iterator[Group | Repeat]:
        """Yield the items of the whole plan for one item of a lane of the phase."""
        if isinstance(written, Group):
            yield self._group(written, 0)
            return
        for first, times in self._runs(written):
            groups = tuple(self._group(group, first) for group in written.groups)
            yield from (Repeat(times, groups),) if times > 1 else groups

    def _runs(self, repeat: Repeat) -> Iterator[tuple[int, int]]:
        """Yield (first, number) of each run of iterations in which peers and spans advance evenly in the whole plan."""
        advances = [advance for group in repeat.groups for step in group.steps for advance in self._advances(step)]
        first = 0
        while first < repeat.times:
            number = min((advance.iterations_until_jump(first) for advance in advances), default=repeat.times)
            number = min(number, repeat.times - first)
            yield first, number
            first += number

    def _advances(self, step: Step) -> Iterator[_Advance]:
        """Yield an `_Advance` for each peer or block number of a step that changes with the iteration."""
        if isinstance(step, (Send, Recv, RecvReduce)) and step.peer_advance:
            # If the ranks of the phase are not evenly spaced, the peer jumps in every iteration.
            yield _Advance(step.peer, step.peer_advance, len(self._phase.ranks) if self._distance else 1)
        for span in _spans(step).values():
            if span.advance:
                period = self._frames[span.buffer].period
                for block in (span.start, span.start + (span.count - 1) * span.stride):
                    yield _Advance(block, span.advance, period)

    def _group(self, group: Group, iteration: int) -> Group:
        steps = [renamed for step in group.steps for renamed in self._steps(step, iteration)]
        return Group(tuple(step for step in steps if not _is_copy_to_itself(step)), group.after)

    def _steps(self, step: Step, iteration: int) -> Sequence[Step]:
        """Return the steps of the whole plan for one step of the phase.

        A local step is split block by block if no single span of the whole plan can name all its blocks.
        """
        renamed = self._renamed(step, iteration)
        if renamed is not None:
            return (renamed,)
        parts = [self._renamed(part, iteration) for part in _by_block(step)]
        steps = [part for part in parts if part is not None]
        if not steps:
            raise UsageError(
                f"{_named(self._phase.plan)} cannot be a phase here: one of its messages has blocks that are not "
                "consecutive in the whole vector; choose another algorithm for this phase"
            )
        return steps

    def _renamed(self, step: Step, iteration: int) -> Step | None:
        changes: dict[str, Any] = {}
        sources = []
        for name, span in _spans(step).items():
            moved = replace(span, start=span.start + iteration * span.advance)
            placed = self._frames[span.buffer].placed(moved)
            if placed is None:
                return None
            if name in ("src", "dst"):
                changes[name] = placed
            else:
                sources.append(placed)
        if isinstance(step, Reduce):
            changes["sources"] = tuple(sources)
        if isinstance(step, (Send, Recv, RecvReduce)):
            ranks = self._phase.ranks
            changes["peer"] = ranks[(step.peer + iteration * step.peer_advance) % len(ranks)]
            changes["peer_advance"] = step.peer_advance * self._distance
        if isinstance(step, (RecvReduce, Copy, Reduce)):
            changes["lower"] = step.lower and self._phase.lower
        return replace(step, **changes)


def _named(plan: Plan) -> str:
    return f"{plan.collective} {plan.algorithm}"


def _spans(step: Step) -> dict[str, Span]:
    """Return the spans of a step by name. The sources of a `Reduce` are named "0", "1", …."""
    if isinstance(step, Send):
        return {"src": step.src}
    if isinstance(step, Recv):
        return {"dst": step.dst}
    if isinstance(step, (RecvReduce, Copy)):
        return {"dst": step.dst, "src": step.src}
    if isinstance(step, Reduce):
        return {"dst": step.dst, **{str(index): source for index, source in enumerate(step.sources)}}
    raise UsageError(
        f"a phase cannot use mapped memory, but this one has a {type(step).__name__} step: a phase can rename blocks "
        "of its own rank only; choose an algorithm that sends messages"
    )


def _by_block(step: Step) -> Iterator[Step]:
    """Yield a local step split into one step per block. Yield nothing for a message."""
    if not isinstance(step, (Copy, Reduce)):
        return
    for index in range(step.dst.count):

        def block(span: Span, index: int = index) -> Span:
            return replace(span, start=span.start + index * span.stride, count=1)

        if isinstance(step, Copy):
            yield replace(step, dst=block(step.dst), src=block(step.src))
        else:
            yield replace(step, dst=block(step.dst), sources=tuple(map(block, step.sources)))


def _is_copy_to_itself(step: Step) -> bool:
    """Return whether a step copies blocks onto themselves.

    This happens when two buffers of the phase are the same buffer of the whole plan.
    """
    return isinstance(step, Copy) and step.dst == step.src and not step.lower
