"""One rank of a local job as a process: its environment, its start, its signals and how it ended."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from io import FileIO
from pathlib import Path

from unisono.forks import closed_in_child
from unisono.options import LAUNCHER_VARIABLES, PREFIX
from unisono.processes import LOST, Child
from unisono.transports import core_path

# How pidfd_open fails where there is none: kernels before 5.3, and old profiles of containers.
_NO_PIDFD = (errno.ENOSYS, errno.EPERM, errno.EACCES)
# What torchrun sets for itself. It would send torch to a store that torchrun serves.
_OF_TORCHRUN = "TORCHELASTIC_"
_CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Command:
    """What a rank executes.

    Attributes:
        argv: the program and its arguments; the program is looked up in PATH.
        descriptors: file descriptors of the launcher that are handed over: the rank inherits them under the same
            numbers, and they are closed in the launcher when the ranks have been started.
    """

    argv: tuple[str, ...]
    descriptors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Exit:
    """How a rank ended.

    Attributes:
        rank: the rank.
        code: its exit code, minus the number of the signal that killed it, or `processes.LOST`.
        stopped: whether it was a signal that the launcher sent.
    """

    rank: int
    code: int
    stopped: bool = False

    @property
    def status(self) -> int:
        """The status as a shell counts it: the code, or 128 plus the signal's number; 1 for a code that is lost."""
        if self.code == LOST:
            return 1
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        """Return what happened: ``exited with code 3`` or ``was killed by SIGKILL``."""
        if self.code == LOST:
            return "ended, and its exit code is lost (the program has waited for all of its children)"
        return f"exited with code {self.code}" if self.code >= 0 else f"was killed by {signal_name(-self.code)}"


def above_standard_streams(descriptor: int) -> int:
    """Return `descriptor`, or, if its number is one of a standard stream, another one in its place.

    Where this process was started with a standard stream closed, a new descriptor gets that number. A rank could not
    inherit it, because its own standard stream takes that number.
    """
    if descriptor > 2:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9; a real-time signal without a name of its own is ``signal 40``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a rank stands among `size` local ranks, and the core that it is bound to (None: not bound)."""

    rank: int
    size: int
    core: int | None

    @classmethod
    def of(cls, rank: int, size: int, bind: str | None) -> Placement:
        """Return the place of `rank`; with `bind` "core" the r-th rank has the r-th allowed core, starting again."""
        cores = sorted(os.sched_getaffinity(0))
        return cls(rank, size, cores[rank % len(cores)] if bind == "core" else None)

    def threads(self) -> int:
        """Return how many threads the rank can run without taking cores from the others."""
        return 1 if self.core is not None else max(1, len(os.sched_getaffinity(0)) // self.size)


def rank_environment(
    environ: Mapping[str, str], place: Placement, store: str, job: str, key_fd: int, torch_port: int
) -> dict[str, str]:
    """Return the environment of a rank: `environ`, with the variables that Unisono and torch read.

    Where `environ` is that of a rank of another job, of `unisono run` or torchrun, nothing of that job is left in it.
    """
    of_unisono = {
        "RANK": place.rank,
        "SIZE": place.size,
        "LOCAL_RANK": place.rank,
        "LOCAL_SIZE": place.size,
        "STORE": store,
        "JOB": job,
        "KEY_FD": key_fd,
    }
    of_torch = {
        "RANK": place.rank,
        "WORLD_SIZE": place.size,
        "LOCAL_RANK": place.rank,
        "LOCAL_WORLD_SIZE": place.size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": torch_port,
    }
    outer = {PREFIX + name for name in LAUNCHER_VARIABLES}
    inherited = {
        name: value for name, value in environ.items() if name not in outer and not name.startswith(_OF_TORCHRUN)
    }
    defaults = {"OMP_NUM_THREADS": str(place.threads()), "PYTHONUNBUFFERED": "1"}
    place_of_rank = of_torch | {PREFIX + name: value for name, value in of_unisono.items()}
    return {**defaults, **inherited, **{name: str(value) for name, value in place_of_rank.items()}}


@cache
def _exec_rank() -> str:
    """Return the path of the program that becomes a rank; it stands beside the native core.

    Raises:
        ImportError: this copy of Unisono has no native core.
    """
    return str(Path(core_path()).with_name("exec_rank"))


def start(command: Command, core: int | None, environ: Mapping[str, str]) -> Child:
    """Start what becomes a rank, bound to a core if one is given, with pipes for what it writes."""
    return Child(
        [_exec_rank(), str(os.getpid()), str(-1 if core is None else core), *command.argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        pass_fds=command.descriptors,
        start_new_session=True,
        bufsize=0,
    )


class RankProcess:
    """A started rank, in a session and a process group of its own, killed by the kernel if the launcher dies.

    The kernel ties it to the *thread* that starts it, which therefore has to live as long as the rank.

    Attributes:
        rank: the rank.
        pidfd: a descriptor that is readable once the process has ended. None where the kernel (before 5.3) or a
            container's profile has no pidfd_open; then `has_ended` is to be asked from time to time.
        streams: "stdout" and "stderr" as non-blocking descriptors, for reading.
    """

    def __init__(self, command: Command, place: Placement, environ: Mapping[str, str]) -> None:
        self._popen = start(command, place.core, environ)
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self.rank = place.rank
        self._popen.stdout, self._popen.stderr = map(closed_in_child, (self._popen.stdout, self._popen.stderr))
        try:
            self.pidfd = _pidfd_of(self._popen.pid)
        except OSError:  # The launcher has no descriptor left to watch the rank with.
            self._popen.kill()
            self._popen.wait()
            raise
        self.streams = {"stdout": self._popen.stdout.fileno(), "stderr": self._popen.stderr.fileno()}
        for descriptor in self.streams.values():
            os.set_blocking(descriptor, False)

    def signal(self, number: int) -> None:
        """Send a signal to the rank and to the processes that it started, if there are any left."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)

    def signal_if_caught(self, number: int) -> None:
        """Send a signal to the rank alone, if it has a handler for it: without one, the signal would kill it."""
        with contextlib.suppress(OSError):
            caught = _CAUGHT.search(Path("/proc", str(self._popen.pid), "status").read_text())
            if caught and int(caught[1], 16) >> (number - 1) & 1:
                os.kill(self._popen.pid, number)

    def has_survivors(self) -> bool:
        """Return whether processes that the rank started are still there after it was reaped."""
        try:
            os.killpg(self._popen.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def has_ended(self) -> bool:
        """Return whether the process has ended; does not block."""
        return self._popen.poll() is not None

    def reap(self) -> int:
        """Collect the ended process and return the `code` of its `Exit`."""
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
    except AttributeError:  # Python was built for such a kernel.
        return None
    except OSError as error:
        if error.errno in _NO_PIDFD:
            return None
        raise
