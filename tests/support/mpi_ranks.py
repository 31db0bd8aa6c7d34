"""Ranks under the launchers of MPI libraries, in the environments that ``make mpi`` makes.

`run` runs a program on ranks, and `MpiRanks` are ranks that serve calls, on this host or between hosts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cloudpickle
from support.deadlines import DEADLINE_S
from support.import_path import import_path
from support.programs import completed, end_session
from support.ranks import STACKS_S, Ranks, by_value

import unisono as un
from unisono.bench.namespaces import SUBNET, address, inside

ROOT = Path(__file__).parents[2] / ".mpi"
LIBRARIES = ("openmpi", "mpich")
OPTIONS: dict[str, tuple[str, ...]] = {"openmpi": ("--map-by", "slot:oversubscribe", "--bind-to", "none"), "mpich": ()}
# Open MPI refuses to run as root unless both variables are set. Tests in containers often run as root.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_CHILD = "from support import mpi_ranks; mpi_ranks.serve()"
_PLACE = "TEST_PLACE"


def environment_of(library: str) -> Path:
    """Return the folder of the environment of an MPI library. The test is skipped if the folder is missing."""
    import pytest  # ranks have none

    folder = ROOT / library
    if not (folder / "complete").exists():
        pytest.skip(f"{folder} is missing: `make mpi` makes it")
    return folder


def launcher(library: str, *options: str) -> list[str]:
    """Return the command line of the library's ``mpiexec`` with the usual options and `options`."""
    return [str(environment_of(library) / "bin" / "mpiexec"), *OPTIONS[library], *options]


def run(
    library: str,
    ranks: int,
    program: str,
    *,
    python: Path | str | None = None,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
) -> subprocess.CompletedProcess[str]:
    """Run a Python program on ranks under the library's ``mpiexec``. No process outlives this call.

    Args:
        library: the MPI library.
        ranks: the number of ranks.
        program: the text of the program.
        python: the Python that runs it; by default the one of the library's environment.
        options: options of mpiexec, in addition to the usual ones.
        variables: environment variables of the ranks, in addition to those of this process.
        deadline_s: seconds after which all processes are killed.
    """
    command = [*launcher(library, *options), "-n", str(ranks)]
    command += [str(python or environment_of(library) / "bin" / "python"), "-c", program]
    # With buffering, a rank writes each of its lines at once, so that the lines of several ranks do not mix.
    environ = {**AS_ROOT, "PYTHONUNBUFFERED": "", "PYTHONPATH": import_path(), **(variables or {})}
    return completed([command], [environ], deadline_s=deadline_s)[0]


class MpiRanks(Ranks):
    """Ranks under mpiexec, which get their calls from the test over sockets.

    Args:
        size: the number of ranks.
        library: the MPI library whose mpiexec starts the ranks.
        transports: the option `transports` of the ranks.
        command: the command line of mpiexec; the default is `launcher(library)`.
        variables: environment variables of the ranks, in addition to those of this process.
    """

    def __init__(
        self,
        size: int,
        library: str,
        transports: str = "mpi",
        command: Sequence[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.size = size
        self.transport = transports.split(",", maxsplit=1)[0]
        self._directory = tempfile.mkdtemp(prefix="unisono-test-")
        place = f"{self._directory}/ranks"
        words = [*(command or launcher(library)), "-n", str(size)]
        words += [str(environment_of(library) / "bin" / "python"), "-c", _CHILD]
        settings = {_PLACE: place, "UNISONO_TRANSPORTS": transports, "PYTHONPATH": import_path()}
        self._connections: list[Connection] = []
        with Listener(place, "AF_UNIX") as listener:
            listener._listener._socket.settimeout(DEADLINE_S)  # type: ignore[attr-defined]
            self._process = subprocess.Popen(
                words, env={**os.environ, **AS_ROOT, **settings, **variables}, start_new_session=True
            )
            try:
                self._connections = sorted(
                    (listener.accept() for _ in range(size)), key=lambda connection: connection.recv()
                )
            except BaseException:
                self._kill()
                raise
        self.pids = [connection.recv() for connection in self._connections]

    def run_calls(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        self.start(fn, *args)
        deadline = time.monotonic() + DEADLINE_S
        results = [self.hear(rank, deadline - time.monotonic()) for rank in range(self.size)]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def start(self, fn: Callable[..., Any], *args: Any) -> None:
        """Start ``fn(world, *args)`` on every rank; return at once."""
        task = by_value(fn, args)
        for connection in self._connections:
            connection.send_bytes(task)

    def hear(self, rank: int, timeout_s: float = DEADLINE_S) -> Any:
        """Return the result of the function on a rank, or the exception that it raised."""
        connection = self._connections[rank]
        if not connection.poll(max(0.0, timeout_s)):
            for pid in self.pids:
                os.kill(pid, signal.SIGABRT)  # they write the stacks of their threads
            time.sleep(STACKS_S)
            self._kill()
            raise TimeoutError(f"rank {rank} has not answered")
        return connection.recv()

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

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        try:
            code = self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._kill()
            raise
        finally:
            shutil.rmtree(self._directory)
        assert code == 0, f"mpiexec ended with {code}"

    def _kill(self) -> None:
        end_session(self._process)
        self._process.wait()


# Options with which a launcher of MPI starts its daemons by `agent` instead of ssh, and with which daemons and ranks
# use `eth0` alone. Slots are not oversubscribed, because Open MPI then fills several hosts unevenly.
BETWEEN_HOSTS = {
    "openmpi": (
        *("--map-by", "slot", "--bind-to", "none"),
        *("--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", "{agent}", "--prtemca", "prte_if_include", "eth0"),
        *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "eth0"),
        *("--host", "{hosts}"),
    ),
    "mpich": ("-launcher", "rsh", "-launcher-exec", "{agent}", "-iface", "eth0", "-hosts", "{hosts}"),
}
BY_TCP = {"UCX_TLS": "tcp,self", "MPIR_CVAR_NOLOCAL": "1"}


def between_hosts(
    library: str, namespaces: Sequence[str], per_host: Sequence[int], directory: Path, transports: str
) -> MpiRanks:
    """Start ranks on the hosts of a `network` by mpiexec. The messages of the MPI library go over TCP."""
    agent = directory / "agent"
    rows = [f'{address(host)}) exec {shlex.join(inside(name))} sh -c "$*" ;;' for host, name in enumerate(namespaces)]
    agent.write_text("\n".join(["#!/bin/sh", "host=$1; shift", 'case "$host" in', *rows, "esac", ""]))
    agent.chmod(0o700)
    hosts = ",".join(f"{address(host)}:{ranks}" for host, ranks in enumerate(per_host))
    mpiexec = str(environment_of(library) / "bin" / "mpiexec")
    options = [word.format(agent=agent, hosts=hosts) for word in BETWEEN_HOSTS[library]]
    variables = {**BY_TCP, "UNISONO_BIND_ADDRESS": SUBNET}
    return MpiRanks(sum(per_host), library, transports, [*inside(namespaces[0]), mpiexec, *options], variables)


def serve() -> None:
    """Run the calls of a rank of `MpiRanks` until the test closes the connection."""
    world = un.init()
    faulthandler.enable()
    with Client(os.environ[_PLACE], "AF_UNIX") as connection:
        connection.send(world.rank)
        connection.send(os.getpid())
        while True:
            try:
                fn, args = cloudpickle.loads(connection.recv_bytes())
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
