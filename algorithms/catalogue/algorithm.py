"""The declaration of one algorithm, as data: its builder, its properties, its cost and its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, Literal, TypeAlias

from unisono.algorithms.catalogue.host_crossing import Crossing, RanksPerHost, along
from unisono.algorithms.ir.plan import Plan
from unisono.errors import NoAlgorithmError, UsageError
from unisono.foundation.records import record

# The order in which contributions are combined. "none": nothing is reduced. "rank": one after the other, in ascending
# order of ranks. "at_once": all in one step, in that order. "canonical": by one balanced binary tree over the ranks.
# "fixed": an order that depends only on the number of ranks, the root and the block.
Order = Literal["none", "rank", "at_once", "canonical", "fixed"]


_PARAMETERS_OF_ALL = ("size", "rank", "root")

# A builder, `build(size, rank, root=0, **params) -> Plan`: a pure, deterministic function that returns the plan of one
# rank. The type leaves the arguments open because each builder has different parameters.
Build: TypeAlias = Callable[..., Plan]


class Builder:
    """A reference to a builder of Unisono, by module and function; the first call imports the module.

    The import is late because a rank uses few of the builders. `inspect.signature` sees the signature of the builder.
    """

    def __init__(self, module: str, function: str) -> None:
        self._module = module
        self._function = function

    @property
    def __wrapped__(self) -> Build:
        build: Build = getattr(import_module(f"unisono.algorithms.{self._module}"), self._function)
        return build

    @property
    def file(self) -> str:
        """Return the name of the builder's file, such as "ring". Builders of one file share an idea."""
        return self._module.rpartition(".")[2]

    def __call__(self, *arguments: Any, **params: Any) -> Plan:
        """Return the plan that the builder returns."""
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
        most_messages: number of messages that the busiest sender sends. It is declared only if that rank sends more
            than one message in a round and these messages are parts of the vector; else 0.
        stored: elements that the rank with the most writes to SCRATCH writes there, as a multiple of the vector length;
            None if not declared.
        path: elements that pass one after another along the slowest path from rank to rank, without segments, as a
            multiple of the vector length; None if not declared. For example, a chain of p ranks has a path of p − 1.
    """

    rounds: int
    sent: float
    reduced: float
    most_messages: int = 0
    stored: float | None = None
    path: float | None = None


@record
class Algorithm:
    """One algorithm of one collective.

    Attributes:
        collective: "allreduce", "broadcast", …
        name: the name by which users force the algorithm with ``algorithm=``.
        build: the builder.
        cost: the closed form of the cost from the reference, `cost(size, **params) -> Cost`, for the most expensive
            root. It takes the number of ranks and those parameters of the builder that change the cost. It never calls
            `build`. None if the cost is unknown: the tuner then does not choose the algorithm, and it runs only if it
            is forced.
        reference: the publication that the algorithm and its cost are taken from.
        commutative_only: whether the operation must be commutative.
        order: the order in which contributions are combined, as `verifier.combine_order` proves it: "none" (no
            reduction), "rank" (one after the other, in ascending order of ranks), "at_once" (all in one step, in that
            order, so that the result is rounded once), "canonical" (by one balanced binary tree over the ranks), or
            "fixed" (an order that depends only on the number of ranks, the root and the block). Two algorithms of the
            same order give the same bits, except for "fixed".
        same_bits: whether all ranks get the same bits for floating-point reductions.
        in_place: whether INPUT and OUTPUT may be the same memory.
        segmentable: whether running the plan over several segments overlaps its groups usefully.
        in_blocks: whether the builder takes `blocks`, the number of blocks that travel one after the other. The tuner
            chooses it, as it chooses the number of segments of other algorithms.
        steady: whether all ranks send in every round. Segments then overlap nothing, and only keep blocks in the
            caches.
        mapped: whether the algorithm needs memory that peers can map.
        varying: whether the builder takes `varying=True`, for shares whose lengths differ from rank to rank.
        is_cost_exact: whether the cost is exact. If not, it is an upper bound, as for phases with different busiest
            ranks.
        vendor: whether a library carries the algorithm out by itself; the plans are then empty.
        by_name_only: whether the tuner must not choose the algorithm, because its cost alone would mislead.
        short_ways: whether its only gain are shorter ways of messages within a network. A campaign does not measure it
            on one host, where all ways are equal.
        chosen_far: whether the tuner may choose it nevertheless between hosts that are far apart. Messages to several
            ranks are under way at the same time there, so they cost one latency.
        supports: a function of the number of ranks that returns None, or the reason why the algorithm cannot run.
        crossing: the part of the cost that lies between hosts, as a function of the number of consecutive ranks on each
            host, and of those parameters of the builder that change it; see `catalogue.host_crossing`.
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
    in_blocks: bool = False
    steady: bool = False
    mapped: bool = False
    varying: bool = False
    is_cost_exact: bool = True
    by_name_only: bool = False
    short_ways: bool = False
    chosen_far: bool = False
    vendor: bool = False
    supports: Callable[[int], str | None] = lambda size: None
    crossing: Callable[..., Crossing] = along

    def check_supports(self, size: int) -> None:
        """Raise an error if the algorithm does not support `size` ranks.

        Raises:
            NoAlgorithmError: it does not; the message gives the reason.
        """
        if reason := self.supports(size):
            raise NoAlgorithmError(f"{self.collective} {self.name!r} cannot run on {size} ranks: {reason}")

    def parameters(self) -> dict[str, Parameter]:
        """Return the parameters of the builder by name, without `size`, `rank` and `root`."""
        parameters = signature(self.build).parameters
        return {name: parameters[name] for name in parameters if name not in _PARAMETERS_OF_ALL}

    def check_parameters(self, names: Iterable[str], also: Sequence[str] = ()) -> None:
        """Check that each of `names` is a parameter of the builder or is in `also`.

        Raises:
            UsageError: the builder has no parameter of this name; the message lists its parameters.
        """
        accepted = [*self.parameters(), *also]
        for name in names:
            if name not in accepted:
                listed = f"{', '.join(accepted) or 'none'}{suggestion(name, accepted)}"
                raise UsageError(f"{self.collective} {self.name} has no parameter {name!r}; it has {listed}")

    def cost_of(self, size: int, params: Mapping[str, Any]) -> Cost | None:
        """Return the declared cost, or None if there is none. Parameters that do not change the cost are ignored."""
        if self.cost is None:
            return None
        return self.cost(size, **_accepted(self.cost, params)) if params else self.cost(size)

    def crossing_of(self, ranks_per_host: RanksPerHost, params: Mapping[str, Any]) -> Crossing:
        """Return the part of the cost that lies between hosts. Parameters that do not change it are ignored."""
        return (
            self.crossing(ranks_per_host, **_accepted(self.crossing, params))
            if params
            else self.crossing(ranks_per_host)
        )


def _accepted(function: Callable[..., Any], params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return those of `params` that a function has."""
    accepted = signature(function).parameters
    return {name: value for name, value in params.items() if name in accepted}


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: "did you mean …?" if one of `names` is similar, else "".

    >>> suggestion("rign", ["direct", "ring"]), suggestion("xyz", ["direct", "ring"])
    ("; did you mean 'ring'?", '')
    """
    from difflib import get_close_matches  # only a wrong name pays for this import

    near = get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
