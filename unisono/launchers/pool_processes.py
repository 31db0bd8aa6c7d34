"""Starts the processes of a pool, runs functions in them, and ends them. The first failure ends all of them.

One thread starts and watches the ranks. The thread that calls `PoolProcesses.run` sends tasks and collects replies.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import selectors
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.errors import CollectiveTimeoutError, PeerLostError
from unisono.foundation import streams
from unisono.foundation.deadlines import Deadline
from unisono.foundation.forks import closed_in_child
from unisono.foundation.processes import python_command
from unisono.launchers.job import LocalJob
from unisono.launchers.output import MergedOutput
from unisono.launchers.pool_protocol import Failure, Inbox, RankSetup, Success, encoded
from unisono.launchers.process import Command, Exit, above_standard_streams
from unisono.launchers.root_cause import CONSEQUENCES

OnOutput = Callable[[int, str, str], None]
EXIT_TIMEOUT_S = 10.0


class RankError(Exception):
    """The traceback of an exception in a rank, as text. It is the cause of the exception that is raised here."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f'\n"""\nrank {rank}: {text}"""')


class _Watch(MergedOutput):
    """An observer of the job that passes the lines on, and lets another thread wait for the end of a rank."""

    def __init__(self, on_output: OnOutput) -> None:
        super().__init__(
            lambda rank, stream, line: on_output(rank, stream, line.decode(errors="replace").rstrip("\r\n")), hold=False
        )
        self._exits: dict[int, Exit] = {}
        self._changed = threading.Condition()

    def ended(self, exit_: Exit) -> None:
        super().ended(exit_)
        with self._changed:
            self._exits[exit_.rank] = exit_
            self._changed.notify_all()

    def exit_of(self, rank: int, timeout_s: float) -> Exit | None:
        """Wait until `rank` has ended and return how; None if it has not ended after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: rank in self._exits, timeout_s)
            return self._exits.get(rank)


class PoolProcesses:
    """Started ranks that run the same function at the same time."""

    def __init__(
        self, size: int, setup: RankSetup, on_output: OnOutput | None, *, bind: str | None, environ: Mapping[str, str]
    ) -> None:
        """Start `size` ranks. `run` raises an error of the start. Without `on_output`, their lines are printed.

        Raises:
            UsageError: `LocalJob` cannot take the arguments.
        """
        with contextlib.ExitStack() as stack:
            pairs = [_connection(stack) for _ in range(size)]
            self._watch = _Watch(on_output or self._print)
            commands = [_worker(theirs.fileno()) for _, theirs in pairs]
            self._job = LocalJob(commands, self._watch, bind=bind, environ=environ)
            stack.pop_all()
        for _, theirs in pairs:
            theirs.detach()  # The job closes it.
        self._sockets = [ours for ours, _ in pairs]
        self._start_error: Exception | None = None
        # The kernel kills the ranks when the thread that started them ends, so a thread of their own starts them.
        self._thread = threading.Thread(target=self._supervise, name="unisono-pool", daemon=True)
        self._thread.start()
        self._send(encoded(setup), Deadline(math.inf))

    def run(self, task: bytes, deadline: Deadline) -> list[Any]:
        """Run the encoded `task` on all ranks and return the results by rank. If it raises, the caller calls `kill`.

        Raises:
            CollectiveTimeoutError: a rank has not answered by `deadline`.
            Exception: the failure that caused the others; see `unisono.launchers.root_cause`.
        """
        self._send(task, deadline)
        replies = self._collect(deadline)
        failures = [self._failure(rank, reply) for rank, reply in replies.items() if not isinstance(reply, Success)]
        if failures:
            raise _cause(failures)
        results = {rank: reply.result for rank, reply in replies.items() if isinstance(reply, Success)}
        return [results[rank] for rank in sorted(results)]

    def close(self) -> None:
        """Make the ranks close their communicators and end. Ranks that do not end in 10 s are killed.

        Raises:
            MismatchError: the ranks disagree on their last call; all have ended.
        """
        for sock in self._sockets:
            with contextlib.suppress(OSError):  # the rank has ended
                sock.shutdown(socket.SHUT_WR)
        try:
            replies = self._collect(Deadline(EXIT_TIMEOUT_S))
        except CollectiveTimeoutError:
            replies = {}
        self._end()
        failures = [self._failure(rank, reply) for rank, reply in replies.items() if isinstance(reply, Failure)]
        if failures:
            raise _cause(failures)

    def _end(self) -> None:
        self.hang_up()
        self._thread.join(EXIT_TIMEOUT_S)
        self._job.stop()
        self._thread.join()

    def hang_up(self) -> None:
        """Close the sockets of the ranks, which then end by themselves. Finalizers may call it: it takes no lock."""
        for sock in self._sockets:
            sock.close()

    def kill(self) -> None:
        """Kill the ranks and wait for their end."""
        self._job.kill()
        self._end()

    def _supervise(self) -> None:
        try:
            self._job.run()
        except Exception as error:  # noqa: BLE001 - raised in the thread that calls `run`.
            self._start_error = error
        self._watch.finish()

    def _print(self, rank: int, stream: str, line: str) -> None:
        streams.write(sys.stdout if stream == "stdout" else sys.stderr, f"[{rank}] {line}\n", self._job.attend)

    def _send(self, data: bytes, deadline: Deadline) -> None:
        for rank, sock in enumerate(self._sockets):
            sock.settimeout(deadline.remaining_s())
            try:
                sock.sendall(data)
            except TimeoutError:
                raise self._timed_out([rank]) from None
            except OSError:
                pass  # The rank has ended. `_collect` finds that out.

    def _collect(self, deadline: Deadline) -> dict[int, Success | Failure | None]:
        """Return the replies by rank, in order of arrival; None for a rank that has ended without a reply."""
        replies: dict[int, Success | Failure | None] = {}
        with closed_in_child(selectors.DefaultSelector()) as selector:
            for rank, sock in enumerate(self._sockets):
                selector.register(sock, selectors.EVENT_READ, (rank, Inbox()))
            while selector.get_map():
                events = selector.select(deadline.remaining_s())
                if not events and deadline.has_passed():
                    raise self._timed_out([rank for rank in range(len(self._sockets)) if rank not in replies])
                for key, _ in events:
                    rank, inbox = key.data
                    open_ = inbox.read(key.fileobj)
                    if inbox.complete or not open_:
                        selector.unregister(key.fileobj)
                        replies[rank] = inbox.message() if inbox.complete else None
        return replies

    def _timed_out(self, ranks: Sequence[int]) -> CollectiveTimeoutError:
        late = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(str(rank) for rank in ranks)}"
        where = "".join(f"; {line}" for line in self._job.look())
        return CollectiveTimeoutError(
            f"the function did not return in time: {late} had not answered, and all ranks are killed{where}"
        )

    def _failure(self, rank: int, reply: Failure | None) -> tuple[Exception, bool]:
        """Return the error of a rank, and whether it is the consequence of another rank's error."""
        if isinstance(reply, Failure):
            error = _unpickled(reply)
            error.__cause__ = RankError(rank, reply.traceback)
            return error, isinstance(error, CONSEQUENCES)
        ended = self._watch.exit_of(rank, EXIT_TIMEOUT_S if self._thread.is_alive() else 0.0)
        if self._start_error is not None:
            return self._start_error, False
        how = ended or "has closed its connection to the pool"
        return PeerLostError(f"rank {rank} {how}", peer=rank), ended is not None and ended.stopped


def _cause(failures: Sequence[tuple[Exception, bool]]) -> Exception:
    """Return the first error that is no consequence of another error; if all are, the first one."""
    return next((error for error, is_consequence in failures if not is_consequence), failures[0][0])


def _connection(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new connection to a rank: ours, and the rank's. `stack` closes both."""
    ours, theirs = map(stack.enter_context, socket.socketpair())
    moved = socket.socket(fileno=above_standard_streams(theirs.detach()))
    return closed_in_child(ours), stack.enter_context(moved)


def _worker(descriptor: int) -> Command:
    statement = "from unisono.launchers.worker import main; main()"
    return Command(python_command(statement, str(descriptor)), (descriptor,))


def _unpickled(failure: Failure) -> Exception:
    try:
        error = pickle.loads(failure.exception)
    except Exception:  # noqa: BLE001 - unpickling runs code of its class, or there is no pickle.
        error = None
    return error if isinstance(error, Exception) else RuntimeError(failure.summary)
