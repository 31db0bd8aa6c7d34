"""What an algorithm declares about itself, as data: how to build it, what it can do and costs, where it is from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal, TypeAlias

from unisono.algorithms.plan import Plan
from unisono.errors import NoAlgorithmError

Order = Literal["none", "rank", "fixed"]


# A builder, `build(size, rank, root=0, **params) -> Plan`: pure and deterministic, for one rank at a time. Each builder
# takes parameters of its own, which a callable type can only leave open.
Build: TypeAlias = Callable[..., Plan]


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a plan on its critical rank, in the terms of the alpha-beta-gamma model.

    Attributes:
        rounds: number of message latencies (alpha) on the critical path.
        sent: elements that the busiest rank sends (beta), as a multiple of the vector length.
        reduced: elements that the busiest rank combines (gamma), as a multiple of the vector length.
    """

    rounds: int
    sent: float
    reduced: float


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm of one collective.

    Attributes:
        collective: "allreduce", "broadcast", …
        name: what users force with ``algorithm=``.
        build: the builder.
        cost: the closed form of its reference, `cost(size, **params) -> Cost`, of the number of ranks and those of the
            builder's parameters that matter; of its most expensive root; never derived by calling `build`. None if it
            is not known: the tuner then leaves the algorithm to those who name it.
        reference: where the algorithm and its cost are from.
        commutative_only: whether the operation must be commutative.
        order: in which order contributions are combined: "none" (no reduction), "rank" (ascending ranks), "fixed" (some
            order that depends on nothing but the number of ranks and the block).
        same_bits: whether all ranks get the same bits for floating-point reductions.
        in_place: whether INPUT and OUTPUT may be the same memory.
        segmentable: whether running it over several segments overlaps its groups usefully.
        mapped: whether it needs memory that peers can map.
        varying: whether the builder takes `varying=True`, for shares of the ranks that differ in length.
        is_cost_exact: whether the cost is exact, or else an upper bound, as of phases with different busiest ranks.
        by_name_only: whether the tuner leaves it to those who name it: its cost alone would mislead.
        supports: None if the algorithm can run with this many ranks, or the reason why it cannot.
    """

    collective: str
    name: str
    build: Build
    cost: Callable[..., Cost] | None
    reference: str
    commutative_only: bool = True
    order: Order = "none"
    same_bits: bool = True
    in_place: bool = True
    segmentable: bool = True
    mapped: bool = False
    varying: bool = False
    is_cost_exact: bool = True
    by_name_only: bool = False
    supports: Callable[[int], str | None] = lambda size: None

    def check_supports(self, size: int) -> None:
        """Raise the algorithm's refusal of so many ranks.

        Raises:
            NoAlgorithmError: there is one.
        """
        if reason := self.supports(size):
            raise NoAlgorithmError(f"{self.collective} {self.name!r} cannot run on {size} ranks: {reason}")

    def cost_of(self, size: int, params: Mapping[str, Any]) -> Cost | None:
        """Return the cost with the builder's parameters `params`, of which it takes those that matter, if declared."""
        if self.cost is None:
            return None
        accepted = signature(self.cost).parameters
        return self.cost(size, **{name: value for name, value in params.items() if name in accepted})
