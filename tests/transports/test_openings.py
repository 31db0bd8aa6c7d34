"""Ranks that find each other in a store of torch which still has values of ranks that have died."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.deadlines import DEADLINE_S, eventually

pytest.importorskip("torch.distributed", reason="make torch installs what these tests need")

import torch.distributed as dist

from unisono.errors import RendezvousError
from unisono.transports.rendezvous.openings import agree
from unisono.transports.rendezvous.torch_store import TorchStore

SHORT_S = 0.3


@pytest.fixture(params=["hash", "file", "tcp"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], TorchStore]:
    """Return a function that opens one more client of the same store."""
    if request.param == "file":
        return lambda: TorchStore(dist.FileStore(str(tmp_path / "store"), -1))
    if request.param == "hash":
        store = dist.HashStore()
        return lambda: TorchStore(store)
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: TorchStore(dist.TCPStore("127.0.0.1", served.port, is_master=False))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def start(
    pool: ThreadPoolExecutor, opened: Callable[[], TorchStore], size: int, timeout_s: float = DEADLINE_S
) -> list[tuple[TorchStore, Future[str]]]:
    """Let each of `size` ranks open the store; return its client, and its prefix."""
    clients = [opened() for _ in range(size)]
    return [(client, pool.submit(agree, client, rank, size, timeout_s)) for rank, client in enumerate(clients)]


def prefixes(started: list[tuple[TorchStore, Future[str]]]) -> set[str]:
    return {prefix.result() for _, prefix in started}


def test_every_opening_of_a_store_has_a_prefix_of_its_own(opened: Any, threads: ThreadPoolExecutor) -> None:
    results = [prefixes(start(threads, opened, size)) for size in (2, 2, 4, 1, 3)]
    assert [len(result) for result in results] == [1] * 5
    assert len(set.union(*results)) == 5


def test_ranks_meet_after_a_leader_has_died_before_the_others_came(opened: Any, threads: ThreadPoolExecutor) -> None:
    with pytest.raises(RendezvousError):
        agree(opened(), 0, 2, 0.01)  # it removes its name; a process that is killed does not
    opened().announce("unisono/leader", b"dead")
    old = threads.submit(agree, opened(), 1, 2, DEADLINE_S)
    assert eventually(lambda: opened().look("unisono/dead/here/1") is not None)
    new = threads.submit(agree, opened(), 0, 2, DEADLINE_S)
    assert old.result() == new.result() != "unisono/dead/"


@pytest.mark.parametrize("size", [2, 3])
def test_followers_refuse_the_name_of_a_job_that_has_died(opened: Any, threads: ThreadPoolExecutor, size: int) -> None:
    (dead,) = prefixes(start(threads, opened, 2))  # nobody clears it
    followers = [threads.submit(agree, opened(), rank, size, DEADLINE_S) for rank in range(1, size)]
    if size == 3:
        assert eventually(lambda: opened().look(f"{dead}here/2") is not None)
    leader = agree(opened(), 0, size, DEADLINE_S)
    assert {follower.result() for follower in followers} == {leader}
    assert leader != dead


def test_follower_that_is_early_for_the_next_opening_waits(opened: Any, threads: ThreadPoolExecutor) -> None:
    first = start(threads, opened, 2)
    assert len(prefixes(first)) == 1
    early = threads.submit(agree, first[1][0], 1, 2, DEADLINE_S)
    first[0][0].clear()
    assert agree(first[0][0], 0, 2, DEADLINE_S) == early.result()


def test_leader_clears_all_values_of_an_opening(threads: ThreadPoolExecutor) -> None:
    store = dist.HashStore()
    started = start(threads, lambda: TorchStore(store), 3)
    assert len(prefixes(started)) == 1
    assert store.num_keys() == 4
    for client, _ in reversed(started):
        client.clear()
    assert store.num_keys() == 0


def test_all_ranks_name_those_that_do_not_open_the_store(opened: Any, threads: ThreadPoolExecutor) -> None:
    present = [
        threads.submit(agree, opened(), rank, 4, timeout_s) for rank, timeout_s in ((0, SHORT_S), (2, DEADLINE_S))
    ]
    for rank in present:
        with pytest.raises(RendezvousError, match=r"ranks 1, 3 of 4 did not arrive within 0.3 s"):
            rank.result()


def test_a_rank_without_a_leader_names_rank_0(opened: Any) -> None:
    with pytest.raises(RendezvousError, match=r"rank 0 of 2 did not arrive within 0.3 s"):
        agree(opened(), 1, 2, SHORT_S)


def test_ranks_of_different_sizes_are_told_apart(opened: Any, threads: ThreadPoolExecutor) -> None:
    ranks = [threads.submit(agree, opened(), rank, size, DEADLINE_S) for rank, size in ((0, 2), (1, 3))]
    for rank in ranks:
        with pytest.raises(RendezvousError, match=r"as one of 3 ranks, and rank 0 .* as one of 2 ranks"):
            rank.result()


def test_a_rank_beyond_the_size_of_the_leader_says_so(opened: Any, threads: ThreadPoolExecutor) -> None:
    assert len(prefixes(start(threads, opened, 2))) == 1
    with pytest.raises(RendezvousError, match="rank 0 was started as one of 2 ranks, and rank 2 as one of 3"):
        agree(opened(), 2, 3, SHORT_S)
