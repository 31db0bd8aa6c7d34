"""The store in a Redis server: what the contract of stores does not say. Its contract is in test_stores.py."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S
from support.redis_server import redis_server

from unisono.errors import RendezvousError, UsageError
from unisono.transports.rendezvous.redis_store import RedisStore, hidden
from unisono.transports.rendezvous.stores import VALUE_LIMIT_NBYTES

redis = pytest.importorskip("redis")


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with redis_server(tmp_path_factory.mktemp("redis")) as (port, _):
        yield port


def test_values_have_a_time_to_live_and_go_when_they_are_cleared(port: int) -> None:
    store, client = RedisStore(f"redis://127.0.0.1:{port}/1?prefix=job-7/", 20), redis.Redis(port=port, db=1)
    store.set("a", b"value")
    assert client.get("job-7/a") == b"value"
    assert 60 < client.ttl("job-7/a") <= 80
    store.clear()
    assert client.keys() == []
    store.close()
    client.close()


def test_value_that_no_rank_can_have_set_is_refused(port: int) -> None:
    store, client = RedisStore(f"redis://127.0.0.1:{port}/1?prefix=job-8/", 20), redis.Redis(port=port, db=1)
    client.set("job-8/a", bytes(VALUE_LIMIT_NBYTES + 1))
    with pytest.raises(RendezvousError, match="another program has set it"):
        store.get("a", DEADLINE_S)
    client.delete("job-8/a")
    store.close()
    client.close()


def test_password_is_used_and_never_shown(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", "secret") as (port, _):
        with contextlib.closing(RedisStore(f"redis://:secret@127.0.0.1:{port}", 5)) as store:
            store.set("a", b"value")
        with pytest.raises(RendezvousError, match=f"redis://:\\*\\*\\*@127.0.0.1:{port} cannot be used: .*password"):
            RedisStore(f"redis://:wrong@127.0.0.1:{port}", 5)
        with pytest.raises(RendezvousError, match="Authentication required"):
            RedisStore(f"redis://127.0.0.1:{port}", 5)
    assert hidden("redis://user:wrong@host/2?prefix=x") == "redis://user:***@host/2?prefix=x"


def test_lost_server_is_an_error(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (port, process):
        store = RedisStore(f"redis://127.0.0.1:{port}", 5)
        process.kill()
        process.wait()
        for call in (lambda: store.set("a", b""), lambda: store.get("a", 5)):
            with pytest.raises(RendezvousError, match="cannot be used"):
                call()
        with pytest.raises(RendezvousError, match="refused"):
            RedisStore(f"redis://127.0.0.1:{port}", 5)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://", "write redis://host:port/database"),
        ("redis://host/1?prefx=a", "has the option 'prefx'"),
        ("redis://host:port/1", "cannot be used"),
    ],
)
def test_url_that_cannot_be_used_is_refused(url: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        RedisStore(url, 5)


PROGRAM = """
import unisono as un
with un.init() as world:
    print(world.allgather_object(world.rank))
"""


def run_ranks(url: str, *ranks: int) -> list[subprocess.CompletedProcess[str]]:
    """Start ranks of a job of two that meets in the store; return how they ended."""
    started = []
    for rank in ranks:
        place = {"UNISONO_RANK": str(rank), "UNISONO_SIZE": "2", "UNISONO_STORE": url}
        limit = {"UNISONO_RENDEZVOUS_TIMEOUT_S": "3" if len(ranks) < 2 else str(DEADLINE_S)}
        words = [sys.executable, "-c", PROGRAM]
        environ = {**os.environ, **place, **limit}
        started.append(subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    completed = []
    for process in started:
        out, err = process.communicate(timeout=2 * DEADLINE_S)
        completed.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return completed


def test_ranks_meet_in_redis_and_leave_nothing(port: int) -> None:
    for rank in run_ranks(f"redis://127.0.0.1:{port}/2", 0, 1):
        assert rank.stdout == "[0, 1]\n", rank.stderr
    with contextlib.closing(redis.Redis(port=port, db=2)) as client:
        assert client.keys() == []


def test_values_of_a_job_that_died_are_named_and_expire(port: int) -> None:
    url = f"redis://127.0.0.1:{port}/3"
    (alone,) = run_ranks(url, 0)
    assert "rank 1 of 2 did not arrive within 3 s" in alone.stderr
    with contextlib.closing(redis.Redis(port=port, db=3)) as client:
        assert all(client.ttl(name) <= 3 for name in client.scan_iter())
    with contextlib.closing(RedisStore(url, 5)) as store, contextlib.closing(RedisStore(url, 5)) as other:
        store.set("a", b"")
        with pytest.raises(RendezvousError, match=r"two jobs use the same store.*leaves its values for at most 65 s"):
            other.set("a", b"another")
