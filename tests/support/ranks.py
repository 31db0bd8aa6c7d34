"""How a test gets ranks that run its functions. `support.programs` runs programs, as users start them.

`start_ranks` starts ranks that serve one call of the test after the other, and `ranks_fixture` makes a fixture of
them. `KINDS` has the kinds of ranks. A `Job` has ranks that run one function each, and that the test may kill, stop
and interrupt. They are forked, or start at another `Place`, such as a host of a network.

Ranks in processes have the standard error of the tests, where pytest shows it if a test fails. If a rank misses the
deadline, all ranks of the job write the stacks of their threads there. No rank outlives its with-block.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
from support import forked_ranks
from support.deadlines import DEADLINE_S
from support.forked_ranks import Started
from support.import_path import import_path

import unisono as un
from unisono.collectives.calls.planning import HostLayout
from unisono.errors import AbortedError
from unisono.launchers.launch import Pool
from unisono.launchers.process import Command
from unisono.transports.contracts.transport import MessageTransport
from unisono.transports.executors.generic import GenericExecutor
from unisono.transports.message.faulty import Faults, FaultyTransport
from unisono.transports.message.local import LocalNetwork

_CHILD = "from support import ranks; ranks.serve()"
STACKS_S = 5.0  # time to write stacks for ranks that miss the deadline


# --- ranks that serve calls -------------------------------------------------------------------------------------------


class Ranks:
    """`size` ranks that serve one call of the test after the other; a context manager."""

    size: int
    transport: str
    faults: Faults | None = None  # of the transport

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``fn(executor, *args)`` on every rank; return the results by rank, or raise the first error."""
        return self.run_calls(_with_executor, fn, args)

    def run_calls(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``fn(communicator, *args)`` on every rank; return the results by rank, or raise the first error."""
        raise NotImplementedError

    def close(self) -> None:
        """End the ranks."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


class PoolRanks(Ranks):
    """Forked ranks of a `Pool`, each with a `NativeExecutor`."""

    def __init__(self, size: int, transports: str) -> None:
        self.size = size
        self.transport = transports
        self._pool = Pool(size, options=un.Options(transports=transports))

    def run_calls(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return self._pool.run(fn, *args, timeout_s=DEADLINE_S)

    def close(self) -> None:
        with contextlib.suppress(un.MismatchError):  # at the end of some tests, ranks have made different calls
            self._pool.close()


class LocalRanks(Ranks):
    """Ranks as threads of this process, each with a `GenericExecutor` over the local transport.

    Args:
        size: the number of ranks.
        capacity: the number of messages that a link holds; with 0, a send waits for its receive.
        faults: the faults of the transport.
        deadline_s: the time for one `run`.
    """

    transport = "local"

    def __init__(
        self, size: int, capacity: int = 0, faults: Faults | None = None, *, deadline_s: float = DEADLINE_S
    ) -> None:
        self.size = size
        self.capacity = capacity
        self.faults = faults
        self._deadline_s = deadline_s

    def run_calls(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return self.run(_with_communicator, fn, args)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """See `Ranks.run`. A rank closes its executor as soon as it has finished.

        Ranks that still run at the deadline are aborted, and then TimeoutError names them.
        """
        network = LocalNetwork(self.size, self.capacity)
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def run_rank(rank: int, executor: GenericExecutor) -> None:
            try:
                results[rank] = fn(executor, *args)
            except BaseException as error:  # noqa: BLE001  (it is raised again by the thread of the test)
                errors.append(error)
            finally:
                executor.close()

        executors = [GenericExecutor(transport) for transport in self._transports(network)]
        threads = [
            threading.Thread(target=run_rank, args=(executor.rank, executor), daemon=True) for executor in executors
        ]
        for thread in threads:
            thread.start()
        stuck = _join_until(threads, time.monotonic() + self._deadline_s)
        if stuck:
            faulthandler.dump_traceback()
            network.fail(AbortedError(f"the test's deadline has passed; ranks {stuck} were still running"))
            _join_until(threads, time.monotonic() + 1.0)
        if errors:
            raise errors[0]
        if stuck:
            raise TimeoutError(f"ranks {stuck} were still running after {self._deadline_s} s")
        return results

    def _transports(self, network: LocalNetwork) -> Iterator[MessageTransport]:
        for transport in network.transports:
            yield transport if self.faults is None else FaultyTransport(transport, self.faults)


def _mpi_ranks(library: str) -> Callable[[int], Ranks]:
    def started(size: int) -> Ranks:
        from support.mpi_ranks import MpiRanks

        return MpiRanks(size, library)

    return started


# Other kinds are values of the option `transports`, for `PoolRanks`.
KINDS: dict[str, Callable[[int], Ranks]] = {
    "generic": LocalRanks,
    "generic, buffered": lambda size: LocalRanks(size, 8),
    "generic, delayed": lambda size: LocalRanks(size, 2, Faults(seed=5, delay=0.4)),
    "openmpi": _mpi_ranks("openmpi"),
    "mpich": _mpi_ranks("mpich"),
}


def start_ranks(size: int, kind: str) -> Any:
    """Start `Ranks` of a kind. The test is skipped if the library of that kind is not installed."""
    require(kind)
    return KINDS[kind](size) if kind in KINDS else PoolRanks(size, kind)


def ranks_fixture(*jobs: tuple[int, str], scope: Any = "module") -> Any:
    """Return a fixture of ranks with these sizes and kinds. Ranks of the scope "function" may fail or end."""
    import pytest

    names = [f"{size} ranks, {kind}" for size, kind in jobs]

    @pytest.fixture(scope=scope, params=jobs, ids=names)
    def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
        with start_ranks(*request.param) as started:
            yield started

    return ranks


def require(kind: str) -> None:
    """Skip the test if ranks of a kind need UCX, and it is not installed."""
    import pytest

    if kind.startswith("ucx"):
        pytest.importorskip("ucxx", reason="UCX is not installed: `make ucx` installs it")


def communicator_of(executor: Any, *hosts: tuple[int, ...]) -> un.Communicator:
    """Return a communicator over the executor of a rank of `LocalRanks`, with all ranks on one host by default."""
    return un.Communicator(executor, HostLayout(hosts or (tuple(range(executor.size)),), "local"), un.Options())


def _with_communicator(executor: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with communicator_of(executor) as world:
        return fn(world, *args)


def _with_executor(world: un.Communicator, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return fn(_Executor(world), *args)


class _Executor:
    """The executor of a communicator. Closing it closes the communicator, which owns the links below."""

    def __init__(self, world: un.Communicator) -> None:
        self._inner = world._executor
        self.close = world.close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _join_until(threads: list[threading.Thread], deadline: float) -> list[int]:
    """Wait for the threads until `deadline`; return the indices of the threads that still run."""
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [index for index, thread in enumerate(threads) if thread.is_alive()]


# --- ranks that a test may kill ---------------------------------------------------------------------------------------


class Place:
    """Where the processes of a job with `size` ranks start: by default they are forked."""

    def __init__(self, size: int) -> None:
        self.size = size

    def start(self, number: int, command: Command, environ: Mapping[str, str]) -> Started:
        """Start a process. Ranks have the first numbers."""
        return forked_ranks.server().start_plain(command, environ)

    def variables(self, number: int) -> Mapping[str, str]:
        """Return further environment variables of a process."""
        return {}


class Prefixed(Place):
    """Starts each rank by a command of its own, such as ``ip netns exec NAME``; `prefixes` has the words of each."""

    def __init__(self, prefixes: Sequence[Sequence[str]]) -> None:
        super().__init__(len(prefixes))
        self._prefixes = prefixes

    def start(self, number: int, command: Command, environ: Mapping[str, str]) -> Started:
        return subprocess.Popen([*self._prefixes[number], *command.argv], env=environ, pass_fds=command.descriptors)


class Job:
    """Ranks that run ``fn(world, say, *args)``. The test may kill, stop and interrupt each of them.

    A rank sends a value to the test by ``say(value)``, and the test receives it by ``hear(rank)``. At the end, ranks
    have `DEADLINE_S` to end by themselves; then they are killed, and the test fails.

    Args:
        fn: the function of the ranks.
        place: where the ranks start; for forked ranks their number.
        directory: where the ranks meet.
        args: further arguments of `fn`.
        options: the options of `un.init`.
    """

    def __init__(self, fn: Callable[..., Any], place: int | Place, directory: Path, *args: Any, **options: Any) -> None:
        self._place = Place(place) if isinstance(place, int) else place
        self.size = self._place.size
        self._directory = directory
        self._processes: list[Started] = []
        self._connections: list[Connection] = []
        task = by_value(fn, args)
        for rank in range(self.size):
            self._start(self._meeting(rank, un.Options(**options)), task)

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

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, TimeoutError):
            end_with_stacks(self._processes)
        elif error is not None:
            _kill(self._processes)
        late = late_of(self._processes, DEADLINE_S)
        end_with_stacks([self._processes[rank] for rank in late])
        for connection in self._connections:
            connection.close()
        assert not late, f"ranks {late} did not end"

    def _meeting(self, rank: int, options: un.Options) -> dict[str, Any] | None:
        """Return the arguments of `un.init` on a rank."""
        return {"options": options, "store": f"file://{self._directory}/store", "rank": rank, "size": self.size}

    def _variables(self, number: int) -> Mapping[str, str]:
        return self._place.variables(number)

    def _start(self, meeting: Mapping[str, Any] | None, task: bytes) -> None:
        ours, theirs = socket.socketpair()
        number = len(self._processes)
        environ = {**os.environ, "PYTHONPATH": import_path(), **self._variables(number)}
        with theirs:
            command = Command((sys.executable, "-c", _CHILD, str(theirs.fileno())), (theirs.fileno(),))
            self._processes.append(self._place.start(number, command, environ))
        connection = Connection(ours.detach())
        self._connections.append(connection)
        connection.send(meeting)
        connection.send_bytes(task)


class LastingJob(Job):
    """A `Job` that other processes may join: its variables name a key, and a store that outlives ranks."""

    def __init__(self, fn: Callable[..., Any], place: int | Place, directory: Path, *args: Any, **options: Any) -> None:
        self._key = new_key(directory / "key")
        super().__init__(fn, place, directory, *args, **options)

    def start(self, fn: Callable[..., Any], *args: Any) -> int:
        """Start a process that runs ``fn(say, *args)`` with the variables of the job; return its number for `hear`."""
        self._start(None, by_value(fn, args))
        return len(self._processes) - 1

    def _meeting(self, rank: int, options: un.Options) -> dict[str, Any] | None:
        return {"options": options}

    def _variables(self, number: int) -> Mapping[str, str]:
        lasting = {"UNISONO_STORE": f"file://{self._directory}/store", "UNISONO_KEY_FILE": str(self._key)}
        of_rank = {"UNISONO_RANK": str(number), "UNISONO_SIZE": str(self.size)} if number < self.size else {}
        return {**lasting, **of_rank, **super()._variables(number)}


def new_key(path: Path) -> Path:
    """Write a new key of a job to a file that others cannot read; return its path."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(os.urandom(32))
    return path


def by_value(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return a pickle of the call that contains the function's module by value.

    So a rank need not import that module, whose other imports would take long on many ranks.
    """
    module = sys.modules[(args[0] if fn is _with_executor else fn).__module__]
    cloudpickle.register_pickle_by_value(module)
    try:
        data: bytes = cloudpickle.dumps((fn, args))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    return data


def serve() -> None:
    """Run a rank or another process of a `Job`. An exception ends the process with a traceback, as in a script."""
    faulthandler.enable()
    sys.excepthook = _write_at_once
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    meeting = connection.recv()
    fn, args = cloudpickle.loads(connection.recv_bytes())
    if meeting is None:
        fn(connection.send, *args)
        return
    world = un.init(**meeting)
    fn(world, connection.send, *args)
    world.close()


def _write_at_once(*error: Any) -> None:
    """Write a traceback by one system call. Otherwise tracebacks of two ranks would mix within lines."""
    os.write(2, "".join(traceback.format_exception(*error)).encode())


def end_with_stacks(processes: Sequence[Started]) -> None:
    """End processes. Those with a fault handler write the stacks of their threads first."""
    for process in processes:
        for number in (signal.SIGABRT, signal.SIGCONT):
            process.send_signal(number)
    late_of(processes, STACKS_S)
    _kill(processes)


def late_of(processes: Sequence[Started], timeout_s: float) -> list[int]:
    """Wait until all processes have ended; return the indices of those that still run after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    late = []
    for index, process in enumerate(processes):
        try:
            process.wait(max(0.01, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(index)
    return late


def _kill(processes: Sequence[Started]) -> None:
    for process in processes:
        process.kill()
        process.wait()
