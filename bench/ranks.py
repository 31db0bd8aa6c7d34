"""The ranks of one measured library: starts them by their launcher, sends them commands, and always ends them.

Each worker (`bench.adapters.worker`) connects to an abstract Unix socket of its job. This leaves nothing in the file
system, and only processes of the same user are admitted. A job that does not answer in time, or loses a rank, is killed
as a whole: the launcher's process group and every worker by its id, because launchers put ranks in other groups.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.bench.peers import ADAPTERS, Library

POLL_S = 0.05
STOP_S = 5.0
READ_NBYTES = 1 << 20
LINE_LENGTH = 200
RANK_ENDED = "a rank ended unexpectedly"
SHARED_MEMORY = "/dev/shm/"
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class JobError(Exception):
    """A job crashed, hung or was refused. The message is one line, and the job has been killed."""


class RefusedError(Exception):
    """The measured library lacks the collective or the dtype, or its result is wrong. The job continues."""


def elapsed_s(replies: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of a loop of calls on the slowest rank, from the replies to its command."""
    return max(int(reply["elapsed_ns"]) for reply in replies) / 1e9


def calls_taking(least_s: float, run: Callable[[int], float]) -> tuple[int, float]:
    """Return a number of calls that take at least `least_s` seconds, and their time; ``run(calls)`` measures it."""
    calls = 1
    while (seconds := run(calls)) < least_s:
        calls *= 4
    return calls, seconds


class _Connection:
    """The connection to one worker: one request at a time, and its reply."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self.channel = channel
        self._pid = pid
        self._received = b""
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except (OSError, AttributeError):  # without pidfd_open, the worker is killed by its id
            self._pidfd = None

    def receive(self) -> dict[str, Any] | None:
        """Read the available bytes; return the message once it is complete, else None.

        Raises:
            JobError: the worker has ended, or has failed.
        """
        data = self.channel.recv(READ_NBYTES)
        if not data:
            raise JobError(RANK_ENDED)
        self._received += data
        if not self._received.endswith(b"\n"):
            return None
        message: dict[str, Any] = json.loads(self._received)
        self._received = b""
        if "failed" in message:
            raise JobError(message["failed"])
        return message

    def shared_memory(self) -> list[str]:
        """Return the paths of the named shared memory that the worker has mapped; empty if it has ended."""
        with contextlib.suppress(OSError):
            lines = Path("/proc", str(self._pid), "maps").read_text().splitlines()
            return [SHARED_MEMORY + line.rpartition(SHARED_MEMORY)[2] for line in lines if SHARED_MEMORY in line]
        return []

    def kill(self) -> None:
        """Kill the worker if it still runs, and close the connection."""
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is None:
                os.kill(self._pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if self._pidfd is not None:
            os.close(self._pidfd)
        self.channel.close()


class BenchJob:
    """The running ranks of a library.

    Attributes:
        version: the library and its version, from its adapter.
    """

    def __init__(self, library: Library, ranks: int, cores: Sequence[int], deadline_s: float) -> None:
        """Start the ranks and wait until they have joined their library's job.

        Raises:
            JobError: they have not done so within `deadline_s`.
        """
        self.library = library
        self._connections: dict[int, _Connection] = {}
        self._shared_memory: set[str] = set()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the job)
        self._scratch = tempfile.TemporaryDirectory(prefix="unisono-bench-")  # for files that launchers leave behind
        address = f"unisono-bench-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("\0" + address)
            listener.listen(ranks)
            self._launcher = self._start(ranks, cores, address)
            with self._killed_on_error():
                self._accept(listener, ranks, time.monotonic() + deadline_s)
        joined = self.ask("join", deadline_s)
        self._note_shared_memory()
        self.version = str(joined[0]["version"])
        if joined[0]["size"] != ranks:
            self.close()
            raise JobError(f"the library sees {joined[0]['size']} ranks instead of {ranks}")

    def ask(self, do: str, deadline_s: float, **arguments: Any) -> list[dict[str, Any]]:
        """Run the command `do` on all ranks, and return their replies by rank.

        Raises:
            RefusedError: the library does not support it, or a rank replied that its result is wrong.
            JobError: a rank has not answered within `deadline_s`, has ended, or has raised.
        """
        request = json.dumps({"do": do, **arguments}).encode() + b"\n"
        with self._killed_on_error():
            for connection in self._connections.values():
                connection.channel.sendall(request)
            replies = _receive(self._connections, time.monotonic() + deadline_s)
        reasons = [reply["unsupported"] for reply in replies if "unsupported" in reply]
        if reasons:
            raise RefusedError(reasons[0])
        for rank, reply in enumerate(replies):
            if reply.get("wrong"):
                raise RefusedError(f"wrong result on rank {rank}: {reply['wrong']}")
        return replies

    def close(self) -> None:
        """Ask all ranks to leave, and kill those that do not within some seconds. May be called twice."""
        if self._connections:
            with contextlib.suppress(JobError):
                self.ask("leave", STOP_S)
        for connection in self._connections.values():
            connection.channel.shutdown(socket.SHUT_WR)  # ends the worker's read
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(STOP_S)
        self._kill()

    def _start(self, ranks: int, cores: Sequence[int], address: str) -> subprocess.Popen[bytes]:
        adapter = str(ADAPTERS / f"{self.library.adapter}.py")
        binding = ",".join(map(str, cores)) if cores and self.library.binds else "-"
        worker = [
            self.library.python,
            "-s",
            str(ADAPTERS / "worker.py"),
            adapter,
            address,
            self.library.rank_variable,
            binding,
        ]
        # Python's variables of the user are dropped. The option -I would also hide mpi4py's variables.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        try:
            return subprocess.Popen(
                self.library.command(ranks, worker),
                env={**inherited, "TMPDIR": self._scratch.name, **self.library.environ()},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._scratch.cleanup()
            self._output.close()
            raise JobError(f"its launcher cannot be started: {error}") from None

    def _accept(self, listener: socket.socket, ranks: int, deadline: float) -> None:
        listener.settimeout(POLL_S)
        while len(self._connections) < ranks:
            if self._launcher.poll() is not None:
                raise JobError(f"its launcher ended with code {self._launcher.returncode}")
            if time.monotonic() > deadline:
                raise JobError(f"only {len(self._connections)} of {ranks} ranks have started in time")
            with contextlib.suppress(TimeoutError):
                channel, _ = listener.accept()
                pid, uid, _ = CREDENTIALS.unpack(
                    channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
                )
                if uid != os.getuid():
                    channel.close()
                    continue
                connection = _Connection(channel, pid)
                (greeting,) = _receive({0: connection}, deadline)
                self._connections[greeting["rank"]] = connection

    @contextlib.contextmanager
    def _killed_on_error(self) -> Iterator[None]:
        """Kill the job if the body raises; add the last line of its output with "error" to an error of the job."""
        try:
            yield
        except (JobError, OSError) as error:
            reason = str(error) if isinstance(error, JobError) else RANK_ENDED
            raise JobError(reason + self._kill()) from None
        except BaseException:
            self._kill()
            raise

    def _last_words(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        errors = [line.strip()[:LINE_LENGTH] for line in lines if "error" in line.lower()]
        return f" ({errors[-1]})" if errors else ""

    def _note_shared_memory(self) -> None:
        for connection in self._connections.values():
            self._shared_memory.update(connection.shared_memory())

    def _kill(self) -> str:
        """Kill all remaining processes, remove what killed libraries leave behind, and return the last error line."""
        if self._output.closed:
            return ""
        self._note_shared_memory()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._launcher.pid, signal.SIGKILL)
        self._launcher.wait()
        for connection in self._connections.values():
            connection.kill()
        for name in self._shared_memory:
            Path(name).unlink(missing_ok=True)
        self._connections.clear()
        self._scratch.cleanup()
        with self._output:
            return self._last_words()


def _receive(connections: Mapping[int, _Connection], deadline: float) -> list[dict[str, Any]]:
    """Return one message from each connection, by ascending rank.

    Raises:
        JobError: `deadline` (of the monotonic clock) has passed, or a worker has ended or failed.
    """
    messages: dict[int, dict[str, Any]] = {}
    with selectors.DefaultSelector() as selector:
        for rank, connection in connections.items():
            selector.register(connection.channel, selectors.EVENT_READ, rank)
        while len(messages) < len(connections):
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise JobError("its ranks did not answer in time")
            for key, _ in ready:
                message = connections[key.data].receive()
                if message is not None:
                    messages[key.data] = message
                    selector.unregister(key.fileobj)
    return [messages[rank] for rank in sorted(messages)]
