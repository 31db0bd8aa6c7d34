"""The order of places on a described machine: against all orders, on machines of all kinds, on the command line."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from unisono.algorithms.catalogue.registry import find
from unisono.cli.commands.place import command
from unisono.errors import UsageError
from unisono.tuning.decide.place_order import best_place_order
from unisono.tuning.machine.placed_topology import PlacedTopology
from unisono.tuning.machine.topology_files import Description, described, load
from unisono.tuning.simulator.orders import times_of
from unisono.tuning.simulator.simulate import simulate
from unisono.tuning.simulator.step_table import schedule

TOPOLOGIES = Path(__file__).resolve().parents[2] / "examples" / "topologies"
LINK = {"latency_s": 1e-6, "overhead_s": 1e-7, "per_byte_s": 1e-10}
# Pairs of hosts under switches, whose way out carries one message at a time.
PAIRS = described(
    {
        "levels": [
            {"name": "host", "size": 2, **LINK},
            {"name": "leaf", "size": 2, **LINK},
            {"name": "spine", **LINK, "latency_s": 4e-6, "per_byte_s": 4e-10},
        ]
    }
)


@pytest.mark.parametrize("name", ["fat-tree", "dragonfly", "torus", "islands"])
def test_orders_of_places_side_by_side_take_as_long_as_alone(name: str) -> None:
    machine = load(TOPOLOGIES / f"{name}.toml").over(800)
    orders = np.array([[0, 1, 2, 3, 4, 5], [0, 17, 34, 799, 500, 3], [799, 3, 500, 17, 34, 0]])
    steps = schedule(find("alltoall", "pairwise"), 6, 0, {})
    times = times_of(steps, lambda some: PlacedTopology(machine, some), orders, 1e6).seconds
    for order, seconds in zip(orders, times, strict=True):
        alone = simulate(find("alltoall", "pairwise"), 1e6, PlacedTopology(machine, order[None]), engine="rounds")
        assert seconds == pytest.approx(alone.seconds, rel=1e-12)
    assert times[0] == pytest.approx(simulate(find("alltoall", "pairwise"), 1e6, load_of(name, 6)).seconds)
    assert len(set(times.tolist())) > 1


def load_of(name: str, size: int) -> object:
    return load(TOPOLOGIES / f"{name}.toml").over(size)


@pytest.mark.parametrize("name", ["rabenseifner", "recursive_doubling"])
def test_proposal_takes_nearly_the_least_time_of_all_orders(name: str) -> None:
    algorithm, places = find("allreduce", name), (0, 4, 1, 5, 2)
    proposal = best_place_order(algorithm, 1 << 20, PAIRS, places)
    over = PAIRS.over(12)
    times = [
        simulate(algorithm, 1 << 20, PlacedTopology(over, ranks_of(order))).seconds for order in permutations(places)
    ]
    assert proposal.simulation.seconds <= 1.02 * min(times)
    assert proposal.present.seconds == pytest.approx(times[0])
    assert proposal.simulation.seconds == pytest.approx(times[[*permutations(places)].index(proposal.places)])
    assert proposal.simulation.seconds < proposal.present.seconds


def ranks_of(order: tuple[int, ...]) -> np.ndarray:
    return (np.array(order)[:, None] * 2 + np.arange(2)).reshape(1, -1)


def test_present_order_stays_if_no_order_is_faster() -> None:
    proposal = best_place_order(find("allreduce", "ring"), 1 << 20, PAIRS, (3, 2, 1, 0))
    assert proposal.places == (3, 2, 1, 0)
    assert proposal.simulation is proposal.present
    assert proposal.ranks_at_place == 2


def test_a_single_place_keeps_its_order() -> None:
    assert best_place_order(find("allreduce", "ring"), 1 << 20, PAIRS, (7,)).places == (7,)


@pytest.mark.parametrize(
    ("name", "machine", "places", "root", "reason"),
    [
        ("ring", PAIRS, (), 0, "0 places"),
        ("ring", PAIRS, tuple(range(65)), 0, "65 places"),
        ("ring", PAIRS, (0, -1), 0, "no place -1"),
        ("ring", PAIRS, (0, 1, 0), 0, "place 0 occurs twice"),
        ("ring", PAIRS, (0, 1 << 40), 0, "there is no place 1099511627776"),
        ("ring", PAIRS, (0, 1), 4, "root"),
        ("ring", load(TOPOLOGIES / "torus.toml"), (0, 4096), 0, "4096 ranks"),
        ("hierarchical", PAIRS, (0, 1), 0, "follows the hosts"),
    ],
)
def test_places_that_cannot_be_are_refused(
    name: str, machine: Description, places: tuple[int, ...], root: int, reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        best_place_order(find("allreduce", name), 1 << 20, machine, places, root=root)


def test_messages_on_a_torus_pass_through_places_without_a_rank() -> None:
    few = simulate(find("alltoall", "pairwise"), 1 << 20, load_of("torus", 34))
    assert few.seconds < simulate(find("alltoall", "pairwise"), 1 << 20, load_of("torus", 256)).seconds


ARGUMENTS = ["allreduce", "rabenseifner", "--topology", str(TOPOLOGIES / "dragonfly.toml"), "--size", "16M"]


def test_command_prints_the_names_of_hosts_in_the_proposed_order() -> None:
    names = [f"node{number}" for number in (0, 96, 1, 97, 2, 98, 3, 99)]
    arguments = [*ARGUMENTS, "--places", "0,96,1,97,2,98,3,99", "--names", ",".join(names)]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    lines = result.stdout.splitlines()
    assert any("proposed" in line for line in lines)
    assert sorted(lines[-1].split(",")) == sorted(names)
    of_json = json.loads(CliRunner().invoke(command, [*arguments, "--json"]).stdout)
    assert lines[-1].split(",") == of_json["order"] == [f"node{place}" for place in of_json["places"]]
    assert of_json["proposed"]["seconds"] < of_json["present"]["seconds"]
    assert of_json["ranks_at_place"] == 4


@pytest.mark.parametrize(
    ("places", "reason"),
    [("0,x", "'x' is neither"), ("3-1", "ends before"), ("0-1000000000", "more than 64"), ("", "'' is neither")],
)
def test_command_refuses_places_that_are_no_numbers(places: str, reason: str) -> None:
    result = CliRunner().invoke(command, [*ARGUMENTS, "--places", places])
    assert result.exit_code == 2
    assert reason in result.stderr


def test_command_needs_places_unless_the_file_has_them() -> None:
    result = CliRunner().invoke(command, ARGUMENTS)
    assert isinstance(result.exception, UsageError)
    assert "pass --places" in str(result.exception)
