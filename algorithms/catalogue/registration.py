"""Registration of users' algorithms: `un.algorithm` proves a builder and makes it a candidate like any other."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace as with_fields
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, get_args

from unisono.algorithms.catalogue.algorithm import Algorithm, Build, Cost, Order, suggestion
from unisono.algorithms.catalogue.flat import REGISTERED
from unisono.algorithms.catalogue.host_crossing import Crossing, along
from unisono.algorithms.catalogue.registry import algorithms_of
from unisono.algorithms.catalogue.variants import BLOCKS
from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.algorithms.ir.plan import Plan
from unisono.algorithms.verifier.combine_order import check_order
from unisono.algorithms.verifier.verify import Report, verify_sizes
from unisono.errors import PlanError, UsageError

# The numbers of ranks for which an algorithm without `sizes` is proved: all small ones, then odd, prime and even ones.
PROVED_SIZES = (*range(1, 17), 21, 31, 32, 48)

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED = ("auto",)

_Builder = TypeVar("_Builder", bound=Build)


def algorithm(
    collective: str,
    name: str,
    *,
    cost: Callable[..., Cost] | None = None,
    reference: str | None = None,
    sizes: Collection[int] | None = None,
    supports: Callable[[int], str | None] = lambda size: None,
    commutative_only: bool = True,
    order: Order | None = None,
    same_bits: bool = True,
    in_place: bool = True,
    segmentable: bool = True,
    in_blocks: bool = False,
    steady: bool = False,
    mapped: bool = False,
    is_cost_exact: bool = True,
    by_name_only: bool = False,
    crossing: Callable[..., Crossing] = along,
    replace: bool = False,
) -> Callable[[_Builder], _Builder]:
    """Return a decorator that proves a builder and registers it as algorithm `name` of `collective`.

    From then on `algorithm=name` forces it, and the tuner compares its cost with the costs of the others. Without a
    cost it runs only if it is forced. The decorator returns the builder unchanged. It proves the builder with the
    default values of its parameters.

    All ranks of a job must register the same algorithms, between the same two calls. A communicator that has already
    planned a call spec (collective, shape, dtype, operation, root and so on) keeps its algorithm for that call spec. It
    considers a new algorithm only for other call specs; so do communicators that are created later. Ranks that register
    at different times may choose differently, which is a `MismatchError` on every rank.

    Args:
        collective: "allreduce", "broadcast", …
        name: lower-case letters, digits and underscores; the plans must carry the same name.
        cost: as in `Algorithm`.
        reference: the source of the algorithm; by default, the name of the builder.
        sizes: the only numbers of ranks that the algorithm supports, each of which is proved. None: it runs on every
            number that `supports` accepts, and `PROVED_SIZES` are proved.
        supports: as in `Algorithm`.
        commutative_only: as in `Algorithm`; if it is False, the proof demands that contributions are combined in the
            order of ranks.
        order: as in `Algorithm`; every order but "none" is proved. None: "fixed", or "none" if nothing is reduced.
        same_bits: as in `Algorithm`.
        in_place: as in `Algorithm`.
        segmentable: as in `Algorithm`.
        in_blocks: as in `Algorithm`; the builder must take `blocks`.
        steady: as in `Algorithm`.
        mapped: as in `Algorithm`.
        is_cost_exact: as in `Algorithm`; if it is False, the plans may cost less than declared, but never more.
        by_name_only: as in `Algorithm`; the cost is proved and shown, but the tuner does not use it.
        crossing: as in `Algorithm`; it is not proved. By default, one rank of a host at a time sends to other hosts.
        replace: whether the algorithm may replace a registered one of the same name, for example when a cell of a
            notebook runs again. Call specs that a communicator has planned keep the earlier one. The algorithms of
            Unisono itself cannot be replaced.

    Raises:
        NoAlgorithmError: there is no such collective.
        UsageError: the name is taken or not valid, the declarations contradict each other, the builder cannot be called
            as `Build` says, or the algorithm supports none of the numbers of ranks to prove.
        PlanError: the builder is wrong, or its cost or its order differs from the declaration; the message says where.
            The decorator raises it and then registers nothing.
    """
    _check_name(collective, name, replace=replace)
    _check_order(collective, order)
    _check_has_cost(cost, is_cost_exact=is_cost_exact, by_name_only=by_name_only)
    proved = PROVED_SIZES if sizes is None else _numbers_of_ranks(sizes)

    def register(build: _Builder) -> _Builder:
        _check_builder(build)
        if in_blocks and BLOCKS not in signature(build).parameters:
            raise UsageError(
                f"{collective} {name!r} is declared in_blocks, and its builder takes no {BLOCKS!r}: add it"
            )
        declared = Algorithm(
            collective=collective,
            name=name,
            build=build,
            cost=cost,
            reference=reference or f"{build.__module__}.{build.__qualname__}",
            commutative_only=commutative_only,
            order=order or _least_order(collective),
            same_bits=same_bits,
            in_place=in_place,
            segmentable=segmentable,
            in_blocks=in_blocks,
            steady=steady,
            mapped=mapped,
            varying="varying" in signature(build).parameters,
            is_cost_exact=is_cost_exact,
            by_name_only=by_name_only,
            crossing=crossing,
            supports=supports if sizes is None else _only(proved, supports),
        )
        _check_refusals(declared, proved)
        _check_cost_form(declared, proved)
        reports = [prove(declared, size) for size in proved]
        if not any(reports):
            listed = ", ".join(map(str, proved)) or "none is listed"
            raise UsageError(
                f"{collective} {name!r} supports none of these numbers of ranks, so nothing is proved: {listed}"
            )
        REGISTERED.setdefault(collective, {})[name] = declared
        return build

    return register


def prove(declared: Algorithm, size: int) -> Report | None:
    """Prove an algorithm for `size` ranks and return the report; None if it does not support this number of ranks.

    The proof consists of `verify_sizes` and `check_order`.

    Raises:
        PlanError: the algorithm is wrong, or its builder raises; the message begins with the algorithm and the number
            of ranks.
    """
    checked = with_fields(declared, build=_checked(declared.build))
    try:
        report = verify_sizes(checked, [size]).get(size)
        if report is not None:
            check_order(checked, size)
    except PlanError as error:
        prefix, message = f"{declared.collective} {declared.name} on {size} ranks: ", str(error)
        raise PlanError(message if message.startswith(prefix) else prefix + message) from error.__cause__
    return report


def _checked(build: Build) -> Build:
    """Return a wrapper of `build` that turns every failure into a `PlanError` that names the rank."""

    @wraps(build)
    def checked(size: int, rank: int, *arguments: Any, **params: Any) -> Plan:
        try:
            plan = build(size, rank, *arguments, **params)
        except Exception as error:
            raise PlanError(f"rank {rank}: the builder raises {type(error).__name__}: {error}") from error
        if not isinstance(plan, Plan):
            raise PlanError(f"rank {rank}: the builder returns {plan!r}, which is not a Plan")
        return plan

    return checked


def registered() -> list[Algorithm]:
    """Return the registered algorithms, grouped by collective."""
    return [declared for of_collective in REGISTERED.values() for declared in of_collective.values()]


def _check_name(collective: str, name: str, *, replace: bool) -> None:
    algorithms, of_users = algorithms_of(collective), REGISTERED.get(collective, {})
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise UsageError(
            f"{name!r} is not a valid name for an algorithm: use lower-case letters, digits and underscores, and begin "
            "with a letter; 'auto' is reserved"
        )
    if name in of_users and not replace:
        raise UsageError(f"{collective} has an algorithm {name!r} already: choose another name, or pass replace=True")
    if name in algorithms and name not in of_users:
        raise UsageError(f"{collective} has an algorithm {name!r} already; it has {', '.join(algorithms)}")


def _check_order(collective: str, order: Order | None) -> None:
    orders = get_args(Order)
    if order not in (None, *orders):
        raise UsageError(f"an order is one of {', '.join(orders)}, not {order!r}{suggestion(str(order), orders)}")
    if order is not None and (order == "none") == CONTRACTS[collective].reduces:
        combines = "combines contributions" if order == "none" else "combines nothing"
        raise UsageError(f"{collective} {combines}, so its order cannot be {order!r}")


def _least_order(collective: str) -> Order:
    return "fixed" if CONTRACTS[collective].reduces else "none"


def _check_has_cost(cost: Callable[..., Cost] | None, **about_cost: bool) -> None:
    """Check that `is_cost_exact` and `by_name_only` are declared only together with a cost."""
    if cost is None and (not about_cost["is_cost_exact"] or about_cost["by_name_only"]):
        name = "by_name_only" if about_cost["by_name_only"] else "is_cost_exact"
        raise UsageError(f"{name} says something about the cost, but no cost is declared: declare one, or omit {name}")


def _numbers_of_ranks(sizes: Collection[int]) -> tuple[int, ...]:
    numbers = tuple(sizes) if isinstance(sizes, Collection) else (sizes,)
    if not isinstance(sizes, Collection) or not all(type(size) is int and size > 0 for size in numbers):
        raise UsageError(f"sizes must be numbers of ranks such as [2, 4, 8], not {sizes!r}")
    return numbers


def _check_builder(build: Build) -> None:
    """Check that a builder can be called with just the number of ranks, a rank and a root."""
    parameters = signature(build)
    try:
        parameters.bind(size=1, rank=0, root=0)
        parameters.bind(1, 0, 0)
    except TypeError as error:
        raise UsageError(
            f"{build.__qualname__}{parameters} cannot be called as build(size, rank, root): {error}; a builder takes "
            "these three, and needs a default for every other parameter"
        ) from None


def _check_refusals(declared: Algorithm, sizes: Collection[int]) -> None:
    """Check that `supports` returns a string or None. A bool is an error, because True would count as a refusal."""
    for size in sizes:
        refusal = declared.supports(size)
        if refusal is not None and not isinstance(refusal, str):
            raise UsageError(f"supports({size}) returns {refusal!r}: it must return None, or a str with the reason")


def _check_cost_form(declared: Algorithm, sizes: Collection[int]) -> None:
    """Check that `cost` is a function that returns a Cost for each supported number of ranks."""
    if declared.cost is None:
        return
    form = "pass a function of the number of ranks that returns a Cost, such as cost=lambda size: Cost(rounds=1, ...)"
    if not callable(declared.cost):
        raise UsageError(f"cost is {declared.cost!r}, which cannot be called: {form}")
    for size in sizes:
        if declared.supports(size) is None and not isinstance(cost := declared.cost(size), Cost):
            raise UsageError(f"cost({size}) returns {cost!r}: {form}")


def _only(sizes: Collection[int], supports: Callable[[int], str | None]) -> Callable[[int], str | None]:
    """Return a function like `supports` that also refuses all numbers of ranks except `sizes`."""
    listed = ", ".join(map(str, sorted(sizes)))

    def refusal(size: int) -> str | None:
        return supports(size) if size in sizes else f"it supports only {listed} ranks"

    return refusal
