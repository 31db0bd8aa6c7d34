"""Servers of hybrid groups: a rank serves the clock and the centers that it holds, beside its own training.

Theory of operation
-------------------
For each handler, which is a center or the clock, a server has one receive from any source in flight. Its callback
passes the message to the handler, sends the answers that are due without waiting, and starts the next receive. So no
thread runs while no message arrives, and a rank serves while it computes. A rank cannot send messages to itself, so the
leader on the server's own rank calls `submit` and gets its answer as a future. After the last message of the last group
no receive is started, so none is in flight when the communicators are closed. Any failure ends all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from unisono import ANY_SOURCE, Communicator, UnisonoError, Work
from unisono.frameworks.data_parallel.center import LAST, Handler
from unisono.frameworks.data_parallel.layers import Frame

# The time limit of calls that wait for groups: groups may train for any time, and lost ranks are detected anyway.
FOREVER_S = 1e8


class Server:
    """The handlers of one rank.

    Args:
        to_servers: carries messages; the tag is the index of the handler.
        to_leaders: carries answers; the tag is the index of the handler.
        handlers: the handlers of this rank, by index.
        make_frame: ``make_frame(index)`` returns a new frame for the messages of a handler.
        leaders: the leader of each group.
    """

    def __init__(
        self,
        to_servers: Communicator,
        to_leaders: Communicator,
        handlers: Mapping[int, Handler],
        make_frame: Callable[[int], Frame],
        leaders: Sequence[int],
    ) -> None:
        self._to_servers, self._to_leaders = to_servers, to_leaders
        self._handlers, self._make_frame, self._leaders = handlers, make_frame, leaders
        self._group_of = {leader: group for group, leader in enumerate(leaders)}
        self._own_group = self._group_of.get(to_servers.rank)
        self._lock = threading.Lock()  # of the state below, and of the handlers
        self._spare: dict[int, list[Frame]] = {index: [] for index in handlers}
        self._own: dict[int, Future[Frame]] = {}  # answers to this rank, by handler
        self._ended: Future[None] = Future()
        # By handler, how many leaders on other ranks have not sent the last message of their group.
        self._remote = dict.fromkeys(handlers, len(leaders) - (self._own_group is not None))
        if not handlers:
            self._ended.set_result(None)
        for index, leaders_to_hear in self._remote.items():
            if leaders_to_hear:
                self._receive(index)

    def submit(self, index: int, frame: Frame) -> Future[Frame]:
        """Handle a message of the leader on this rank, which must not use the frame until it has the answer.

        Raises:
            UnisonoError: the error of an earlier failure.
        """
        assert self._own_group is not None, "only leaders submit messages"
        answer: Future[Frame] = Future()
        with self._lock:
            if self._ended.done():
                self._ended.result()
            self._own[index] = answer
            self._take(index, self._own_group, frame)
        return answer

    def wait(self) -> None:
        """Wait until all groups have sent their last message to all handlers of this rank.

        Raises:
            UnisonoError: the error of a failure.
        """
        self._ended.result()

    def _receive(self, index: int) -> None:
        """Start the receive of the next message for a handler."""
        spare = self._spare[index]
        frame = spare.pop() if spare else self._make_frame(index)
        work = self._to_servers.recv(frame.memory, ANY_SOURCE, index, wait=False, timeout_s=FOREVER_S)
        work.add_done_callback(partial(self._received, index, frame))

    def _received(self, index: int, frame: Frame, work: Work[Any]) -> None:
        try:
            message = work.message()
            assert message is not None, "a receive that has ended without an error has a message"
            with self._lock:
                self._remote[index] -= LAST in frame.numbers
                goes_on = self._remote[index] > 0
                self._take(index, self._group_of[message.source], frame)
            if goes_on:  # without the lock: a message that has arrived is handled inside this call
                self._receive(index)
        except UnisonoError as error:
            self._fail(error)
        except Exception as error:  # the caller of a callback only logs it, and all groups would wait for an answer
            self._to_servers.abort(f"rank {self._to_servers.rank} failed as a server of hybrid groups: {error!r}")
            self._fail(error)
            raise

    def _take(self, index: int, group: int, frame: Frame) -> None:
        for answered_group, answer in self._handlers[index].take(group, frame):
            if answered_group == self._own_group:
                self._own.pop(index).set_result(answer)
            else:
                sent = self._to_leaders.send(answer.memory, self._leaders[answered_group], index, wait=False)
                sent.add_done_callback(partial(self._reuse, index, answer))
        if not any(handler.active_groups for handler in self._handlers.values()) and not self._ended.done():
            self._ended.set_result(None)

    def _reuse(self, index: int, frame: Frame, _: Work[None]) -> None:
        self._spare[index].append(frame)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            futures: list[Future[Any]] = [self._ended, *self._own.values()]
            for future in futures:
                if not future.done():
                    future.set_exception(error)
            self._own.clear()
