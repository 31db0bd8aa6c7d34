"""Each facility that a system may refuse is taken away from ranks; the rest works as the table says.

The table is `CHECKS` of `unisono doctor`, which docs/environments.md shows.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S
from support.programs import by_variables
from support.ranks import Job, Prefixed
from support.refused_calls import refused

import unisono as un
from unisono.cli.machine.checks import CHECKS, ORDINARY, SHARED, Check

Say = Callable[[Any], None]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"
COUNT = 300_000

# OpenBLAS starts threads when it is loaded, and ends the interpreter if it cannot.
ONE_THREAD = ("env", "OPENBLAS_NUM_THREADS=1")
HIDDEN_PROC = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"')
# The kernel seems not to overcommit memory. There, a page that it cannot give would end a rank by SIGBUS.
_STRICT = 'policy=$(mktemp) && echo 2 > "$policy" && mount --bind "$policy" "$0" && rm "$policy" && exec "$@"'
STRICT = ("unshare", "--mount", "sh", "-c", _STRICT, "/proc/sys/vm/overcommit_memory")
# For each facility, the words before a command that runs without it.
TAKEN_AWAY: dict[str, tuple[Sequence[str], ...]] = {
    "wake-ups": (refused("eventfd", "ENOSYS"),),
    "threads": ([*ONE_THREAD, *refused("threads", "EAGAIN")],),
    "descriptors": (("prlimit", "--nofile=12:12"),),
    "sealed memory": (
        refused("memfd_create", "ENOSYS"),
        refused("memfd_create", "EPERM"),
        ("prlimit", "--fsize=65536:65536"),
        (*STRICT, *refused("fallocate", "ENOSPC")),
    ),
    "Unix sockets": (refused("unix_sockets", "EAFNOSUPPORT"), refused("names_of_unix_sockets", "EACCES")),
    "process watching": (refused("pidfd_open", "ENOSYS"), refused("pidfd_open", "EPERM")),
    "single copies": (refused("process_vm_readv", "EPERM"),),
    "light fences": (refused("membarrier", "ENOSYS"),),
    "facts of the kernel": ((*HIDDEN_PROC, "/proc/sys/kernel/random"), (*HIDDEN_PROC, "/proc")),
    "cache folder": (("env", "-u", "XDG_CACHE_HOME", "HOME=/dev/null"),),
}
# A process that imports numpy and meets other ranks on this machine cannot do without these facilities.
ALWAYS_THERE = {"native core", "TCP loopback"}
CASES = [(name, words) for name, ways in TAKEN_AWAY.items() for words in ways]
IDS = [f"{name}: {' '.join(words[-2:])}" for name, words in CASES]


def check_of(name: str) -> Check:
    return next(check for check in CHECKS if check.subject == name)


def runnable(words: Sequence[str]) -> Sequence[str]:
    """Return the words, or skip the test if they cannot run a command here."""
    try:
        completed = subprocess.run([*words, "true"], capture_output=True, timeout=DEADLINE_S, check=False)
    except OSError as error:
        pytest.skip(f"not allowed here: {' '.join(words)}: {error}")
    if completed.returncode:
        pytest.skip(f"not allowed here: {' '.join(words)}: {completed.stderr.decode()}")
    return words


def use_everything(world: un.Communicator, say: Say) -> None:
    x = np.arange(COUNT, dtype=np.float32) % 1000
    for count in (1, 1000, COUNT):
        total = world.allreduce(x[:count] + world.rank)
        assert (total == 2 * x[:count] + 1).all()
    other, out = 1 - world.rank, np.empty(COUNT, np.float32)
    world.sendrecv(x + world.rank, other, out, other)
    assert (out == x + other).all()
    assert world.allreduce(np.ones(3), wait=False).wait().tolist() == [2, 2, 2]
    mapped = un.empty(COUNT, "float32")
    assert not mapped.any()
    assert mapped.ctypes.data % mmap.PAGESIZE == 0
    mapped[:] = x
    assert (world.allreduce(mapped, out=mapped) == 2 * x).all()
    memory = ORDINARY if isinstance(mapped.base, mmap.mmap) else SHARED
    with un.GradientReducer(world) as reducer:
        reducer.ready("weight", np.full(COUNT, float(world.rank), np.float32))
        assert (reducer.finish()["weight"] == 0.5).all()
    messages = {traffic.transport for traffic in world.stats().values()}
    say((messages, memory))


@pytest.mark.parametrize(("name", "words"), CASES, ids=IDS)
def test_ranks_without_a_system_facility_behave_as_documented(tmp_path: Path, name: str, words: Sequence[str]) -> None:
    check, transports = check_of(name), {SHARED: "shm", "TCP": "tcp"}
    if check.required:
        program, before = "import unisono as un; un.init()", [runnable(words)] * 2
        for process in by_variables(program, before=before, folder=tmp_path, UNISONO_RENDEZVOUS_TIMEOUT_S="3"):
            assert process.returncode == 1, process
            assert process.stderr.splitlines()[-1].startswith("unisono.errors."), process.stderr
        return
    with Job(use_everything, Prefixed([runnable(words)] * 2), tmp_path, timeout_s=DEADLINE_S) as job:
        assert job.hear_all() == [({transports[check.messages]}, check.memory)] * 2


def test_ranks_share_memory_where_the_system_does_not_overcommit(tmp_path: Path) -> None:
    with Job(use_everything, Prefixed([runnable(STRICT)] * 2), tmp_path, timeout_s=DEADLINE_S) as job:
        assert job.hear_all() == [({"shm"}, SHARED)] * 2


@pytest.mark.parametrize("name", ["sealed memory", "Unix sockets"])
def test_rank_without_shared_memory_warns_once_and_is_reached_by_tcp(tmp_path: Path, name: str) -> None:
    words = runnable(TAKEN_AWAY[name][0])
    program = (
        "import numpy as np, unisono as un\n"
        "with un.init() as world:\n"
        "    for _ in range(3):\n"
        "        assert (world.allreduce(un.empty(100_000, 'float32') + 1) == 2).all()\n"
    )
    first, second = by_variables(program, before=[(), words], folder=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    assert second.returncode == 0, second.stderr
    warnings = second.stderr.splitlines()
    assert len(warnings) == (2 if check_of(name).memory == ORDINARY else 1), warnings
    assert "rank 1 shares memory with no other rank, and uses TCP instead" in warnings[0]


@pytest.mark.parametrize(("name", "words"), CASES, ids=IDS)
def test_doctor_names_the_missing_facility_and_its_consequence(name: str, words: Sequence[str]) -> None:
    program = (
        "import dataclasses, json; from unisono.cli.machine.checks import run_checks\n"
        "print(json.dumps([dataclasses.asdict(check) for check in run_checks()]))"
    )
    completed = subprocess.run(
        [*runnable(words), sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    lacking = {finding["subject"]: finding for finding in json.loads(completed.stdout) if not finding["usable"]}
    assert name in lacking, lacking
    assert lacking[name]["detail"].endswith(check_of(name).consequence)
    assert lacking[name]["required"] == check_of(name).required


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="make torch installs what this test needs")
def test_fsdp_takes_ordinary_memory_without_memfds() -> None:
    program = (
        "import torch; from unisono.frameworks.torch.training.fsdp import AllGather\n"
        "tensor = AllGather().allocate((100_000,), dtype=torch.float32, device=torch.device('cpu'))\n"
        "tensor.fill_(2); print(float(tensor.sum()))"
    )
    command = [*runnable(refused("memfd_create", "ENOSYS")), sys.executable, "-c", program]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (completed.returncode, completed.stdout) == (0, "200000.0\n"), completed.stderr
    assert "un.empty gives ordinary memory" in completed.stderr


def test_every_checked_facility_is_tested_and_documented() -> None:
    assert {check.subject for check in CHECKS} == {*TAKEN_AWAY, *ALWAYS_THERE}
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    shown = {row[0]: tuple(row[1:]) for row in rows if row[0] != "Without" and len(row) == 4}
    assert shown == {
        check.subject: (check.messages or "nothing", check.memory or "nothing", check.without) for check in CHECKS
    }
