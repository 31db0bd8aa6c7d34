"""Users' algorithms: proved when they are registered, and candidates like any other from then on."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from inspect import signature
from typing import TypeVar

from unisono.algorithms.algorithm import Algorithm, Build, Cost, Order
from unisono.algorithms.registry import REGISTERED, algorithms_of
from unisono.algorithms.verify import Report, verify_sizes
from unisono.errors import PlanError, UsageError

# The numbers of ranks that an algorithm for any number is proved for: all small ones, then odd, prime and even ones.
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
    order: Order = "none",
    same_bits: bool = True,
    in_place: bool = True,
    segmentable: bool = True,
    mapped: bool = False,
) -> Callable[[_Builder], _Builder]:
    """Return a decorator that proves a builder and registers it as algorithm `name` of `collective`.

    From then on `algorithm=name` runs it, and the tuner weighs it against the others by its cost; without a cost it
    runs only where it is named. All ranks of a job must register the same. The builder is returned as it is; it is
    proved with its parameters at their defaults.

    Args:
        collective: "allreduce", "broadcast", …
        name: lower-case letters, digits and underscores; the plans must have it too.
        cost: as in `Algorithm`.
        reference: where the algorithm is from; by default, the name of the builder.
        sizes: the only numbers of ranks that it is for, each of which is proved; None: all that `supports` does not
            refuse, of which `PROVED_SIZES` are proved.
        supports: as in `Algorithm`.
        commutative_only: as in `Algorithm`; if it is False, the proof keeps to the order of ranks.
        order: as in `Algorithm`.
        same_bits: as in `Algorithm`.
        in_place: as in `Algorithm`.
        segmentable: as in `Algorithm`.
        mapped: as in `Algorithm`.

    Raises:
        NoAlgorithmError: there is no such collective.
        UsageError: the name is taken or is none, or no number of ranks is left to prove.
        PlanError: the builder is wrong, or costs other than declared; says where. Raised by the decorator, which then
            registers nothing.
    """
    _check_name(collective, name)

    def register(build: _Builder) -> _Builder:
        declared = Algorithm(
            collective=collective,
            name=name,
            build=build,
            cost=cost,
            reference=reference or f"{build.__module__}.{build.__qualname__}",
            commutative_only=commutative_only,
            order=order,
            same_bits=same_bits,
            in_place=in_place,
            segmentable=segmentable,
            mapped=mapped,
            varying="varying" in signature(build).parameters,
            supports=supports if sizes is None else _only(sizes, supports),
        )
        reports = [prove(declared, size) for size in (PROVED_SIZES if sizes is None else sizes)]
        if not any(reports):
            raise UsageError(f"{collective} {name!r} supports no number of ranks that it could be proved for")
        REGISTERED.setdefault(collective, {})[name] = declared
        return build

    return register


def prove(declared: Algorithm, size: int) -> Report | None:
    """Prove an algorithm for `size` ranks, as `verify_sizes` does; return None if it does not support so many.

    Raises:
        PlanError: it is wrong; names the algorithm and the number of ranks before all else.
    """
    try:
        return verify_sizes(declared, [size]).get(size)
    except PlanError as error:
        named, told = f"{declared.collective} {declared.name} on {size} ranks: ", str(error)
        raise PlanError(told if told.startswith(named) else named + told) from None


def registered() -> list[Algorithm]:
    """Return the algorithms that have been registered so far, by collective."""
    return [declared for of_collective in REGISTERED.values() for declared in of_collective.values()]


def _check_name(collective: str, name: str) -> None:
    taken = algorithms_of(collective)
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise UsageError(f"an algorithm cannot be called {name!r}: lower-case letters, digits and underscores only")
    if name in taken:
        raise UsageError(f"{collective} has an algorithm {name!r} already; it has {', '.join(taken)}")


def _only(sizes: Collection[int], supports: Callable[[int], str | None]) -> Callable[[int], str | None]:
    """Return `supports` with a refusal of all numbers of ranks but `sizes`."""
    listed = ", ".join(map(str, sorted(sizes)))

    def refusal(size: int) -> str | None:
        return supports(size) if size in sizes else f"it is for {listed} ranks only"

    return refusal
