"""Transports of installed packages in whole jobs, such as the tutorial's, and the errors of transports that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S
from support.ports import free_port
from support.ranks import Job

import unisono as un
from unisono.cli.commands.bench import _libraries as libraries
from unisono.cli.machine.checks import third_party
from unisono.postmortem.analysis import analyse
from unisono.postmortem.loading import load

Say = Callable[[Any], None]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "socket_transport.py"
BROKEN = """
from socket_transport import open_sockets
import time

def raises_on_one(bootstrap):
    bootstrap.exchange(b"")
    if bootstrap.rank == 1:
        raise OSError("the device is on fire")
    return open_sockets(bootstrap)

def returns_nothing(bootstrap):
    return None

def never(bootstrap):
    if bootstrap.rank == 1:
        time.sleep(1000)
    return open_sockets(bootstrap)
"""
NAMES = {
    "sockets": "socket_transport:open_sockets",
    "raises": "broken:raises_on_one",
    "nothing": "broken:returns_nothing",
    "never": "broken:never",
    "absent": "no_such_module:open",
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the tutorial's transport and broken ones where this process and its children find packages."""
    place = tmp_path / "site"
    folder = place / "sockets-1.dist-info"
    folder.mkdir(parents=True)
    (place / "socket_transport.py").write_text(EXAMPLE.read_text())
    (place / "broken.py").write_text(BROKEN)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sockets\nVersion: 1\n")
    points = "".join(f"{name} = {value}\n" for name, value in NAMES.items())
    (folder / "entry_points.txt").write_text(f"[unisono.transports]\n{points}")
    monkeypatch.syspath_prepend(str(place))
    return place


def use_everything(world: un.Communicator, say: Say) -> None:
    summary = un.testing.check_collectives(world, cases=60, seed=3)
    half = world.split(world.rank % 2)
    assert half is not None
    assert half.allreduce(np.array(1)).item() == half.size
    work = world.allreduce(np.full(1000, world.rank), wait=False)
    assert (work.wait() == world.size * (world.size - 1) // 2).all()
    with world.group():
        works = [world.allreduce(np.full(n, 1.0), wait=False) for n in (1, 10)]
    assert [work.wait().sum() for work in works] == [world.size, 10 * world.size]
    before = world.stats()
    world.barrier()
    world.allreduce(np.zeros(1200, np.int64), algorithm="ring")
    sent = {peer: traffic.sent_nbytes - before[peer].sent_nbytes for peer, traffic in world.stats().items()}
    say(
        (
            sum(summary.cases.values()),
            {t.transport for t in world.stats().values()},
            sent,
            str(world.explain("barrier", 0)),
        )
    )
    world.barrier()


@pytest.mark.usefixtures("installed")
def test_all_calls_work_over_an_installed_transport(tmp_path: Path) -> None:
    with Job(use_everything, 3, tmp_path, transports="sockets") as job:
        for rank, (cases, ways, sent, explanation) in enumerate(job.hear_all()):
            assert (cases, ways) == (60, {"sockets"})
            # The messages and bytes of a ring allreduce of 9600 bytes. Each message of a barrier has one byte.
            assert 12_800 <= sent[(rank + 1) % 3] < 12_900
            assert sent[(rank + 2) % 3] < 100
            assert ": sockets" in explanation


@pytest.mark.usefixtures("installed")
def test_bench_accepts_the_name_of_an_installed_transport() -> None:
    (library,) = libraries("sockets", "")
    assert (library.name, library.variables) == ("unisono-sockets", {"UNISONO_TRANSPORTS": "sockets"})


def reduce_until_an_error(world: un.Communicator, say: Say) -> None:
    world.barrier()
    say("ready")
    try:
        while True:
            world.allreduce(np.ones(10_000), timeout_s=DEADLINE_S)
    except un.UnisonoError as error:
        say((type(error).__name__, str(error)))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_end_of_a_rank_on_a_plugin_transport_is_an_error_on_others(number: int, tmp_path: Path) -> None:
    with Job(reduce_until_an_error, 3, tmp_path, transports="sockets") as job:
        job.hear_all()
        job.signal(1, number)
        for kind, text in job.hear_all(but=1):
            # An interrupted rank aborts its call, or has departed already.
            assert kind == "PeerLostError" or (kind, number) == ("AbortedError", signal.SIGINT), text
            assert "rank 1" in text


def disagree(world: un.Communicator, say: Say) -> None:
    try:
        world.barrier()  # all ranks have left init(), which would raise the error
        world.allreduce(np.ones(4, np.int32 if world.rank == 2 else np.int64), timeout_s=DEADLINE_S)
        world.barrier()
        say(("", "no error"))
    except un.UnisonoError as error:
        say((type(error).__name__, str(error)))


@pytest.mark.usefixtures("installed")
def test_mismatch_on_a_plugin_transport_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    with Job(disagree, 3, tmp_path, transports="sockets", dump=str(tmp_path / "dumps")) as job:
        for kind, text in job.hear_all():
            assert kind == "MismatchError", text
            assert "int32[4]" in text
            assert "int64[4]" in text
    finding, *_ = analyse(load([tmp_path / "dumps"])).findings
    assert (finding.kind, finding.ranks) == ("mismatch", (2,))


def record_calls(world: un.Communicator, say: Say, folder: str) -> None:
    pair = world.subgroup([0, 2]) if world.rank != 1 else None
    world.allreduce(np.ones(4))
    if pair is not None:
        pair.barrier()
    say(json.loads(world.trace(f"{folder}/{world.rank}.json").read_text())["traceEvents"])
    world.barrier()


@pytest.mark.usefixtures("installed")
def test_collectives_on_a_plugin_transport_are_recorded(tmp_path: Path) -> None:
    with Job(record_calls, 3, tmp_path, str(tmp_path), transports="sockets") as job:
        for rank, events in enumerate(job.hear_all()):
            tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
            calls = [event for event in events if event["ph"] == "X" and "args" in event]
            calls = [call for call in calls if tracks[call["tid"]] != "collectives of all ranks"]  # Unisono's own links
            own = [(call["name"], tracks[call["tid"]]) for call in calls]
            pair = [("barrier()", "collectives of ranks 0, 2")] * (rank != 1)
            assert own == [("allreduce(float64[4], op=sum)", "collectives of ranks 0, 1, 2"), *pair]
            assert all(call["args"]["state"] == "done" and call["args"]["site"] for call in calls)


def errors_of(name: str, place: Path, ranks: int = 3, **more: str) -> tuple[int, str]:
    """Return the exit code of a job with this transport, and the text of its standard error."""
    program = "import unisono as un, numpy as np; un.init().allreduce(np.ones(3))"
    command: Sequence[str] = [
        sys.executable,
        "-m",
        "unisono",
        "run",
        "-n",
        str(ranks),
        "--",
        sys.executable,
        "-c",
        program,
    ]
    environ = {**os.environ, "PYTHONPATH": str(place), "UNISONO_TRANSPORTS": name, **more}
    completed = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=environ)
    return completed.returncode, completed.stderr


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("raises", "transport 'raises' cannot be opened: OSError: the device is on fire"),
        ("nothing", "transport 'nothing' cannot be used: its factory returned None, which lacks subgroup"),
        ("absent", "transport 'absent' cannot be imported from 'no_such_module:open': ModuleNotFoundError"),
        ("soccets", "or only one of ucx_core, absent, never, nothing, raises, sockets"),
        ("sockets,tcp", "or only one of ucx_core"),
    ],
)
def test_every_rank_reports_a_transport_that_cannot_be_opened(name: str, what: str, installed: Path) -> None:
    code, output = errors_of(name, installed)
    # the launcher refuses an impossible setting before it starts a rank
    assert code == (1 if name in NAMES else 2), output
    assert what in output


def test_transport_that_one_rank_never_opens_fails_at_the_deadline(installed: Path) -> None:
    code, output = errors_of("never", installed, UNISONO_RENDEZVOUS_TIMEOUT_S="3")
    assert code == 1
    assert "waited" in output or "did not" in output


def open_where_only_rank_0_has_it(world: un.Communicator, say: Say, place: str, port: int) -> None:
    """Rank 0 alone has the option and the package."""
    if world.rank == 0:
        sys.path.insert(0, place)
    options = un.Options(transports="sockets") if world.rank == 0 else un.Options()
    try:
        un.init(options, store=f"tcp://127.0.0.1:{port}", rank=world.rank, size=world.size)
        say(("", ""))
    except un.UnisonoError as error:
        say((type(error).__name__, str(error)))


def test_transport_installed_on_rank_0_only_is_an_error_on_all_ranks(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(installed)])
    with Job(open_where_only_rank_0_has_it, 2, tmp_path, str(installed), free_port()) as job:
        (kind_0, text_0), (kind_1, text_1) = job.hear_all()
    assert (kind_0, kind_1) == ("PeerLostError", "UsageError"), (text_0, text_1)
    assert "transports='sockets' cannot be used" in text_1
    assert "rank 1 has left: UsageError" in text_0


def test_the_doctor_lists_installed_transports(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(installed))
    result = {finding.subject: (finding.usable, finding.detail) for finding in third_party()}
    assert set(result) == set(NAMES)
    assert result["sockets"] == (True, "of socket_transport:open_sockets")
    assert result["absent"] == (False, "ModuleNotFoundError: No module named 'no_such_module'")
