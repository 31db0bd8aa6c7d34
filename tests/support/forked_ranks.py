"""Ranks that are forked by a process which has imported what they need, instead of each importing it again.

Importing takes a rank ten times as long as most tests of it. The fork server is started once by each process that runs
tests, and has no threads. What it forks is told in the words of a command line, ``python -m MODULE …`` or ``python -c
CODE …``, has the environment, the descriptors and the folder that it would have as a process of its own, and is killed
by the kernel if the server dies, as that is if whoever runs the tests does. It differs in that ranks share the hashes
of strings. Ranks are started where that is what is tested, or where the system's loader is to find other libraries.

Each rank has a pipe in which the server tells the starter what its process is, and how it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from unisono.launchers.process import Command, start as started

# What ranks import: the library up to a first result, and what tests of ranks have at their beginnings.
PRELOADED = (
    *("unisono.collectives." + name for name in ("communicator", "bootstrap.environment", "bootstrap.rendezvous")),
    *(
        "unisono.collectives.bootstrap.shared_settings",
        "unisono.launchers.pool_protocol",
        "unisono.testing",
        "unisono.transports.executors.native",
        "unisono.tuning.machine.fingerprint",
    ),
    *("cloudpickle", "hypothesis.extra.numpy", "ml_dtypes", "numpy.random", "numpy.testing", "pytest"),
    *("support.executor_contract", "support.harness", "support.native_ranks", "numpy.linalg"),
)
# What takes longer to import, and ranks need only if the process that runs tests has needed it.
PRELOADED_IF_USED = ("torch", "sklearn.datasets")
# What the loader has read when a process begins.
_OF_LOADER = ("LD_LIBRARY_PATH", "LD_PRELOAD")
_NUMBER = struct.Struct("=i")
_FIRST_FREE = 512  # descriptors from here on are not in the way of those that a rank is to have
_GRACE_S = 10.0  # for ranks that are still there when tests have ended
_KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class _Request:
    command: Command
    environ: Mapping[str, str]
    folder: str
    core: int | None
    is_session: bool
    preloaded: Sequence[str]


class ForkedProcess:
    """A forked rank, with what `subprocess.Popen` has that tests and launchers use."""

    def __init__(self, told: int, stdout: Any, stderr: Any) -> None:
        self.stdout = stdout
        self.stderr = stderr
        self.returncode: int | None = None
        self._told = told
        self.pid = self._hear(None)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                self.returncode = self._hear(timeout)
                os.close(self._told)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _hear(self, timeout_s: float | None) -> int:
        if not select.select([self._told], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired("a forked rank", timeout_s or 0.0)
        data = os.read(self._told, _NUMBER.size)
        if not data:
            raise RuntimeError("the process that forks ranks has ended, and its ranks with it")
        return int(_NUMBER.unpack(data)[0])


Started: TypeAlias = subprocess.Popen[bytes] | ForkedProcess


class ForkServer:
    """The process that forks ranks, as it is seen by the one that runs tests."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        own = {"PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
        self._of_loader = [os.environ.get(name) for name in _OF_LOADER]
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-c",
                    "from support import forked_ranks; forked_ranks.serve()",
                    str(theirs.fileno()),
                ],
                env={**os.environ, **own},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def start(self, command: Command, core: int | None, environ: Mapping[str, str]) -> Started:
        """Fork a rank as `unisono.launchers.process.start` starts one."""
        if [environ.get(name) for name in _OF_LOADER] != self._of_loader:
            return started(command, core, environ)
        out, err = os.pipe(), os.pipe()
        try:
            told = self._fork(command, environ, (out[1], err[1]), core=core, is_session=True)
        finally:
            os.close(out[1])
            os.close(err[1])
        return ForkedProcess(told, open(out[0], "rb", buffering=0), open(err[0], "rb", buffering=0))

    def start_plain(self, command: Command, environ: Mapping[str, str]) -> ForkedProcess:
        """Fork a process that writes where this one writes."""
        return ForkedProcess(self._fork(command, environ, (1, 2)), None, None)

    def close(self) -> None:
        """End the server, and what is left of its ranks, which there should be none of."""
        self._socket.close()
        left = self._process.wait()
        assert not left, f"{left} ranks were left behind by the tests"

    def _fork(
        self,
        command: Command,
        environ: Mapping[str, str],
        outputs: tuple[int, int],
        *,
        core: int | None = None,
        is_session: bool = False,
    ) -> int:
        preloaded = [name for name in PRELOADED_IF_USED if name in sys.modules]
        request = _Request(command, dict(environ), os.getcwd(), core, is_session, preloaded)
        told, tell = os.pipe()
        data = pickle.dumps(request)
        try:
            with self._lock:
                passed = [tell, *outputs, *command.descriptors]
                socket.send_fds(self._socket, [_NUMBER.pack(len(data))], passed)
                self._socket.sendall(data)
        except BaseException:
            os.close(told)
            raise
        finally:
            os.close(tell)
        return told


def import_path() -> str:
    """Return the PYTHONPATH with which another process imports what this one can."""
    return os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])


@cache
def server() -> ForkServer:
    """Return the server of this process. The thread that calls it first has to live as long as it is needed."""
    return ForkServer()


def serve() -> None:
    """Fork ranks as they are asked for, until nobody can ask any more; return in a rank when it has been one.

    Ranks that are left then are killed, after some time; how many they were is the exit code.
    """
    _die_with_parent()
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    woken, wake = _hear_of_children()
    own_pid = os.getpid()
    tells: dict[int, int] = {}
    while True:
        ready = select.select([requests, woken], [], [])[0]
        if woken in ready:
            _tell_of_ended(woken, tells)
        if requests not in ready:
            continue
        if (asked := _next_request(requests)) is None:
            break
        request, (tell, *descriptors) = asked
        # Only now, because many tests need no ranks, and should not wait while this takes the cores.
        _preload((*PRELOADED, *request.preloaded))
        pid = os.fork()
        if pid == 0:
            return _become(request, descriptors, (requests.detach(), woken, wake, tell, *tells.values()), own_pid)
        os.write(tell, _NUMBER.pack(pid))
        tells[pid] = tell
        for each in descriptors:
            os.close(each)
    sys.exit(_end_all(woken, tells))


def _preload(names: Sequence[str]) -> None:
    if all(name in sys.modules for name in names):
        return
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _hear_of_children() -> tuple[int, int]:
    """Return a pipe that has something to be read when a child has ended; others write nothing to it."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return woken, wake


def _next_request(requests: socket.socket) -> tuple[_Request, list[int]] | None:
    """Return what is asked for next, and the descriptors that came along."""
    header, descriptors, *_ = socket.recv_fds(requests, _NUMBER.size, _FIRST_FREE // 2)
    if not header:
        return None
    data = bytearray()
    while len(data) < _NUMBER.unpack(header)[0]:
        data += requests.recv(_NUMBER.unpack(header)[0] - len(data))
    return pickle.loads(data), descriptors


def _end_all(woken: int, tells: dict[int, int]) -> int:
    """Wait for the ranks that are left, and kill those that stay; return how many these were."""
    until = time.monotonic() + _GRACE_S
    while tells and time.monotonic() < until:
        if select.select([woken], [], [], 0.1)[0]:
            _tell_of_ended(woken, tells)
    for pid in tells:
        os.kill(pid, signal.SIGKILL)
    return len(tells)


def _tell_of_ended(woken: int, tells: dict[int, int]) -> None:
    os.read(woken, 4096)
    while tells:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        tell = tells.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # where nobody wants to know
            os.write(tell, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os.close(tell)


def _become(request: _Request, descriptors: Sequence[int], of_server: Sequence[int], parent: int) -> None:
    """Be what is asked for, in a process that has just been forked."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    if request.is_session:
        os.setsid()
    if request.core is not None:
        os.sched_setaffinity(0, {request.core})
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, _FIRST_FREE) for each in descriptors]
    for each in (*descriptors, *of_server):
        os.close(each)
    for each, wanted in zip(moved, (1, 2, *request.command.descriptors), strict=True):
        os.dup2(each, wanted, inheritable=True)
        os.close(each)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environ)
    path = request.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [each for each in path if each not in sys.path]
    random.seed()
    _, how, what, *arguments = request.command.argv
    sys.argv = ["-", *arguments]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(what, {"__name__": "__main__"})


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)
