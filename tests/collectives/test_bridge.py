"""Jobs that meet at a port. In most tests they are parts of one world, which only passes them the name of the port."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S
from support.outcomes import error_of
from support.ranks import Job, Ranks, ranks_fixture

import unisono as un
from unisono.collectives.bootstrap import bridge
from unisono.collectives.bootstrap.environment import job_of_key
from unisono.transports.rendezvous import host_and_port
from unisono.transports.rendezvous.tcp_store import TcpStore

Say = Callable[[Any], None]


five = ranks_fixture((5, "shm"), (5, "tcp"))


def text_of(call: Callable[[], Any]) -> str:
    return ": ".join(error_of(call))


@contextlib.contextmanager
def jobs(world: un.Communicator, *sizes: int) -> Iterator[tuple[int, un.Communicator, un.Port | None, str]]:
    """Split the world into jobs of these sizes, of which job 0 opens a port; yield (job, its world, port, name)."""
    job = int(np.searchsorted(np.cumsum(sizes), world.rank, side="right"))
    with world.split(job) as own, contextlib.ExitStack() as opened:  # type: ignore[union-attr]
        port = opened.enter_context(un.Port(own)) if job == 0 else None
        yield job, own, port, world.broadcast_object(port and port.name)
        world.barrier()


def meet_twice(world: un.Communicator) -> list[Any]:
    results: list[Any] = []
    with jobs(world, 2, 3) as (_, own, port, name):
        for turn in range(2):
            with port.accept() if port else un.connect(name, own) as bridge:
                union = bridge.union
                assert bridge.own[own.rank] == union.rank
                total = union.allreduce(np.arange(3.0) + turn).tolist()
                got = np.zeros(1, int)
                if union.rank == bridge.own[-1]:
                    union.sendrecv(np.array([own.size]), bridge.remote[-1], got, bridge.remote[-1])
                results.append((bridge.own, bridge.remote, total, int(got[0]), union.hosts))
        results.append(int(own.allreduce(np.array(1))))
    return results


def test_two_jobs_meet_again_and_again_and_call_together(five: Ranks) -> None:
    first, second = (0, 1), (2, 3, 4)
    for rank, (*meetings, own_size) in enumerate(five.run_calls(meet_twice)):
        is_first = rank in first
        assert own_size == len(first if is_first else second)
        for turn, (own, remote, total, got, hosts) in enumerate(meetings):
            assert (own, remote) == ((first, second) if is_first else (second, first))
            assert total == [5.0 * (value + turn) for value in range(3)]
            assert got == {1: 3, 4: 2}.get(rank, 0)
            assert hosts == ((0, 1, 2, 3, 4),)


def meet_two_others(world: un.Communicator) -> list[int]:
    sizes = []
    with jobs(world, 1, 2, 2) as (_, own, port, name):
        for _ in range(2 if port else 1):
            with port.accept() if port else un.connect(name, own) as bridge:
                sizes.append(int(bridge.union.allreduce(np.array(1))))
    return sizes


def test_jobs_that_connect_at_the_same_time_are_accepted_one_after_the_other(five: Ranks) -> None:
    assert five.run_calls(meet_two_others) == [[3, 3], [3], [3], [3], [3]]


def accept_late(world: un.Communicator) -> tuple[str, int]:
    """Nobody connects while job 0 accepts for the first time, and the second time the other job does."""
    text = ""
    with jobs(world, 2, 3) as (_, own, port, name):
        if port:
            text = text_of(lambda: port.accept(timeout_s=0.6))
        world.barrier()
        with port.accept() if port else un.connect(name, own) as bridge:
            return text, int(bridge.union.allreduce(np.array(1)))


def test_port_in_vain_is_an_error_of_every_rank_and_accepts_later(five: Ranks) -> None:
    for rank, (text, size) in enumerate(five.run_calls(accept_late)):
        assert size == 5
        assert ("RendezvousError" in text and "no job connected to this port in time" in text) == (rank < 2)


def connect_wrongly(world: un.Communicator) -> list[str]:
    texts = []
    with jobs(world, 2, 3) as (job, own, port, name):
        if port:
            port.close()
            port.close()
            texts.append(text_of(port.accept))
        world.barrier()
        if job == 1:
            texts += [text_of(lambda wrong=wrong: un.connect(wrong, own)) for wrong in ("", name[:-1], None, b"")]
            texts.append(text_of(lambda: un.connect(name, own)))
            others = name if own.rank else name.replace("tcp://", "tcp://0")
            texts.append(text_of(lambda: un.connect(others, own)))
            texts.append(text_of(lambda: un.connect(name, own, timeout_s=0)))
        assert own.allreduce(np.array(1)) == own.size
    return texts


def test_wrong_use_of_ports_is_a_typed_error_and_the_jobs_go_on(five: Ranks) -> None:
    accepting, connecting = (five.run_calls(connect_wrongly)[ranks] for ranks in (slice(2), slice(2, 5)))
    assert all("UsageError" in text and "this port is closed" in text for (text,) in accepting)
    for *wrong, closed, mismatch, timeout in connecting:
        assert all("UsageError" in text and "the name of a port is tcp://host:port#key" in text for text in wrong)
        assert "RendezvousError" in closed
        assert "no store answers" in closed
        assert "MismatchError" in mismatch
        assert "UsageError" in timeout


PLANTED = [
    b"[]",
    b'{"size": 0, "nonce": "' + b"00" * 16 + b'"}',
    json.dumps({"size": 1 << 40, "nonce": "00" * 16}).encode(),
    json.dumps({"size": 1, "nonce": "zz" * 16}).encode(),
    json.dumps({"size": 1, "nonce": "00"}).encode(),
]


def accept_strangers(world: un.Communicator) -> list[str]:
    """A process with the name of the port does not follow the protocol, or has no right key."""
    texts = []
    with jobs(world, 2, 3) as (_, own, port, name):
        for turn, value in enumerate(PLANTED):
            if world.rank == 4:
                url, _, key = name.partition("#")
                of_port = bytes.fromhex(key)
                store = TcpStore(*host_and_port(url), key=of_port, job=job_of_key(of_port), timeout_s=DEADLINE_S)
                with contextlib.closing(store):
                    store.set(f"knock/{turn}", value)
            world.barrier()
            if port:
                texts.append(text_of(port.accept))
        if port is None:
            guessed = name[:-4] + ("0000" if name[-4:] != "0000" else "1111")
            texts.append(text_of(lambda: un.connect(guessed, own, timeout_s=1)))
    return texts


def test_stranger_at_a_port_is_an_error_of_every_rank(five: Ranks) -> None:
    accepting, connecting = (five.run_calls(accept_strangers)[ranks] for ranks in (slice(2), slice(2, 5)))
    for texts in accepting:
        assert len(texts) == len(PLANTED)
        assert all("RendezvousError" in text and "does not follow the protocol of ports" in text for text in texts)
    assert all("RendezvousError" in text for (text,) in connecting)


def lose_a_rank(world: un.Communicator, say: Say) -> None:
    """A rank of the second job dies. The world is of all ranks, so each job opens one of its own first."""
    port, name = None, ""
    with un.init(store=f"file://{os.getcwd()}/{world.rank < 2}", rank=world.rank % 2, size=2) as own:
        port = un.Port(own) if world.rank < 2 else None
        name = world.broadcast_object(port and port.name)
        with port.accept() if port else un.connect(name, own) as bridge:
            bridge.union.barrier()
            if world.rank == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            text = text_of(lambda: bridge.union.allreduce(np.ones(4)))
        say((text, int(own.allreduce(np.array(1))) if port else 0))
        if port:
            port.close()


def test_loss_of_a_rank_ends_the_union_and_not_the_other_job(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Job(lose_a_rank, 4, tmp_path) as job:
        first, second, _ = job.hear_all(but=3)
    for text, size in (first, second):
        assert "PeerLostError" in text
        assert size == 2


def test_port_whose_store_cannot_be_opened_closes_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    urls: list[str] = []

    def refuse(url: str, *_: object) -> None:
        urls.append(url)
        raise un.RendezvousError("no store")

    monkeypatch.setattr(bridge, "_store_at", refuse)
    with un.init() as world, pytest.raises(un.RendezvousError, match="no store"):
        un.Port(world)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(host_and_port(urls[0]), timeout=DEADLINE_S)
