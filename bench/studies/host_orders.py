"""Compares the order of hosts that calls take with all orders, in the simulator and across a wide-area network.

    python -m unisono.bench.studies.host_orders simulate --maps 20
    sudo python -m unisono.bench.studies.host_orders wire --maps 3 --hosts 5 --size 8M

A random map has 5 to 8 hosts in a square of 60 ms. The rates of its ways are random, and differ from those of the ways
back. `simulate` compares our order with all others. It also finds the order on a copy of the map with errors of up to
10 %, as measured maps have them, and simulates it on the map itself.

`wire` measures a ring in the order that the ranks choose by the map that they have measured, in the best and worst
orders by the map itself, and in the order of ranks. It compares the times with those of the simulator.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from functools import partial
from itertools import permutations
from math import dist
from pathlib import Path
from typing import Any

import numpy as np

from unisono.algorithms.catalogue.registry import find
from unisono.bench.programs.wan import measured
from unisono.bench.sizes import format_size, parse_sizes
from unisono.bench.wide_area import UNLIMITED, Area, NetworkWay, wide_area
from unisono.tuning.decide.host_order import best_order, steps_of
from unisono.tuning.machine.map_topology import MapTopology
from unisono.tuning.machine.network_map import NetworkMap
from unisono.tuning.simulator.orders import times_of
from unisono.tuning.simulator.simulate import simulate

_MOST_HOSTS = 8
_RATES_MBIT_S = (10, 20, 40, 80)
# The part of the bytes on a way that is payload: packets of 1,500 bytes have 52 bytes of headers.
_PAYLOAD = 1448 / 1500
_CALLS = (
    ("allreduce", "ring"),
    ("allreduce", "bidirectional_ring"),
    ("broadcast", "binomial"),
    ("broadcast", "scatter_ring"),
)
_SIZES = (1 << 10, 1 << 20, 64 << 20)
_ERROR = 0.1


def random_area(hosts: int, chance: random.Random) -> Area:
    """Return hosts at random places, with ways of random rates."""
    places = [(chance.random(), chance.random()) for _ in range(hosts)]
    ways = {
        (i, j): NetworkWay(chance.choice(_RATES_MBIT_S), round(2 + 60 * dist(places[i], places[j]), 1))
        for i in range(hosts)
        for j in range(hosts)
        if i != j
    }
    return Area((UNLIMITED,) * hosts, ways)


def map_of(area: Area) -> NetworkMap:
    """Return the map that hosts of an area would measure without errors."""
    hosts = range(len(area.lines))

    def delay_s(i: int, j: int) -> float:  # the ways there and back have the same delay
        return area.way(i, j).delay_ms / 1e3 if i != j else 0.0

    def per_byte_s(i: int, j: int) -> float:
        return 8e-6 / (_PAYLOAD * area.way(i, j).mbit_s) if i != j else 0.0

    return NetworkMap(*(tuple(tuple(value(i, j) for j in hosts) for i in hosts) for value in (delay_s, per_byte_s)))


def with_errors(network: NetworkMap, chance: random.Random) -> NetworkMap:
    """Return a map whose values are wrong by up to 10 %."""
    return NetworkMap(
        *(
            tuple(tuple(value * chance.uniform(1 - _ERROR, 1 + _ERROR) for value in row) for row in matrix)
            for matrix in network
        )
    )


def simulated(maps: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for each map, call and size: the times of our order and others, as multiples of the best one's."""
    chance, rows = random.Random(seed), []
    for number in range(maps):
        hosts = 5 + number % (_MOST_HOSTS - 4)
        network = map_of(random_area(hosts, chance))
        wrong = with_errors(network, chance)
        for collective, name in _CALLS:
            for nbytes in _SIZES:
                others = np.array([(0, *order) for order in permutations(range(1, hosts))])
                ours = [best_order(collective, name, each, nbytes) for each in (network, wrong)]
                orders = np.concatenate((np.array([*ours, range(hosts)]), others))
                over = partial(MapTopology, network)
                times = times_of(steps_of(collective, name, hosts), over, orders, nbytes).seconds
                of_ours, of_wrong, of_ranks = (times[:3] / times[3:].min()).tolist()
                median, worst = np.quantile(times[3:], (0.5, 1.0)) / times[3:].min()
                row = {"map": number, "hosts": hosts, "call": f"{collective} {name}", "nbytes": nbytes}
                rows.append(
                    {
                        **row,
                        "ours": of_ours,
                        "with_errors": of_wrong,
                        "ranks": of_ranks,
                        "median": float(median),
                        "worst": float(worst),
                    }
                )
    return rows


def on_the_wire(maps: int, hosts: int, nbytes: int, seed: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each map and order of a ring: the measured and the simulated seconds."""
    chance, rows = random.Random(seed), []
    for number in range(maps):
        area = random_area(hosts, chance)
        network = map_of(area)
        orders = [(0, *order) for order in permutations(range(1, hosts))]
        steps, over = steps_of("allreduce", "ring", hosts), partial(MapTopology, network)
        times = times_of(steps, over, np.array(orders), nbytes).seconds
        named = {
            "best": orders[int(np.argmin(times))],
            "ranks": tuple(range(hosts)),
            "worst": orders[int(np.argmax(times))],
        }
        with tempfile.TemporaryDirectory() as folder, wide_area(area, seed) as running:
            path = str(Path(folder, "map.json"))
            request = {"sizes": [nbytes], "rounds": rounds, "at_once": 1, "map": path}
            algorithms = ["ring", "auto", *(f"ring(order={order})" for order in named.values())]
            found = measured(area, running.namespaces, {**request, "algorithms": algorithms})
            of_ranks = NetworkMap.read(Path(path))
        ours = best_order("allreduce", "ring", of_ranks, nbytes)
        for label, order, each in zip(("ours", "tuner", *named), (ours, None, *named.values()), found, strict=True):
            row = {"map": number, "hosts": hosts, "nbytes": nbytes, "order": label, "chosen": each.chosen}
            row["wire_s"] = each.median_ms / 1e3
            if order is not None:
                row["simulated_s"] = simulated_s(network, order, nbytes)
                row["on_measured_map_s"] = simulated_s(of_ranks, order, nbytes)
            rows.append(row)
            sys.stderr.write(json.dumps(row) + "\n")
    return rows


def simulated_s(network: NetworkMap, order: tuple[int, ...], nbytes: int) -> float:
    """Return the seconds of a ring in an order, message by message."""
    return simulate(find("allreduce", "ring"), nbytes, MapTopology(network, [order]), engine="events").seconds


def main() -> None:
    """Run the study, and print its rows as JSON and a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["simulate", "wire"])
    parser.add_argument("--maps", type=int, default=20)
    parser.add_argument("--hosts", type=int, default=5, help="on the wire")
    parser.add_argument("--size", default="8M", help="on the wire")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.part == "simulate":
        rows = simulated(options.maps, options.seed)
        for name in ("ours", "with_errors", "ranks", "median", "worst"):
            values = [row[name] for row in rows]
            sys.stderr.write(f"{name}: median {statistics.median(values):.3f}, most {max(values):.3f}\n")
    else:
        (nbytes,) = parse_sizes(options.size)
        rows = on_the_wire(options.maps, options.hosts, nbytes, options.seed, options.rounds)
        sys.stderr.write(f"{len(rows)} rows of {format_size(nbytes)}\n")
    sys.stdout.write(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
