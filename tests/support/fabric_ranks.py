"""Ranks that exchange messages by UCX or MPI. They run the same tests as ranks over shared memory and TCP.

mpiexec starts ranks over MPI, in the environments that ``make mpi`` makes, and the test sends them tasks over sockets.
`SETS` names the sets of ranks, and `started` starts one. If its library is not installed, the test is skipped.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import cloudpickle
from support.deadlines import DEADLINE_S
from support.forked_ranks import import_path
from support.native_ranks import NativeRanks, _by_value, _with_executor

import unisono as un

SERVE = "from support import fabric_ranks; fabric_ranks.serve()"
ADDRESS = "TEST_ADDRESS"
SETS = ("ucx", "openmpi", "mpich")


def require(name: str) -> None:
    """Skip the test if the library of the set `name` is not installed."""
    import pytest

    if name in ("openmpi", "mpich"):
        from support.mpi_ranks import environment_of

        environment_of(name)
    elif name == "ucx":
        pytest.importorskip("ucxx", reason="UCX is not installed: `make ucx` installs it")


def started(size: int, name: str, transports: str = "") -> NativeRanks | MpiRanks:
    """Start `size` ranks over the transport `name`, or under the MPI library `name`."""
    require(name)
    if name in ("openmpi", "mpich"):
        return MpiRanks(size, name, transports or "mpi")
    return NativeRanks(size, transports or name)


class MpiRanks:
    """Ranks under mpiexec, with the interface of `NativeRanks`.

    Args:
        size: the number of ranks.
        library: the MPI library whose mpiexec starts the ranks.
        transports: the option `transports` of the ranks.
        launcher: the command line of mpiexec; the default is `mpi_ranks.launcher(library)`.
        variables: environment variables of the ranks, in addition to those of this process.
    """

    def __init__(
        self,
        size: int,
        library: str,
        transports: str = "mpi",
        launcher: Sequence[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        from support import mpi_ranks

        self.size = size
        self.transport = transports.split(",", maxsplit=1)[0]
        self._directory = tempfile.mkdtemp(prefix="unisono-test-")
        address = f"{self._directory}/ranks"
        command = [*(launcher or mpi_ranks.launcher(library)), "-n", str(size)]
        command += [str(mpi_ranks.environment_of(library) / "bin" / "python"), "-c", SERVE]
        settings = {ADDRESS: address, "UNISONO_TRANSPORTS": transports, "PYTHONPATH": import_path()}
        self._connections: list[Connection] = []
        with Listener(address, "AF_UNIX") as listener:
            listener._listener._socket.settimeout(DEADLINE_S)  # type: ignore[attr-defined]
            self._process = subprocess.Popen(
                command, env={**os.environ, **mpi_ranks.AS_ROOT, **settings, **variables}, start_new_session=True
            )
            try:
                self._connections = sorted(
                    (listener.accept() for _ in range(size)), key=lambda connection: connection.recv()
                )
            except BaseException:
                self._kill()
                raise
        self.pids = [connection.recv() for connection in self._connections]

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """See `NativeRanks.run`."""
        return self.run_calls(_with_executor, fn, args)

    def run_calls(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """See `NativeRanks.run_calls`."""
        self.start(fn, *args)
        deadline = time.monotonic() + DEADLINE_S
        results = [self.hear(rank, deadline - time.monotonic()) for rank in range(self.size)]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def start(self, fn: Callable[..., Any], *args: Any) -> None:
        """Start ``fn(world, *args)`` on every rank; return at once."""
        inner = args[0] if fn is _with_executor else fn
        task = _by_value(inner, (fn, args))
        for connection in self._connections:
            connection.send_bytes(task)

    def hear(self, rank: int, timeout_s: float = DEADLINE_S) -> Any:
        """Return the result of the function on a rank, or the exception that it raised."""
        connection = self._connections[rank]
        if not connection.poll(max(0.0, timeout_s)):
            self._kill()
            raise TimeoutError(f"rank {rank} has not answered")
        return pickle.loads(connection.recv_bytes())

    @contextlib.contextmanager
    def killed_at_end(self) -> Iterator[None]:
        """Kill the ranks and mpiexec at the end of a with-block, and remove the files of MPI in shared memory.

        A test whose ranks may fail or hang uses it, because MPI removes its files only when ranks end well.
        """
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in self.pids)
        try:
            yield
        finally:
            self._kill()
            for name in set(re.findall(r"/dev/shm/\S+", maps)):
                Path(name).unlink(missing_ok=True)
            for connection in self._connections:
                connection.close()
            shutil.rmtree(self._directory)

    def __enter__(self) -> MpiRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for connection in self._connections:
            connection.close()
        try:
            code = self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._kill()
            raise
        finally:
            shutil.rmtree(self._directory)
        assert error is not None or code == 0, f"mpiexec ended with {code}"

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def serve() -> None:
    """Run the tasks of a rank of `MpiRanks` until the test closes the connection."""
    world = un.init()
    with Client(os.environ[ADDRESS], "AF_UNIX") as connection:
        connection.send(world.rank)
        connection.send(os.getpid())
        while True:
            try:
                _, (fn, args) = cloudpickle.loads(connection.recv_bytes())
            except EOFError:
                break
            connection.send_bytes(_outcome(world, fn, args))
    world.close()


def _outcome(world: un.Communicator, fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        result: Any = fn(world, *args)
    except BaseException as error:  # noqa: BLE001  (it is raised again in the test)
        result = error
    data: bytes = cloudpickle.dumps(result)
    return data
