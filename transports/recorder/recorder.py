"""`Recorder`: the flight recorder of a session, and its dumps.

The native core records the calls (flight_recorder.h). This file writes dumps of the records: when the job fails,
when the process gets SIGUSR1, and when the program asks. The thread of the session's event loop does so, because the
thread of the program may be in a call that never ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import FileIO
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from unisono.foundation import log
from unisono.foundation.forks import closed_in_child
from unisono.transports import _core
from unisono.transports.recorder.clocks import LIMIT_S, facts_of

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

    from unisono.errors import UnisonoError
    from unisono.transports.recorder.memory import Snapshot

_log = log.get("calls")

# How many different calls before the failed one an error shows, and of how many calls they are taken.
_CALLS_IN_ERRORS = 2
_CALLS_LOOKED_AT = 16
# No more than this much of the program's command line is recorded.
_MOST_ARGUMENTS = 32
_MOST_ARGUMENT_LENGTH = 200
# The directory of the package, whose frames are not the program's.
_PACKAGE = os.path.normpath(os.path.join(__file__, "..", "..", ".."))


class Loop(Protocol):
    """The part of an event loop that a recorder uses."""

    def submit(self, callback: Callable[[], None]) -> None:
        """Call `callback` soon, in the thread of the loop."""

    def watch(self, sock: FileIO, callback: Callable[[], None]) -> None:
        """Call `callback` in the thread of the loop whenever `sock` can be read."""

    def unwatch(self, sock: int) -> None:
        """Stop watching a descriptor."""


class Directories(NamedTuple):
    """The directories of files that nobody asks for in the program; empty for none.

    Attributes:
        dumps: for dumps on failures and SIGUSR1.
        traces: for a trace when the rank leaves the job.
        setting: the place where a user sets the directory of dumps, as advice names it.
    """

    dumps: str
    traces: str
    setting: str


class Recorder:
    """The flight recorder of a session.

    Args:
        control: the native control of the session, which holds the recorder.
        loop: the event loop of the session, whose thread writes dumps.
        directories: where to write files that nobody asks for.
        name: the job and the epoch, for the names of files.
        error_name: returns the name of the error for the number of a native failure.
    """

    def __init__(
        self, control: _core.Control, loop: Loop, directories: Directories, name: str, error_name: Callable[[int], str]
    ) -> None:
        self._control = control
        self._loop = loop
        self._directory, self._traces, self._setting = directories
        self._name = name
        self._error_name = error_name
        self._writing = threading.Lock()
        self._has_other_clock = False
        self._dump_of_failure: str | None = None  # its path, once it has been written; "" if that failed
        self._events = _event()
        self._signals = _event()

    def start(self) -> None:
        """Begin to wait for failures, notices and SIGUSR1, which does not end the process from now on.

        SIGUSR1 is taken only if the process has no handler for it. A handler that the program sets later replaces this
        one.
        """
        _core.notify_of_signal(self._signals.fileno())
        self._loop.submit(self._watch)

    def _watch(self) -> None:
        self._loop.watch(self._events, self._on_event)
        self._control.add_doorbell(self._events.fileno())
        self._loop.watch(self._signals, self._on_signal)

    def close(self) -> None:
        """Write the dump of a failure that has not been written yet, and stop. Called in the thread of the loop.

        A rank that ends by an exception that nobody has caught, such as that of Ctrl-C, also writes a dump.
        """
        _core.forget_signal(self._signals.fileno())
        self._control.remove_doorbell(self._events.fileno())
        for event in (self._events, self._signals):
            self._loop.unwatch(event.fileno())
            event.close()
        if self._control.failed():
            self.dump_failure()
        elif self._directory and _uncaught_error() is not None:
            # The job fails in the other ranks, which need this one. This rank ends before it hears of that.
            self._dump_or_warn("error", None)
        if self._traces:
            self._trace_or_warn()

    def compare_clocks(self) -> None:
        """Begin to measure how far the clock of rank 0, which is on another host, is ahead of this rank's.

        Files of a rank that has not called this say that the clocks are the same.
        """
        self._has_other_clock = True
        self._control.measure_clock(0.0)

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write a description of the rank into the recorder's memory: `facts`, its program and its versions."""
        self._control.describe(json.dumps(_described(facts)))

    def snapshot(self) -> Snapshot:
        """Return a copy of the calls and messages that the recorder holds now."""
        from unisono.transports.recorder.memory import parse

        return parse(self._control.recorded())

    def _snapshot_for_file(self) -> Snapshot:
        offset = self._control.measure_clock(LIMIT_S) if self._has_other_clock else (0, 0)
        snapshot = self.snapshot()
        return replace(snapshot, about={**snapshot.about, **facts_of(offset)})

    def last_calls(self) -> tuple[str, ...]:
        """Return the last calls of this rank that ended, as errors show them, the newest first.

        Of calls that were made again and again, only the last one is in the list.
        """
        latest: dict[str, str] = {}
        for call in self._control.last_calls(_CALLS_LOOKED_AT):
            latest.setdefault(call.partition(" ")[2] if call.startswith("#") else call, call)
        return tuple(latest.values())[:_CALLS_IN_ERRORS]

    def dump_failure(self) -> str:
        """Write the dump of the job's failure, unless it has been written; return its path, or "" if there is none.

        A dump that cannot be written is a warning in the log, because the failure itself matters more.
        """
        if not self._directory:
            return ""
        with self._writing:
            if self._dump_of_failure is None:
                self._dump_of_failure = self._dump_or_warn("error", self._failure())
            return self._dump_of_failure

    def dump(self, directory: str | os.PathLike[str], reason: str, error: Mapping[str, Any] | None = None) -> Path:
        """Write a dump and return its path; raises `OSError` if that fails."""
        from unisono.transports.recorder.dumps import Dump, write

        dump = Dump(self._snapshot_for_file(), reason, time.monotonic_ns(), time.time(), error, _stacks())
        return write(dump, directory, self._name)

    def trace(self, path: str | os.PathLike[str]) -> Path:
        """Write a trace of the recorded calls to a file and return its path; raises `OSError` if that fails."""
        from unisono.transports.recorder import traces

        return traces.write(self._snapshot_for_file(), path)

    def _trace_or_warn(self) -> None:
        from unisono.transports.recorder import traces

        snapshot = self._snapshot_for_file()
        name = traces.file_name(self._name, snapshot.rank, snapshot.size)
        try:
            traces.write(snapshot, os.path.join(self._traces, name))
        except OSError as refusal:
            _log.warning("no trace could be written to %s: %s", self._traces, refusal.strerror)

    def _dump_or_warn(self, reason: str, error: Mapping[str, Any] | None) -> str:
        try:
            return str(self.dump(self._directory, reason, error))
        except OSError as refusal:
            _log.warning("no dump could be written to %s: %s", self._directory, refusal.strerror)
            return ""

    def _on_event(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._events.fileno())
        for notice, is_important in self._control.take_notices():
            (_log.warning if is_important else _log.debug)("%s", notice)
        if self._control.failed():
            self.dump_failure()

    def _on_signal(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._signals.fileno())
        if self._directory:
            path = self._dump_or_warn("SIGUSR1", None)
            if path:
                _log.warning("SIGUSR1: wrote the dump %s", path)
        else:
            from unisono.transports.recorder.activity import where

            for line in where(self._name):
                _log.warning("SIGUSR1: %s", line)
            _log.warning("SIGUSR1: for dumps of all calls, set %s to a directory before the job starts", self._setting)

    def _failure(self) -> Mapping[str, Any]:
        kind, finder, peer, sequence, text = self._control.failure()
        return {
            "type": self._error_name(kind),
            "text": text,
            "found_by": finder,
            "peer": peer if peer >= 0 else None,
            "sequence": sequence if sequence >= 0 else None,
        }


def dump_of_start(directory: str, job: str, rank: int, size: int, error: UnisonoError) -> str:
    """Write the dump of a rank that could not meet the other ranks and so has no calls; return its path.

    If it cannot be written, that is a warning in the log, and the result is "".
    """
    from unisono.transports.recorder.dumps import Dump, write
    from unisono.transports.recorder.memory import Snapshot, job_name

    about = _described({"job": job, "epoch": 0, "host": os.uname().nodename})
    facts = {"type": type(error).__name__, "text": error.message, "found_by": rank, "peer": error.peer}
    snapshot = Snapshot(rank, size, os.getpid(), about, {}, (), 0, ())
    dump = Dump(snapshot, "error", time.monotonic_ns(), time.time(), {**facts, "sequence": None}, _stacks())
    try:
        return str(write(dump, directory, job_name(about)))
    except OSError as refusal:
        _log.warning("no dump could be written to %s: %s", directory, refusal.strerror)
        return ""


def _described(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = [argument[:_MOST_ARGUMENT_LENGTH] for argument in sys.argv[:_MOST_ARGUMENTS]]
    return {**facts, "program": arguments, "python": sys.version.split()[0], "started_s": time.time()}


def _event() -> FileIO:
    return closed_in_child(FileIO(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), "r+"))


def _stacks() -> dict[str, list[str]]:
    """Return where each thread of the program is, outermost frame first.

    Threads of Unisono are omitted, and so are the frames of Unisono in which the program's own frames end.
    """
    import traceback

    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {names.get(ident, str(ident)): frame for ident, frame in sys._current_frames().items()}
    stacks = {
        name: list(traceback.walk_stack(frame)) for name, frame in frames.items() if not name.startswith("unisono")
    }
    # After an exception that nobody has caught, such as that of Ctrl-C, the main thread only ends the interpreter.
    error = _uncaught_error()
    if error is not None and error.__traceback__ is not None:
        stacks[threading.main_thread().name] = list(traceback.walk_tb(error.__traceback__))[::-1]
    return {name: _places(stack) for name, stack in stacks.items()}


def _uncaught_error() -> BaseException | None:
    """Return the exception that ends this process because nobody has caught it; None if there is none."""
    return getattr(sys, "last_value", None)


def _places(stack: list[tuple[FrameType, int]]) -> list[str]:
    """Return the places of a stack, innermost frame first, as text in the opposite order."""
    own = [frame.f_code.co_filename.startswith(_PACKAGE) for frame, _ in stack]
    first = own.index(False) if False in own else 0
    return [f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}" for frame, line in reversed(stack[first:])]
