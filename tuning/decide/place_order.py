"""Finds the order of places of a machine in which a collective takes the least simulated time.

A job has some places of a machine, such as 8 hosts under three switches. Its launcher numbers the ranks in the order of
the places, host by host. A ring that crosses a switch twice is faster than one that crosses it eight times, and the two
differ in this order alone.

The time of an order is that of the simulator. The search starts from the present order, from that of the machine, and
from the order that takes one place of each part of the machine in turn. `order_search.py` improves them. Ranks of one
host stay together, because launchers place them so.

Example: a ring over the hosts 0, 32, 1 and 33 of a fat tree, with 32 hosts under a switch, crosses the upper switches
with each of its messages. In the order 0, 1, 33, 32, two of four messages stay under a switch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from unisono.algorithms.builders.arguments import check_ranks
from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.composition.phases import Composition
from unisono.errors import UsageError
from unisono.tuning.decide.order_search import improved
from unisono.tuning.machine.placed_topology import PlacedTopology
from unisono.tuning.machine.topology import Floats, Ranks, Topology
from unisono.tuning.machine.topology_files import MOST_RANKS, Description
from unisono.tuning.simulator.orders import times_of
from unisono.tuning.simulator.simulate import Simulation, simulate
from unisono.tuning.simulator.step_table import schedule

# The search tries all changes of an order. Their number grows with the square of that of the places.
MOST_PLACES = 64
# Of two orders that take equally long, the one that occupies the network for less time is better.
_BUSY = 1e-3
# Another order must take less than this part of the time of the present one, because a simulation is not that exact.
_BETTER = 0.98


class PlaceOrder(NamedTuple):
    """The best order of places that was found.

    Attributes:
        places: the numbers of the places, in the best order.
        simulation: the collective in that order.
        present: the collective in the order that was passed.
        ranks_at_place: how many ranks stand at each place, with consecutive numbers.
    """

    places: tuple[int, ...]
    simulation: Simulation
    present: Simulation
    ranks_at_place: int


def best_place_order(
    algorithm: Algorithm,
    nbytes: float,
    machine: Description,
    places: Sequence[int],
    *,
    root: int = 0,
    params: Mapping[str, Any] | None = None,
) -> PlaceOrder:
    """Return the order of places in which an algorithm takes the least time; the present one, if none takes 2 % less.

    Args:
        algorithm: an algorithm whose plans have rounds. The search simulates one segment.
        nbytes: bytes of the vector, as for `simulate`.
        machine: the levels of the machine.
        places: the hosts (parts of the second level) of the job, in their present order, at most `MOST_PLACES`. If the
            machine has only one level, the places are those of single ranks.
        root: the rank of the root.
        params: parameters of the algorithm's builder.

    Raises:
        UsageError: there are no places or too many, one occurs twice or lies outside of the machine, or the algorithm
            cannot be placed; the message says why.
        NoAlgorithmError: the algorithm does not run on so many ranks.
    """
    ranks = machine.ranks_at_place
    _check(algorithm, places, ranks)
    check_ranks(len(places) * ranks, 0, root)
    over = machine.machine((max(places) + 1) * ranks)
    now = np.array(places)
    arguments = dict(params or {})
    steps = schedule(algorithm, len(places) * ranks, root, arguments)
    values = partial(_values, partial(times_of, steps, partial(_placed, over, ranks), nbytes=nbytes))
    try:
        best = improved(np.stack((now, np.sort(now), _in_turn(np.sort(now), machine))), values, fixed=0)
    except RecursionError:
        raise UsageError(
            f"{algorithm.name} cannot be placed, because its plan has no rounds: `unisono simulate` predicts it"
        ) from None
    before, after = (
        simulate(algorithm, nbytes, _placed(over, ranks, order[None]), root=root, params=arguments)
        for order in (now, best)
    )
    if after.seconds >= _BETTER * before.seconds:
        best, after = now, before
    return PlaceOrder(tuple(best.tolist()), after, before, ranks)


def _check(algorithm: Algorithm, places: Sequence[int], ranks: int) -> None:
    if isinstance(algorithm, Composition):
        raise UsageError(
            f"{algorithm.name} follows the hosts of its ranks: place the algorithm of its phase between hosts instead"
        )
    if not 1 <= len(places) <= MOST_PLACES:
        raise UsageError(f"there are {len(places)} places: pass 1 to {MOST_PLACES}")
    if min(places) < 0:
        raise UsageError(f"there is no place {min(places)}: places count from 0")
    if (max(places) + 1) * ranks > MOST_RANKS:
        last = MOST_RANKS // ranks - 1
        raise UsageError(f"there is no place {max(places)}: with {ranks} ranks at each, they count up to {last}")
    if len(set(places)) < len(places):
        twice = next(place for at, place in enumerate(places) if place in places[:at])
        raise UsageError(f"place {twice} occurs twice: a place has its ranks once")


def _placed(machine: Topology, ranks: int, orders: Ranks) -> PlacedTopology:
    """Return the ranks of some orders of places, `ranks` at each place."""
    of_ranks = orders[:, :, None] * ranks + np.arange(ranks)
    return PlacedTopology(machine, of_ranks.reshape(len(orders), -1))


def _values(times: Any, orders: Ranks) -> Floats:
    """Return the value of each order: its seconds and, for orders that take equally long, the busy seconds."""
    of_orders = times(orders)
    value: Floats = of_orders.seconds + _BUSY / orders.shape[1] * of_orders.busy_s
    return value


def _in_turn(places: Ranks, machine: Description) -> Ranks:
    """Return ascending places in the order that takes one of each part of the level above the hosts in turn."""
    width = machine.levels[1].size if len(machine.levels) > 2 else 0
    parts = places // width if width else np.zeros_like(places)
    turn = np.concatenate([np.arange(count) for count in np.unique(parts, return_counts=True)[1]])
    return places[np.lexsort((parts, turn))]
