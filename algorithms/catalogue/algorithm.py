"""What an algorithm declares about itself, as data: how to build it, what it can do and costs, where it is from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, Literal, TypeAlias

from unisono.algorithms.catalogue.host_crossing import Crossing, along
from unisono.algorithms.ir.plan import Plan
from unisono.errors import NoAlgorithmError, UsageError
from unisono.records import record

# In which order contributions are combined: there is no reduction; in ascending order of ranks, one after the other or
# all at once; by one balanced binary tree over the ranks; in some order that depends on nothing but the number of
# ranks, the root and the block.
Order = Literal["none", "rank", "at_once", "canonical", "fixed"]


_PARAMETERS_OF_ALL = ("size", "rank", "root")

# A builder, `build(size, rank, root=0, **params) -> Plan`: pure and deterministic, for one rank at a time. Each builder
# takes parameters of its own, which a callable type can only leave open.
Build: TypeAlias = Callable[..., Plan]


class Builder:
    """A builder of Unisono by its place, imported when it is first needed: a rank needs few of all that there are.

    `inspect.signature` sees the builder itself.
    """

    def __init__(self, module: str, function: str) -> None:
        self._module = module
        self._function = function

    @property
    def __wrapped__(self) -> Build:
        build: Build = getattr(import_module(f"unisono.algorithms.{self._module}"), self._function)
        return build

    def __call__(self, *arguments: Any, **params: Any) -> Plan:
        """See `Build`."""
        return self.__wrapped__(*arguments, **params)

    def __repr__(self) -> str:
        return f"{self._module}.{self._function}"


@record
class Cost:
    """The cost of a plan on its critical rank, in the terms of the alpha-beta-gamma model.

    Attributes:
        rounds: number of message latencies (alpha) on the critical path.
        sent: elements that the busiest rank sends (beta), as a multiple of the vector length.
        reduced: elements that the busiest rank combines (gamma), as a multiple of the vector length.
        most_messages: messages of the rank that sends most of them, where they are more than one in each round and are
            not whole vectors; else 0.
        stored: elements that the rank that stores most writes to SCRATCH, as a multiple of the vector length; None
            where that has not been said.
    """

    rounds: int
    sent: float
    reduced: float
    most_messages: int = 0
    stored: float | None = None


@record
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
        order: in which order contributions are combined, as `algorithms.orders` proves: "none" (no reduction), "rank"
            (one after the other, in ascending order of ranks), "at_once" (all in one step, in that order, so that the
            result is rounded once), "canonical" (by one balanced binary tree over the ranks), or "fixed" (some order
            that depends on nothing but the number of ranks, the root and the block). All algorithms of an order but
            the last give the same bits.
        same_bits: whether all ranks get the same bits for floating-point reductions.
        in_place: whether INPUT and OUTPUT may be the same memory.
        segmentable: whether running it over several segments overlaps its groups usefully.
        steady: whether all ranks send in every round, so that segments overlap nothing, and only keep blocks in caches.
        mapped: whether it needs memory that peers can map.
        varying: whether the builder takes `varying=True`, for shares of the ranks that differ in length.
        is_cost_exact: whether the cost is exact, or else an upper bound, as of phases with different busiest ranks.
        vendor: whether a library carries it out by itself, where there is one; its plans are empty.
        by_name_only: whether the tuner leaves it to those who name it: its cost alone would mislead.
        supports: None if the algorithm can run with this many ranks, or the reason why it cannot.
        crossing: which part of its cost lies between hosts of so many consecutive ranks each, as a function of the
            number of ranks and of those of a host; see `algorithms.crossing`.
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
    steady: bool = False
    mapped: bool = False
    varying: bool = False
    is_cost_exact: bool = True
    by_name_only: bool = False
    vendor: bool = False
    supports: Callable[[int], str | None] = lambda size: None
    crossing: Callable[[int, int], Crossing] = along

    def check_supports(self, size: int) -> None:
        """Raise the algorithm's refusal of so many ranks.

        Raises:
            NoAlgorithmError: there is one.
        """
        if reason := self.supports(size):
            raise NoAlgorithmError(f"{self.collective} {self.name!r} cannot run on {size} ranks: {reason}")

    def parameters(self) -> dict[str, Parameter]:
        """Return the parameters of the builder's own, by name: all but the number of ranks, the rank and the root."""
        every = signature(self.build).parameters
        return {name: every[name] for name in every if name not in _PARAMETERS_OF_ALL}

    def check_parameters(self, names: Iterable[str], also: Sequence[str] = ()) -> None:
        """Check that the builder takes parameters of these names, or that they are in `also`.

        Raises:
            UsageError: there is one that it does not take; names those that it does.
        """
        own = [*self.parameters(), *also]
        for name in names:
            if name not in own:
                those = f"{', '.join(own) or 'none'}{suggestion(name, own)}"
                raise UsageError(f"{self.collective} {self.name} has no parameter {name!r}; it has {those}")

    def cost_of(self, size: int, params: Mapping[str, Any]) -> Cost | None:
        """Return the cost with the builder's parameters `params`, of which it takes those that matter, if declared."""
        if self.cost is None:
            return None
        if not params:
            return self.cost(size)
        accepted = signature(self.cost).parameters
        return self.cost(size, **{name: value for name, value in params.items() if name in accepted})


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about a name that is not known: which one may have been meant, if one is near.

    >>> suggestion("rign", ["direct", "ring"]), suggestion("xyz", ["direct", "ring"])
    ("; did you mean 'ring'?", '')
    """
    from difflib import get_close_matches  # only who has made a mistake waits for it

    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
