"""The ranks of a job on this machine: starts them, opens their store, watches them, and ends every process it started.

Theory of operation
-------------------
`LocalJob.run` is one loop in one thread. It waits for output in the pipes of the ranks and for their pidfds. Without
pidfds, the loop asks every `TICK_S` which ranks have ended. Other threads and signal handlers only put a request into a
queue, and the loop takes it within `TICK_S`.

Every way to end a job is an *escalation*: a list of (seconds from now, signal). When a rank fails, the other ranks get
3 s to notice it by themselves, then SIGTERM, and SIGKILL 5 s later. In a job with `on_loss` they run on instead. Of two
escalations, the one that ends sooner is followed. If the launcher itself is killed, the kernel kills the ranks.

A job with `max_restarts` starts failed ranks anew. If a rank had met the others, its new process joins the running job.
If it had not, its new process takes part in the first rendezvous.

The observer writes the output of the ranks, and a slow reader of that output may delay it. While the observer waits, it
calls `attend`, so that time limits and signals keep their effect.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Protocol, TypeAlias

from unisono.errors import UsageError
from unisono.foundation.forks import closed_in_child
from unisono.foundation.processes import exit_statuses_kept
from unisono.launchers.job_store import JobStore
from unisono.launchers.process import BINDINGS, Command, Exit, JobPart, LocalPlace, RankProcess, rank_environment
from unisono.options import variable
from unisono.transports.host.fd_limit import lift_limit_of_files

TICK_S = 0.1
DRAIN_S = 1.0  # How long the job reads the output of processes that outlive their rank.
FILES_PER_RANK = 8
FILES_OF_LAUNCHER = 64
READ_NBYTES = 1 << 16  # the capacity of a pipe

Escalation = Sequence[tuple[float, int]]
AFTER_FAILURE: Escalation = ((3.0, signal.SIGTERM), (8.0, signal.SIGKILL))
STOP: Escalation = ((0.0, signal.SIGTERM), (5.0, signal.SIGKILL))
STOP_AFTER_DUMPS: Escalation = ((1.0, signal.SIGTERM), (6.0, signal.SIGKILL))
KILL: Escalation = ((0.0, signal.SIGKILL),)


# Is called with the end of a lost rank, the number of other ranks that run, and whether it has been started anew.
OnLoss: TypeAlias = Callable[[Exit, int, bool], None]


class Observer(Protocol):
    """Receives the events of a running job, in the thread that runs `LocalJob.run`."""

    def output(self, rank: int, stream: str, data: bytes) -> None:
        """`rank` has written `data`, of any length, to "stdout" or "stderr"; b"" is the end of the stream."""

    def ended(self, exit_: Exit) -> None:
        """A rank has ended. More of its output may follow."""

    def tick(self) -> None:
        """Called again and again, at most about `TICK_S` apart."""


class LocalJob:
    """The ranks of one job on this machine. It runs once.

    Attributes:
        late: the ranks that were stopped because the time limit of `run` had passed.
        alone: the ranks that were stopped because they waited to join, and no other rank was left to admit them.
        whereabouts: sentences about the call of each rank just before the job ended the ranks; empty until it does so.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        observer: Observer,
        *,
        bind: str | None = None,
        environ: Mapping[str, str] | None = None,
        on_loss: OnLoss | None = None,
        max_restarts: int = 0,
        share: JobPart | None = None,
        store: Callable[[], JobStore] = JobStore,
    ) -> None:
        """Prepare a job with one rank per command. `run` starts it.

        Args:
            commands: the command of each rank.
            observer: receives the output of the ranks and how they ended.
            bind: "core" or "numa" binds the ranks to cores; see `LocalPlace.of`. None binds them to nothing.
            environ: the environment that the ranks inherit; None for that of this process.
            on_loss: is called with the end of each failed rank, the number of other ranks that still run, which run on,
                and whether the rank has been started anew. It is not called for ranks that fail after the job has sent
                a signal to end them. None means that the job ends the other ranks when one fails.
            max_restarts: how many failed ranks the job starts anew, in all; only with `on_loss`.
            share: which ranks of the job these are, one for each command; None if there are no others.
            store: opens the store in which the ranks of the job meet.

        Raises:
            UsageError: there is no rank, `bind` is unknown, or there are more ranks than this process can watch.
        """
        if not commands:
            raise UsageError("a job needs at least one rank")
        if bind is not None and bind not in BINDINGS:
            raise UsageError(f"bind must be None, {' or '.join(map(repr, BINDINGS))}; got {bind!r}")
        require_open_files(len(commands))
        self.late: list[int] = []
        self.alone: list[int] = []
        self.whereabouts: list[str] = []
        self._job = ""
        self._share = share or JobPart(0, len(commands), len(commands))
        self._open_store = store
        self._commands = dict(zip(self._share.ranks, commands, strict=True))
        self._observer = observer
        self._bind = bind
        self._environ = os.environ if environ is None else environ
        self._on_loss = on_loss
        self._max_restarts = max_restarts
        self._restarts = 0
        self._joining: set[int] = set()  # ranks that were started anew, and had not joined the others when last seen
        self._requests: deque[Callable[[], None]] = deque()
        self._selector = closed_in_child(selectors.DefaultSelector())
        self._ranks: dict[int, RankProcess] = {}
        self._replaced: list[RankProcess] = []  # have ended, and their ranks run in new processes
        self._living: set[int] = set()
        self._exits: list[Exit] = []
        self._unwatched: list[RankProcess] = []  # running ranks without a pidfd
        self._deadline = math.inf
        self._escalation: list[tuple[float, int]] = []
        self._sent: set[int] = set()
        self._kills_at_once = False

    def run(self, timeout_s: float | None = None) -> list[Exit]:
        """Start the ranks, wait for them, and return how they ended, in the order of their ends.

        When it returns or raises, all processes of the ranks have ended.

        Args:
            timeout_s: seconds after which the ranks are stopped; None means never.

        Raises:
            RendezvousError: the store cannot be served.
            OSError: a process cannot be started; the others are killed.
        """
        if timeout_s is not None:
            self._deadline = time.monotonic() + timeout_s
        with exit_statuses_kept():
            try:
                with closing(self._open_store()) as store:
                    self._job = store.job.hex()[:8]
                    self._start_all(store)
                    while self._living:
                        self._step(store)
                    self._drain(store)
            finally:
                self._clean_up()
        return self._exits

    def attend(self) -> bool:
        """Handle requests and send the signals that are due. Code that makes the thread of `run` wait must call it.

        Returns:
            False if the ranks are being killed at once, so that the caller should stop waiting.
        """
        while self._requests:
            self._requests.popleft()()
        if self._living and not self.late and time.monotonic() >= self._deadline:
            self.late = sorted(self._living)
            self.whereabouts = self.look()
            if writes_dumps := bool(self._environ.get(variable("dump"))):
                self._pass_on(signal.SIGUSR1)
            self._escalate(STOP_AFTER_DUMPS if writes_dumps else STOP)
        while self._escalation and self._escalation[0][0] <= time.monotonic():
            self._signal(self._escalation.pop(0)[1])
        return not self._kills_at_once

    def forward(self, number: int) -> None:
        """Request that a signal that ends processes is sent to all ranks, followed by the usual escalation."""
        self._requests.append(lambda: self._forward(number))

    def pass_on(self, number: int) -> None:
        """Request that a signal is sent to the ranks that have a handler for it."""
        self._requests.append(lambda: self._pass_on(number))

    def look(self) -> list[str]:
        """Return sentences that say what each rank does now, which ranks are not in the job, and who is the culprit."""
        from unisono.postmortem.culprits import live_findings
        from unisono.transports.recorder.activity import where
        from unisono.transports.recorder.live_ranks import live_ranks

        ranks = live_ranks(self._job)
        latest = max((each.snapshot.epoch for each in ranks), default=0)
        culprits = [
            finding.text for finding in live_findings([each for each in ranks if each.snapshot.epoch == latest])
        ]
        return [*where(self._job, self._share.ranks), *culprits]

    def end_after_failure(self) -> None:
        """Request the end of all ranks as after the failure of one of them; for a rank that failed on another host."""
        self._requests.append(lambda: self._escalate(AFTER_FAILURE))

    def report(self, tell: Callable[[str], None]) -> None:
        """Request that `tell` is called with each sentence of `look`."""

        def say() -> None:
            for line in self.look():
                tell(line)

        self._requests.append(say)

    def stop(self) -> None:
        """Request the end of all ranks: SIGTERM, and SIGKILL 5 s later."""
        self._requests.append(lambda: self._escalate(STOP))

    def kill(self) -> None:
        """Request that all ranks are killed at once."""
        self._requests.append(self._kill)

    def _start_all(self, store: JobStore) -> None:
        try:
            for rank in self._commands:
                self._start(rank, store)
        finally:
            for descriptor in {descriptor for command in self._commands.values() for descriptor in command.descriptors}:
                os.close(descriptor)

    def _start(self, rank: int, store: JobStore, restarts: int = 0) -> None:
        """Start a process for a rank, and watch it."""
        place, command = LocalPlace.of(rank, self._share, self._bind), self._commands[rank]
        with store.meeting() as meeting:
            environ = rank_environment(self._environ, place, meeting, restarts)
            command = replace(command, descriptors=(*command.descriptors, meeting.key_fd))
            process = RankProcess(command, place, environ)
        self._ranks[rank] = process
        self._living.add(rank)
        if process.pidfd is None:
            self._unwatched.append(process)
        else:
            self._selector.register(process.pidfd, selectors.EVENT_READ, (self._reap, process, store))
        for stream, descriptor in process.streams.items():
            self._selector.register(descriptor, selectors.EVENT_READ, (self._read, process, stream))

    def _step(self, store: JobStore) -> None:
        for selected, _ in self._selector.select(TICK_S):
            act, *arguments = selected.data
            act(*arguments)
        for process in [process for process in self._unwatched if process.has_ended()]:
            self._reap(process, store)
        if self._on_loss is None and self._living and not self._escalation and (failure := store.failure_elsewhere()):
            self.whereabouts.append(failure)
            self._escalate(AFTER_FAILURE)
        self.attend()
        self._observer.tick()

    def _drain(self, store: JobStore) -> None:
        """Read the rest of the output. Processes that outlive their rank may hold the pipes open."""
        end = time.monotonic() + DRAIN_S
        while self._selector.get_map() and time.monotonic() < end:
            self._step(store)
        # If the reader of our output is slow, the time may be over before all pipes have been read once.
        for key in list(self._selector.get_map().values()):
            act, *arguments = key.data
            act(*arguments)

    def _read(self, process: RankProcess, stream: str) -> None:
        descriptor = process.streams[stream]
        try:
            data = os.read(descriptor, READ_NBYTES)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(descriptor)
        self._observer.output(process.rank, stream, data)

    def _reap(self, process: RankProcess, store: JobStore) -> None:
        if process.pidfd is None:
            self._unwatched.remove(process)
        else:
            self._selector.unregister(process.pidfd)
        code = process.reap()
        ended = Exit(process.rank, code, stopped=-code in self._sent, pid=process.pid)
        self._exits.append(ended)
        self._living.discard(process.rank)
        is_loss = bool(code) and self._on_loss is not None and not self._sent
        others = len(self._living)
        is_restarted = is_loss and self._restart(process, store)
        if not is_restarted:
            store.rank_ended(ended)
        self._observer.ended(ended)
        if code and self._on_loss is None:
            store.publish_failure(ended)
            self._escalate(AFTER_FAILURE)
        elif is_loss and self._on_loss is not None:
            self._on_loss(ended, others, is_restarted)
        self._stop_joiners_alone(store)

    def _restart(self, process: RankProcess, store: JobStore) -> bool:
        """Start a lost rank anew if that is allowed; return whether it was.

        A rank that had met the others can only join them, so it is not started anew if no other rank runs.
        """
        joins = store.has_arrived(process.rank)
        if self._restarts == self._max_restarts or (joins and not self._living):
            return False
        self._restarts += 1
        if joins:
            self._joining.add(process.rank)
        self._replaced.append(process)
        self._start(process.rank, store, restarts=self._restarts if joins else 0)
        return True

    def _stop_joiners_alone(self, store: JobStore) -> None:
        """End the job if all ranks that run wait to join it, because no rank is left that could admit them."""
        self._joining &= self._living
        if self._living and self._living == self._joining and not self._sent:
            self._joining = {rank for rank in self._joining if not store.has_joined(self._ranks[rank].pid)}
            if self._living == self._joining:
                self.alone = sorted(self._living)
                self._escalate(STOP)

    def _forward(self, number: int) -> None:
        self.whereabouts = self.look()
        self._signal(number)
        self._escalate(AFTER_FAILURE)

    def _pass_on(self, number: int) -> None:
        for rank in self._living:
            self._ranks[rank].signal_if_caught(number)

    def _kill(self) -> None:
        self._kills_at_once = True
        self._escalate(KILL)

    def _escalate(self, escalation: Escalation) -> None:
        now = time.monotonic()
        steps = [(now + after_s, number) for after_s, number in escalation]
        if not self._escalation or steps[-1][0] < self._escalation[-1][0]:
            self._escalation = steps

    def _signal(self, number: int) -> None:
        self._sent.add(number)
        for rank in self._living:
            self._ranks[rank].signal(number)

    def _clean_up(self) -> None:
        for process in (*self._ranks.values(), *self._replaced):
            if process.rank in self._living and process not in self._replaced:
                process.signal(signal.SIGKILL)
                process.reap()
            elif process.has_survivors():
                process.signal(signal.SIGKILL)
            process.close()
        self._selector.close()


def require_open_files(size: int) -> None:
    """Raise the limit of open files of this process to the number that it needs to watch `size` ranks.

    Raises:
        UsageError: the system does not allow so many.
    """
    needed = size * FILES_PER_RANK + FILES_OF_LAUNCHER
    hard_limit = lift_limit_of_files(needed)
    if hard_limit is not None:
        raise UsageError(
            f"{size} ranks need about {needed} open files, and {hard_limit} are allowed here (`ulimit -Hn`): start "
            "fewer ranks or raise the limit"
        )
