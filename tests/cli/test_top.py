"""`unisono top` beside real jobs: one that runs, one that hangs, and one with a stopped rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import unisono
from support.deadlines import DEADLINE_S

from unisono.cli.commands import top
from unisono.cli.main import main
from unisono.transports.recorder.live_ranks import live_ranks

PROGRAM = """
import signal, sys, time
import numpy as np, unisono as un
if "own signal" in sys.argv: signal.signal(signal.SIGUSR2, signal.SIG_IGN)
world = un.init()
x = np.ones(1 << 16, np.float32)
world.barrier()
if "hangs" in sys.argv and world.rank == 1:
    while True: pass
while True:
    world.allreduce(x)
    if world.rank == 1: time.sleep(0.005)
"""
NOBODY = 65534
Ranks = list[dict[str, Any]]


@contextlib.contextmanager
def job(folder: Path, *arguments: str) -> Iterator[int]:
    """Run the program on two ranks; yield the process id of the launcher."""
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", "program.py", *arguments]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) as launcher:
        try:
            yield launcher.pid
        finally:
            launcher.terminate()
            launcher.wait(DEADLINE_S)


def ranks_of(launcher: int, folder: Path) -> Ranks:
    """Return what `unisono top --json` says about the ranks that a launcher has started."""
    shown = unisono("top", "--json", folder=folder)
    assert (shown.returncode, shown.stderr) == (0, "")
    return [rank for rank in json.loads(shown.stdout) if _parent(rank["pid"]) == launcher]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def eventually(launcher: int, folder: Path, condition: Callable[[Ranks], bool]) -> Ranks:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        ranks = ranks_of(launcher, folder)
        if condition(ranks):
            return ranks
    raise AssertionError(ranks)


def jobs_that_another_user_sees() -> str:
    """Return the jobs of the ranks that a process of the user nobody can read, separated by spaces."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(sender, " ".join(rank.job for rank in live_ranks()).encode() or b" ")
        os._exit(0)
    os.close(sender)
    with open(receiver, "rb") as answer:
        jobs = answer.read().decode()
    os.waitpid(child, 0)
    assert jobs, "the child has failed"
    return jobs.strip()


def test_a_running_job_is_shown_with_its_rates(tmp_path: Path) -> None:
    with job(tmp_path) as launcher:
        first, second = eventually(launcher, tmp_path, lambda ranks: len(ranks) == 2 and ranks[0]["calls_per_s"])
        assert [first["rank"], second["rank"], first["size"]] == [0, 1, 2]
        assert first["program"] == ["program.py"]
        assert first["bytes_per_s"]["shm"] > 0
        assert 0 <= first["waiting"] <= 1
        if os.geteuid() == 0:
            assert jobs_that_another_user_sees() == ""
        table = unisono("top", "--once", first["job"], folder=tmp_path).stdout
        assert f"job {first['job']}: 2 ranks; program.py" in table


def test_a_hanging_job_shows_who_waits_for_whom_and_where_each_rank_is(tmp_path: Path) -> None:
    with job(tmp_path, "hangs") as launcher:
        waits = lambda ranks: len(ranks) == 2 and ranks[0]["waits_for"] == 1  # noqa: E731
        first, second = eventually(launcher, tmp_path, waits)
        assert first["call"] == "allreduce(float32[65536], op=sum)"
        assert first["site"].endswith("program.py:11")
        assert second["call"] is None
        shown = unisono("top", "--stacks", "--json", first["job"], folder=tmp_path)
        stacks = [rank["stack"] for rank in json.loads(shown.stdout)]
        assert 'program.py", line 11 in <module>' in stacks[0]
        assert 'program.py", line 9 in <module>' in stacks[1]
        assert "event_loop.py" not in stacks[1]
        if os.geteuid() == 0:
            apart = ["unshare", "--pid", "--fork", sys.executable, "-m", "unisono", "top", "--stacks", first["job"]]
            seen = subprocess.run(apart, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
            assert seen.count("no stack: the process is in another pid namespace") == 2
        os.kill(second["pid"], signal.SIGSTOP)
        eventually(launcher, tmp_path, lambda ranks: len(ranks) == 2 and ranks[1]["stopped"])
        assert "stopped" in unisono("top", "--once", first["job"], folder=tmp_path).stdout
        os.kill(second["pid"], signal.SIGCONT)


def test_a_program_that_uses_sigusr2_gives_no_stacks_and_runs_on(tmp_path: Path) -> None:
    with job(tmp_path, "own signal") as launcher:
        first, _ = eventually(launcher, tmp_path, lambda ranks: len(ranks) == 2 and ranks[0]["calls_per_s"])
        shown = unisono("top", "--stacks", "--json", first["job"], folder=tmp_path)
        assert all("handles SIGUSR2 itself" in rank["stack"] for rank in json.loads(shown.stdout))
        eventually(launcher, tmp_path, lambda ranks: len(ranks) == 2 and ranks[0]["calls"] > first["calls"])


def test_no_job_is_one_sentence(tmp_path: Path) -> None:
    shown = unisono("top", "--once", "no such job", folder=tmp_path)
    assert shown.returncode == 0
    assert shown.stdout.startswith("no job of this user runs on this host")
    assert unisono("top", "--json", "no such job", folder=tmp_path).stdout == "[]\n"


def test_ctrl_c_ends_the_live_view(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pauses = iter([0.5, 0.5])

    def pause(seconds: float) -> None:
        assert seconds == 0.5
        if next(pauses, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", pause)
    assert main(["top", "no such job", "--interval", "0.5"]) == 0
    assert "no job of this user runs on this host" in capsys.readouterr().out


@pytest.mark.parametrize("option", [("--interval", "0"), ("--nonsense",)])
def test_wrong_options_are_refused(option: tuple[str, ...], tmp_path: Path) -> None:
    assert unisono("top", *option, folder=tmp_path).returncode == 2
