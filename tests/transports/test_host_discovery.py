"""Ranks find out by trying whether they share memory.

Tests put them into namespaces, under other users, and without the system calls or files that they need.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S
from support.ports import free_port
from support.programs import completed
from support.ranks import Job, Prefixed
from support.refused_calls import refused

import unisono as un
from unisono.foundation.deadlines import Deadline
from unisono.transports.host.host_discovery import HostDiscovery, Surroundings
from unisono.transports.links.handshake import NO_RANK, DialerHandshake, Hello, Purpose
from unisono.transports.links.handshake_io import greet

Say = Callable[[Any], None]

KEY, JOB = bytes(range(32)), b"j" * 16
HERE = Surroundings("machine", "node", 1, 2, 3)


def works(*prefix: str) -> bool:
    """Return whether a command runs after the words `prefix`, and can read the files that ranks need."""
    command = [*prefix, sys.executable, "-c", "import unisono.transports.host.host_discovery"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False).returncode == 0
    return False


def needs(*prefix: str) -> Sequence[str]:
    """Return `prefix`, or skip the test if commands do not run after it."""
    if not works(*prefix):
        pytest.skip(f"not allowed here: {' '.join(prefix)}")
    return prefix


def localities(size: int, job: bytes = JOB, meeting: int = 0) -> list[HostDiscovery]:
    return [HostDiscovery(KEY, job, 0, rank, size, meeting, DEADLINE_S) for rank in range(size)]


def close_all(discoveries: Sequence[HostDiscovery]) -> None:
    for discovery in discoveries:
        discovery.close()


# --- the handshake -------------------------------------------------------------------------------------------------


def test_ranks_of_one_job_find_one_host_and_other_jobs_another() -> None:
    ours, theirs = localities(3), localities(2, b"k" * 16)
    close_all([*ours, *theirs])
    assert len({our.host_id for our in ours}) == 1
    assert len({discovery.host_id for discovery in (*ours, *theirs)}) == 2
    assert not any(our.surroundings.alone for our in ours)


def test_host_discovery_of_a_second_init_is_separate_from_the_first() -> None:
    first, again = localities(2, b"a" * 16), localities(2, b"a" * 16, meeting=1)
    close_all([*first, *again])
    assert len({discovery.host_id for discovery in first}) == len({discovery.host_id for discovery in again}) == 1
    assert first[0].host_id != again[0].host_id


def test_many_concurrent_ranks_discover_the_same_host() -> None:
    results: list[HostDiscovery] = []
    threads = [
        threading.Thread(
            target=lambda rank=rank: results.append(HostDiscovery(KEY, b"m" * 16, 0, rank, 32, 0, DEADLINE_S))
        )
        for rank in range(32)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    close_all(results)
    assert len(results) == 32
    assert len({result.host_id for result in results}) == 1


def test_host_discovery_leaves_no_threads_or_descriptors() -> None:
    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    one = HostDiscovery(KEY, JOB, 0, 0, 1, 0, DEADLINE_S)
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == before
    close_all([one, *localities(2, b"n" * 16)])
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == before


@contextlib.contextmanager
def squatted(job: bytes, answer: Callable[[socket.socket], object]) -> Iterator[HostDiscovery]:
    """Bind the socket name of a job's rank 0 to a stranger's socket, which `answer` serves in a thread.

    Yield that rank.
    """
    first = HostDiscovery(KEY, job, 0, 0, 2, 0, DEADLINE_S)
    assert first._serving is not None
    name = first._serving[2].getsockname()
    first.close()
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(name)
        squatter.listen()
        threading.Thread(target=answer, args=(squatter,), daemon=True).start()
        yield first


def test_host_discovery_falls_back_when_a_stranger_holds_its_name(caplog: pytest.LogCaptureFixture) -> None:
    def lie(squatter: socket.socket) -> None:
        theirs, _ = squatter.accept()
        with theirs:
            theirs.recv(1000)
            theirs.sendall(b"\xff" * 122)

    with squatted(b"s" * 16, lie):
        result = HostDiscovery(KEY, b"s" * 16, 0, 1, 2, 0, DEADLINE_S)
    assert "does not hold the key" in result.surroundings.alone
    assert "shares memory with no other rank" in caplog.text


def test_host_discovery_works_when_the_first_rank_closes_early() -> None:
    def go(squatter: socket.socket) -> None:
        theirs, _ = squatter.accept()
        squatter.close()
        theirs.close()

    with squatted(b"g" * 16, go) as first:
        second = HostDiscovery(KEY, b"g" * 16, 0, 1, 2, 0, DEADLINE_S)
    close_all([second])
    assert not second.surroundings.alone
    assert second.host_id != first.host_id


def test_silent_rank_does_not_block_host_discovery() -> None:
    job = b"w" * 16
    first = HostDiscovery(KEY, job, 0, 0, 3, 0, DEADLINE_S)
    assert first._serving is not None
    hello = Hello(job, 0, 2, NO_RANK, Purpose.HOST)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(first._serving[2].getsockname())
        greet(silent, DialerHandshake(KEY, hello), Deadline(DEADLINE_S))
        second = HostDiscovery(KEY, job, 0, 1, 3, 0, DEADLINE_S)
        close_all([first, second])
        assert silent.recv(1) == b""
    assert second.host_id == first.host_id


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (replace(HERE, machine="other", network=9), "another machine"),
        (replace(HERE, network=9, user=4), "another network namespace"),
        (replace(HERE, user=4, users=9), "another user: 4, here 3"),
        (replace(HERE, alone="no descriptors"), "no shared memory there: no descriptors"),
        (replace(HERE, users=9), "another user namespace"),
        (HERE, "its sockets cannot be reached"),
    ],
)
def test_host_discovery_gives_a_reason_for_ranks_that_are_apart(there: Surroundings, why: str) -> None:
    assert HERE.apart_from(there) == why


# --- whole jobs ----------------------------------------------------------------------------------------------------


def tell(world: un.Communicator, say: Say) -> None:
    total = world.allreduce(np.arange(5000, dtype=np.int64) * (world.rank + 1), algorithm="ring")
    assert (total == np.arange(5000) * (world.size * (world.size + 1) // 2)).all()
    gathered = world.allgather(np.array([world.rank]))
    assert gathered.ravel().tolist() == list(range(world.size))
    ways = {peer: traffic.transport for peer, traffic in world.stats().items()}
    say((world.hosts, ways, str(world.explain("allreduce", 8))))
    world.barrier()


def check(prefixes: Sequence[Sequence[str]], hosts: Any, reason: str, directory: Path) -> None:
    """Run a job of three ranks and check their hosts, and the `reason` that they report if rank 2 has another host."""
    with Job(tell, Prefixed(prefixes), directory) as job:
        for rank, (result, ways, explanation) in enumerate(job.hear_all()):
            assert result == hosts
            together = next(host for host in hosts if rank in host)
            assert ways == {peer: "shm" if peer in together else "tcp" for peer in ways}
            assert ways
            if hosts != ((0, 1, 2),):
                other = "rank 2: " if rank != 2 else "ranks 0, 1: "
                assert f"{other}tcp ({reason}" in explanation


APART = ((0, 1), (2,))


def test_rank_in_an_unmapped_user_namespace_uses_tcp(tmp_path: Path) -> None:
    prefix = needs("unshare", "--user")
    check([[], [], prefix], APART, "another user: ", tmp_path)


def test_ranks_of_other_pid_and_mount_namespaces_share_memory(tmp_path: Path) -> None:
    prefix = needs("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    check([prefix, [], prefix], ((0, 1, 2),), "", tmp_path)


def test_ranks_share_memory_with_dev_shm_full_or_read_only(tmp_path: Path) -> None:
    needs("unshare", "--mount")
    script = 'mount -t tmpfs -o size=4k none /dev/shm && {} && exec "$@"'
    full = ["unshare", "--mount", "sh", "-c", script.format("! head -c 9000 /dev/zero > /dev/shm/x 2> /dev/null"), "-"]
    sealed = ["unshare", "--mount", "sh", "-c", script.format("mount -o remount,ro /dev/shm"), "-"]
    check([needs(*full), needs(*sealed), []], ((0, 1, 2),), "", tmp_path)


def test_ranks_share_memory_despite_different_boot_ids(tmp_path: Path) -> None:
    """A container may show another boot id than its host. Ranks do not use it to find their host."""
    fake = tmp_path / "boot_id"
    fake.write_text("00000000-0000-0000-0000-000000000000\n")
    script = f'mount --bind {fake} /proc/sys/kernel/random/boot_id && exec "$@"'
    check([[], [], needs("unshare", "--mount", "sh", "-c", script, "-")], ((0, 1, 2),), "", tmp_path)


def test_rank_that_cannot_make_shared_memory_uses_tcp(tmp_path: Path) -> None:
    """Some sandboxes refuse the system call `memfd_create`."""
    prefix = needs(*refused("memfd_create", "ENOSYS"))
    check([[], [], prefix], APART, "no shared memory ", tmp_path)


def test_ranks_of_different_users_use_tcp(tmp_path: Path) -> None:
    # The ranks meet at a TCP store, because a folder can be used by its owner alone.
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("to be another user needs root and setpriv")
    # lets the other user read root's folders
    reading = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    prefix = needs("setpriv", "--reuid=23456", "--regid=23456", "--clear-groups", *reading)
    program = (
        "import sys, numpy, unisono as un\n"
        "rank = int(sys.argv[1])\n"
        f"world = un.init(store='tcp://127.0.0.1:{free_port()}', rank=rank, size=2)\n"
        "world.allreduce(numpy.ones(3))\n"
        "print(world.stats()[1 - rank].transport, world.explain('barrier', 0), flush=True)\n"
        "world.barrier()\n"
    )
    commands = [[*words, sys.executable, "-c", program, str(rank)] for rank, words in enumerate([[], prefix])]
    ranks = completed(commands)
    assert [rank.stdout.startswith("tcp ") for rank in ranks] == [True, True], ranks
    assert "rank 1: tcp (another user: 23456, here 0)" in ranks[0].stdout
    assert "rank 0: tcp (another user: 0, here 23456)" in ranks[1].stdout
