"""What is decided once for each kind of call: its algorithm, this rank's plan, and what the ranks must agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple, TypeAlias

from unisono import log
from unisono.algorithms.catalogue.algorithm import Order
from unisono.algorithms.catalogue.registry import candidates_of, check_known, find
from unisono.algorithms.catalogue.variants import is_rules
from unisono.algorithms.ir.binding import Shape
from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.collectives.calls.shapes import Layout, counts_of
from unisono.dtypes import DTYPES, DType
from unisono.errors import UsageError
from unisono.operations import Lower, Op, operation
from unisono.options import Options
from unisono.records import record
from unisono.transports import _core
from unisono.transports.contracts.call import Argument, Call, Extent, Signature, VendorRefusal
from unisono.tuning.decide.choice import NO_STATE, Choice, Question, TunerState, choose
from unisono.tuning.decide.model import shown

_log = log.get(log.NAME)

# Kinds of calls that are remembered; a program whose shapes never repeat must not fill the memory with them.
_MOST_CALLS = 4096
# Each rank ends with another number of contributions there, and an average divides by that of all ranks.
_PREFIXES = ("scan", "exscan")


@record
class HostLayout:
    """Where the ranks of a communicator are.

    Attributes:
        hosts: the ranks of each host, in the order of their lowest ranks.
        link: the slowest kind of link between ranks: the name of a transport.
        cores: the number of cores that the ranks of each host share; none if that is not known.
        near: the kind of link between ranks of one host; empty if it is `link`.
    """

    hosts: tuple[tuple[int, ...], ...]
    link: str
    cores: tuple[int, ...] = ()
    near: str = ""

    @property
    def crowd(self) -> float:
        """The number of ranks for each core on the most crowded host, and at least 1."""
        return max([1.0, *(len(ranks) / cores for ranks, cores in zip(self.hosts, self.cores, strict=False))])

    @property
    def inside(self) -> str:
        """The kind of link between ranks of one host."""
        return self.near or self.link

    def of(self, ranks: Sequence[int]) -> HostLayout:
        """Return the place of a communicator of some of the ranks, in this order."""
        new = {rank: index for index, rank in enumerate(ranks)}
        cores = self.cores or (0,) * len(self.hosts)
        shares = [tuple(sorted(new[rank] for rank in host if rank in new)) for host in self.hosts]
        places = sorted((share, its_cores) for share, its_cores in zip(shares, cores, strict=True) if share)
        link = self.inside if len(places) == 1 else self.link
        cores = tuple(each for _, each in places) if self.cores else ()
        return HostLayout(tuple(share for share, _ in places), link, cores, self.near)


@record
class AlgorithmRequest:
    """What the algorithm of a reduction must be, beyond its name; made by `algorithm_request`.

    Attributes:
        algorithm: the name of an algorithm to force, or None.
        reproducible: whether the bits of the result may depend on nothing but the contributions, in the order of ranks.
        accumulate: the dtype in which an element is combined, to be rounded once; None if each combination may round.
    """

    algorithm: str | None = None
    reproducible: bool = False
    accumulate: str | None = None

    def order(self, collective: str, dtypes: Sequence[DType]) -> Order | None:
        """Return the order in which contributions to arrays of these dtypes must be combined; None for any.

        Raises:
            UsageError: `accumulate` is not what a dtype is combined in, or the dtypes need different orders.
        """
        orders = {self._order_of(collective, dtype) for dtype in dtypes} - {None}
        if len(orders) > 1:
            names = ", ".join(dict.fromkeys(dtype.name for dtype in dtypes))
            raise UsageError(
                f"{names} cannot go together with reproducible=True and accumulate={self.accumulate!r}: some are "
                "rounded once, and others go by the balanced tree; make a call for each, outside of any group"
            )
        return next(iter(orders), None)

    def _order_of(self, collective: str, dtype: DType) -> Order | None:
        if self.accumulate is not None and self.accumulate != dtype.accumulate:
            raise UsageError(
                f"accumulate={self.accumulate!r} is not for {dtype.name}, accumulated in {dtype.accumulate}"
            )
        if self.accumulate not in (None, dtype.name):
            return "at_once"
        return _REPRODUCIBLE.get(collective, "canonical") if self.reproducible and dtype.kind not in _EXACT else None


# How an algorithm is asked for: by its name or more, or not at all.
AlgorithmLike: TypeAlias = AlgorithmRequest | str | None

# The order of what is reproducible, where it is not the canonical one: each prefix goes on from the one before.
_REPRODUCIBLE: dict[str, Order] = {"scan": "rank", "exscan": "rank"}
# The kinds of dtype that are never rounded: their bits are the same in any order.
_EXACT = frozenset({"bool", "integer"})


def algorithm_request(algorithm: str | None, reproducible: bool, accumulate: str | None) -> AlgorithmLike:
    """Return what is wanted of an algorithm. Equal ones are one object, by which the cache of calls knows it.

    Raises:
        UsageError: an argument is of another type, or there is no dtype `accumulate`.
    """
    try:
        return _selection(algorithm, reproducible, accumulate)
    except TypeError:
        raise UsageError(f"algorithm and accumulate must be names; got {algorithm!r} and {accumulate!r}") from None


@cache
def _selection(algorithm: str | None, reproducible: bool, accumulate: str | None) -> AlgorithmLike:
    if not isinstance(reproducible, bool):
        raise UsageError(f"reproducible must be True or False, not {reproducible!r}")
    if accumulate is not None and accumulate not in DTYPES:
        raise UsageError(f"accumulate must be None or one of {', '.join(DTYPES)}, not {accumulate!r}")
    return (
        AlgorithmRequest(algorithm, reproducible, accumulate) if reproducible or accumulate is not None else algorithm
    )


def as_request(wanted: AlgorithmLike) -> AlgorithmRequest:
    """Return what is wanted of an algorithm in full, where it may be a name only."""
    return wanted if isinstance(wanted, AlgorithmRequest) else AlgorithmRequest(wanted)


class CallSpec(NamedTuple):
    """Everything that decides about a call, or one array of a call on several, but the memory of its arrays.

    Attributes:
        collective: its name in the registry, which is the same with equal shares and with counts.
        layout: the shapes; None for a barrier, as is `dtype`.
        dtype: the type of the elements.
        order: the memory order of the arrays, "C" or "F".
        op: an operation, or the name of one; None where nothing is reduced.
        root: the root; None where there is none.
        algorithm: the algorithm that is wanted.
    """

    collective: str
    layout: Layout | None = None
    dtype: DType | None = None
    order: str = "C"
    op: str | Op | None = None
    root: int | None = None
    algorithm: AlgorithmLike = None


class CallPlanner:
    """The calls of one rank of a communicator, by their kind. Kinds that are equal on all ranks get equal plans."""

    def __init__(
        self,
        rank: int,
        size: int,
        place: HostLayout,
        options: Options,
        vendors: Mapping[str, VendorRefusal],
        known: TunerState = NO_STATE,
    ) -> None:
        self._vendors = vendors
        self._rank = rank
        self.known = known
        self._size = size
        self._place = place
        self._options = options
        self._known: dict[tuple[CallSpec, ...], Call] = {}

    def find(self, *kinds: CallSpec) -> Call:
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

    def carrying(self, kind: CallSpec, exchange: CallSpec) -> Call:
        """Return the call of `exchange`, which ranks know as one of `kind`: that is what they must agree on.

        Raises:
            NoAlgorithmError: no algorithm carries it out.
        """
        call = self.find(exchange)
        algorithm = f"{exchange.collective} {call.signature.algorithm}"
        return replace(call, signature=_signature((kind,), algorithm, call.segments))

    def announcing(self, *kinds: CallSpec) -> Call:
        """Return a barrier that ranks know as a call of these kinds on a device, to which its elements go elsewhere."""
        call = self.find(CallSpec("barrier", algorithm="auto"))
        signature = _signature(kinds, call.signature.algorithm, call.segments)
        return replace(call, signature=replace(signature, memory="device"))

    def predicted_s(self, kind: CallSpec) -> float:
        """Return the predicted seconds of a call; 0 if the algorithm that the options name has no known cost."""
        return self._choice((kind,), []).predicted_s or 0.0

    def question(
        self,
        collective: str,
        nbytes: int,
        reduced: Sequence[tuple[DType, Op]],
        wanted: AlgorithmLike,
        varying: bool,
        arrays: int = 1,
    ) -> Question:
        """Return what the tuner is asked about a call of so many arrays.

        `reduced` are the dtype and operation of each, if any.

        Raises:
            UsageError: no collective has the algorithm of the options, or what is wanted is not for the dtypes.
        """
        selected = as_request(wanted)
        return Question(
            collective=collective,
            nbytes=nbytes,
            size=self._size,
            link=self._place.link,
            commutative=all(op.commutative for _, op in reduced),
            algorithm=selected.algorithm or self._preferred(collective, nbytes),
            segment_nbytes=self._options.segment_nbytes,
            varying=varying,
            hosts=self._place.hosts,
            inside=self._place.inside,
            crowd=self._place.crowd,
            order=selected.order(collective, [dtype for dtype, _ in reduced]),
            vendors=tuple(
                (name, refusal(collective, nbytes, reduced, arrays, self._size))
                for name, refusal in self._vendors.items()
            ),
            dtype="narrow" if any(dtype.accumulate != dtype.name for dtype, _ in reduced) else "plain",
        )

    def _preferred(self, collective: str, nbytes: int) -> str:
        """Return the algorithm of the options, which is only for the collectives that have it, or "auto"."""
        name = self._options.algorithm
        if is_rules(name):
            from unisono.tuning.decide.forced_rules import forced

            return forced(name, collective, nbytes)
        if name == "auto" or name in candidates_of(collective):
            return name
        check_known(name)
        return "auto"

    def _make(self, kinds: tuple[CallSpec, ...]) -> Call:
        kind, layout = kinds[0], kinds[0].layout
        extents = tuple(extent for each in kinds if (extent := _extent(each)) is not None)
        choice = self._choice(kinds, [(extent.dtype, extent.op) for extent in extents if extent.op is not None])
        form = {"varying": True} if _varies(kind) else {}
        build = find(kind.collective, choice.algorithm).build
        plan = build(self._size, self._rank, kind.root or 0, **form, **dict(choice.params))
        signature = _signature(kinds, choice.shown, choice.segments)
        _log.info(
            "%s: %s over %d segment(s), by tier %s, %s",
            *(signature, choice.variant, choice.segments, choice.tier, shown(choice.predicted_s)),
        )
        counts = counts_of(CONTRACTS[kind.collective].varying, layout) if layout else {}
        source, target = zip(*(extent.elements for extent in extents), strict=True) if extents else ((1,), (1,))
        return Call(signature, plan, Shape((sum(source), sum(target)), counts), extents, choice.segments)

    def _choice(self, kinds: tuple[CallSpec, ...], reduced: Sequence[tuple[DType, Op]]) -> Choice:
        kind = kinds[0]
        nbytes = sum(each.layout.whole * each.dtype.itemsize if each.layout and each.dtype else 1 for each in kinds)
        question = self.question(kind.collective, nbytes, reduced, kind.algorithm, _varies(kind), len(kinds))
        with _core.DefaultFloatEnvironment():  # predicted times decide, so they need the same bits on all ranks
            return choose(question, self.known)


def _varies(kind: CallSpec) -> bool:
    return kind.layout is not None and kind.layout.rows is not None


def _extent(kind: CallSpec) -> Extent | None:
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


def _signature(kinds: tuple[CallSpec, ...], algorithm: str, segments: int) -> Signature:
    kind = kinds[0]
    rows, selected = kind.layout.rows if kind.layout else None, as_request(kind.algorithm)
    first, *others = [_argument(each) for each in kinds]
    return Signature(
        kind.collective if rows is None else f"{kind.collective}v",
        *first,
        root=kind.root,
        algorithm=algorithm,
        segments=segments,
        # Of counts to send and counts to receive, no rank knows those of the others.
        counts=rows[0] if rows is not None and len(rows) == 1 else None,
        reproducible=selected.reproducible,
        accumulate=selected.accumulate,
        others=tuple(others),
        asked=selected.algorithm if selected.algorithm != "auto" else None,
    )


def _argument(kind: CallSpec) -> Argument:
    return Argument(
        dtype=kind.dtype.name if kind.dtype else None,
        shape=kind.layout.agreed if kind.layout else None,
        order=kind.order,
        op=None if kind.op is None else operation(kind.op).name,
    )
