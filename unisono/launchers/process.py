"""One rank of a local job as a process: its environment, its start, its signals and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from unisono.options import LAUNCHER_VARIABLES, PREFIX
from unisono.transports import core_path


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
        code: its exit code, or minus the number of the signal that killed it.
        stopped: whether it was a signal that the launcher sent.
    """

    rank: int
    code: int
    stopped: bool = False

    @property
    def status(self) -> int:
        """The exit status as a shell counts it: the code, or 128 plus the signal's number."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        """Return what happened: ``exited with code 3`` or ``was killed by SIGKILL``."""
        return f"exited with code {self.code}" if self.code >= 0 else f"was killed by {signal_name(-self.code)}"


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


def rank_environment(environ: Mapping[str, str], place: Placement, store: str, job: str, key_fd: int) -> dict[str, str]:
    """Return the environment of a rank: `environ` with what `unisono.collectives.environment` reads."""
    told = {
        "RANK": place.rank,
        "SIZE": place.size,
        "LOCAL_RANK": place.rank,
        "LOCAL_SIZE": place.size,
        "STORE": store,
        "JOB": job,
        "KEY_FD": key_fd,
    }
    outer = {PREFIX + name for name in LAUNCHER_VARIABLES}  # of a job that this launcher is itself a rank of
    inherited = {name: value for name, value in environ.items() if name not in outer}
    defaults = {"OMP_NUM_THREADS": str(place.threads()), "PYTHONUNBUFFERED": "1"}
    return {**defaults, **inherited, **{PREFIX + name: str(value) for name, value in told.items()}}


@cache
def _exec_rank() -> str:
    """Return the path of the program that becomes a rank; it stands beside the native core.

    Raises:
        ImportError: this copy of Unisono has no native core.
    """
    return str(Path(core_path()).with_name("exec_rank"))


def start(command: Command, core: int | None, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start what becomes a rank, bound to a core if one is given, with pipes for what it writes."""
    return subprocess.Popen(
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
        pidfd: readable once the process has ended.
        streams: "stdout" and "stderr" as non-blocking descriptors, for reading.
    """

    def __init__(self, command: Command, place: Placement, environ: Mapping[str, str]) -> None:
        self._popen = start(command, place.core, environ)
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self.rank = place.rank
        try:
            self.pidfd = os.pidfd_open(self._popen.pid)
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

    def has_survivors(self) -> bool:
        """Return whether processes that the rank started are still there after it was reaped."""
        try:
            os.killpg(self._popen.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def reap(self) -> int:
        """Collect the ended process and return its exit code, or minus the signal's number."""
        return self._popen.wait()

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.pidfd)
        for stream in (self._popen.stdout, self._popen.stderr):
            assert stream is not None
            stream.close()
