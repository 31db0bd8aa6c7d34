"""What is decided once for each kind of call: its algorithm, this rank's plan, and what the ranks must agree on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
from unisono.transports.base import Call, Signature
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
        cores: the number of cores that the ranks of each host share; none if that is not known.
    """

    hosts: tuple[tuple[int, ...], ...]
    link: str
    cores: tuple[int, ...] = ()

    @property
    def crowd(self) -> float:
        """The number of ranks for each core on the most crowded host, and at least 1."""
        return max([1.0, *(len(ranks) / cores for ranks, cores in zip(self.hosts, self.cores, strict=False))])

    def of(self, ranks: Sequence[int], transport: str) -> Place:
        """Return the place of a communicator of some of the ranks, in this order; `transport` is the option."""
        new = {rank: index for index, rank in enumerate(ranks)}
        cores = self.cores or (0,) * len(self.hosts)
        shares = [tuple(sorted(new[rank] for rank in host if rank in new)) for host in self.hosts]
        places = sorted((share, its_cores) for share, its_cores in zip(shares, cores, strict=True) if share)
        is_near = self.link == "tcp" and transport == "auto" and len(places) == 1
        hosts = tuple(share for share, _ in places)
        return Place(hosts, "shm" if is_near else self.link, tuple(each for _, each in places) if self.cores else ())


class Kind(NamedTuple):
    """Everything that decides about a call but the memory of its arrays.

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
        self._known: dict[Kind, Call] = {}

    def find(self, kind: Kind) -> Call:
        """Return the call of this kind.

        Raises:
            UsageError: there is no such operation, or it is not defined for such a call.
            NoAlgorithmError: no algorithm carries it out.
        """
        try:
            found = self._known.get(kind)
        except TypeError:
            raise UsageError(f"op and algorithm must be names; got {kind.op!r} and {kind.algorithm!r}") from None
        if found is None:
            if len(self._known) >= _MOST_CALLS:
                self._known.clear()
            found = self._known[kind] = self._make(kind)
        return found

    def question(self, collective: str, nbytes: int, op: Op | None, forced: str | None, varying: bool) -> Question:
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
            commutative=op is None or op.commutative,
            algorithm=forced or self._preferred(collective),
            segment_nbytes=self._options.segment_nbytes,
            varying=varying,
            hosts=self._place.hosts,
            inside="shm" if is_mixed else self._place.link,
            crowd=self._place.crowd,
        )

    def _preferred(self, collective: str) -> str:
        """Return the algorithm of the options, which is only for the collectives that have it, or "auto"."""
        name = self._options.algorithm
        if name == "auto" or name in algorithms_of(collective):
            return name
        check_known(name)
        return "auto"

    def _make(self, kind: Kind) -> Call:
        layout, dtype = kind.layout, kind.dtype
        op = None if kind.op is None else operation(kind.op)
        if op is not None and dtype is not None:
            op.check(dtype)
            if op.lower is Lower.DIVIDE_BY_SIZE and kind.collective in _PREFIXES:
                raise UsageError(
                    f"op {op.name!r} is not defined for {kind.collective}: each rank would divide otherwise"
                )
        varying = layout is not None and layout.rows is not None
        nbytes = layout.whole * dtype.itemsize if layout and dtype else 1
        choice = choose(self.question(kind.collective, nbytes, op, kind.algorithm, varying))
        form = {"varying": True} if varying else {}
        build = find(kind.collective, choice.algorithm).build
        plan = build(self._size, self._rank, kind.root or 0, **form, **dict(choice.params))
        signature = _signature(kind, op, choice.algorithm, choice.segments)
        _log.info(
            "%s: %s over %d segment(s), by tier %s, %s",
            *(signature, choice.algorithm, choice.segments, choice.tier, shown(choice.predicted_s)),
        )
        counts = counts_of(CONTRACTS[kind.collective].varying, layout) if layout else {}
        shape = Shape(layout.elements if layout else (1, 1), counts)
        return Call(signature, plan, shape, dtype, op, choice.segments)


def _signature(kind: Kind, op: Op | None, algorithm: str, segments: int) -> Signature:
    rows = kind.layout.rows if kind.layout else None
    return Signature(
        collective=kind.collective if rows is None else f"{kind.collective}v",
        dtype=kind.dtype.name if kind.dtype else None,
        shape=kind.layout.agreed if kind.layout else None,
        order=kind.order,
        op=None if op is None else op.name,
        root=kind.root,
        algorithm=algorithm,
        segments=segments,
        # Of counts to send and counts to receive, no rank knows those of the others.
        counts=rows[0] if rows is not None and len(rows) == 1 else None,
    )
