"""A fork server that starts the ranks of tests. It has imported the library once, so the ranks need not.

The reason is time: most tests of a rank take a tenth of the time that its imports take.

Theory of operation
-------------------
Each process that runs tests starts a fork server, which has no threads. It starts a second one for the tests of files
that name torch or sklearn, which imports these: a rank that is forked with torch takes twice the time of another one.
A request to a server has the words of a command line, ``python -m MODULE …`` or ``python -c CODE …``. The server
forks, and the child runs that module or code with the requested environment, descriptors and folder. For each rank
there is a pipe, into which the server writes the rank's process id and, when the rank has ended, its exit code.

The kernel kills the ranks if the server dies, and the server if the process that runs tests dies.

A forked rank differs from a started one in two respects. All ranks of a server hash strings alike. And a rank that
ends well runs its exit functions, but does not take its interpreter down, which would write to all pages that it
shares with the server. Tests of how ranks start and end, and ranks whose loader must find other libraries, start real
processes instead.
"""

from __future__ import annotations

import atexit
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

from support.import_path import import_path

from unisono.launchers.process import Command, start as start_process

# The modules that ranks import: the library up to a first result, and the imports of tests that run on ranks.
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
    *("support.executor_contract", "support.harness", "support.ranks", "numpy.linalg"),
)
# These modules take longer to import, and make each rank larger. Only ranks of tests whose files name them need them.
PRELOADED_IF_USED = ("torch", "torch._dynamo", "sklearn.datasets")
# The system's loader reads these variables only when a process starts.
_LOADER_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD")
_NUMBER = struct.Struct("=i")
_FIRST_FREE = 512  # above all numbers that the descriptors of a rank are moved to
_GRACE_S = 10.0  # time to end for ranks that still run when the tests have ended
_KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class _Request:
    command: Command
    environ: Mapping[str, str]
    folder: str
    cores: Sequence[int]
    has_group: bool
    preloaded: Sequence[str]


class ForkedProcess:
    """A forked rank, with the methods of `subprocess.Popen` that tests and launchers use.

    `status_pipe` is the descriptor from which the process id and the exit code are read.
    """

    def __init__(self, status_pipe: int, stdout: Any, stderr: Any) -> None:
        self.stdout = stdout
        self.stderr = stderr
        self.returncode: int | None = None
        self._status_pipe = status_pipe
        self.pid = self._read_number(None)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                self.returncode = self._read_number(timeout)
                os.close(self._status_pipe)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read_number(self, timeout_s: float | None) -> int:
        if not select.select([self._status_pipe], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired("a forked rank", timeout_s or 0.0)
        data = os.read(self._status_pipe, _NUMBER.size)
        if not data:
            raise RuntimeError("the process that forks ranks has ended, and its ranks with it")
        return int(_NUMBER.unpack(data)[0])


Started: TypeAlias = subprocess.Popen[bytes] | ForkedProcess


# The servers of this process.
SERVERS: list[ForkServer] = []
# The modules of PRELOADED_IF_USED that the file of the current test names.
used_by_test: tuple[str, ...] = ()


class ForkServer:
    """A fork server, as the process that runs tests uses it.

    Args:
        modules: the modules that it imports before the first rank.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        variables = {"PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
        self._loader_values = [os.environ.get(name) for name in _LOADER_VARIABLES]
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-c",
                    "from support import forked_ranks; forked_ranks.serve()",
                    str(theirs.fileno()),
                ],
                env={**os.environ, **variables},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int:
        """The id of the server's process."""
        return self._process.pid

    def start(self, command: Command, cores: Sequence[int], environ: Mapping[str, str]) -> Started:
        """Fork a rank with the interface of `unisono.launchers.process.start`."""
        if [environ.get(name) for name in _LOADER_VARIABLES] != self._loader_values:
            return start_process(command, cores, environ)
        out, err = os.pipe(), os.pipe()
        try:
            status_pipe = self._fork(command, environ, (out[1], err[1]), cores=cores, has_group=True)
        finally:
            os.close(out[1])
            os.close(err[1])
        return ForkedProcess(status_pipe, open(out[0], "rb", buffering=0), open(err[0], "rb", buffering=0))

    def start_plain(self, command: Command, environ: Mapping[str, str]) -> ForkedProcess:
        """Fork a process that shares the standard output and standard error of this one."""
        return ForkedProcess(self._fork(command, environ, (1, 2)), None, None)

    def close(self) -> None:
        """End the server and its ranks. A rank that still runs is an error of its test."""
        self._socket.close()
        number = self._process.wait()
        assert not number, f"{number} ranks outlived the tests"

    def _fork(
        self,
        command: Command,
        environ: Mapping[str, str],
        outputs: tuple[int, int],
        *,
        cores: Sequence[int] = (),
        has_group: bool = False,
    ) -> int:
        request = _Request(command, dict(environ), os.getcwd(), cores, has_group, self._modules)
        status_pipe, status_end = os.pipe()
        data = pickle.dumps(request)
        try:
            with self._lock:
                passed = [status_end, *outputs, *command.descriptors]
                socket.send_fds(self._socket, [_NUMBER.pack(len(data))], passed)
                self._socket.sendall(data)
        except BaseException:
            os.close(status_pipe)
            raise
        finally:
            os.close(status_end)
        return status_pipe


def prepare_for(file: Path) -> None:
    """Let the ranks of the tests in a file be forked from a process that has imported the modules that the file names.

    Modules that this process has not imported do not count, because they may not be installed. The main thread calls
    this function, because the kernel kills a server when the thread that started it ends.
    """
    global used_by_test  # noqa: PLW0603  (pools start ranks by a function that has no further argument)
    text = _text_of(file)
    used_by_test = tuple(name for name in PRELOADED_IF_USED if name in text and name in sys.modules)
    server()


def server(*modules: str) -> ForkServer:
    """Return the server of this process that imports these modules; by default those of the current test."""
    return _server(modules or (*PRELOADED, *used_by_test))


@cache
def _text_of(file: Path) -> str:
    return file.read_text()


@cache
def _server(modules: tuple[str, ...]) -> ForkServer:
    SERVERS.append(ForkServer(*modules))
    return SERVERS[-1]


def serve() -> None:
    """Run the server until the process that runs tests closes its socket. In a forked rank, run the rank and return.

    At the end, the server kills ranks that still run after `_GRACE_S`. Its exit code is the number of these ranks.
    """
    _die_with_parent()
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    wakeup, wakeup_end = _wakeup_at_end_of_children()
    own_pid = os.getpid()
    status_ends: dict[int, int] = {}  # by the rank's process id
    while True:
        ready = select.select([requests, wakeup], [], [])[0]
        if wakeup in ready:
            _report_ended(wakeup, status_ends)
        if requests not in ready:
            continue
        if (received := _next_request(requests)) is None:
            break
        request, (status_end, *descriptors) = received
        # The first request comes only from a test with ranks. Many tests have none, and should not wait for the
        # imports.
        _preload(request.preloaded)
        pid = os.fork()
        if pid == 0:
            of_server = (requests.detach(), wakeup, wakeup_end, status_end, *status_ends.values())
            return _run_rank(request, descriptors, of_server, own_pid)
        os.write(status_end, _NUMBER.pack(pid))
        status_ends[pid] = status_end
        for descriptor in descriptors:
            os.close(descriptor)
    sys.exit(_end_all(wakeup, status_ends))


def _preload(names: Sequence[str]) -> None:
    if all(name in sys.modules for name in names):
        return
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _wakeup_at_end_of_children() -> tuple[int, int]:
    """Return both ends of a new pipe, into which Python writes a byte whenever a child has ended."""
    wakeup, wakeup_end = os.pipe()
    os.set_blocking(wakeup_end, False)
    signal.set_wakeup_fd(wakeup_end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return wakeup, wakeup_end


def _next_request(requests: socket.socket) -> tuple[_Request, list[int]] | None:
    """Return the next request and the descriptors that were passed with it; None if the socket was closed."""
    header, descriptors, *_ = socket.recv_fds(requests, _NUMBER.size, _FIRST_FREE // 2)
    if not header:
        return None
    data = bytearray()
    while len(data) < _NUMBER.unpack(header)[0]:
        data += requests.recv(_NUMBER.unpack(header)[0] - len(data))
    return pickle.loads(data), descriptors


def _end_all(wakeup: int, status_ends: dict[int, int]) -> int:
    """Wait until all ranks have ended, for `_GRACE_S` at most, and kill the others; return the number of these."""
    until = time.monotonic() + _GRACE_S
    while status_ends and time.monotonic() < until:
        if select.select([wakeup], [], [], 0.1)[0]:
            _report_ended(wakeup, status_ends)
    for pid in status_ends:
        os.kill(pid, signal.SIGKILL)
    return len(status_ends)


def _report_ended(wakeup: int, status_ends: dict[int, int]) -> None:
    """Write the exit code of every rank that has ended into its pipe."""
    os.read(wakeup, 4096)
    while status_ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        status_end = status_ends.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # the test has dropped its `ForkedProcess`
            os.write(status_end, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os.close(status_end)


def _run_rank(request: _Request, descriptors: Sequence[int], of_server: Sequence[int], parent: int) -> None:
    """Run a requested command in the child that has just been forked.

    Args:
        request: the command, its environment and folder.
        descriptors: the passed descriptors: standard output, standard error, and those of the command.
        of_server: the descriptors of the server, which the rank closes.
        parent: the process id of the server.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    if request.has_group:
        os.setpgid(0, 0)
    if request.cores:
        os.sched_setaffinity(0, request.cores)
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FIRST_FREE) for descriptor in descriptors]
    for inherited in (*descriptors, *of_server):
        os.close(inherited)
    for duplicate, number in zip(moved, (1, 2, *request.command.descriptors), strict=True):
        os.dup2(duplicate, number, inheritable=True)
        os.close(duplicate)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environ)
    path = request.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in path if folder not in sys.path]
    random.seed()
    _, option, module_or_code, *arguments = request.command.argv
    sys.argv = ["-", *arguments]
    code: Any = 0
    try:
        if option == "-m":
            runpy.run_module(module_or_code, run_name="__main__", alter_sys=True)
        else:
            exec(module_or_code, {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code or 0
    if not isinstance(code, int):
        sys.exit(code)  # the interpreter writes a text
    _end_quickly(code)


def _end_quickly(code: int) -> None:
    """End this process as the interpreter does, but leave its modules and objects to the kernel.

    With torch, taking the interpreter down takes five times the processor time of a short rank.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)
