"""One rank of a local job as a process: environment, start, signals and exit code."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import FileIO
from pathlib import Path

from unisono.foundation.forks import closed_in_child
from unisono.foundation.processes import LOST, Child
from unisono.options import LAUNCHER_VARIABLES, PREFIX
from unisono.transports import core_path

# The errors of pidfd_open on systems without it: kernels before 5.3, and containers with an old security profile.
_NO_PIDFD = (errno.ENOSYS, errno.EPERM, errno.EACCES)
# The prefix of variables that torchrun sets. A rank must not see them: torch would use a store that torchrun serves.
_OF_TORCHRUN = "TORCHELASTIC_"
_CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)


# The exit code of a rank whose host was lost. No process can end with this code.
LOST_HOST = LOST + 1
_STATUSES = {LOST: 1, LOST_HOST: 255}


@dataclass(frozen=True, slots=True)
class Command:
    """The command that a rank executes.

    Attributes:
        argv: the program and its arguments; the program is looked up in PATH.
        descriptors: file descriptors that the rank inherits under the same numbers. The launcher closes them when all
            ranks have been started.
        stdin: the descriptor that the rank inherits as its standard input, or `subprocess.DEVNULL`.
    """

    argv: tuple[str, ...]
    descriptors: tuple[int, ...] = ()
    stdin: int = subprocess.DEVNULL


def own_stdin() -> int:
    """Return the standard input of this process for a rank; DEVNULL if it is closed, or a terminal of another job.

    A rank has no controlling terminal, so the kernel would not stop it by SIGTTIN when it reads. If this process runs
    in the background of a terminal, the rank would take from the shell what the user types.
    """
    if sys.__stdin__ is None:
        return subprocess.DEVNULL
    try:
        descriptor = sys.__stdin__.fileno()
        is_foreign = os.isatty(descriptor) and os.tcgetpgrp(descriptor) != os.getpgrp()
    except (OSError, ValueError):  # it is closed, or the terminal is not the one of this session
        return subprocess.DEVNULL
    return subprocess.DEVNULL if is_foreign else descriptor


@dataclass(frozen=True, slots=True)
class Exit:
    """How a rank ended.

    Attributes:
        rank: the rank.
        code: its exit code, minus the number of the signal that killed it, or `processes.LOST`.
        stopped: whether a signal of the launcher ended it.
        pid: the id of its process; 0 if unknown.
        host: the name of its host; empty if it is this one.
    """

    rank: int
    code: int
    stopped: bool = False
    pid: int = 0
    host: str = ""

    @property
    def status(self) -> int:
        """The exit status in a shell: the code, or 128 plus the number of the signal; 1 if the code is lost."""
        if self.code in _STATUSES:
            return _STATUSES[self.code]
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        """Return the end in words: ``exited with code 3`` or ``was killed by SIGKILL``."""
        if self.code == LOST_HOST:
            return f"was lost with host {self.host}"
        if self.code == LOST:
            return "ended, and its exit code is lost (the program has waited for all of its children)"
        return f"exited with code {self.code}" if self.code >= 0 else f"was killed by {signal_name(-self.code)}"


def above_standard_streams(descriptor: int) -> int:
    """Return `descriptor`, or a duplicate with a higher number if it has the number of a standard stream.

    If this process was started with a standard stream closed, a new descriptor gets that number. A rank could not
    inherit it, because its own standard stream takes the number.
    """
    if descriptor > 2:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGKILL`` for 9, and ``signal 40`` for a real-time signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, slots=True)
class JobPart:
    """The ranks of a job that one launcher starts, all on its machine: `count` ranks from `first` on, of `size` in all.

    The whole job is ``JobPart(0, size, size)``.
    """

    first: int
    count: int
    size: int

    @property
    def ranks(self) -> range:
        """The ranks of this share."""
        return range(self.first, self.first + self.count)


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """The place of a rank in its job and on this machine.

    Attributes:
        rank: the rank.
        share: the ranks of the job on this machine.
        cores: the processors that the rank is bound to; empty if it is not bound.
        threads: how many threads the rank can run without taking cores from the other ranks.
    """

    rank: int
    share: JobPart
    cores: tuple[int, ...]
    threads: int

    @classmethod
    def of(cls, rank: int, share: JobPart, bind: str | None) -> LocalPlace:
        """Return the place of `rank`.

        With `bind` "core", the r-th rank of this machine gets allowed core r modulo their number. With "numa", it gets
        the allowed cores of NUMA node r modulo the number of nodes that have some.
        """
        sets = BINDINGS[bind]() if bind else [tuple(os.sched_getaffinity(0))]
        number = (rank - share.first) % len(sets)
        sharing = len(range(number, share.count, len(sets)))
        return cls(rank, share, sets[number] if bind else (), max(1, len(sets[number]) // sharing))

    @property
    def local_rank(self) -> int:
        """The number of the rank among those of this machine."""
        return self.rank - self.share.first


def _each_core() -> list[tuple[int, ...]]:
    return [(core,) for core in sorted(os.sched_getaffinity(0))]


def _numa_nodes() -> list[tuple[int, ...]]:
    """Return the allowed cores of each NUMA node that has some."""
    from unisono.tuning.machine.levels import processors

    allowed = os.sched_getaffinity(0)
    nodes = processors().levels.get("numa", ())
    return [tuple(sorted(node & allowed)) for node in nodes if node & allowed] or [tuple(sorted(allowed))]


# By the value of `--bind`: returns the sets of cores to which ranks are bound in turn.
BINDINGS: Mapping[str, Callable[[], list[tuple[int, ...]]]] = {"core": _each_core, "numa": _numa_nodes}


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a job meet; a launcher passes it to its ranks.

    Attributes:
        store: the URL of the store.
        job: the id of the job, in hexadecimal.
        key_fd: the descriptor of a pipe with the key of the job.
        torch_host, torch_port: where rank 0 serves the store of torch.distributed, if the program uses it.
    """

    store: str
    job: str
    key_fd: int
    torch_host: str
    torch_port: int


def rank_environment(environ: Mapping[str, str], place: LocalPlace, meeting: Meeting, restarts: int) -> dict[str, str]:
    """Return the environment of a rank: `environ`, with the variables that Unisono and torch read.

    `restarts` is not 0 if the rank must join the running job, because it has been started anew.

    If this process is itself a rank, of `unisono run` or torchrun, the variables of that job are removed.
    """
    of_unisono = {
        "RANK": place.rank,
        "SIZE": place.share.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_SIZE": place.share.count,
        "STORE": meeting.store,
        "JOB": meeting.job,
        "KEY_FD": meeting.key_fd,
        "RESTART": restarts,
    }
    of_torch = {
        "RANK": place.rank,
        "WORLD_SIZE": place.share.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.share.count,
        "MASTER_ADDR": meeting.torch_host,
        "MASTER_PORT": meeting.torch_port,
    }
    of_outer_job = {PREFIX + name for name in LAUNCHER_VARIABLES}
    inherited = {
        name: value for name, value in environ.items() if name not in of_outer_job and not name.startswith(_OF_TORCHRUN)
    }
    defaults = {"OMP_NUM_THREADS": str(place.threads), "PYTHONUNBUFFERED": "1"}
    of_rank = of_torch | {PREFIX + name: value for name, value in of_unisono.items()}
    return {**defaults, **inherited, **{name: str(value) for name, value in of_rank.items()}}


@contextlib.contextmanager
def statistics_folder(is_needed: bool) -> Iterator[str]:
    """Yield a new folder for the statistics of ranks, which is removed at the end; an empty text if none is needed."""
    if not is_needed:
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="unisono-run-") as folder:
        yield folder


@cache
def _exec_rank() -> str:
    """Return the path of the program that starts a rank. It lies beside the native core.

    Raises:
        ImportError: this copy of Unisono has no native core.
    """
    return str(Path(core_path()).with_name("exec_rank"))


def start(command: Command, cores: Sequence[int], environ: Mapping[str, str]) -> Child:
    """Start the process of a rank, bound to `cores` unless these are empty, with pipes for its output.

    It soon moves into a process group of its own.
    """
    return Child(
        [_exec_rank(), str(os.getpid()), ",".join(map(str, cores)), *command.argv],
        stdin=command.stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        pass_fds=command.descriptors,
        bufsize=0,
    )


class RankProcess:
    """The process of a rank, in a process group of its own. The kernel kills it if the launcher dies.

    The rank stays in the launcher's session (`exec_rank.cpp` has the reason), but without its terminal.

    The kernel kills it when the *thread* that started it ends, so that thread must live as long as the rank.

    Attributes:
        rank: the rank.
        pid: the id of the process.
        pidfd: a descriptor that becomes readable when the process has ended. None if the kernel (before 5.3) or a
            container has no pidfd_open; the caller must then poll `has_ended`.
        streams: "stdout" and "stderr" as non-blocking descriptors, for reading.
    """

    def __init__(self, command: Command, place: LocalPlace, environ: Mapping[str, str]) -> None:
        self._popen = start(command, place.cores, environ)
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self.rank = place.rank
        self.pid = self._popen.pid
        self._popen.stdout, self._popen.stderr = map(closed_in_child, (self._popen.stdout, self._popen.stderr))
        try:
            self.pidfd = _pidfd_of(self._popen.pid)
        except OSError:  # The launcher has no free descriptor to watch the rank.
            self._popen.kill()
            self._popen.wait()
            raise
        self.streams = {"stdout": self._popen.stdout.fileno(), "stderr": self._popen.stderr.fileno()}
        for descriptor in self.streams.values():
            os.set_blocking(descriptor, False)

    def signal(self, number: int) -> None:
        """Send a signal to the rank and to the processes that it has started."""
        try:
            os.killpg(self._popen.pid, number)
        except ProcessLookupError:  # It has ended, or has only just started and has no group yet.
            self._popen.send_signal(number)
        except PermissionError:
            pass

    def signal_if_caught(self, number: int) -> None:
        """Send a signal to the rank only, if it has a handler for it: without a handler, the signal would kill it."""
        with contextlib.suppress(OSError):
            caught = _CAUGHT.search(Path("/proc", str(self._popen.pid), "status").read_text())
            if caught and int(caught[1], 16) >> (number - 1) & 1:
                os.kill(self._popen.pid, number)

    def has_survivors(self) -> bool:
        """Return whether processes that the rank started still run after the rank was reaped."""
        try:
            os.killpg(self._popen.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def has_ended(self) -> bool:
        """Return whether the process has ended, without waiting."""
        return self._popen.poll() is not None

    def reap(self) -> int:
        """Take the exit status of the ended process, and return the `code` for its `Exit`."""
        return self._popen.wait()

    def close(self) -> None:
        """Close the descriptors."""
        if self.pidfd is not None:
            self.pidfd.close()
        for stream in (self._popen.stdout, self._popen.stderr):
            assert stream is not None
            stream.close()


def _pidfd_of(pid: int) -> FileIO | None:
    try:
        return closed_in_child(FileIO(os.pidfd_open(pid)))
    except AttributeError:  # Python was built on a system without it.
        return None
    except OSError as error:
        if error.errno in _NO_PIDFD:
            return None
        raise
