"""Communicators over the workers of a real Dask cluster on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S

dask = pytest.importorskip("dask", reason="make engines installs it and runs these tests")
distributed = pytest.importorskip("distributed", reason="make engines installs it and runs these tests")

import unisono as un  # noqa: E402
import unisono.launchers.dask as ud  # noqa: E402


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with distributed.Client(n_workers=3, threads_per_worker=1, dashboard_address=":0") as opened:
        yield opened


def summed(world: un.Communicator, value: float = 1.0) -> tuple[int, float]:
    return world.rank, float(world.allreduce(np.full(1, value))[0])


def test_workers_are_ranks_in_their_order(client: Any) -> None:
    known = list(client.scheduler_info()["workers"])
    with ud.communicator(client, known[::-1], name="mine") as ranks:
        assert ranks.workers == known[::-1]
        assert ranks.run(summed) == [(0, 3.0), (1, 3.0), (2, 3.0)]
        assert ranks.run(summed, value=2.0) == [(0, 6.0), (1, 6.0), (2, 6.0)]
        with pytest.raises(un.UsageError, match="has a communicator named 'mine' already"):
            ud.communicator(client, name="mine")
    with pytest.raises(un.UsageError, match="no communicator named 'mine'"):
        ranks.run(summed)


def rank_of(world: un.Communicator) -> int:
    return world.rank


def test_tasks_run_on_their_workers_with_the_value_of_their_rank(client: Any) -> None:
    with ud.communicator(client) as ranks:
        futures = ranks.submit(summed, ud.of_ranks([1.0, 2.0, 3.0]))
        assert client.gather(futures) == [(0, 6.0), (1, 6.0), (2, 6.0)]


def test_two_communicators_are_open_at_once(client: Any) -> None:
    known = list(client.scheduler_info()["workers"])
    with ud.communicator(client) as three, ud.communicator(client, known[:2]) as two:
        assert three.run(summed)[0] == (0, 3.0)
        assert two.run(summed) == [(0, 2.0), (1, 2.0)]


def test_wrong_workers_are_refused(client: Any) -> None:
    known = list(client.scheduler_info()["workers"])
    with pytest.raises(un.UsageError, match="the cluster has no worker 'tcp://nowhere:1': its workers are tcp://"):
        ud.communicator(client, ["tcp://nowhere:1"])
    with pytest.raises(un.UsageError, match="names a worker twice"):
        ud.communicator(client, [known[0]] * 2)
    with pytest.raises(un.UsageError, match="the cluster has no workers"):
        ud.communicator(client, [])


def missing_file(world: un.Communicator) -> None:
    raise FileNotFoundError(f"no file on rank {world.rank}")


def test_error_of_a_file_is_no_lost_worker(client: Any) -> None:
    with ud.communicator(client) as ranks, pytest.raises(FileNotFoundError, match="no file on rank"):
        ranks.run(missing_file)


def test_workers_in_one_process_are_refused() -> None:
    with (
        distributed.Client(n_workers=2, processes=False, dashboard_address=":0") as threads,
        pytest.raises(un.UsageError, match="the workers are threads of one process"),
    ):
        ud.communicator(threads)


def failing(world: un.Communicator) -> None:
    world.barrier()
    if world.rank == 1:
        raise KeyError(world.rank)
    world.barrier()


def test_error_of_one_rank_ends_the_calls_of_the_others(client: Any) -> None:
    with ud.communicator(client) as ranks, pytest.raises(KeyError, match="1"):
        ranks.run(failing)  # the other ranks do not wait for rank 1


def dying(world: un.Communicator) -> None:
    if world.rank == 1:
        os._exit(1)
    while True:
        world.barrier()


def test_dead_worker_is_named_and_the_cluster_goes_on() -> None:
    with distributed.Client(n_workers=2, threads_per_worker=1, dashboard_address=":0") as client:
        ranks = ud.communicator(client)
        with pytest.raises(un.PeerLostError, match=f"the worker {ranks.workers[1]} of rank 1 has died"):
            ranks.run(dying)
        ranks.close()
        client.wait_for_workers(2, timeout=DEADLINE_S)
        with ud.communicator(client) as others:
            assert others.run(summed) == [(0, 2.0), (1, 2.0)]


def test_timer_of_the_client_hides_no_worker() -> None:
    with (
        dask.config.set({"distributed.client.scheduler-info-interval": "1ms"}),
        distributed.Client(n_workers=2, threads_per_worker=1, dashboard_address=":0") as client,
        ud.communicator(client) as ranks,
    ):
        for _ in range(200):
            assert ranks.run(rank_of) == [0, 1]


def test_example_sorts_an_array(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "dask_sort.py"
    words = [sys.executable, str(example), "--workers", "2", "--elements", "100000"]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S * 2, check=False)
    assert result.returncode == 0, result.stderr
    assert "sorted 100,000 elements on 2 workers" in result.stdout
