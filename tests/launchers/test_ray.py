"""Communicators over the actors of a real Ray cluster on this machine, and the backend of its collective groups."""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="make engines installs it and runs these tests")

import unisono as un  # noqa: E402
import unisono.launchers.ray as ur  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    environment = {"env_vars": {"PYTHONPATH": os.path.dirname(os.path.dirname(__file__))}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


class NewActor:
    """An actor that knows nothing of Unisono before it is called."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def ready(self) -> None:
        """Return when the process of the actor runs."""

    def summed_by(self, name: str) -> float:
        return float(ur.current(name).allreduce(np.ones(2))[0])

    def in_group(self, size: int, group: str) -> list[Any]:
        from ray.util import collective

        ur.register()
        collective.init_collective_group(size, self.rank, "unisono", group)
        x, parts, scattered, copied, reduced, received = (np.full(2, self.rank + 1.0) for _ in range(6))
        collective.allreduce(x, group)
        gathered = [np.zeros(2) for _ in range(size)]
        collective.allgather(gathered, parts, group)
        collective.reducescatter(scattered, [np.full(2, float(number)) for number in range(size)], group)
        collective.broadcast(copied, 1, group)
        collective.reduce(reduced, 1, group)
        if self.rank == 0:
            collective.send(np.full(2, 9.0), 1, group)
        elif self.rank == 1:
            collective.recv(received, 0, group)
        collective.barrier(group)
        collective.destroy_collective_group(group)
        return [array.tolist() for array in (x, *gathered, scattered, copied, reduced, received)]


def actors(count: int) -> list[Any]:
    return [ray.remote(num_cpus=0.5)(NewActor).remote(rank) for rank in range(count)]


def summed(world: un.Communicator, value: float = 1.0) -> tuple[int, float]:
    return world.rank, float(world.allreduce(np.full(1, value))[0])


@pytest.mark.usefixtures("cluster")
def test_actors_are_ranks_in_their_order() -> None:
    members = actors(3)
    with ur.communicator(members, name="mine") as ranks:
        assert ranks.run(summed, value=2.0) == [(0, 6.0), (1, 6.0), (2, 6.0)]
        assert ray.get([member.summed_by.remote("mine") for member in members]) == [3.0] * 3
        with ur.communicator(members[:2]) as two:
            assert two.run(summed) == [(0, 2.0), (1, 2.0)]
        with pytest.raises(un.UsageError, match="has a communicator named 'mine' already"):
            ur.communicator(members, name="mine")
    with pytest.raises(un.UsageError, match="no communicator named 'mine'"):
        ranks.run(summed)


@pytest.mark.usefixtures("cluster")
def test_wrong_actors_are_refused() -> None:
    (member,) = actors(1)
    with pytest.raises(un.UsageError, match="at least one actor"):
        ur.communicator([])
    with pytest.raises(un.UsageError, match="names an actor twice"):
        ur.communicator([member, member])


@pytest.mark.usefixtures("cluster")
def test_groups_of_ray_compute_as_documented_and_can_be_made_again() -> None:
    members = actors(3)
    for _ in range(2):
        result = ray.get([member.in_group.remote(3, "g") for member in members])
        for rank, results in enumerate(result):
            gathered = [[1.0] * 2, [2.0] * 2, [3.0] * 2]
            expected = [[6.0] * 2, *gathered, [3.0 * rank] * 2, [2.0] * 2, [6.0 if rank == 1 else rank + 1.0] * 2]
            assert results == [*expected, [9.0] * 2 if rank == 1 else [rank + 1.0] * 2]


@pytest.mark.usefixtures("cluster")
def test_group_ignores_the_ticket_of_a_job_that_died() -> None:
    from ray.experimental import internal_kv

    outdated = ur.Ticket.new("ray", "group old", 2)._replace(store="tcp://127.0.0.1:1")
    key = f"unisono/{ray.get_runtime_context().get_job_id()}/old"
    internal_kv._internal_kv_put(key, ur._encoded(outdated), overwrite=True)
    members = actors(2)
    ray.get([member.ready.remote() for member in members])
    late = members[1].in_group.remote(2, "old")
    ready, _ = ray.wait([late], timeout=1)
    assert not ready
    results = ray.get([members[0].in_group.remote(2, "old"), late])
    assert results[0][0] == [3.0, 3.0]
    assert internal_kv._internal_kv_get(key) is None


def failing(world: un.Communicator) -> None:
    world.barrier()
    if world.rank == 1:
        raise KeyError(world.rank)
    world.barrier()


@pytest.mark.usefixtures("cluster")
def test_error_of_one_rank_ends_the_calls_of_the_others() -> None:
    with ur.communicator(actors(2)) as ranks, pytest.raises(KeyError, match="1"):
        ranks.run(failing)


def dying(world: un.Communicator) -> None:
    if world.rank == 1:
        os._exit(1)
    while True:
        world.barrier()


@pytest.mark.usefixtures("cluster")
def test_dead_actor_is_named_and_the_others_can_go_on() -> None:
    members = actors(3)
    ranks = ur.communicator(members)
    with pytest.raises(un.PeerLostError, match="the actor of rank 1 has died"):
        ranks.run(dying)
    ranks.close()
    with ur.communicator([members[0], members[2]]) as others:
        assert others.run(summed) == [(0, 2.0), (1, 2.0)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray itself
@pytest.mark.parametrize("name", ["ray_actors", "ray_train"])
def test_example_runs(name: str, cluster: None, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    if name == "ray_train":
        pytest.importorskip("torch", reason="make torch installs it")
    monkeypatch.setattr("sys.argv", [name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    expected = {"ray_actors": "as numpy finds", "ray_train": "have fitted the line"}
    assert expected[name] in capsys.readouterr().out
