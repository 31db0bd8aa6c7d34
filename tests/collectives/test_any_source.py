"""Receives from any rank and of any tag, and probes: against a model on every executor, and by `recv` of real ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.ranks import Job, Ranks, ranks_fixture

import unisono as un
from unisono.dtypes import DTYPES
from unisono.transports.contracts.executor import Message
from unisono.transports.contracts.transport import FIRST_RESERVED_TAG

bounded = settings(max_examples=25, deadline=None, derandomize=True)
SIZE, TAGS, WAIT_S = 3, 3, 60.0
INT64 = DTYPES["int64"]

EXECUTORS = ("generic", "generic, buffered", "generic, delayed", "shm", "tcp")

# The messages of each sending rank, as a list of their tags in order.
Sent = list[list[int]]
# The request of a receive or a probe: (source, tag). None stands for any source or any tag.
Wanted = tuple[int | None, int | None]


ranks = ranks_fixture(*[(SIZE, kind) for kind in EXECUTORS])
four = ranks_fixture((4, "shm"), (4, "tcp"))


# --- the model -----------------------------------------------------------------------------------------------------

tags = st.lists(st.integers(0, TAGS - 1), max_size=8)
wanted = st.tuples(
    st.one_of(st.none(), st.integers(1, SIZE - 1)),
    st.one_of(st.none(), st.integers(0, TAGS - 1)),
)


@bounded
@given(
    sent=st.lists(tags, min_size=SIZE - 1, max_size=SIZE - 1),
    windows=st.lists(st.tuples(wanted, st.lists(wanted, max_size=5)), max_size=6),
)
def test_message_goes_to_the_first_matching_receive(
    ranks: Any, sent: Sent, windows: list[tuple[Wanted, list[Wanted]]]
) -> None:
    in_order = ranks.faults is None
    assert ranks.run(run_model, sent, windows, in_order)[0] == sum(map(len, sent))


def run_model(executor: Any, sent: Sent, windows: list[tuple[Wanted, list[Wanted]]], in_order: bool) -> int:
    """Ranks send to rank 0.

    It posts windows of receives, each after a probe, and at the end receives all other messages.
    """
    if executor.rank == 0:
        model = InboxModel(executor, sent, in_order)
        for probed, window in windows:
            model.probe(probed)
            model.receive(window)
        while model.left:
            model.receive([(None, None)] * 3)
        for rank in range(1, executor.size):
            executor.send(np.zeros(3, np.int64), INT64, rank, 0).wait(WAIT_S)
        return model.received
    tags_to_send = sent[executor.rank - 1]
    arrays = [np.array([executor.rank, tag, place]) for place, tag in enumerate(tags_to_send)]
    for operation in [executor.send(x, INT64, 0, tag) for x, tag in zip(arrays, tags_to_send, strict=True)]:
        operation.wait(WAIT_S)
    # A rank that has ended fails rank 0's probes. So all senders wait until rank 0 has made its last one.
    executor.recv(np.zeros(3, np.int64), INT64, 0, 0).wait(WAIT_S)
    return 0


def accepts(want: Wanted, source: int, tag: int) -> bool:
    return want[0] in (None, source) and want[1] in (None, tag)


class InboxModel:
    """The messages that rank 0 has not received yet, and the checks of probes and receives against them."""

    def __init__(self, executor: Any, sent: Sent, in_order: bool) -> None:
        self.executor = executor
        self.in_order = in_order
        # By source and tag: the positions of the remaining messages among all messages of their source.
        self.places = {
            (source, tag): [place for place, its in enumerate(of_source) if its == tag]
            for source, of_source in enumerate(sent, start=1)
            for tag in range(TAGS)
        }
        self.received = 0

    @property
    def left(self) -> int:
        return sum(map(len, self.places.values()))

    def probe(self, want: Wanted) -> None:
        if not any(places and accepts(want, *key) for key, places in self.places.items()):
            assert self.look(want, once=True) is None
            return
        result = self.look(want, once=False)
        assert result is not None
        assert accepts(want, result.source, result.tag)
        assert self.places[result.source, result.tag]
        assert (result.dtype, result.count) == ("int64", 3)
        assert self.look((result.source, result.tag), once=True) == result

    def look(self, want: Wanted, *, once: bool) -> Message | None:
        probe = self.executor.probe(*want, once=once)
        probe.wait(WAIT_S)
        result: Message | None = probe.message()
        return result

    def receive(self, window: Sequence[Wanted]) -> None:
        posted: list[tuple[Wanted, Any, Any]] = []
        for want in window:
            # Earlier receives of the window may take as many of the messages that this receive may have.
            enough = sum(len(places) for key, places in self.places.items() if accepts(want, *key))
            if enough > len(posted):
                out = np.zeros(3, np.int64)
                posted.append((want, out, self.executor.recv(out, INT64, *want)))
        for _, out, operation in posted:
            operation.wait(WAIT_S)
            assert operation.message() == Message(int(out[0]), int(out[1]), "int64", 3)
        self.check([(want, *map(int, out)) for want, out, _ in posted])

    def check(self, got: list[tuple[Wanted, int, int, int]]) -> None:
        for index, (want, source, tag, place) in enumerate(got):
            assert accepts(want, source, tag)
            for earlier, other, other_tag, earlier_place in got[:index]:
                if accepts(earlier, source, tag) and other == source and (self.in_order or other_tag == tag):
                    assert earlier_place < place
        taken = Counter((source, tag) for _, source, tag, _ in got)
        for key, number in taken.items():
            assert sorted(place for _, *of, place in got if tuple(of) == key) == self.places[key][:number]
            del self.places[key][:number]
        self.received += len(got)


# --- other checks of every executor --------------------------------------------------------------------------------


def test_probe_reports_dtype_and_count(ranks: Any) -> None:
    assert ranks.run(run_dtypes)[0] == [(name, count) for name in DTYPES for count in (0, 3)]


def run_dtypes(executor: Any) -> list[tuple[str, int]]:
    """Rank 2 sends an empty and a small array of each dtype to rank 0."""
    results = []
    for name, dtype in DTYPES.items():
        for count in (0, 3):
            array = np.ones(count, getattr(ml_dtypes, name, name))
            if executor.rank == 2:
                executor.send(array, dtype, 0, 9).wait(WAIT_S)
            elif executor.rank == 0:
                probe = executor.probe(None, None, once=False)
                probe.wait(WAIT_S)
                assert (probe.message().source, probe.message().tag) == (2, 9)
                receive = executor.recv(array, dtype, None, 9)
                receive.wait(WAIT_S)
                assert receive.message() == probe.message()
                results.append((probe.message().dtype, probe.message().count))
    return results


def test_any_tag_does_not_match_reserved_tags(ranks: Any) -> None:
    assert ranks.run(run_reserved)[0] == [5, 7, 6]


def run_reserved(executor: Any) -> list[int]:
    out, got = np.zeros(1, np.int64), []
    if executor.rank == 1:
        sends = [(FIRST_RESERVED_TAG, 7), (FIRST_RESERVED_TAG - 1, 5), (2**32 - 1, 6)]
        arrays = [np.array([value]) for _, value in sends]
        for operation in [executor.send(x, INT64, 0, tag) for x, (tag, _) in zip(arrays, sends, strict=True)]:
            operation.wait(WAIT_S)
    elif executor.rank == 0:
        for source, tag in ((None, None), (None, FIRST_RESERVED_TAG), (1, 2**32 - 1)):
            executor.recv(out, INT64, source, tag).wait(WAIT_S)
            got.append(int(out[0]))
            probe = executor.probe(None, None, once=True)
            probe.wait(WAIT_S)
            assert probe.message() is None
        # A probe fails once all others have left, so they stay until it is done.
        for peer in range(1, executor.size):
            executor.send(out, INT64, peer, 1).wait(WAIT_S)
    if executor.rank > 0:
        executor.recv(out, INT64, 0, 1).wait(WAIT_S)
    return got


# --- the public calls ----------------------------------------------------------------------------------------------


def serve_numbers(world: un.Communicator, tasks: int) -> Any:
    """Rank 0 sends a number to each rank, and the next one when the rank has returned its square.

    A message of tag 2 ends it.
    """
    x = np.zeros(1)
    if world.rank > 0:
        world.send(x, 0, tag=1)
        while world.recv(x, 0, un.ANY_TAG)[0] > 0:
            world.send(x**2, 0, tag=1)
        return None
    total, following, busy = 0.0, tasks, world.size - 1
    while busy:
        result = world.probe(tag=1)
        total += float(world.recv(x, result.source, result.tag)[0])
        busy -= following == 0
        world.send(np.array([float(following)]), result.source, tag=3 if following else 2)
        following = max(0, following - 1)
    return total


def test_any_source_receive_serves_a_task_queue(four: Ranks) -> None:
    assert four.run_calls(serve_numbers, 30)[0] == sum(i * i for i in range(31))


def gather_by_works(world: un.Communicator) -> Any:
    if world.rank > 0:
        world.send(np.full(4, world.rank), 0, tag=world.rank)
        return None
    works = [world.recv(np.zeros(4, int), un.ANY_SOURCE, un.ANY_TAG, wait=False) for _ in range(3)]
    arrays = [x.tolist() for x in un.wait_all(works)]
    messages = [work.message() for work in works]
    assert messages == [Message(source, source, "int64", 4) for source, *_ in arrays]
    return sorted(arrays)


def test_recv_from_any_source_returns_a_work_when_not_waiting(four: Ranks) -> None:
    assert four.run_calls(gather_by_works)[0] == [[1] * 4, [2] * 4, [3] * 4]


def probe_until_found(world: un.Communicator) -> Any:
    world.barrier()
    before = world.iprobe()
    world.barrier()
    if world.rank == 3:
        world.send(np.ones(70_000, np.float32), 0, tag=4)
    if world.rank > 0:
        return before
    assert before is None
    while (result := world.iprobe(un.ANY_SOURCE, 4)) is None:
        time.sleep(0.001)
    assert world.iprobe(3) == world.probe(3, 4) == result
    assert world.iprobe(2) is world.iprobe(tag=5) is None
    world.recv(np.empty(result.count, result.dtype), result.source, result.tag)
    return result


def test_iprobe_finds_an_arrived_message(four: Ranks) -> None:
    assert four.run_calls(probe_until_found) == [Message(3, 4, "float32", 70_000), None, None, None]


def object_before_array(world: un.Communicator) -> Any:
    if world.rank == 1:
        world.send_object("small", 0, tag=2)
        world.send(np.array([8]), 0, tag=2)
    if world.rank != 0:
        return None
    x = world.recv(np.zeros(1, int), un.ANY_SOURCE, un.ANY_TAG)
    assert world.iprobe() is None
    return int(x[0]), world.recv_object(1, tag=2)


def test_any_source_receive_of_an_array_skips_objects(four: Ranks) -> None:
    assert four.run_calls(object_before_array)[0] == (8, "small")


def refused(world: un.Communicator) -> list[str]:
    calls = [
        lambda: world.recv(np.zeros(1), -1, 0),
        lambda: world.recv(np.zeros(1), un.ANY_TAG, 0),  # type: ignore[call-overload]
        lambda: world.probe(0, un.ANY_SOURCE),  # type: ignore[arg-type]
        lambda: world.probe(timeout_s=0),
    ]
    said = []
    for call in calls:
        with pytest.raises(un.UsageError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_wrong_recv_and_probe_calls_are_refused(four: Ranks) -> None:
    texts = four.run_calls(refused)[3]
    for text, expected in zip(
        texts,
        ["source must be", "source must be", "tag must be", "timeout_s"],
        strict=True,
    ):
        assert expected in text


# --- failures ------------------------------------------------------------------------------------------------------


def wait_for_any(world: un.Communicator, say: Any, kind: str, timeout_s: float) -> None:
    """Rank 0 waits for a message that no rank sends.

    With a limit of 10 s or more, the other ranks depart at once. With a shorter one, they wait for rank 0's error.
    """
    if world.rank == 1:
        world.send(np.ones(1), 0, tag=3)
    if world.rank == 0:
        world.recv(np.zeros(1), un.ANY_SOURCE, un.ANY_TAG)
        try:
            if kind == "recv":
                world.recv(np.zeros(1), un.ANY_SOURCE, 1, timeout_s=timeout_s)
            elif kind == "probe":
                world.probe(timeout_s=timeout_s)
            while kind == "iprobe" and world.iprobe() is None:
                time.sleep(0.001)
        except un.UnisonoError as error:
            say((type(error).__name__, str(error)))
    elif timeout_s < 10:
        try:
            world.recv(np.zeros(1), 0, 9)
        except un.UnisonoError as error:
            say((type(error).__name__, str(error)))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("kind", ["recv", "probe", "iprobe"])
def test_any_source_wait_fails_when_all_peers_have_departed(tmp_path: Path, kind: str, transport: str) -> None:
    with Job(wait_for_any, 3, tmp_path, kind, 60.0, transports=transport) as job:
        name, text = job.hear(0)
    assert name == "PeerLostError"
    assert "left" in text


@pytest.mark.parametrize("kind", ["recv", "probe"])
def test_any_source_wait_times_out(tmp_path: Path, kind: str) -> None:
    with Job(wait_for_any, 3, tmp_path, kind, 0.5) as job:
        reports = job.hear_all()
    assert [name for name, _ in reports] == ["CollectiveTimeoutError"] * 3
    assert "waited 0.5 s for a message from any rank" in reports[0][1]
