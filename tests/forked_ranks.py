"""Ranks that are forked by a process which has imported what they need, instead of each importing it again.

Importing takes a rank ten times as long as most tests of it. The fork server is started once by each process that runs
tests, and has no threads. What it forks is told in the words of a command line, ``python -m MODULE …`` or ``python -c
CODE …``, has the environment, the descriptors and the folder that it would have as a process of its own, and is killed
by the kernel if the server dies, as that is if whoever runs the tests does. It differs in that ranks share the hashes of
strings. What is about starting ranks is tested by ranks that are started.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from unisono.launchers.process import Command

# What ranks import: the library up to a first result, and what tests of ranks have at their beginnings.
PRELOADED = (
    *("unisono.collectives." + name for name in ("communicator", "environment", "knowledge", "meeting")),
    *("unisono.launchers.messages", "unisono.testing", "unisono.transports.native_executor", "unisono.tuning.identity"),
    *("cloudpickle", "hypothesis.extra.numpy", "ml_dtypes", "numpy.random", "numpy.testing", "pytest"),
    *("executor_contract", "harness", "native_ranks", "numpy.linalg"),
)
_NUMBER = struct.Struct("=i")
_FIRST_FREE = 512  # descriptors from here on are not in the way of those that a rank is to have
_KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class _Request:
    argv: Sequence[str]
    environ: Mapping[str, str]
    folder: str
    descriptors: Sequence[int]  # the numbers that the rank is to have those under that come along
    core: int | None
    is_session: bool


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


class ForkServer:
    """The process that forks ranks, as it is seen by the one that runs tests."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", "import forked_ranks; forked_ranks.serve()", str(theirs.fileno())],
                env={**os.environ, **own},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def start(self, command: Command, core: int | None, environ: Mapping[str, str]) -> ForkedProcess:
        """Fork a rank as `unisono.launchers.process.start` starts one."""
        out, err = os.pipe(), os.pipe()
        try:
            request = _Request(
                command.argv, dict(environ), os.getcwd(), (1, 2, *command.descriptors), core, is_session=True
            )
            told = self._fork(request, (out[1], err[1], *command.descriptors))
        finally:
            os.close(out[1])
            os.close(err[1])
        return ForkedProcess(told, open(out[0], "rb", buffering=0), open(err[0], "rb", buffering=0))

    def start_plain(self, argv: Sequence[str], descriptors: Sequence[int], environ: Mapping[str, str]) -> ForkedProcess:
        """Fork a process that writes where this one writes."""
        request = _Request(argv, dict(environ), os.getcwd(), (1, 2, *descriptors), None, is_session=False)
        return ForkedProcess(self._fork(request, (1, 2, *descriptors)), None, None)

    def close(self) -> None:
        """End the server, and what is left of its ranks."""
        self._socket.close()
        self._process.wait()

    def _fork(self, request: _Request, descriptors: Sequence[int]) -> int:
        told, tell = os.pipe()
        data = pickle.dumps(request)
        try:
            with self._lock:
                socket.send_fds(self._socket, [_NUMBER.pack(len(data))], [tell, *descriptors])
                self._socket.sendall(data)
        except BaseException:
            os.close(told)
            raise
        finally:
            os.close(tell)
        return told


@cache
def server() -> ForkServer:
    """Return the server of this process. The thread that calls it first has to live as long as it is needed."""
    return ForkServer()


def serve() -> None:
    """Fork ranks as they are asked for, until nobody can ask any more; return in a rank when it has been one."""
    _die_with_parent()
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tells: dict[int, int] = {}
    while True:
        ready = select.select([requests, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _tell_of_ended(tells)
        if requests not in ready:
            continue
        header, descriptors, *_ = socket.recv_fds(requests, _NUMBER.size, 64)
        if not header:
            break
        request: _Request = pickle.loads(_read(requests, _NUMBER.unpack(header)[0]))
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(request, descriptors, (requests.detach(), woken, wake, *tells.values()), parent)
            return
        tells[pid] = descriptors[0]
        os.write(descriptors[0], _NUMBER.pack(pid))
        for each in descriptors[1:]:
            os.close(each)
    for pid in tells:
        os.kill(pid, signal.SIGKILL)


def _read(source: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        data += source.recv(nbytes - len(data))
    return bytes(data)


def _tell_of_ended(tells: dict[int, int]) -> None:
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
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, _FIRST_FREE) for each in descriptors[1:]]
    for each in (*descriptors, *of_server):
        os.close(each)
    for each, wanted in zip(moved, request.descriptors, strict=True):
        os.dup2(each, wanted, inheritable=True)
        os.close(each)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environ)
    random.seed()
    sys.argv = ["-", *request.argv[3:]]
    if request.argv[1] == "-m":
        runpy.run_module(request.argv[2], run_name="__main__", alter_sys=True)
    else:
        exec(request.argv[2], {"__name__": "__main__"})


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)
