"""What is decided once for each kind of call: its algorithm, this rank's plan, and what the ranks must agree on."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

from unisono.algorithms.binding import Shape
from unisono.algorithms.contracts import CONTRACTS
from unisono.algorithms.registry import algorithms_of, check_known, find
from unisono.collectives.shapes import Layout, counts_of
from unisono.dtypes import DType
from unisono.errors import UsageError
from unisono.operations import Lower, Op, operation
from unisono.options import Options
from unisono.transports.base import Argument, Call, Extent, Signature
from unisono.tuning.choice import Question, choose
from unisono.tuning.model import shown

_log = logging.getLogger("unisono")

# Kinds of calls that are remembered; a program whose shapes never repeat must not fill the memory with them.
_MOST_CALLS = 4096
# Each rank ends with another number of contributions there, and an average divides by that of all ranks.
_PREFIXES = ("scan", "exscan")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks of a communicator are.

    Attributes:
        hosts: the ranks of each host, in the order of their lowest ranks.
        link: the slowest kind of link between ranks: "shm", "tcp" or "local".
    """

    hosts: tuple[tuple[int, ...], ...]
    link: str


class Kind(NamedTuple):
    """Everything that decides about a call, or one array of a call on several, but the memory of its arrays.

    Attributes:
        collective: its name in the registry, which is the same with equal shares and with counts.
        layout: the shapes; None for a barrier, as is `dtype`.
        dtype: the type of the elements.
        order: the memory order of the arrays, "C" or "F".
        op: an operation, or the name of one; None where nothing is reduced.
        root: the root; None where there is none.
        algorithm: the name of an algorithm to force, or None.
    """

    collective: str
    layout: Layout | None = None
    dtype: DType | None = None
    order: str = "C"
    op: str | Op | None = None
    root: int | None = None
    algorithm: str | None = None


class Calls:
    """The calls of one rank of a communicator, by their kind. Kinds that are equal on all ranks get equal plans."""

    def __init__(self, rank: int, size: int, place: Place, options: Options) -> None:
        self._rank = rank
        self._size = size
        self._place = place
        self._options = options
        self._known: dict[tuple[Kind, ...], Call] = {}

    def find(self, *kinds: Kind) -> Call:
        """Return the call of this kind; of several, which differ in their arrays and operations, all as one call.

        Raises:
            UsageError: there is no such operation, or it is not defined for such a call.
            NoAlgorithmError: no algorithm carries it out.
        """
        try:
            found = self._known.get(kinds)
        except TypeError:
            wrong = ", ".join(f"{kind.op!r} and {kind.algorithm!r}" for kind in kinds)
            raise UsageError(f"op and algorithm must be names; got {wrong}") from None
        if found is None:
            if len(self._known) >= _MOST_CALLS:
                self._known.clear()
            found = self._known[kinds] = self._make(kinds)
        return found

    def question(self, collective: str, nbytes: int, commutative: bool, forced: str | None, varying: bool) -> Question:
        """Return what the tuner is asked about a call.

        Raises:
            UsageError: no collective has the algorithm of the options.
        """
        # A transport that was forced carries what is inside hosts, too.
        is_mixed = self._options.transport == "auto" and self._place.link == "tcp"
        return Question(
            collective=collective,
            nbytes=nbytes,
            size=self._size,
            link=self._place.link,
            commutative=commutative,
            algorithm=forced or self._preferred(collective),
            segment_nbytes=self._options.segment_nbytes,
            varying=varying,
            hosts=self._place.hosts,
            inside="shm" if is_mixed else self._place.link,
        )

    def _preferred(self, collective: str) -> str:
        """Return the algorithm of the options, which is only for the collectives that have it, or "auto"."""
        name = self._options.algorithm
        if name == "auto" or name in algorithms_of(collective):
            return name
        check_known(name)
        return "auto"

    def _make(self, kinds: tuple[Kind, ...]) -> Call:
        kind, layout = kinds[0], kinds[0].layout
        extents = tuple(extent for each in kinds if (extent := _extent(each)) is not None)
        varying = layout is not None and layout.rows is not None
        nbytes = sum(each.layout.whole * each.dtype.itemsize if each.layout and each.dtype else 1 for each in kinds)
        commutative = all(extent.op is None or extent.op.commutative for extent in extents)
        choice = choose(self.question(kind.collective, nbytes, commutative, kind.algorithm, varying))
        form = {"varying": True} if varying else {}
        build = find(kind.collective, choice.algorithm).build
        plan = build(self._size, self._rank, kind.root or 0, **form, **dict(choice.params))
        signature = _signature(kinds, choice.algorithm, choice.segments)
        _log.info(
            "%s: %s over %d segment(s), by tier %s, %s",
            *(signature, choice.algorithm, choice.segments, choice.tier, shown(choice.predicted_s)),
        )
        counts = counts_of(CONTRACTS[kind.collective].varying, layout) if layout else {}
        source, target = zip(*(extent.elements for extent in extents), strict=True) if extents else ((1,), (1,))
        return Call(signature, plan, Shape((sum(source), sum(target)), counts), extents, choice.segments)


def _extent(kind: Kind) -> Extent | None:
    """Return what a kind is in a call; nothing of a barrier.

    Raises:
        UsageError: there is no such operation, or it is not defined for such a call.
    """
    if kind.layout is None or kind.dtype is None:
        return None
    op = None if kind.op is None else operation(kind.op)
    if op is not None:
        op.check(kind.dtype)
        if op.lower is Lower.DIVIDE_BY_SIZE and kind.collective in _PREFIXES:
            raise UsageError(f"op {op.name!r} is not defined for {kind.collective}: each rank would divide otherwise")
    return Extent(kind.layout.elements, kind.dtype, op)


def _signature(kinds: tuple[Kind, ...], algorithm: str, segments: int) -> Signature:
    kind = kinds[0]
    rows = kind.layout.rows if kind.layout else None
    first, *others = [_argument(each) for each in kinds]
    return Signature(
        kind.collective if rows is None else f"{kind.collective}v",
        *first,
        root=kind.root,
        algorithm=algorithm,
        segments=segments,
        # Of counts to send and counts to receive, no rank knows those of the others.
        counts=rows[0] if rows is not None and len(rows) == 1 else None,
        others=tuple(others),
    )


def _argument(kind: Kind) -> Argument:
    return Argument(
        dtype=kind.dtype.name if kind.dtype else None,
        shape=kind.layout.agreed if kind.layout else None,
        order=kind.order,
        op=None if kind.op is None else operation(kind.op).name,
    )
