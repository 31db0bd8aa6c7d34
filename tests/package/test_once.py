"""Values that a process makes once, although its threads need them at the same moment."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.deadlines import DEADLINE_S

from unisono.foundation.once import once_per_process
from unisono.transports.cuda.peers.process_token import process_token

THREADS = 4


@pytest.fixture
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(call: Callable[[], Any]) -> list[Any]:
    """Return the results of a call that several threads make at the same moment."""
    barrier, results = threading.Barrier(THREADS), list[Any]()

    def run() -> None:
        barrier.wait(DEADLINE_S)
        results.append(call())

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return results


def test_threads_that_meet_get_one_value(switching_often: None) -> None:
    made = list[str]()

    @once_per_process
    def value_of(name: str) -> object:
        made.append(name)
        time.sleep(0.01)  # the other threads come meanwhile
        return object()

    for name in ("a", "b"):
        assert len(set(in_threads(lambda name=name: value_of(name)))) == 1
    assert made == ["a", "b"]


def test_threads_that_meet_have_the_identity_of_their_process(
    switching_often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for process in range(50):
        monkeypatch.setattr(os, "getpid", lambda process=process: -process)
        assert len(set(in_threads(process_token))) == 1
    monkeypatch.undo()
    assert process_token() == process_token()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_forked_children_have_values_of_their_own_while_a_thread_makes_one() -> None:
    entered, may_end = threading.Event(), threading.Event()

    @once_per_process
    def process_of_value() -> int:
        entered.set()
        may_end.wait(DEADLINE_S)
        return os.getpid()

    thread = threading.Thread(target=process_of_value)
    thread.start()
    entered.wait(DEADLINE_S)
    child = os.fork()
    if not child:
        may_end.set()
        os._exit(process_of_value() != os.getpid())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    may_end.set()
    thread.join(DEADLINE_S)
    assert process_of_value() == os.getpid()


def test_errors_are_not_kept() -> None:
    outcomes = iter([ValueError("first"), 1])

    @once_per_process
    def value() -> Any:
        if isinstance(outcome := next(outcomes), Exception):
            raise outcome
        return outcome

    with pytest.raises(ValueError, match="first"):
        value()
    assert (value(), value()) == (1, 1)
