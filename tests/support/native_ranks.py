"""Ranks in processes: `NativeRanks`, a pool for calls that must succeed, and `Job`, whose ranks a test may kill."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
from support import forked_ranks
from support.deadlines import DEADLINE_S
from support.forked_ranks import Started

import unisono as un
from unisono.launchers.launch import Pool
from unisono.launchers.process import Command

CHILD = "from support import native_ranks; native_ranks.serve()"


class NativeRanks:
    """A harness for `executor_contract`, whose ranks have a `NativeExecutor` each and serve one `run` after another."""

    def __init__(self, size: int, transport: str) -> None:
        self.size = size
        self.transport = transport
        self._pool = Pool(size, options=un.Options(transports=transport))

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``fn(executor, *args)`` on every rank; return the results by rank, or raise the first error."""
        return self._pool.run(_with_executor, fn, args, timeout_s=DEADLINE_S)

    def run_calls(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``fn(communicator, *args)`` on every rank; return the results by rank, or raise the first error."""
        return self._pool.run(fn, *args, timeout_s=DEADLINE_S)

    def __enter__(self) -> NativeRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with contextlib.suppress(un.MismatchError):  # at the end of some tests, ranks have made different calls
            self._pool.close()


def _with_executor(world: un.Communicator, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return fn(_Executor(world), *args)


class _Executor:
    """The executor of a communicator. Closing it closes the communicator, which owns the links below."""

    def __init__(self, world: un.Communicator) -> None:
        self._inner = world._executor
        self.close = world.close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Job:
    """`size` ranks that run ``fn(world, say, *args)``. The test may kill, stop and interrupt each of them.

    A rank sends a value to the test by ``say(value)``, and the test receives it by ``hear(rank)``. At the end, ranks
    have `DEADLINE_S` to end by themselves; then they are killed, and the test fails.
    """

    def __init__(self, fn: Callable[..., Any], size: int, directory: Path, *args: Any, **options: Any) -> None:
        self.size = size
        self._processes: list[Started] = []
        self._connections: list[Connection] = []
        task = _by_value(fn, args)
        for rank in range(size):
            self._start(rank, f"file://{directory}/store", un.Options(**options), task)

    def hear(self, rank: int, timeout_s: float = DEADLINE_S) -> Any:
        """Return the next value that `rank` sends by `say`.

        Raises:
            EOFError: the rank has ended.
            TimeoutError: the rank has sent no value for `timeout_s` seconds.
        """
        connection = self._connections[rank]
        if not connection.poll(timeout_s):
            raise TimeoutError(f"rank {rank} has sent no value for {timeout_s} s")
        return connection.recv()

    def hear_all(self, *, but: int | None = None) -> list[Any]:
        """Return the next value of every rank except the rank `but`, in the order of the ranks."""
        return [self.hear(rank) for rank in range(self.size) if rank != but]

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank."""
        self._processes[rank].send_signal(number)

    def exit_code(self, rank: int) -> int:
        """Wait until `rank` has ended; return its exit code."""
        return self._processes[rank].wait(DEADLINE_S)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for process in self._processes:
            if process.poll() is None and error is not None:
                process.kill()
        deadline = time.monotonic() + DEADLINE_S
        late = []
        for rank, process in enumerate(self._processes):
            try:
                process.wait(max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(rank)
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()
        assert not late, f"ranks {late} did not end"

    def start_rank(self, rank: int, command: Command, environ: Mapping[str, str]) -> Started:
        """Start the process of `rank`."""
        return forked_ranks.server().start_plain(command, environ)

    def variables(self, rank: int) -> dict[str, str]:
        """Return further environment variables of `rank`."""
        return {}

    def _start(self, rank: int, store: str | None, options: un.Options | None, task: bytes) -> None:
        ours, theirs = socket.socketpair()
        environ = {**os.environ, "PYTHONPATH": forked_ranks.import_path(), **self.variables(rank)}
        with theirs:
            command = Command((sys.executable, "-c", CHILD, str(theirs.fileno())), (theirs.fileno(),))
            self._processes.append(self.start_rank(rank, command, environ))
        connection = Connection(ours.detach())
        self._connections.append(connection)
        connection.send((store, rank, self.size, options))
        connection.send_bytes(task)


class LastingJob(Job):
    """A `Job` that other processes may join: its variables name a key, and a store that outlives ranks."""

    def __init__(self, fn: Callable[..., Any], size: int, directory: Path, *args: Any, **options: Any) -> None:
        self._directory = directory
        self._key = new_key(directory / "key")
        super().__init__(fn, size, directory, *args, **options)

    def variables(self, rank: int) -> dict[str, str]:
        place = {"UNISONO_STORE": f"file://{self._directory}/store", "UNISONO_KEY_FILE": str(self._key)}
        return place if rank >= self.size else {**place, "UNISONO_RANK": str(rank), "UNISONO_SIZE": str(self.size)}

    def start(self, fn: Callable[..., Any], *args: Any) -> int:
        """Start a process that runs ``fn(say, *args)`` with the variables of the job; return its number for `hear`."""
        number = len(self._processes)
        super()._start(number, None, None, _by_value(fn, args))
        return number

    def _start(self, rank: int, store: str | None, options: un.Options | None, task: bytes) -> None:
        super()._start(rank, None, options, task)


def new_key(path: Path) -> Path:
    """Write a new key of a job to a file that others cannot read; return its path."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(os.urandom(32))
    return path


def _by_value(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return a pickle of the call that contains the function's module by value.

    So a rank need not import that module, whose other imports would take long on many ranks.
    """
    module = sys.modules[fn.__module__]
    cloudpickle.register_pickle_by_value(module)
    try:
        data: bytes = cloudpickle.dumps((fn, args))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    return data


def serve() -> None:
    """Run a rank or another process of a `Job`. An exception ends the process with a traceback, as in a script."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    store, rank, size, options = connection.recv()
    fn, args = cloudpickle.loads(connection.recv_bytes())
    if options is None:
        fn(connection.send, *args)
        return
    world = un.init(options) if store is None else un.init(options, store=store, rank=rank, size=size)
    fn(world, connection.send, *args)
    world.close()
