"""Ranks that reach a limit of their machine: every rank gets a typed error, and no rank hangs or crashes."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S
from support.ranks import Job
from support.refused_calls import refuse

import unisono as un
from unisono.collectives.calls.statistics import append_to
from unisono.transports.rendezvous.file_store import FileStore
from unisono.tuning.machine.parameters import PRIORS
from unisono.tuning.measure import calibration_files
from unisono.tuning.measure.measurement_log import Context, Measurement, MeasurementStore
from unisono.tuning.measure.table_files import compile_table

RANKS = 3
COUNT = 300_000
_above: list[bytearray] = []
Say = Callable[[Any], None]
Call = Callable[[un.Communicator, Any], None]


def few_descriptors(spare: int) -> None:
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + spare, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    taken: list[int] = []
    with contextlib.suppress(OSError):  # numbers below the highest may be free
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    for descriptor in taken[len(taken) - spare :]:
        os.close(descriptor)


def little_memory(spare_nbytes: int) -> None:
    """Limit the address space so that no large memory can be mapped, while small objects still have memory.

    The interpreter itself must have memory, because CPython 3.11 otherwise raises a SystemError from `compile`. So this
    function frees blocks below an allocated one. They stay in the heap, and malloc takes small objects from there.
    """
    heap = [bytearray(64 << 10) for _ in range(64)]
    _above.append(bytearray(64 << 10))
    del heap
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare_nbytes, resource.RLIM_INFINITY))


def no_shared_memory(_: int) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    os.memfd_create = refuse


def no_process_descriptors(_: int) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    os.pidfd_open = refuse


def small_files(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def no_locked_memory(_: int) -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))


def short_memory(nbytes: int) -> None:
    whole = os.ftruncate
    os.ftruncate = lambda descriptor, promised: whole(descriptor, promised - nbytes)


def short_memory_for_the_other_side(nbytes: int) -> None:
    pass_whole = socket.send_fds

    def pass_short(sock: socket.socket, data: Any, descriptors: list[int]) -> int:
        memory = os.memfd_create("short", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(memory, os.fstat(descriptors[0]).st_size - nbytes)
        sent = pass_whole(sock, data, [memory, *descriptors[1:]])
        os.close(memory)
        return sent

    socket.send_fds = pass_short


def no_threads(_: int) -> None:
    refuse(["threads"], errno.EAGAIN)


def call_thrice(world: un.Communicator, x: Any) -> None:
    for _ in range(3):
        world.allreduce(x, op="max", out=x, timeout_s=DEADLINE_S)


def call_on_another_communicator(world: un.Communicator, x: Any) -> None:
    call_thrice(world.dup(), x)


def background_call(world: un.Communicator, x: Any) -> None:
    world.allreduce(x, op="max", out=x, wait=False).wait(DEADLINE_S)


def background_call_of_a_function(world: un.Communicator, x: Any) -> None:
    world.allreduce(x, op=un.Op.from_function(np.maximum), out=x, wait=False).wait(DEADLINE_S)


def reduce_below_a_limit(
    world: un.Communicator, say: Say, limited: int, limit: Callable[[int], None], by: int, is_set: Path, call: Call
) -> None:
    x = np.full(COUNT, world.rank, np.float32)
    said = ("", "")
    if world.rank == limited:
        limit(by)
        is_set.mkdir()
    while not is_set.exists():  # no rank opens a link to the limited rank before its limit holds
        time.sleep(0.001)
    try:
        call(world, x)
    except (un.UnisonoError, MemoryError) as error:
        said = (type(error).__name__, str(error))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if not said[0] and not np.all(x == RANKS - 1):
        said = ("", "a wrong result")
    say(said)


def outcomes(
    directory: Path,
    limited: int,
    limit: Callable[[int], None],
    by: int = 0,
    transport: str = "shm",
    call: Call = call_thrice,
) -> Any:
    is_set = directory / "limit"
    with Job(reduce_below_a_limit, RANKS, directory, limited, limit, by, is_set, call, transports=transport) as job:
        return job.hear_all()


@pytest.mark.parametrize("limited", range(RANKS))
@pytest.mark.parametrize("spare", [0, 2, 4])
def test_too_few_descriptors_on_one_rank_are_an_error_on_all(tmp_path: Path, limited: int, spare: int):
    results = outcomes(tmp_path, limited, few_descriptors, spare)
    if spare == 0 or results != [("", "")] * RANKS:
        assert all(names_the_limit(*result, limited) for result in results), results


@pytest.mark.parametrize("limited", [0, 1])
def test_communicator_without_descriptors_is_an_error_on_all_ranks(tmp_path: Path, limited: int):
    results = outcomes(tmp_path, limited, few_descriptors, 1, call=call_on_another_communicator)
    assert all(names_the_limit(*result, limited) for result in results), results


def names_the_limit(kind: str, text: str, limited: int) -> bool:
    limit = "this process has as many files open as its limit allows (`ulimit -n`"
    is_named = f"rank {limited}" in text and limit in text
    return kind == "TransportUnavailableError" and is_named and "UNISONO_TRANSPORTS" not in text


@pytest.mark.parametrize("call", [background_call, background_call_of_a_function], ids=["by the core", "by a function"])
def test_thread_that_cannot_start_is_an_error_on_all_ranks(tmp_path: Path, call: Call):
    results = outcomes(tmp_path, 1, no_threads, call=call)
    assert {kind for kind, _ in results} == {"TransportUnavailableError"}, results
    assert all("rank 1 cannot" in text and "`ulimit -u`" in text for _, text in results), results


@pytest.mark.parametrize("limited", range(RANKS))
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_lack_of_memory_on_one_rank_is_an_error_on_all_or_on_none(tmp_path: Path, limited: int, transport: str):
    results = outcomes(tmp_path, limited, little_memory, 64 << 10, transport)
    assert all(kind for kind, _ in results) or results == [("", "")] * RANKS


@pytest.mark.parametrize(
    ("limit", "by"),
    [
        (no_shared_memory, 0),
        (small_files, 4096),
        (short_memory, 1),
        (short_memory, 4096),
        (short_memory_for_the_other_side, 4096),
    ],
    ids=["no memfd", "small files", "a byte short", "a page short", "a page short for the other side"],
)
def test_lack_of_shared_memory_is_an_error_that_suggests_tcp(tmp_path: Path, limit: Callable[[int], None], by: int):
    results = outcomes(tmp_path, 2, limit, by)
    assert all(kind for kind, _ in results), results
    if limit is not short_memory_for_the_other_side:
        assert all("tcp alone does without shared memory" in text for _, text in results), results


@pytest.mark.parametrize("limit", [no_process_descriptors, no_locked_memory])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ranks_work_without(tmp_path: Path, transport: str, limit: Callable[[int], None]):
    assert outcomes(tmp_path, 0, limit, transport=transport) == [("", "")] * RANKS


def test_tcp_needs_no_shared_memory(tmp_path: Path):
    assert outcomes(tmp_path, 2, no_shared_memory, transport="tcp") == [("", "")] * RANKS


def write_everything(world: un.Communicator, say: Say, folder: Path) -> None:
    """Write each kind of file with room for 100 bytes, as on a full disk; say what each writer answers."""
    world.allreduce(np.ones(8), timeout_s=DEADLINE_S)
    measured = Measurement(Context("m", "allreduce", "shm", "plain", 2, 2), "ring", 8, *[1e-6] * 5, 3)
    calibration = calibration_files.Calibration("m", str(folder / "m.json"), PRIORS)
    writers: dict[str, Callable[[], object]] = {
        "dump": lambda: world.dump(folder),
        "trace": lambda: world.trace(folder / "trace.json"),
        "measurements": lambda: MeasurementStore(folder / "log").append([measured] * 9),
        "table": lambda: compile_table(folder / "table.json", [measured], "1.0"),
        "calibration": lambda: calibration_files.keep(calibration),
        "statistics": lambda: append_to(str(folder), 0, [], []),
        "value of a store": lambda: FileStore(str(folder / "store")).set("key", bytes(1000)),
    }
    answers = {}
    small_files(100)
    for name, write in writers.items():
        try:
            answers[name] = f"returned {write()}"
        except (OSError, un.UnisonoError) as error:
            answers[name] = type(error).__name__
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    say((answers, sorted(path.name for path in folder.iterdir() if path.is_file())))


def test_files_on_a_full_disk_are_errors_and_leave_no_part(tmp_path: Path) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    with Job(write_everything, 1, tmp_path, folder) as job:
        answers, left = job.hear(0)
    assert answers == {
        "dump": "OSError",
        "trace": "OSError",
        "measurements": "UsageError",
        "table": "UsageError",
        "calibration": "returned False",
        "statistics": "returned None",
        "value of a store": "RendezvousError",
    }
    assert left == ["log", "rank-0.jsonl"]  # files to which lines are appended, whose readers skip a part of a line
