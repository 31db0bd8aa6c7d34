"""Plans calls: `CallPlanner` returns the algorithm, this rank's plan and the signature for a call spec, once for each.

Used by: `checking`, the reducer for custom ops, and calls on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from unisono.algorithms.catalogue.algorithm import Order
from unisono.algorithms.catalogue.registry import candidates_of, check_known, find
from unisono.algorithms.catalogue.variants import is_rules
from unisono.algorithms.catalogue.vendors import BY_NCCL
from unisono.algorithms.composition.rank_order import build_in_order
from unisono.algorithms.ir.binding import Shape
from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.collectives.calls.shapes import Layout, counts_of
from unisono.dtypes import DTYPES, DType
from unisono.errors import UsageError
from unisono.foundation import log
from unisono.foundation.records import record
from unisono.operations import Lower, Op, operation
from unisono.options import Options
from unisono.transports import _core
from unisono.transports.contracts.call import Argument, Call, Extent, Signature, VendorRefusal
from unisono.tuning.decide.choice import NO_STATE, Choice, Explanation, Question, TunerState, choose
from unisono.tuning.decide.device_routes import LINK, explain_route
from unisono.tuning.decide.model import shown

_log = log.get("tuning")

# The planner keeps at most this many calls, because a program whose shapes never repeat would fill the memory.
_MOST_CALLS = 4096
# Each rank combines another number of contributions in these, and an average would have to divide by that number.
_PREFIXES = ("scan", "exscan")


@record
class HostLayout:
    """Which ranks of a communicator are on which host, and which kinds of links connect them.

    Attributes:
        hosts: the ranks of each host, in the order of their lowest ranks.
        link: the slowest kind of link between ranks, by the name of its transport.
        cores: for each host, the number of cores that its ranks share; empty if the numbers are unknown.
        near: the kind of link between ranks on one host; empty if it is the same as `link`.
    """

    hosts: tuple[tuple[int, ...], ...]
    link: str
    cores: tuple[int, ...] = ()
    near: str = ""

    @property
    def crowd(self) -> float:
        """The number of ranks per core on the most crowded host; at least 1."""
        return max([1.0, *(len(ranks) / cores for ranks, cores in zip(self.hosts, self.cores, strict=False))])

    @property
    def inside(self) -> str:
        """The kind of link between ranks on one host."""
        return self.near or self.link

    def of(self, ranks: Sequence[int]) -> HostLayout:
        """Return the layout of a communicator of these ranks, which are numbered anew in this order."""
        new_rank = {rank: index for index, rank in enumerate(ranks)}
        all_cores = self.cores or (0,) * len(self.hosts)
        all_members = [tuple(sorted(new_rank[rank] for rank in host if rank in new_rank)) for host in self.hosts]
        hosts = sorted((members, cores) for members, cores in zip(all_members, all_cores, strict=True) if members)
        link = self.inside if len(hosts) == 1 else self.link
        cores = tuple(cores for _, cores in hosts) if self.cores else ()
        return HostLayout(tuple(members for members, _ in hosts), link, cores, self.near)


@record
class AlgorithmRequest:
    """The user's request for an algorithm: its name, and the properties that a reduction must have.

    `algorithm_request` makes it.

    Attributes:
        algorithm: the name of an algorithm to force, or None.
        reproducible: whether the bits of the result may depend on nothing but the contributions, in the order of ranks.
        accumulate: the dtype in which contributions are summed before they are rounded once; None if each combination
            may round.
    """

    algorithm: str | None = None
    reproducible: bool = False
    accumulate: str | None = None

    def order(self, collective: str, dtypes: Sequence[DType]) -> Order | None:
        """Return the order in which contributions to arrays of these dtypes must be combined; None for any order.

        Raises:
            UsageError: a dtype cannot be accumulated in `accumulate`, or the dtypes need different orders.
        """
        orders = {self._order_of(collective, dtype) for dtype in dtypes} - {None}
        if len(orders) > 1:
            names = ", ".join(dict.fromkeys(dtype.name for dtype in dtypes))
            raise UsageError(
                f"{names} cannot be in one call with reproducible=True and accumulate={self.accumulate!r}: some are "
                "rounded once, and others are combined by the balanced tree; make a call for each, outside of any group"
            )
        return next(iter(orders), None)

    def _order_of(self, collective: str, dtype: DType) -> Order | None:
        if self.accumulate is not None and self.accumulate != dtype.accumulate:
            raise UsageError(
                f"accumulate={self.accumulate!r} is not possible for {dtype.name}: pass {dtype.accumulate!r} or None"
            )
        if self.accumulate not in (None, dtype.name):
            return "at_once"
        return _REPRODUCIBLE.get(collective, "canonical") if self.reproducible and dtype.kind not in _EXACT else None


# An algorithm as it is requested: by a full request, by its name only, or left to the tuner (None).
AlgorithmLike: TypeAlias = AlgorithmRequest | str | None
_NO_REQUEST = AlgorithmRequest(None)

# The order of reproducible reductions, if it is not the canonical one. In a scan, each prefix extends the one before.
_REPRODUCIBLE: dict[str, Order] = {"scan": "rank", "exscan": "rank"}
# The kinds of dtype that are never rounded, so that their bits are the same in any order.
_EXACT = frozenset({"bool", "integer"})


def algorithm_request(algorithm: str | None, reproducible: bool, accumulate: str | None) -> AlgorithmLike:
    """Return the request for an algorithm. Equal requests are one object, because the call cache compares identity.

    Raises:
        UsageError: an argument has the wrong type, or there is no dtype `accumulate`.
    """
    try:
        return _request(algorithm, reproducible, accumulate)
    except TypeError:
        raise UsageError(f"algorithm and accumulate must be names; got {algorithm!r} and {accumulate!r}") from None


@cache
def _request(algorithm: str | None, reproducible: bool, accumulate: str | None) -> AlgorithmLike:
    if not isinstance(reproducible, bool):
        raise UsageError(f"reproducible must be True or False, not {reproducible!r}")
    if accumulate is not None and accumulate not in DTYPES:
        raise UsageError(f"accumulate must be None or one of {', '.join(DTYPES)}, not {accumulate!r}")
    return (
        AlgorithmRequest(algorithm, reproducible, accumulate) if reproducible or accumulate is not None else algorithm
    )


def as_request(algorithm: AlgorithmLike) -> AlgorithmRequest:
    """Return the `AlgorithmRequest` for an algorithm, which the caller may request by its name alone."""
    if algorithm is None:
        return _NO_REQUEST
    return algorithm if isinstance(algorithm, AlgorithmRequest) else AlgorithmRequest(algorithm)


class CallSpec(NamedTuple):
    """Everything that decides about a call, or about one array of it, except the memory of the arrays.

    Attributes:
        collective: its name in the registry, which is the same with equal shares and with counts.
        layout: the shapes; None for a barrier.
        dtype: the type of the elements; None for a barrier.
        order: the memory order of the arrays, "C" or "F".
        op: an operation, or the name of one; None if nothing is reduced.
        root: the root; None if there is none.
        algorithm: the requested algorithm.
    """

    collective: str
    layout: Layout | None = None
    dtype: DType | None = None
    order: str = "C"
    op: str | Op | None = None
    root: int | None = None
    algorithm: AlgorithmLike = None


class CallPlanner:
    """The planner of one rank of a communicator. Equal call specs get equal plans on all ranks.

    Attributes:
        tuner_state: the decision table and the calibration by which the tuner chooses.

    Args:
        rank, size: this rank, and the number of ranks.
        host_layout, options, tuner_state: those of the communicator.
        vendors: for each vendor library, the function that says why it refuses a call.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        host_layout: HostLayout,
        options: Options,
        vendors: Mapping[str, VendorRefusal],
        tuner_state: TunerState = NO_STATE,
    ) -> None:
        self._vendors = vendors
        self._rank = rank
        self.tuner_state = tuner_state
        self._size = size
        self._host_layout = host_layout
        self._options = options
        self._calls: dict[tuple[CallSpec, ...], Call] = {}
        self._announcing: dict[tuple[int, tuple[CallSpec, ...]], Call] = {}

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        return self._host_layout.hosts

    def follow(self, tuner_state: TunerState) -> None:
        """Plan later calls by another state of the tuner; all ranks do so between the same two calls."""
        self.tuner_state = tuner_state
        self._calls.clear()
        self._announcing.clear()

    def find(self, *specs: CallSpec) -> Call:
        """Return the call of this spec. Several specs, which differ only in arrays and ops, become one fused call.

        Raises:
            UsageError: there is no such operation, or it is not defined for such a call.
            NoAlgorithmError: no algorithm carries it out.
        """
        try:
            call = self._calls.get(specs)
        except TypeError:
            wrong = ", ".join(f"{spec.op!r} and {spec.algorithm!r}" for spec in specs)
            raise UsageError(f"op and algorithm must be names; got {wrong}") from None
        if call is None:
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            call = self._calls[specs] = self._plan(specs)
        return call

    def carrying(self, spec: CallSpec, exchange: CallSpec) -> Call:
        """Return the call of `exchange` with the signature of `spec`.

        A reduction by a Python function uses it, so that ranks that disagree on the reduction get a `MismatchError`
        about the reduction.

        Raises:
            NoAlgorithmError: no algorithm carries out `exchange`.
        """
        call = self.find(exchange)
        algorithm = f"{exchange.collective} {call.signature.algorithm}"
        return replace(call, signature=_signature((spec,), algorithm, call.segments))

    def announcing(self, *specs: CallSpec, plan: int = 0) -> Call:
        """Return a barrier with the signature of a call on a device, whose elements travel by other means.

        A persistent call has a number `plan`, on which all ranks must agree too.
        """
        barrier = self.find(CallSpec("barrier", algorithm="auto"))
        call = self._announcing.get((plan, specs))
        if call is None or call.plan is not barrier.plan:
            if len(self._announcing) >= _MOST_CALLS:
                self._announcing.clear()
            signature = _signature(specs, barrier.signature.algorithm, barrier.segments)
            memory = f"device, as plan {plan}" if plan else "device"
            call = replace(barrier, signature=replace(signature, memory=memory))
            self._announcing[plan, specs] = call
        return call

    def predicted_s(self, spec: CallSpec) -> float:
        """Return the predicted seconds of a call; 0 if the options force an algorithm of unknown cost."""
        return self._choice(self._question_of((spec,), ())).predicted_s or 0.0

    def question(
        self,
        collective: str,
        nbytes: int,
        reduced: Sequence[tuple[DType, Op]],
        algorithm: AlgorithmLike,
        varying: bool,
        arrays: int = 1,
        root: int = 0,
    ) -> Question:
        """Return the question to the tuner about a call.

        Args:
            collective: its name in the registry.
            nbytes: the bytes of the whole vector.
            reduced: the dtype and op of each array that is reduced.
            algorithm: the requested algorithm.
            varying: whether the shares have counts of rows.
            arrays: the number of arrays of the call.
            root: its root, if it has one.

        Raises:
            UsageError: no collective has the algorithm of the options, or the request is impossible for the dtypes.
        """
        request = as_request(algorithm)
        return Question(
            collective=collective,
            nbytes=nbytes,
            size=self._size,
            link=self._host_layout.link,
            commutative=all(op.commutative for _, op in reduced),
            algorithm=request.algorithm or self._preferred(collective, nbytes),
            segment_nbytes=self._options.segment_nbytes,
            varying=varying,
            hosts=self._host_layout.hosts,
            inside=self._host_layout.inside,
            crowd=self._host_layout.crowd,
            order=request.order(collective, [dtype for dtype, _ in reduced]),
            vendors=tuple(
                (name, refusal(collective, nbytes, reduced, arrays, self._size))
                for name, refusal in self._vendors.items()
            ),
            dtype="narrow" if any(dtype.accumulate != dtype.name for dtype, _ in reduced) else "plain",
            root=root,
        )

    def explain_route(
        self,
        collective: str,
        nbytes: int,
        dtype: DType | None,
        algorithm: str | None,
        refusals: Mapping[str, str | None],
    ) -> Explanation:
        """Explain the route of a call on arrays of a GPU; see `device_routes.explain_route`.

        Args:
            collective: its name in the registry.
            nbytes: the bytes of the whole vector.
            dtype: the dtype of the elements.
            algorithm: the route that the call forces, if any.
            refusals: by name, the reason why the ranks cannot take a route; None if they can.

        Raises:
            NoAlgorithmError: the forced route is refused or unknown, or all routes are.
        """
        hosts, link = self._host_layout.hosts, self._host_layout.link
        is_narrow = dtype is not None and dtype.accumulate != dtype.name
        question = Question(
            collective=collective,
            nbytes=nbytes,
            size=self._size,
            link=link if len(hosts) > 1 else LINK,
            algorithm=algorithm or "auto",
            hosts=hosts,
            dtype="narrow" if is_narrow else "plain",
            memory="device",
        )
        with _core.DefaultFloatEnvironment():
            return explain_route(question, refusals, self.tuner_state)

    def of_nccl(self, spec: CallSpec) -> str | None:
        """Return the algorithm of NCCL that a call on a GPU array names, or that the options force; None if none."""
        name = as_request(spec.algorithm).algorithm
        if name is None:
            nbytes = spec.layout.whole * spec.dtype.itemsize if spec.layout and spec.dtype else 0
            name = self._forced(spec.collective, nbytes)
        return name if name in BY_NCCL else None

    def _preferred(self, collective: str, nbytes: int) -> str:
        """Return the algorithm for arrays on the host that the options force, if any, and otherwise "auto"."""
        name = self._forced(collective, nbytes)
        return "auto" if name in BY_NCCL else name

    def _forced(self, collective: str, nbytes: int) -> str:
        """Return the algorithm that the options force, if the collective has it, and otherwise "auto"."""
        name = self._options.algorithm
        if is_rules(name):
            from unisono.tuning.decide.forced_rules import forced

            return forced(name, collective, nbytes)
        if name == "auto" or name in candidates_of(collective):
            return name
        try:
            check_known(name)
        except UsageError as error:
            raise UsageError(f"{self._options.source_of('algorithm')} is {name!r}: {error}") from None
        return "auto"

    def _plan(self, specs: tuple[CallSpec, ...]) -> Call:
        spec, layout = specs[0], specs[0].layout
        extents = tuple(extent for each in specs if (extent := _extent(each)) is not None)
        choice = self._choice(self._question_of(specs, extents))
        form: dict[str, Any] = {"varying": True} if _varies(spec) else {}
        build = find(spec.collective, choice.algorithm).build
        plan = build_in_order(build, self._size, self._rank, spec.root or 0, **{**form, **dict(choice.params)})
        signature = _signature(specs, choice.shown, choice.segments)
        _log.debug(
            "%s: %s over %d segment(s), by tier %s, %s",
            *(signature, choice.variant, choice.segments, choice.tier, shown(choice.predicted_s)),
        )
        units = 1 if spec.dtype is None else spec.dtype.units
        counts = counts_of(CONTRACTS[spec.collective].varying, layout, units) if layout else {}
        source, target = zip(*(extent.elements for extent in extents), strict=True) if extents else ((1,), (1,))
        return Call(signature, plan, Shape((sum(source), sum(target)), counts), extents, choice.segments)

    def question_of(self, specs: Sequence[CallSpec]) -> Question:
        """Return the question to the tuner about a call of these specs; raises as `question` does."""
        return self._question_of(specs, [extent for each in specs if (extent := _extent(each)) is not None])

    def variant_of(self, question: Question) -> str:
        """Return the algorithm that the tuner chooses for a question, with its parameters.

        Raises:
            NoAlgorithmError: no algorithm carries the call out.
        """
        return self._choice(question).variant

    def _question_of(self, specs: Sequence[CallSpec], extents: Sequence[Extent]) -> Question:
        first = specs[0]
        nbytes = sum(spec.layout.whole * spec.dtype.itemsize if spec.layout and spec.dtype else 1 for spec in specs)
        reduced = [(extent.dtype, extent.op) for extent in extents if extent.op is not None]
        return self.question(
            first.collective, nbytes, reduced, first.algorithm, _varies(first), len(specs), first.root or 0
        )

    def _choice(self, question: Question) -> Choice:
        # Predicted times decide the choice, so they must have the same bits on all ranks.
        with _core.DefaultFloatEnvironment():
            return choose(question, self.tuner_state)


def _varies(spec: CallSpec) -> bool:
    return spec.layout is not None and spec.layout.rows is not None


def _extent(spec: CallSpec) -> Extent | None:
    """Return the extent of an array in its call; None for a barrier, which has no array.

    Raises:
        UsageError: there is no such operation, or it is not defined for such a call.
    """
    if spec.layout is None or spec.dtype is None:
        return None
    op = None if spec.op is None else operation(spec.op)
    if op is not None:
        op.check(spec.dtype)
        if op.lower is Lower.DIVIDE_BY_SIZE and spec.collective in _PREFIXES:
            raise UsageError(
                f"op {op.name!r} is not defined for {spec.collective}, in which every rank combines another number of "
                "arrays: use 'sum', and divide the result"
            )
    return Extent.of(spec.layout.elements, spec.dtype, op)


def _signature(specs: tuple[CallSpec, ...], algorithm: str, segments: int) -> Signature:
    spec = specs[0]
    rows, request = spec.layout.rows if spec.layout else None, as_request(spec.algorithm)
    first, *others = [_argument(spec) for spec in specs]
    return Signature(
        spec.collective if rows is None else f"{spec.collective}v",
        *first,
        root=spec.root,
        algorithm=algorithm,
        segments=segments,
        # An alltoallv has send_counts and recv_counts, of which each rank knows only its own, so they are left out.
        counts=rows[0] if rows is not None and len(rows) == 1 and not _has_root_counts(spec) else None,
        reproducible=request.reproducible,
        accumulate=request.accumulate,
        others=tuple(others),
        asked=request.algorithm if request.algorithm != "auto" else None,
    )


def _has_root_counts(spec: CallSpec) -> bool:
    return spec.layout is not None and spec.layout.counts_at_root


def _argument(spec: CallSpec) -> Argument:
    return Argument(
        dtype=spec.dtype.name if spec.dtype else None,
        shape=spec.layout.agreed if spec.layout else None,
        order=spec.order,
        op=None if spec.op is None else operation(spec.op).name,
    )
