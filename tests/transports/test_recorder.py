"""The flight recorder: its records of calls and messages, their dumps, and dumps that fail."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.transports.recorder import dumps, memory
from unisono.transports.recorder.dumps import Dump
from unisono.transports.recorder.live_ranks import live_ranks
from unisono.transports.recorder.memory import Snapshot

X = np.ones(8, np.float32)


def of_rank(world: un.Communicator, folder: Path) -> Dump:
    """Return the dump of a rank, read from the file that it has written."""
    return dumps.read(world.dump(folder))


def last(dump: Dump) -> memory.RecordedCall:
    return dump.snapshot.calls[-1]


def test_wrong_arguments_write_no_dump(tmp_path: Path) -> None:
    with pytest.raises(un.UsageError):
        un.init(un.Options(dump=str(tmp_path)), store="pigeon://loft", rank=0, size=2)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_meets_nobody_writes_a_dump_unless_the_disk_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, is_written in (("dumps", True), ("file/dumps", False)):
        options = un.Options(dump=str(tmp_path / folder), rendezvous_timeout_s=0.1)
        with pytest.raises(un.RendezvousError) as caught:
            un.init(options, store=f"file://{tmp_path}/store", rank=0, size=2)
        assert (caught.value.dump is not None) == is_written
    (path,) = (tmp_path / "dumps").iterdir()
    dump = dumps.read(path)
    assert dump.error is not None
    assert (dump.error["type"], dump.error["text"]) == ("RendezvousError", "rank 1 of 2 did not arrive within 0.1 s")
    assert dump.stack["MainThread"]


@pytest.fixture
def world() -> un.Communicator:
    with un.init(un.Options()) as world:
        yield world


def test_a_collective_is_recorded_with_its_facts(world: un.Communicator, tmp_path: Path) -> None:
    world.barrier()
    world.allreduce(np.ones((2, 3)), op="max", algorithm="ring")
    call = last(of_rank(world, tmp_path))
    assert (call.text, call.state, call.sequence) == ("allreduce(float64[2,3], op=max, algorithm=ring)", "done", 1)
    facts = {"collective": "allreduce", "dtype": "float64", "op": "max", "algorithm": "ring", "root": None}
    assert facts.items() <= call.facts.items()
    assert call.facts["elements"] == [6, 6]
    assert call.nbytes == 48
    assert not call.is_message
    assert call.site.startswith(__file__)
    assert 0 < call.called_ns <= call.begun_ns <= call.ended_ns <= time.monotonic_ns()


def test_calls_without_a_python_frame_are_recorded(world: un.Communicator, tmp_path: Path) -> None:
    plan = world.plan("allreduce", X, out=X.copy())
    for _ in range(3):
        world.allreduce(X)  # the second call and later ones run in the native call cache
        plan()
    calls = of_rank(world, tmp_path).snapshot.calls
    assert [call.text for call in calls] == ["allreduce(float32[8], op=sum)"] * 6
    assert [call.sequence for call in calls] == list(range(6))


@pytest.mark.parametrize("depth", [0, 100])
def test_only_the_last_calls_are_kept(depth: int, tmp_path: Path) -> None:
    with un.init(un.Options(recorded_calls=depth)) as world:
        for _ in range(150):
            world.allreduce(X)
        snapshot = of_rank(world, tmp_path).snapshot
    assert snapshot.made == 150
    assert [call.number for call in snapshot.calls] == list(range(150 - max(depth, 64), 150))


def test_texts_that_were_overwritten_are_unknown_and_never_wrong(world: un.Communicator, tmp_path: Path) -> None:
    for count in range(1, 1001):
        world.allreduce(np.ones(count), op="sum")
    calls = of_rank(world, tmp_path).snapshot.calls
    assert len(calls) == 1000
    assert all(call.text in (f"allreduce(float64[{call.number + 1}], op=sum)", "?") for call in calls)
    assert [call.text for call in calls[-400:]] == [f"allreduce(float64[{n}], op=sum)" for n in range(601, 1001)]


def messages(world: un.Communicator, folder: str) -> Snapshot:
    pair = world.subgroup([0, 1]) if world.rank < 2 else None
    if pair is not None:
        work = pair.recv(X.copy(), 1 - pair.rank, tag=7, wait=False)
        pair.send(X, 1 - pair.rank, tag=7)
        work.wait()
    world.barrier()
    return of_rank(world, Path(folder)).snapshot


def test_messages_and_communicators_are_recorded(tmp_path: Path) -> None:
    first, second, third = un.launch(messages, 3, str(tmp_path))
    for rank, snapshot in enumerate((first, second)):
        results = [call for call in snapshot.calls if call.is_message]
        texts = {f"recv(source={1 - rank}, tag=7)", f"send(dest={1 - rank}, tag=7)"}
        assert {call.text for call in results} == texts
        assert {(call.peer, call.nbytes, call.state) for call in results} == {(1 - rank, 32, "done")}
        assert all(call.facts == {"dtype": "float32", "count": 8} for call in results)
        assert set(snapshot.communicators.values()) == {(0, 1)}
        (traffic,) = [link for link in snapshot.traffic if link.peer == 1 - rank and link.sent_nbytes == 32]
        assert traffic.transport == "shm"
        assert traffic.sent_messages == 1
    assert not third.communicators
    assert [call.text for call in third.calls] == ["barrier()"]
    assert len({snapshot.about["job"] for snapshot in (first, second, third)}) == 1


def wait_for_late_rank(world: un.Communicator) -> tuple[int | None, float]:
    world.allreduce(X)  # opens the channels
    if world.rank == 1:
        time.sleep(0.3)
    world.allreduce(X)
    (call,) = (call for call in world._executor.session.recorder.snapshot().calls if call.sequence == 1)
    return call.waits_for, world.stats()[1 - world.rank].waited_s


def test_a_call_that_waits_says_for_whom_and_traffic_says_how_long() -> None:
    (waits_for, waited_s), _ = un.launch(wait_for_late_rank, 2)
    assert waits_for == 1
    assert waited_s > 0.1


# --- the memory as others see it -----------------------------------------------------------------------------------

PROGRAM = """
import sys, time, numpy as np, unisono as un
world = un.init()
world.allreduce(np.ones(8, np.float32))
print("ready", flush=True)
sys.stdin.read()
"""


def published(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    return [f"{folder}/{name}" for name in os.listdir(folder) if memory.NAME in os.readlink(f"{folder}/{name}")]


def test_another_process_can_read_the_memory_and_not_write_it() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        try:
            assert rank.stdout.readline() == b"ready\n"
            (path,) = published(rank.pid)
            snapshot = memory.parse(Path(path).read_bytes())
            assert snapshot.pid == rank.pid
            assert snapshot.calls[-1].text == "allreduce(float32[8], op=sum)"
            with pytest.raises(PermissionError), open(path, "r+b", buffering=0) as file:
                file.write(b"x")
        finally:
            rank.stdin.close()
            assert rank.wait(DEADLINE_S) == 0


@pytest.mark.parametrize(
    ("broken", "says"),
    [(b"", "not the memory"), (b"x" * 200, "not the memory"), (b"\0UNISONO\x09" + bytes(200), "version 9")],
)
def test_other_memory_is_refused(broken: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        memory.parse(broken)


def memory_of(about: dict[str, object], communicators: int = 0) -> bytes:
    """Return the memory of a rank with a description, and communicators of 65,535 ranks each."""
    text, at = json.dumps(about).encode(), memory._HEADER.size
    rows = b"".join(memory._COMMUNICATOR.pack(number, b"ranks 0-65534") for number in range(communicators))
    after, end = at + len(text), at + len(text) + len(rows)
    areas = (at, len(text), after, communicators, end, 0, end, memory._RECORD.size, 0, end, 0, communicators)
    return memory._HEADER.pack(memory.MAGIC, memory.VERSION, 9, 0, 2, *areas, 0, 0) + text + rows


@pytest.mark.parametrize(
    ("about", "communicators", "nbytes", "programs"),
    [
        ({"program": ["\x1b[2J\x1b[31mred\x07"]}, 0, None, [[r"\x1b[2J\x1b[31mred\x07"]]),
        ({"program": ["sparse"]}, 0, 1 << 36, []),
        ({"program": ["crowded"]}, 20_000, None, []),
        ({"program": ["x" * (1 << 21)]}, 0, None, []),
    ],
    ids=["escapes", "64 GiB", "20,000 communicators", "a long description"],
)
def test_the_memory_of_a_hostile_process_is_bounded_and_printable(
    about: dict[str, object], communicators: int, nbytes: int | None, programs: list[list[str]]
) -> None:
    descriptor = os.memfd_create(memory.NAME)
    try:
        os.write(descriptor, memory_of(about, communicators))
        if nbytes is not None:
            os.ftruncate(descriptor, nbytes)
        ranks = [rank for rank in live_ranks(pids=[os.getpid()]) if rank.snapshot.pid == 9]
        assert [rank.snapshot.about["program"] for rank in ranks] == programs
    finally:
        os.close(descriptor)


# --- dumps -----------------------------------------------------------------------------------------------------------


def test_a_dump_is_read_as_it_was_written(world: un.Communicator, tmp_path: Path) -> None:
    world.allreduce(X)
    path = world.dump(tmp_path / "made")
    dump = dumps.read(path)
    dumps.write(dump, tmp_path, "again")
    (again,) = tmp_path.glob("unisono-again-*.json")
    assert dumps.read(again).snapshot == dump.snapshot
    assert dump.reason == "request"
    assert dump.stack["MainThread"][-1].startswith(__file__)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "only a part of one"),
        ("[1]", "no dump of Unisono"),
        ('{"format": "unisono-dump", "version": 2}', "version 2"),
        ('{"format": "unisono-dump", "version": 1, "rank": 0}', "not a whole dump"),
    ],
)
def test_a_file_that_is_no_dump_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=says):
        dumps.read(tmp_path / "x.json")


def test_a_full_disk_leaves_no_half_dump(
    world: un.Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        world.dump(tmp_path)
    assert not list(tmp_path.iterdir())


def fail(world: un.Communicator) -> None:
    world.barrier()
    if world.rank == 1:
        world.barrier()
    else:
        world.allreduce(X)


def test_every_rank_dumps_a_failure_and_its_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(un.MismatchError) as raised:
        un.launch(fail, 2, options=un.Options(dump=str(tmp_path)))
    written = [dumps.read(path) for path in sorted(tmp_path.iterdir())]
    assert [dump.snapshot.rank for dump in written] == [0, 1]
    assert all(dump.error is not None and dump.error["type"] == "MismatchError" for dump in written)
    assert raised.value.dump is not None
    assert f"dump: {raised.value.dump}" in str(raised.value)


def test_an_error_without_a_dump_shows_the_calls_before(tmp_path: Path) -> None:
    with pytest.raises(un.MismatchError, match=r"calls before: #0 barrier\(\) at ") as raised:
        un.launch(fail, 2)
    assert raised.value.dump is None


def test_a_directory_that_cannot_be_written_does_not_hide_the_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(un.MismatchError):
        un.launch(fail, 2, options=un.Options(dump=str(tmp_path / "file")))


# --- SIGUSR1 ---------------------------------------------------------------------------------------------------------

LOOPING = """
import signal, sys, numpy as np, unisono as un
if "own" in sys.argv: signal.signal(signal.SIGUSR1, lambda *_: print("own", flush=True))
world = un.init()
world.allreduce(np.ones(8, np.float32))
if "close" in sys.argv: world.close()
print("ready", flush=True)
while True: pass
"""


@contextlib.contextmanager
def looping(tmp_path: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a rank that is in an endless loop and has received SIGUSR1; kill it at the end."""
    environ = {**os.environ, "UNISONO_DUMP": str(tmp_path)}
    command = [sys.executable, "-c", LOOPING, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ) as rank:
        try:
            assert rank.stdout is not None
            assert rank.stdout.readline() == b"ready\n"
            rank.send_signal(signal.SIGUSR1)
            yield rank
        finally:
            rank.kill()


def test_a_rank_in_an_endless_loop_dumps_on_sigusr1(tmp_path: Path) -> None:
    with looping(tmp_path):
        deadline = time.monotonic() + DEADLINE_S
        while not (result := list(tmp_path.glob("*.json"))) and time.monotonic() < deadline:
            time.sleep(0.02)
        values = json.loads(result[0].read_text())
        assert values["reason"] == "SIGUSR1"
        assert values["stack"]["MainThread"][-1] == "<string>:8 in <module>"


# The thread that answers the signal does nothing before the signal comes.
SOON = """
import os, signal, unisono as un
from unisono.transports.links.event_loop import EventLoop
EventLoop.submit = lambda *_: None
world = un.init()
os.kill(os.getpid(), signal.SIGUSR1)
os._exit(7)
"""


def test_sigusr1_ends_no_rank_that_gets_it_right_after_init() -> None:
    assert subprocess.run([sys.executable, "-c", SOON], timeout=DEADLINE_S, check=False).returncode == 7


def test_sigusr1_stays_with_a_program_that_handles_it(tmp_path: Path) -> None:
    with looping(tmp_path, "own") as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"own\n"
        assert not list(tmp_path.iterdir())


def test_sigusr1_ends_a_program_that_has_closed_its_job(tmp_path: Path) -> None:
    with looping(tmp_path, "close") as rank:
        assert rank.wait(DEADLINE_S) == -signal.SIGUSR1


# --- slow calls ------------------------------------------------------------------------------------------------------


def come_late(world: un.Communicator, delay_s: float) -> None:
    world.barrier()
    if world.rank == 1:
        time.sleep(delay_s)
    world.allreduce(X)


@pytest.mark.parametrize(("limit_s", "expected"), [(0.3, 1), (float("inf"), 0)])
def test_the_first_waiting_rank_logs_a_slow_call_once(limit_s: float, expected: int) -> None:
    lines: list[tuple[int, str]] = []
    options = un.Options(warn_after_s=limit_s, timeout_s=DEADLINE_S)
    un.launch(come_late, 3, 1.5, options=options, on_output=lambda rank, _, line: lines.append((rank, line)))
    logged = [(rank, line) for rank, line in lines if "has waited" in line]
    assert [rank for rank, _ in logged] == [0] * expected
    for _, line in logged:
        assert "rank 0 has waited 0.3 s in call #1 allreduce(float32[8], op=sum) at " in line
        assert ": rank 1 has not called it (last: barrier() at " in line


def receive_late(world: un.Communicator, timeout_s: float) -> None:
    world.barrier()
    if world.rank == 1:
        time.sleep(1.5)
        world.send(X, 0)
    else:
        world.recv(X.copy(), 1, timeout_s=timeout_s)


def test_a_slow_message_is_logged_with_what_the_other_rank_does() -> None:
    lines: list[str] = []
    options = un.Options(warn_after_s=0.3, timeout_s=DEADLINE_S)
    un.launch(receive_late, 2, DEADLINE_S, options=options, on_output=lambda _rank, _stream, line: lines.append(line))
    (logged,) = [line for line in lines if "has waited" in line]
    assert "rank 0 has waited 0.3 s: rank 1 is in no call (last: barrier() at " in logged


def test_a_message_without_a_time_limit_is_never_slow() -> None:
    lines: list[str] = []
    options = un.Options(warn_after_s=0.3, timeout_s=DEADLINE_S)
    un.launch(receive_late, 2, float("inf"), options=options, on_output=lambda _rank, _stream, line: lines.append(line))
    assert not [line for line in lines if "has waited" in line]
