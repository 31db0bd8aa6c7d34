"""Schedules of MSCCL and MSCCL++: proved, with their cost, and refused with the place of the fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings, strategies as st
from support import schedule_files as files
from support.schedule_files import MscclppRank, MscclRank, local, msccl, mscclpp, operation

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.algorithms.schedules.msccl_writing import msccl_xml
from unisono.algorithms.schedules.proving import Loaded, proved, schedule_of
from unisono.algorithms.verifier.verify import verify_plans
from unisono.errors import PlanError, UsageError

MADE = {
    **{f"ring of {size}": files.ring_allreduce(size) for size in (2, 3, 5)},
    **{f"all pairs of {size}": files.allpairs_allreduce(size, 2) for size in (2, 3, 8)},
    **{f"two ways of {size}": files.two_way_allgather(size) for size in (2, 3, 5)},
    "swap": files.swap_alltoall(),
    **{f"additions of {size}": files.reduce_scatter_by_scratch(size) for size in (2, 4)},
    "chain": files.broadcast_chain(4),
    **{f"puts of {size}": files.put_allreduce(size) for size in (2, 3)},
    **{f"gets of {blocks} threadblocks": files.get_allgather(3, threadblocks=blocks) for blocks in (1, 2)},
    "packets": files.packet_allreduce(),
    "semaphores": files.semaphore_allreduce(),
}


def loaded(text: bytes) -> Loaded:
    return proved(schedule_of(text))


@pytest.mark.parametrize("text", MADE.values(), ids=MADE)
def test_schedules_are_proved(text: bytes) -> None:
    algorithm = loaded(text)
    assert len(algorithm.plans) == algorithm.size


@pytest.mark.parametrize(
    ("text", "rounds", "sent", "reduced"),
    [
        (files.ring_allreduce(4), 6, Fraction(3, 2), Fraction(3, 4)),
        (files.allpairs_allreduce(8, 1), 2, Fraction(7, 4), Fraction(7, 8)),
        (files.two_way_allgather(4), 3, Fraction(3, 4), 0),
        (files.put_allreduce(3), 2, Fraction(4, 3), Fraction(2, 3)),
        (files.get_allgather(3, threadblocks=2), 1, Fraction(2, 3), 0),
    ],
)
def test_cost_of_a_schedule_is_that_of_its_idea(text: bytes, rounds: int, sent: Fraction, reduced: Fraction) -> None:
    report = loaded(text).report
    assert (report.rounds, report.sent, report.reduced) == (rounds, sent, reduced)


def test_reductions_of_one_chunk_after_another_round_once() -> None:
    (lane,) = loaded(files.allpairs_allreduce(4, 1)).plans[0].lanes
    assert len(lane) == 3  # messages, one reduction of four operands, messages


def test_names_become_names_of_algorithms() -> None:
    assert loaded(files.ring_allreduce(2)).name == "ring_fused_1"
    assert proved(schedule_of(files.ring_allreduce(2)), "mine").name == "mine"


def written() -> list[tuple[Algorithm, int]]:
    """Return the algorithms that MSCCL can express, with numbers of ranks."""
    return [
        (algorithm, size)
        for collective, by_name in ALGORITHMS.items()
        for algorithm, size in product(by_name.values(), (2, 3, 4, 5, 8))
        if collective not in ("barrier", "scan", "exscan")
        if not (algorithm.vendor or algorithm.mapped or algorithm.supports(size))
    ]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(written()))
def test_written_schedules_come_back_as_right_plans_of_no_higher_cost(case: tuple[Algorithm, int]) -> None:
    algorithm, size = case
    plans = [algorithm.build(size, rank, 0) for rank in range(size)]
    again = loaded(msccl_xml(plans).encode()).report
    before = verify_plans(plans, in_place=algorithm.in_place)
    assert (again.sent, again.reduced) == (before.sent, before.reduced)
    assert again.rounds <= before.rounds + 1


@pytest.mark.parametrize(
    ("collective", "name", "refusal"),
    [("barrier", "dissemination", "no collective barrier"), ("allreduce", "one_shot", "the memory of a peer")],
)
def test_plans_that_msccl_cannot_express_are_refused(collective: str, name: str, refusal: str) -> None:
    algorithm = find(collective, name)
    with pytest.raises(UsageError, match=refusal):
        msccl_xml([algorithm.build(4, rank, 0) for rank in range(4)])


# --- wrong schedules -------------------------------------------------------------------------------------------------


def edited(text: bytes, old: str, new: str, count: int = 1) -> bytes:
    assert old in text.decode()
    return text.decode().replace(old, new, count).encode()


def racing() -> bytes:
    """Two threadblocks write one chunk, and neither waits for the other."""
    ranks = [MscclRank() for _ in range(2)]
    for channel in range(2):
        ranks[0].add((1, -1, channel), "s", ("i", channel), ("o", 0))
        ranks[1].add((-1, 0, channel), "r", ("i", 0), ("o", 0))
    return msccl("broadcast", ranks, (2, 2, 0))


def waiting_for_each_other() -> bytes:
    ranks = [MscclRank() for _ in range(2)]
    for rank, made in enumerate(ranks):
        other = 1 - rank
        made.add((other, other, 0), "r", ("i", other), ("o", other))
        made.add((other, other, 0), "s", ("i", 0), ("o", rank))
    return msccl("allgather", ranks, (1, 2, 0))


def put_without_wait() -> bytes:
    """Rank 1 copies a chunk of scratch without waiting for the signal of the rank that puts it there."""
    ranks = [MscclppRank(2, rank) for rank in range(2)]
    first, second = (rank.block() for rank in ranks)
    first += [
        operation("put", src=[local("i", 0)], dst=[ranks[0].remote(1, "s", 0)]),
        operation("signal", channels=[0]),
    ]
    first.append(operation("copy", src=[local("i", 0)], dst=[local("o", 0)]))
    second.append(operation("copy", src=[local("s", 0)], dst=[local("o", 0)]))
    return mscclpp("broadcast", ranks, (1, 1, 1), in_place=False)


def reading_unwritten_scratch() -> bytes:
    ranks = [MscclRank() for _ in range(2)]
    for made in ranks:
        made.add((-1, -1, 0), "cpy", ("s", 0), ("o", 0))
    return msccl("allreduce", ranks, (1, 1, 1))


RING = files.ring_allreduce(3)
FIRST_SEND = 'type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1"'
WRONG = {
    "a race": (racing(), r"rank 1, threadblock ., step 0: .* both use chunk 0 of the output of rank 1"),
    "a race of memory": (
        put_without_wait(),
        "rank 1, threadblock 0, operation 0: .* chunk 0 of the scratch",
    ),
    "a deadlock": (waiting_for_each_other(), "deadlock: .*rank 0, threadblock 0, step 0"),
    "a wrong sum": (edited(RING, "rrcs", "rcs"), "block . of OUTPUT lacks the contribution of rank"),
    "a missing message": (
        edited(RING, 'type="r"', 'type="nop"'),
        "4 messages are sent from rank 2 to rank 0 on channel 0, and 3 are received",
    ),
    "messages of different lengths": (
        edited(RING, FIRST_SEND, FIRST_SEND.replace('cnt="1"', 'cnt="2"')),
        "rank 0, threadblock 0, step 0 sends 2 chunks, and rank 1, threadblock 0, step 1 receives 1",
    ),
    "a written input": (
        files.ring_allreduce(3, in_place=False),
        "rank ., threadblock 0, step .: chunk . of the input is written, which only a schedule in place may do",
    ),
    "unwritten scratch": (
        reading_unwritten_scratch(),
        "rank 0, threadblock 0, step 0: chunk 0 of the scratch is read before anything is written there",
    ),
    "a missing signal": (
        edited(files.put_allreduce(2), '"signal"', '"nop"'),
        "operation . waits for a signal of rank 0, which signals only 1 times on this channel",
    ),
}


@pytest.mark.parametrize(("text", "place"), WRONG.values(), ids=WRONG)
def test_wrong_schedule_is_refused_with_the_place(text: bytes, place: str) -> None:
    with pytest.raises(PlanError, match=place):
        loaded(text)


BOMB = b"""<?xml version="1.0"?><!DOCTYPE algo [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;">]><algo name="&b;"/>"""
PLAN = json.loads(files.put_allreduce(2))


def plan_with(change: Callable[[dict[str, object]], object]) -> bytes:
    """Return the plan of MSCCL++ after a change to its first operation."""
    plan = json.loads(json.dumps(PLAN))
    change(plan["gpus"][0]["threadblocks"][0]["ops"][0])
    return json.dumps(plan).encode()


REFUSED = {
    "an XML bomb": (BOMB, "declares a document type or entities"),
    "broken XML": (RING[:200], "this is no XML"),
    "broken JSON": (b'{"gpus": [', "this is no JSON"),
    "JSON too deep": (b'{"gpus": ' + b"[" * 100_000, "this is no JSON"),
    "neither": (b"hello", "neither the XML of MSCCL nor the JSON of MSCCL"),
    "another JSON": (b'{"format": "unisono table"}', "this JSON is no plan of MSCCL"),
    "another root": (b"<html/>", "begins with <algo>, not <html>"),
    "no number": (edited(RING, 'ngpus="3"', 'ngpus="many"'), "ngpus must be an integer, not 'many'"),
    "a huge number": (edited(RING, 'ngpus="3"', 'ngpus="1000000000"'), "ngpus is 1000000000, and must be 1 to 1024"),
    "too few gpus": (edited(RING, 'ngpus="3"', 'ngpus="4"'), "ngpus is 4, and the file describes"),
    "an unknown peer": (edited(RING, 'send="1"', 'send="7"'), "send is 7, and must be -1 to 2"),
    "no peer": (edited(RING, 'send="1"', 'send="-1"'), "needs a peer, and its threadblock has send=-1"),
    "a chunk beyond": (edited(RING, 'srcoff="2"', 'srcoff="3"'), "chunks 3 to 3 of i, which has 3"),
    "an unknown type": (edited(RING, 'type="rrs"', 'type="xyz"'), "has the type 'xyz': MSCCL has s, r"),
    "an unknown step": (
        edited(RING, 'depid="-1" deps="-1"', 'depid="5" deps="0"'),
        "step 0 of threadblock 5",
    ),
    "an unknown collective": (
        edited(RING, 'coll="allreduce"', 'coll="custom"'),
        "Unisono cannot check",
    ),
    "uneven shares": (
        edited(files.two_way_allgather(3), 'o_chunks="6"', 'o_chunks="7"', 9),
        "7 chunks, of which 3 shares",
    ),
    "a switch": (plan_with(lambda op: op.update(name="glres")), "adds values in an NVLink switch"),
    "an unknown operation": (plan_with(lambda op: op.update(name="fly")), "MSCCL\\+\\+ has no operation 'fly'"),
    "an unknown buffer": (plan_with(lambda op: op["dst_buff"][0].update(buffer_id=9)), "buffer_id is 9"),  # type: ignore[index]
    "no list": (plan_with(lambda op: op.update(src_buff=3)), "src_buff must be a list, not 3"),
    "the first version": (b'{"colletive": "allreduce", "gpus": []}', "first version of MSCCL"),
}


@pytest.mark.parametrize(("text", "complaint"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_schedule_is_refused_with_the_place(text: bytes, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        loaded(text)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(MADE)), st.integers(0, 10**6), st.integers(0, 255))
def test_damaged_files_are_refused_or_right(name: str, place: int, byte: int) -> None:
    text = bytearray(MADE[name])
    text[place % len(text)] = byte
    try:
        loaded(bytes(text))
    except (UsageError, PlanError):
        return
