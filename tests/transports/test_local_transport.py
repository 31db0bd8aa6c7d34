from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unisono.errors import AbortedError, InternalError, MismatchError, PeerLostError, UsageError
from unisono.transports.contracts.call import Signature
from unisono.transports.contracts.transport import Identity, Traffic
from unisono.transports.message.faulty import Faults, FaultyTransport
from unisono.transports.message.local import LocalNetwork

CALL = Signature("allreduce", "uint8", (4,), "C", "sum", None, "direct", 1)


def at(group: int, lane: int = 0, sequence: int = 0) -> Identity:
    return Identity(sequence, lane, group, 0)


def send(transport: Any, peer: int, identity: Identity, data: bytes, call: Signature = CALL) -> Any:
    return transport.post_send(peer, identity, call, [memoryview(data)])


def receive(
    transport: Any, peer: int, identity: Identity, nbytes: int = 4, call: Signature = CALL
) -> tuple[Any, bytearray]:
    memory = bytearray(nbytes)
    return transport.post_recv(peer, identity, call, [memoryview(memory)]), memory


def test_unbuffered_send_is_done_when_its_receive_is_posted() -> None:
    a, b = LocalNetwork(2).transports
    sent = send(a, 1, at(0), b"four")
    assert not sent.done()
    received, memory = receive(b, 0, at(0))
    assert sent.done()
    assert received.done()
    assert memory == b"four"


def test_receive_may_be_posted_before_its_message() -> None:
    a, b = LocalNetwork(2).transports
    received, memory = receive(b, 0, at(0))
    assert not received.done()
    assert send(a, 1, at(0), b"four").done()
    assert received.done()
    assert memory == b"four"


def test_messages_are_matched_by_identity_not_by_order() -> None:
    a, b = LocalNetwork(2).transports
    identities = [at(0), at(1), at(0, lane=1), at(0, sequence=1)]
    for number, identity in enumerate(identities):
        send(a, 1, identity, bytes([number] * 4))
    for number, identity in reversed(list(enumerate(identities))):
        received, memory = receive(b, 0, identity)
        assert received.done()
        assert memory == bytes([number] * 4)


def test_message_and_receive_may_be_cut_into_different_pieces() -> None:
    a, b = LocalNetwork(2).transports
    memory = bytearray(5)
    b.post_recv(0, at(0), CALL, [memoryview(memory)[:1], memoryview(memory)[1:5]])
    assert a.post_send(1, at(0), CALL, [memoryview(b"abc"), memoryview(b"de")]).done()
    assert memory == b"abcde"


def test_capacity_is_the_number_of_buffered_messages() -> None:
    a, b = LocalNetwork(2, capacity=2).transports
    sent = [send(a, 1, at(group), b"four") for group in range(4)]
    assert [request.done() for request in sent] == [True, True, False, False]
    receive(b, 0, at(0))
    assert [request.done() for request in sent] == [True, True, True, False]


def test_each_lane_and_each_direction_has_its_own_capacity() -> None:
    a, b, c = LocalNetwork(3, capacity=1).transports
    assert send(a, 1, at(0), b"four").done()
    assert send(a, 1, at(0, lane=1), b"four").done()
    assert send(b, 0, at(0), b"four").done()
    assert send(a, 2, at(0), b"four").done()
    assert send(c, 1, at(0), b"four").done()
    assert not send(a, 1, at(1), b"four").done()


def test_buffered_message_is_a_copy_of_the_memory_of_its_sender() -> None:
    a, b = LocalNetwork(2, capacity=1).transports
    mine = bytearray(b"four")
    assert a.post_send(1, at(0), CALL, [memoryview(mine)]).done()
    mine[:] = b"five"
    assert receive(b, 0, at(0))[1] == b"four"


@pytest.mark.parametrize("capacity", [0, 2])
def test_traffic_counts_messages_and_bytes_by_peer(capacity: int) -> None:
    a, b, c = LocalNetwork(3, capacity).transports
    for group, data in enumerate((b"1", b"22")):
        send(a, 1, at(group), data)
        receive(b, 0, at(group), len(data))
    assert a.traffic() == {1: Traffic("local", sent_messages=2, sent_nbytes=3)}
    assert b.traffic() == {0: Traffic("local", received_messages=2, received_nbytes=3)}
    assert c.traffic() == {}


def test_message_of_another_call_is_a_mismatch_on_every_rank() -> None:
    a, b, c = LocalNetwork(3).transports
    sent = send(a, 1, at(0), b"four")
    received, memory = receive(b, 0, at(0), call=replace(CALL, op="max"))
    for fails in (sent.done, received.done, a.progress, b.progress, c.progress):
        with pytest.raises(MismatchError, match=r"rank 0 called .*op=sum.* rank 1 called .*op=max"):
            fails()
    assert memory == bytes(4)


def test_message_of_another_length_is_a_mismatch() -> None:
    a, b = LocalNetwork(2).transports
    send(a, 1, at(0), b"four")
    with pytest.raises(MismatchError, match="rank 0 sent 4 bytes where rank 1 expected 3"):
        receive(b, 0, at(0), 3)[0].done()


def test_different_announced_calls_are_a_mismatch_on_every_rank() -> None:
    a, b, c = LocalNetwork(3).transports
    a.announce(0, CALL)
    b.announce(1, replace(CALL, op="max"))
    c.progress()
    c.announce(0, replace(CALL, algorithm="ring"))
    for transport in (a, b, c):
        with pytest.raises(MismatchError, match=r"rank 2 called .* by ring .*rank 0 called .* by direct"):
            transport.progress()


def test_rank_is_absent_until_it_announces_a_call_of_the_others() -> None:
    a, b, c = LocalNetwork(3).transports
    assert list(a.absent(0)) == []
    b.announce(0, CALL)
    assert list(a.absent(0)) == [0, 2]
    a.announce(0, CALL)
    assert list(b.absent(0)) == [2]
    c.announce(0, CALL)
    assert list(b.absent(0)) == []


def test_departed_peer_is_lost_only_to_ranks_that_need_it() -> None:
    a, b, c = LocalNetwork(3).transports
    to_closed, (from_closed, _) = send(a, 1, at(0), b"four"), receive(a, 1, at(0))
    other, _ = receive(a, 2, at(0))
    b.close()
    for request in (to_closed, from_closed, send(c, 1, at(0), b"four"), receive(c, 1, at(0))[0]):
        with pytest.raises(PeerLostError, match=r"rank 1 left while rank [02] still needed it"):
            request.done()
    assert not other.done()
    send(c, 0, at(0), b"four")
    assert other.done()


def test_buffered_message_arrives_after_its_sender_closes() -> None:
    a, b = LocalNetwork(2, capacity=1).transports
    send(a, 1, at(0), b"four")
    send(a, 1, at(1), b"five")
    a.close()
    received, memory = receive(b, 0, at(0))
    assert received.done()
    assert memory == b"four"
    with pytest.raises(PeerLostError):
        receive(b, 0, at(1))[0].done()


def test_abort_reaches_every_rank_and_stops_writes_to_memory() -> None:
    a, b = LocalNetwork(2, capacity=1).transports
    received, memory = receive(b, 0, at(0))
    finished = send(a, 1, at(1), b"done")
    a.abort(AbortedError("enough"))
    a.abort(AbortedError("more than enough"))
    sent = send(a, 1, at(0), b"four")
    for fails in (received.done, sent.done, a.progress, b.progress):
        with pytest.raises(AbortedError, match=r"^enough$"):
            fails()
    assert finished.done()
    assert memory == bytes(4)


def test_message_sent_twice_is_refused() -> None:
    a, b = LocalNetwork(2, capacity=2).transports
    send(a, 1, at(0), b"four")
    receive(b, 0, at(0))
    send(a, 1, at(0), b"four")
    with pytest.raises(InternalError, match=r"rank 0 sent .* to rank 1 twice"):
        b.progress()


def faulty_pair(faults: Faults) -> tuple[FaultyTransport, FaultyTransport]:
    a, b = (FaultyTransport(transport, faults) for transport in LocalNetwork(2, capacity=100).transports)
    return a, b


def arrivals(faults: Faults, messages: int = 20) -> list[int]:
    """Return the numbers of the messages from rank 0 to rank 1 in the order in which they arrived."""
    a, b = faulty_pair(faults)
    expected = {number: receive(b, 0, at(number))[0] for number in range(messages)}
    arrived: list[int] = []
    for number in range(messages + faults.max_hold):
        if number < messages:
            send(a, 1, at(number), b"four")
        a.progress()
        new = [number for number, request in expected.items() if number not in arrived and request.done()]
        arrived += new
    return arrived


def test_delayed_messages_all_arrive_in_another_order() -> None:
    order = arrivals(Faults(seed=3, delay=0.5))
    assert sorted(order) == list(range(20))
    assert order != sorted(order)


def test_faults_depend_on_the_seed_alone() -> None:
    faults = Faults(seed=3, delay=0.5, drop=0.2)
    assert arrivals(faults) == arrivals(faults)
    assert arrivals(faults) != arrivals(replace(faults, seed=4))


def test_dropped_messages_do_not_change_the_order_of_the_others() -> None:
    all_of_them = arrivals(Faults(seed=3, delay=0.5))
    some = arrivals(Faults(seed=3, delay=0.5, drop=0.3))
    assert 0 < len(some) < 20
    assert some == [number for number in all_of_them if number in some]


def test_faulty_transport_does_not_claim_to_be_ordered() -> None:
    inner = LocalNetwork(1).transports[0]
    assert inner.capabilities.ordered
    assert not FaultyTransport(inner, Faults(seed=1)).capabilities.ordered


def test_send_of_a_dropped_message_is_done() -> None:
    a, b = faulty_pair(Faults(seed=1, drop=1.0))
    received, _ = receive(b, 0, at(0))
    assert send(a, 1, at(0), b"four").done()
    assert not received.done()


def test_send_of_a_delayed_message_is_done_once_it_is_passed_on() -> None:
    a, _ = faulty_pair(Faults(seed=1, delay=1.0, max_hold=1))
    held = send(a, 1, at(0), b"four")
    assert not held.done()
    a.progress()
    assert held.done()


@pytest.mark.parametrize("wrong", [{"delay": 1.5}, {"drop": -0.1}, {"duplicate": float("nan")}, {"max_hold": 0}])
def test_faults_refuse_invalid_arguments(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Faults(seed=1, **wrong)
