"""`Negotiator`: makes calls in the same order on all ranks, though each rank starts them in its own order.

Theory of operation
-------------------
A communicator needs the same calls in the same order on all ranks. The calls of Horovod have names instead, and a rank
may start them in any order, from any thread: hooks of backward start them as gradients become ready. So the ranks
agree on an order while they go, as Horovod's own coordinator does:

1. A rank that starts a call notes a `StartedCall`, and sends rank 0 a `ReadyCall`: kind, name, dtype, shape. If other
   calls are waiting, the *sender* thread sends it. Calls that start while the sender is busy go into the same message.
2. The *collector* thread of rank 0 receives the requests, and the `Coordinator` keeps a table of them. When all ranks
   have asked for a name, it answers: the call is due, or it fails because the requests do not fit together. The answers
   to one message go to all ranks as one message.
3. The *maker* thread of each rank receives answers, all ranks in the same order, and makes the calls on a communicator.
   Neighbours of one kind run as one call, which is what Horovod names fusion. They are asynchronous, so the maker goes
   on to the next answers. The thread of the program waits for the call in `StartedCall.wait`.

For example, rank 0 starts "a" and "b", and rank 1 starts "b" and "a". The table has "a" and "b" of rank 0, then "b" of
rank 1: "b" is due. Then "a" is. Both ranks make "b" first.

A rank that has joined counts as if it had asked for every name. Its maker takes part with zeros, because answers say
what they need. The steps of optimizers go over communicators of their own. So rank 0 tells all ranks when one has
joined, and from then on they announce the numbers of their steps. The rank in `join` makes the steps that it lacks.

A name that only some ranks ask for is an error on all ranks after the time limit. A rank that got this error before it
asked raises it when it asks. When a rank shuts down, rank 0 tells all ranks that this answer is the last one, each rank
says that it has got it, and all threads end. So no thread waits for a rank that has left.

Requests and answers go over a communicator of their own. Its receives have no time limit, because a rank may have
nothing to say for hours. They end when a rank of the job dies, as all calls do.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from unisono import ANY_SOURCE, Communicator
from unisono.compat.horovod import errors, execution
from unisono.compat.horovod.coordinator import Coordinator
from unisono.compat.horovod.entries import StartedCall, as_internal
from unisono.compat.horovod.errors import DuplicateNameError, HorovodInternalError, ShutDownError
from unisono.compat.horovod.requests import Answer, ReadyCall, decode_answers, decode_requests, encode
from unisono.compat.horovod.settings import Settings
from unisono.errors import AbortedError, InternalError, UnisonoError
from unisono.foundation import log
from unisono.frameworks.sparse_sums import SparseSums

_log = log.get("horovod")

_FOREVER_S = float("inf")
_TAG = 0
_HAS_LAST_ANSWER = b"!"
# `close` waits this long for the last answer. It comes at once, unless rank 0 hangs.
_CLOSE_S = 10.0
# An error that names the lost rank comes at most this much later than one that does not.
_EXPLANATION_S = 1.0
# The threads of rank 0 look for names without an answer at least this often.
_CHECK_S = 0.5


class Negotiator:
    """The calls of one process set on this rank. All ranks of the set create it at the same place.

    Args:
        comm: the ranks of the set; this object closes it.
        settings: the settings of the job.
        on_event: called with a name and one of "begin", "start" and "end", for the timeline.
        open_reducer: called with the name of an optimizer and the ranks, where its reducer is to be opened.
        steps: returns the numbers of the steps that optimizers are making now, by the name of the optimizer.

    Attributes:
        comm: the argument, for further communicators of these ranks.
        sparse_sums: the sums of sparse tensors, which are started in the order of calls.
    """

    def __init__(
        self,
        comm: Communicator,
        settings: Settings,
        on_event: Callable[[str, str], None],
        open_reducer: Callable[[str, Communicator], None],
        steps: Callable[[], Mapping[str, int]],
    ) -> None:
        self.comm = comm
        self._settings = settings
        self._on_event, self._open_reducer, self._steps_in_progress = on_event, open_reducer, steps
        self._announces = False  # whether a rank has joined, and must hear of the steps of the others
        self._control, self._data = comm.dup(), comm.dup()
        self.sparse_sums = SparseSums(comm)
        self._condition = threading.Condition()  # of the attributes below
        self._outbox: list[ReadyCall] = []
        self._waiting: dict[str, StartedCall] = {}  # by key, the calls without an answer
        self._in_use: dict[str, StartedCall] = {}  # by key, the last call; its name is in use until the call has ended
        self._refused: dict[str, HorovodInternalError] = {}  # by key, errors that this rank has not asked for yet
        self._error: HorovodInternalError | None = None
        self._stalls_seen = 0  # the number of answers about stalled names
        self._numbers: dict[str, int] = {}  # by kind, the number of the next call without a name
        self._steps: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()  # for `join`; None at its end
        self._local_answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # of rank 0 to itself
        self._coordinator = Coordinator(comm.world_ranks) if comm.rank == 0 else None
        self._sending = threading.Lock()  # of the requests of this rank, whose order must stay
        self._deciding = threading.Lock()  # of the coordinator, and of the order in which answers are sent
        roles = [("sender", self._send), ("maker", self._make)]
        roles += [("collector", self._collect)] if comm.rank == 0 and comm.size > 1 else []
        self._threads = [
            threading.Thread(target=self._run, args=(role,), name=f"unisono-horovod-{name}", daemon=True)
            for name, role in roles
        ]
        for thread in self._threads:
            thread.start()

    def unnamed(self, kind: str) -> str:
        """Return a name for a call without one: ranks match these by their order among the calls of the kind."""
        with self._condition:
            number = self._numbers[kind] = self._numbers.get(kind, -1) + 1
        return f"noname.{number}"

    def submit(self, entry: StartedCall) -> StartedCall:
        """Start a call, and return its entry.

        Raises:
            DuplicateNameError: a call of the same kind and name has not ended.
            HorovodInternalError: an earlier call failed in a way that ended all communicators, or a rank has left.
        """
        key = entry.request.key
        with self._condition:
            if self._error is not None:
                raise _renewed(self._error)
            before = self._in_use.get(key)
            if before is not None and not before.done():
                raise DuplicateNameError(
                    f"{entry.request.name!r} is in use by a {entry.request.kind} that has not ended: call "
                    "synchronize(handle) first, or pass another name"
                )
            if (refusal := self._refused.pop(key, None)) is not None:
                entry.fail(refusal)
                return entry
            entry.request = entry.request._replace(stalls_seen=self._stalls_seen)
            entry.explain = self.explain
            self._waiting[key] = self._in_use[key] = entry
            # A call that is alone is sent by this thread, because waking the sender takes longer than sending.
            is_sent_here = len(self._waiting) == 1 and not self._outbox and self._sending.acquire(blocking=False)
            if not is_sent_here:
                self._outbox.append(entry.request)
                self._condition.notify_all()
        self._on_event(key, "begin")
        if is_sent_here:
            try:
                self._run(lambda: self._pass_on([entry.request]))
            finally:
                self._sending.release()
        return entry

    def make(self, entry: StartedCall) -> Any:
        """Start a call, wait for it, and return its result. Raises the errors of `submit` and `StartedCall.wait`."""
        entry = self.submit(entry)
        try:
            return entry.wait()
        finally:
            self.forget(entry)

    def forget(self, entry: StartedCall) -> None:
        """Free the name of a call that has ended and whose result has been taken."""
        with self._condition:
            if self._in_use.get(entry.request.key) is entry:
                del self._in_use[entry.request.key]
        self._on_event(entry.request.key, "end")

    def explain(self, error: UnisonoError) -> HorovodInternalError:
        """Return the error to raise for an error of a communicator of the job.

        When a rank is lost, one call raises the error that names it, and all others raise `AbortedError`. The threads
        of this object always wait for messages, so one of them may have got the better error.
        """
        if isinstance(error, AbortedError):
            with self._condition:
                self._condition.wait_for(lambda: self._error is not None, _EXPLANATION_S)
                if self._error is not None:
                    return _renewed(self._error)
        return as_internal(error)

    def begin_step(self, optimizer: str, number: int) -> None:
        """Note that an optimizer begins its step of this number, and announce it if a rank has joined."""
        if self._announces:
            with self._condition:
                self._outbox.append(ReadyCall("step", optimizer, root=number))
                self._condition.notify_all()

    def open(self, name: str) -> None:
        """Open the reducer of an optimizer, on all ranks, joined ones too, at one place in the order of calls."""
        self.make(StartedCall(ReadyCall("reducer", name)))

    def join(self, catch_up: Callable[[str, int], None]) -> int:
        """Take part with zeros in the calls of other ranks until all have joined; return the rank that joined last.

        Args:
            catch_up: called with the name of an optimizer and the number of the step that the other ranks begin.
        """
        entry = self.submit(StartedCall(ReadyCall("join", "")))
        while (step := self._steps.get()) is not None:
            catch_up(*step)
        try:
            last: int = entry.wait()
        finally:
            self.forget(entry)
        return last

    def close(self) -> None:
        """End the calls on all ranks, and close the communicators. Every rank calls it, at any time."""
        with self._condition:
            if self._error is None:
                self._outbox.append(ReadyCall("leave", ""))
                self._condition.notify_all()
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self.comm.close()

    # --- threads ----------------------------------------------------------------------------------------------------

    def _run(self, role: Callable[[], None]) -> None:
        """Run the loop of one of the negotiator's threads, and end all calls if it fails.

        An error of a communicator ends all calls, as none of the job works after it.
        """
        try:
            role()
        except UnisonoError as error:
            self._end(as_internal(error))
        except Exception as error:  # noqa: BLE001  (the program must not wait for ever, whatever the error is)
            self._end(HorovodInternalError(f"{type(error).__name__}: {error}"))
            _log.exception("a thread that matches calls by name failed")

    def _send(self) -> None:
        """Send the requests of this rank to rank 0. On rank 0, also look for names without an answer."""
        while True:
            with self._condition:
                if not self._outbox and self._error is None:
                    self._condition.wait(_CHECK_S if self._coordinator and self._coordinator.waits() else None)
            with self._sending:
                with self._condition:
                    if self._error is not None:
                        return
                    requests, self._outbox = self._outbox, []
                self._pass_on(requests)

    def _pass_on(self, requests: Sequence[ReadyCall]) -> None:
        """Send requests of this rank to rank 0, or decide about them, if this is rank 0."""
        if self._coordinator is not None:
            self._decide(self._coordinator, 0, requests)
        elif requests:
            self._control.send(_bytes(encode(requests)), 0, _TAG)

    def _collect(self) -> None:
        """Receive the requests of other ranks, on rank 0, until each has got the last answer."""
        assert self._coordinator is not None
        has_last_answer: set[int] = set()
        while len(has_last_answer) < self.comm.size - 1:
            source, data = self._receive(ANY_SOURCE)
            if data == _HAS_LAST_ANSWER:
                has_last_answer.add(source)
            else:
                self._decide(self._coordinator, source, decode_requests(data))

    def _make(self) -> None:
        """Make the calls that are due, in the order of the answers."""
        while True:
            answers = decode_answers(self._local_answers.get() if self.comm.rank == 0 else self._receive(0)[1])
            leaving = answers[-1] if answers and answers[-1].request.kind == "leave" else None
            for batch in execution.batches(
                answers[: len(answers) - (leaving is not None)], self._settings.fusion_nbytes
            ):
                self._obey(batch)
            if leaving is not None:
                self._end(ShutDownError(f"no rank can make calls any more: {leaving.message}"))
                if self.comm.rank > 0:
                    with self._sending:  # so that this is the last message of this rank
                        self._control.send(_bytes(_HAS_LAST_ANSWER), 0, _TAG)
                return

    def _receive(self, source: object) -> tuple[int, bytes]:
        message = self._control.probe(source, _TAG, timeout_s=_FOREVER_S)  # type: ignore[call-overload]
        data = np.empty(message.count, np.uint8)
        self._control.recv(data, message.source, _TAG)
        return message.source, data.tobytes()

    # --- rank 0 -----------------------------------------------------------------------------------------------------

    def _decide(self, coordinator: Coordinator, rank: int, requests: Sequence[ReadyCall]) -> None:
        """Add requests of a rank to the table, and send all ranks the answers that are due."""
        with self._deciding:
            had_waiting = coordinator.waits()
            now_s = time.monotonic()
            answers = coordinator.add(rank, requests, now_s)
            if self._settings.is_checked:
                for text in coordinator.slow(now_s, self._settings.warn_s):
                    _log.warning(text)
                answers = [*coordinator.stalled(now_s, self._settings.stall_s), *answers]
            if answers:
                data = encode(answers)
                for peer in range(1, self.comm.size):
                    self._control.send(_bytes(data), peer, _TAG)
                self._local_answers.put(data)
        if coordinator.waits() and not had_waiting:
            with self._condition:
                self._condition.notify_all()  # the sender looks for names without an answer from now on

    # --- every rank -------------------------------------------------------------------------------------------------

    def _obey(self, batch: Sequence[Answer]) -> None:
        """Make the calls of a batch, or hand their error to the threads that wait for them."""
        first = batch[0]
        if first.request.kind in ("step", "joined"):
            return self._obey_notice(first.request)
        entries: dict[str, StartedCall] = {}
        with self._condition:
            for answer in batch:
                entry = self._waiting.pop(answer.request.key, None)
                if entry is not None:
                    entries[answer.request.key] = entry
            if first.error == "StalledError":
                self._stalls_seen += 1
                if not entries:
                    self._refused[first.request.key] = self._error_of(first)
            has_joined = "join." in self._waiting
        if first.error:
            for entry in entries.values():
                entry.fail(self._error_of(first))
            return
        if len(entries) < len(batch) and not has_joined:
            raise InternalError(
                f"rank 0 lets all ranks make {first.request.key!r}, and rank {self.comm.rank} has not requested it"
            )
        for key in entries:
            self._on_event(key, "start")
        if first.request.kind == "reducer":
            self._open_reducer(first.request.name, self.comm)
        execution.run(self._data, batch, entries)
        if first.request.kind == "join":
            self._announces = False
            self._steps.put(None)

    def _obey_notice(self, notice: ReadyCall) -> None:
        """Announce steps from now on, because a rank has joined; or hand an announced step to `join`."""
        with self._condition:
            has_joined = "join." in self._waiting
        if notice.kind == "step":
            if has_joined:
                self._steps.put((notice.name, notice.root))
            return
        self._announces = True
        if not has_joined:
            # A step that has begun before may be waiting for the rank that has joined.
            for optimizer, number in self._steps_in_progress().items():
                self.begin_step(optimizer, number)

    def _error_of(self, answer: Answer) -> HorovodInternalError:
        error: HorovodInternalError = getattr(errors, answer.error)(
            answer.message, peer=self.comm.world_ranks[answer.last]
        )
        return error

    def _end(self, error: HorovodInternalError) -> None:
        """Fail all calls that have no answer, and all later ones."""
        with self._condition:
            self._error = self._error or error
            failed = list(self._waiting.values())
            self._waiting.clear()
            self._condition.notify_all()
        for entry in failed:
            entry.fail(error)
        self._steps.put(None)
        if self._coordinator is not None:
            self._local_answers.put(encode([Answer(ReadyCall("leave", ""), (), 0, "", str(error))]))


def _bytes(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(data, np.uint8)


def _renewed(error: HorovodInternalError) -> HorovodInternalError:
    """Return a copy of an error, because an error that several threads raise would collect all their tracebacks."""
    if isinstance(error, UnisonoError):
        return type(error)(error.message)
    renewed = HorovodInternalError(str(error))
    renewed.__cause__ = error.__cause__
    return renewed
