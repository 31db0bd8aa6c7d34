"""The rendezvous: how `init` finds the other ranks, which settings they agree on, and how it fails."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S, eventually
from support.harness import message_algorithms
from support.ports import free_port
from support.programs import by_variables
from support.ranks import Job

import unisono as un
from unisono.algorithms.catalogue.registry import algorithms_of
from unisono.collectives.bootstrap import rendezvous
from unisono.transports.links.session import Session

Say = Callable[[Any], None]


# --- one rank ------------------------------------------------------------------------------------------------------


def test_init_without_a_launcher_makes_a_world_of_one() -> None:
    with un.init() as world:
        assert (world.rank, world.size, world.local_rank, world.hosts) == (0, 1, 0, ((0,),))
        x = np.arange(4.0)
        assert world.allreduce(x, "avg").tolist() == x.tolist()
        assert world.broadcast(x).tolist() == x.tolist()
        world.barrier()
        assert world.stats() == {}
    with pytest.raises(un.UsageError, match="is closed"):
        world.barrier()


def test_repeated_worlds_of_one_leak_no_file_descriptors() -> None:
    un.init().close()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        un.init().close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before  # threads of earlier tests may close some meanwhile


def drop_the_world() -> None:
    world = un.init()
    world.allreduce(np.ones(3))
    world.barrier(wait=False).wait()


def world_of_a_plan() -> Callable[[], Any]:
    return un.init().plan("allreduce", np.ones(3))


def opened() -> tuple[int, int]:
    """Return the numbers of descriptors and threads of this process, after a garbage collection."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_world_is_closed_when_garbage_collected() -> None:
    un.init().close()
    before = opened()
    for _ in range(5):
        drop_the_world()
    assert eventually(lambda: opened() == before)


def test_world_stays_open_while_anything_made_from_it_is_alive() -> None:
    before = opened()
    plan, work, part = world_of_a_plan(), un.init().allreduce(np.ones(3), wait=False), un.init().dup()
    gc.collect()
    assert [plan().tolist(), work.wait().tolist(), part.allreduce(np.ones(3)).tolist()] == [[1.0] * 3] * 3
    del plan, work, part
    assert eventually(lambda: opened() == before)


def test_concurrent_closes_of_a_world_all_return_after_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, is_closed, left = threading.Event(), threading.Event(), threading.Event(), []
    leave = Session.close

    def leave_slowly(session: Session, farewell: str) -> None:
        begun.set()
        go_on.wait()
        leave(session, farewell)
        is_closed.set()

    monkeypatch.setattr(Session, "close", leave_slowly)
    world = un.init()

    def close() -> None:
        world.close()
        left.append(is_closed.is_set())

    threads = [threading.Thread(target=close) for _ in range(2)]
    threads[0].start()
    begun.wait()
    threads[1].start()
    threads[1].join(0.2)  # long enough for a thread that does not wait
    go_on.set()
    for thread in threads:
        thread.join()
    assert left == [True, True]


AT_EXIT = """
import unisono as un
from unisono.launchers.launch import Pool
{program}
"""


@pytest.mark.parametrize(
    "program",
    [
        "world = un.init()",
        "un.init()",
        "import threading; threading.Thread(target=un.init().close, daemon=True).start()",
        "pool = Pool(1); pool.run(lambda comm: None)",
        "Pool(1).run(lambda comm: None)",
    ],
)
def test_open_world_is_closed_at_exit_without_a_warning(tmp_path: Path, program: str) -> None:
    place = {"UNISONO_RANK": "0", "UNISONO_SIZE": "1", "UNISONO_STORE": f"file://{tmp_path}/store"}
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", AT_EXIT.format(program=program)]
    environ = {**os.environ, **place, "PYTHONWARNINGS": "error", "PYTHONDEVMODE": "1"}
    completed = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=environ)
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("algorithm", message_algorithms("allreduce"))
def test_algorithm_option_applies_to_collectives_that_have_it(algorithm: str) -> None:
    with un.init(un.Options(algorithm=algorithm)) as world:
        choice = world.explain("allreduce", 1 << 20).choice
        assert (choice.algorithm, choice.tier) == (algorithm, "forced")
        for collective in ("broadcast", "barrier"):
            forced = algorithm in algorithms_of(collective)
            assert world.explain(collective, 1 << 20).choice.tier == ("forced" if forced else "model")


def test_unknown_algorithm_option_is_refused_with_suggestions() -> None:
    with un.init(un.Options(algorithm="rign")) as world:
        for call in (lambda: world.allreduce(np.ones(1)), world.barrier):
            with pytest.raises(
                un.UsageError, match=r"no collective has an algorithm 'rign'; did you mean 'ring' \(of all"
            ):
                call()
    with (
        un.init(un.Options(algorithm="quantum")) as world,
        pytest.raises(un.UsageError, match="there are direct, ring"),
    ):
        world.explain("scan", 8)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"rank": 0}, "together"),
        ({"store": "file:///tmp/x", "rank": 0}, "together"),
        ({"store": "file:///tmp/x", "rank": 2, "size": 2}, "rank=2"),
        ({"store": "file:///tmp/x", "rank": -1, "size": 2}, "rank=-1"),
        ({"store": "file:///tmp/x", "rank": 0, "size": 0}, "size=0"),
        ({"store": "ftp://host", "rank": 0, "size": 2}, "ftp"),
        ({"store": {}, "rank": 0, "size": 2}, "a store of torch"),
        ({"store": "tcp://127.0.0.1", "rank": 0, "size": 2}, "port"),
    ],
)
def test_init_refuses_wrong_arguments(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(un.UsageError, match=why):
        un.init(**arguments)


@pytest.mark.parametrize("transports", ["pigeon", "", "tcp,", (), ("shm", "shm"), ("auto", "tcp")])
def test_transports_option_refuses_unknown_or_repeated_names(transports: Any) -> None:
    with pytest.raises(un.UsageError, match="some of shm, tcp, ucx, mpi, cuda_ipc separated by commas"):
        un.Options(transports=transports)


def test_transports_may_be_a_tuple() -> None:
    assert un.Options(transports=("shm", "tcp")) == un.Options(transports="SHM, tcp")
    assert un.Options(transports=("shm", "tcp")).preference == ("shm", "tcp")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UNISONO_TIMEOUT_S", "soon"),
        ("UNISONO_TRANSPORTS", "pigeon"),
        ("UNISONO_TRANSPORTS", "shm,tcp,shm"),
        ("UNISONO_TRANSPORTS", "auto,tcp"),
        ("UNISONO_SIZE", "two"),
    ],
)
def test_init_refuses_invalid_environment_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(un.UsageError, match=name):
        un.init()


def test_init_refuses_bind_address_of_another_machine() -> None:
    with pytest.raises(un.UnisonoError, match=r"192\.0\.2\.1"):
        un.init(un.Options(bind_address="192.0.2.1"))


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_closed_communicators_do_not_leak_memory() -> None:
    with un.init() as world:
        loop = world._executor.session._listener.loop  # the event loop is notified of each closed connection
        for count in (10_000, 20_000):  # the first ones fill lists of a limited length
            gc.collect()
            before = resident_nbytes()
            for number in range(count):
                world.dup().close()
                assert number % 100 or eventually(lambda: not loop._submitted)
        gc.collect()
        assert resident_nbytes() - before < 50 * count


# --- several ranks -------------------------------------------------------------------------------------------------


def meet_again(world: un.Communicator, say: Say, stores: list[str]) -> None:
    """Start one job after the other at one store, while the first job stays open."""
    for store in stores:
        with un.init(store=store, rank=world.rank, size=world.size) as other:
            say(other.allreduce(np.array([other.rank + 1])).tolist())
    say(world.allreduce(np.array([1])).tolist())


def test_ranks_rendezvous_at_tcp_and_file_stores(tmp_path: Path) -> None:
    stores = [f"tcp://127.0.0.1:{free_port()}", f"file://{tmp_path}/other"]
    with Job(meet_again, 3, tmp_path, stores) as job:
        assert [job.hear_all() for _ in range(3)] == [[[6]] * 3, [[6]] * 3, [[3]] * 3]


def differ(world: un.Communicator, say: Say, store: str) -> None:
    """Let rank 0 alone request TCP, the ring and segments."""
    asked = un.Options(transports="tcp", algorithm="ring", segment_nbytes=4096) if world.rank == 0 else un.Options()
    with un.init(asked, store=store, rank=world.rank, size=world.size) as other:
        other.allreduce(np.ones(100_000))
        choice = other.explain("allreduce", 800_000).choice
        transports = {traffic.transport for traffic in other.stats().values()}
    say((choice.algorithm, choice.segments > 1, transports))


def test_all_ranks_adopt_the_settings_of_rank_0(tmp_path: Path) -> None:
    with Job(differ, 3, tmp_path, f"file://{tmp_path}/other") as job:
        assert job.hear_all() == [("ring", True, {"tcp"})] * 3


def wait_in_vain(world: un.Communicator, say: Say, store: str) -> None:
    """Rank 2 does not come to the second rendezvous."""
    if world.rank == 2:
        say("absent")
        return
    try:
        un.init(un.Options(rendezvous_timeout_s=3.0), store=store, rank=world.rank, size=world.size)
    except un.RendezvousError as error:
        say(str(error))


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_rendezvous_error_names_the_missing_rank(tmp_path: Path, kind: str) -> None:
    store = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/other"
    with Job(wait_in_vain, 3, tmp_path, store) as job:
        for text in job.hear_all(but=2):
            assert "rank 2 of 3 did not arrive within 3 s" in text, text


def say_the_place(world: un.Communicator, say: Say) -> None:
    say((world.rank, world.size, world.local_rank, world.hosts))


def test_ranks_of_one_host_get_local_ranks_in_order(tmp_path: Path) -> None:
    with Job(say_the_place, 3, tmp_path) as job:
        assert job.hear_all() == [(rank, 3, rank, ((0, 1, 2),)) for rank in range(3)]


MEETINGS = """
import os, socket
import numpy as np
import unisono as un

for _ in range(5):
    with un.init() as world:
        with un.init() as other:
            assert other.allreduce(np.array([world.rank + 1])).tolist() == [6]
        if world.rank == 0:  # nobody is served any more
            socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))).close()
        world.barrier()
"""


def test_ranks_with_variables_of_torch_reuse_one_port_for_many_worlds(tmp_path: Path) -> None:
    for process in by_variables(MEETINGS, port=free_port(), folder=tmp_path, ranks=3, UNISONO_LOG="info"):
        assert process.returncode == 0, process.stderr
        assert ("Rank 0 makes this job's key and hands it out in the store" in process.stderr) == (
            "[0/3]" in process.stderr
        )


def look_at_the_store(world: un.Communicator, say: Say, folder: Path) -> None:
    world.barrier()
    say(folder.exists())
    world.barrier()


def test_file_store_is_removed_after_the_rendezvous(tmp_path: Path) -> None:
    with Job(look_at_the_store, 3, tmp_path, tmp_path / "store") as job:
        assert job.hear_all() == [False] * 3


def fail_to_listen(world: un.Communicator, say: Say, store: str, failing: int) -> None:
    """One rank cannot listen at the second rendezvous, for which the others would wait for minutes."""
    address = "192.0.2.1" if world.rank == failing else "127.0.0.1"
    options = un.Options(rendezvous_timeout_s=3 * DEADLINE_S, bind_address=address)
    rendezvous._LINGER_S = DEADLINE_S
    try:
        un.init(options, store=store, rank=world.rank, size=world.size)
    except un.UnisonoError as error:
        say((type(error), str(error)))


@pytest.mark.parametrize("kind", ["tcp", "file"])
@pytest.mark.parametrize("failing", range(4))
def test_rank_that_fails_in_init_tells_the_others_why(tmp_path: Path, kind: str, failing: int) -> None:
    store = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/other"
    with Job(fail_to_listen, 4, tmp_path, store, failing) as job:
        for rank, (error, text) in enumerate(job.hear_all()):
            assert error is (un.UsageError if rank == failing else un.RendezvousError)
            assert "192.0.2.1" in text
            assert rank == failing or f"rank {failing} gave up: UNISONO_BIND_ADDRESS" in text


def count_mappings_of_meetings(world: un.Communicator, say: Say, store: str) -> None:
    """Count mappings after many rendezvous. Each has a key of its own, which must not stay in memory."""
    for _ in range(2):
        for _ in range(20):
            with un.init(store=store, rank=world.rank, size=world.size) as other:
                other.barrier()
        gc.collect()
        say(len(Path("/proc/self/maps").read_text().splitlines()))


def test_closed_worlds_leave_no_memory_mappings(tmp_path: Path) -> None:
    with Job(count_mappings_of_meetings, 2, tmp_path, f"file://{tmp_path}/other") as job:
        before, after = job.hear_all(), job.hear_all()
    assert max(one - other for one, other in zip(after, before, strict=True)) < 5
