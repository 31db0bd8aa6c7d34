import contextlib
import dataclasses
import os

import pytest
from hypothesis import given, strategies as st

from unisono.errors import InternalError, TransportUnavailableError, UsageError
from unisono.transports.links.handshake import (
    HELLO_NBYTES,
    AcceptorHandshake,
    Admission,
    DialerHandshake,
    HandshakeError,
    Hello,
    Purpose,
    common_version,
)

KEY = b"k" * 32
JOB = b"j" * 16
HELLO = Hello(JOB, epoch=3, sender=1, receiver=0, purpose=Purpose.TCP, communicator=1 << 63, lane=2)
ADMISSION = Admission(JOB, epoch=3, rank=0, senders=range(1, 4), purposes={Purpose.TCP, Purpose.SHM})


def exchange(dialer, acceptor):
    dialer_sends = acceptor.receive(dialer.opening)
    acceptor_sends = dialer.receive(dialer_sends)
    dialer.receive(acceptor.receive(acceptor_sends))


def refusal(hello=HELLO, endpoint=ADMISSION):
    """Return the error of the acceptor, and the error of the dialer at the acceptor's reply."""
    dialer = DialerHandshake(KEY, hello)
    with pytest.raises(HandshakeError) as on_acceptor:
        AcceptorHandshake(KEY, endpoint).receive(dialer.opening)
    with pytest.raises(HandshakeError) as on_dialer:
        dialer.receive(on_acceptor.value.reply)
    return on_acceptor.value.message, on_dialer.value.message


def test_handshake_gives_both_sides_the_agreed_hello():
    dialer, acceptor = DialerHandshake(KEY, HELLO), AcceptorHandshake(KEY, ADMISSION)
    exchange(dialer, acceptor)
    assert dialer.done
    assert acceptor.done
    assert acceptor.agreed == HELLO
    assert (dialer.agreed.sender, dialer.agreed.receiver, dialer.agreed.lane) == (0, 1, 2)
    assert dialer.needed == acceptor.needed == 0


def test_the_handshake_works_byte_by_byte():
    dialer, acceptor = DialerHandshake(KEY, HELLO), AcceptorHandshake(KEY, ADMISSION)
    to_acceptor, to_dialer = dialer.opening, b""
    while to_acceptor or to_dialer:
        to_dialer += b"".join(acceptor.receive(to_acceptor[i : i + 1]) for i in range(len(to_acceptor)))
        to_acceptor = b"".join(dialer.receive(to_dialer[i : i + 1]) for i in range(len(to_dialer)))
        to_dialer = b""
    assert dialer.done
    assert acceptor.done


def test_hello_has_a_fixed_size_and_can_be_unpacked():
    assert len(HELLO.pack()) == HELLO_NBYTES == 90
    assert Hello.unpack(HELLO.pack()) == HELLO


def test_each_hello_has_a_new_nonce():
    assert Hello(JOB, 0, 0, 1, Purpose.SHM).nonce != Hello(JOB, 0, 0, 1, Purpose.SHM).nonce


def test_hello_refuses_a_job_id_of_another_length():
    with pytest.raises(UsageError, match="16 bytes"):
        Hello(b"short", 0, 0, 1, Purpose.SHM)


def test_handshake_agrees_on_newest_common_version_and_features():
    hello = dataclasses.replace(HELLO, versions=(2, 5), features=0b011000)
    endpoint = dataclasses.replace(ADMISSION, versions=(3, 4), features=0b001100)
    dialer, acceptor = DialerHandshake(KEY, hello), AcceptorHandshake(KEY, endpoint)
    exchange(dialer, acceptor)
    assert dialer.agreed.versions == acceptor.agreed.versions == (4, 4)
    assert dialer.agreed.features == acceptor.agreed.features == 0b001000


@pytest.mark.parametrize(
    ("ours", "theirs", "common"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((1, 1), (2, 2), 0), ((4, 6), (1, 3), 0), ((1, 9), (4, 4), 4)],
)
def test_the_common_version_is_the_newest_in_both_ranges(ours, theirs, common):
    assert common_version(ours, theirs) == common_version(theirs, ours) == common


def test_handshake_error_names_both_ranges_without_a_common_version():
    on_acceptor, on_dialer = refusal(endpoint=dataclasses.replace(ADMISSION, versions=(2, 3)))
    assert "here 2 to 3, there 1 to 1" in on_acceptor
    assert "here 1 to 1, there 2 to 3" in on_dialer


def test_handshake_error_is_a_transport_unavailable_error():
    assert issubclass(HandshakeError, TransportUnavailableError)


@pytest.mark.parametrize(
    ("changes", "on_acceptor", "on_dialer"),
    [
        ({"epoch": 4}, "of epoch 4, here is epoch 3", "epoch 3, expected was 4"),
        ({"receiver": 2}, "looks for rank 2, here is rank 0", "sender 0, expected was 2"),
    ],
)
def test_hello_for_another_epoch_or_rank_is_refused_with_the_reason(changes, on_acceptor, on_dialer):
    acceptor_says, dialer_says = refusal(hello=dataclasses.replace(HELLO, **changes))
    assert on_acceptor in acceptor_says
    assert on_dialer in dialer_says


@pytest.mark.parametrize("changes", [{"sender": 0}, {"sender": 4}, {"purpose": Purpose.STORE}])
def test_acceptor_refuses_ranks_and_purposes_that_are_not_admitted(changes):
    with pytest.raises(HandshakeError, match=r"not admitted|not served"):
        AcceptorHandshake(KEY, ADMISSION).receive(dataclasses.replace(HELLO, **changes).pack())


def test_acceptor_does_not_answer_another_job():
    with pytest.raises(HandshakeError, match="another job") as caught:
        AcceptorHandshake(KEY, ADMISSION).receive(dataclasses.replace(HELLO, job=b"x" * 16).pack())
    assert caught.value.reply == b""


def test_the_dialer_refuses_an_acceptor_with_another_key():
    dialer, acceptor = DialerHandshake(KEY, HELLO), AcceptorHandshake(b"x" * 32, ADMISSION)
    answer = acceptor.receive(dialer.opening)
    with pytest.raises(HandshakeError, match="does not hold the key"):
        dialer.receive(answer)
    assert not dialer.done


def test_the_acceptor_refuses_a_dialer_without_the_key():
    acceptor = AcceptorHandshake(KEY, ADMISSION)
    acceptor.receive(HELLO.pack())
    with pytest.raises(HandshakeError, match="does not hold the key"):
        acceptor.receive(os.urandom(32))
    assert not acceptor.done


def test_acceptor_refuses_its_own_proof():
    acceptor = AcceptorHandshake(KEY, ADMISSION)
    answer = acceptor.receive(HELLO.pack())
    with pytest.raises(HandshakeError, match="does not hold the key"):
        acceptor.receive(answer[HELLO_NBYTES:])


def test_dialer_refuses_its_own_hello():
    dialer = DialerHandshake(KEY, HELLO)
    own_door = dataclasses.replace(ADMISSION, rank=HELLO.sender, senders=range(4))
    with pytest.raises(HandshakeError) as caught:
        AcceptorHandshake(KEY, own_door).receive(dialer.opening)
    with pytest.raises(HandshakeError, match="answers as sender 1"):
        dialer.receive(caught.value.reply)


def test_a_replayed_dialer_is_refused():
    dialer, acceptor = DialerHandshake(KEY, HELLO), AcceptorHandshake(KEY, ADMISSION)
    recorded = dialer.receive(acceptor.receive(dialer.opening))
    again = AcceptorHandshake(KEY, ADMISSION)
    again.receive(dialer.opening)
    with pytest.raises(HandshakeError, match="does not hold the key"):
        again.receive(recorded)


def test_a_replayed_acceptor_is_refused():
    recorded = AcceptorHandshake(KEY, ADMISSION).receive(HELLO.pack())
    fresh = DialerHandshake(KEY, dataclasses.replace(HELLO, nonce=os.urandom(32)))
    with pytest.raises(HandshakeError, match="does not hold the key"):
        fresh.receive(recorded)


def test_equal_nonces_give_equal_answers():
    first = AcceptorHandshake(KEY, ADMISSION, nonce=b"n" * 32).receive(HELLO.pack())
    assert AcceptorHandshake(KEY, ADMISSION, nonce=b"n" * 32).receive(HELLO.pack()) == first


def test_acceptor_refuses_more_bytes_than_it_needs():
    with pytest.raises(HandshakeError, match="more bytes"):
        AcceptorHandshake(KEY, ADMISSION).receive(HELLO.pack() + b"x")


def test_acceptor_refuses_an_early_end_of_the_connection():
    with pytest.raises(HandshakeError, match="ended"):
        AcceptorHandshake(KEY, ADMISSION).receive(b"")


def test_a_failed_handshake_stays_failed():
    acceptor = AcceptorHandshake(KEY, ADMISSION)
    with pytest.raises(HandshakeError):
        acceptor.receive(b"x" * HELLO_NBYTES)
    with pytest.raises(HandshakeError):
        acceptor.receive(HELLO.pack())
    assert not acceptor.done


def test_agreed_hello_is_not_available_before_the_end():
    acceptor = AcceptorHandshake(KEY, ADMISSION)
    acceptor.receive(HELLO.pack())
    with pytest.raises(InternalError, match="not complete"):
        _ = acceptor.agreed


@given(st.binary(min_size=1, max_size=2 * HELLO_NBYTES))
def test_random_bytes_never_get_past_the_acceptor(garbage):
    acceptor = AcceptorHandshake(KEY, ADMISSION)
    with contextlib.suppress(HandshakeError):
        assert acceptor.receive(garbage) == b""
    assert not acceptor.done


@given(st.binary(min_size=HELLO_NBYTES + 32, max_size=HELLO_NBYTES + 32))
def test_random_answers_never_get_past_the_dialer(garbage):
    with pytest.raises(HandshakeError):
        DialerHandshake(KEY, HELLO).receive(garbage)


@given(st.integers(0, HELLO_NBYTES - 1))
def test_a_truncated_hello_is_never_answered(nbytes):
    acceptor = AcceptorHandshake(KEY, ADMISSION)
    if nbytes:
        assert acceptor.receive(HELLO.pack()[:nbytes]) == b""
    assert acceptor.needed == HELLO_NBYTES - nbytes
    with pytest.raises(HandshakeError, match="ended"):
        acceptor.receive(b"")


@given(message=st.integers(0, 2), position=st.integers(0, 8 * (HELLO_NBYTES + 32) - 1))
def test_one_flipped_bit_in_any_message_ends_the_handshake(message, position):
    dialer, acceptor = DialerHandshake(KEY, HELLO), AcceptorHandshake(KEY, ADMISSION)

    def flipped(data, number):
        if number != message:
            return data
        byte, bit = divmod(position % (8 * len(data)), 8)
        return data[:byte] + bytes([data[byte] ^ 1 << bit]) + data[byte + 1 :]

    with contextlib.suppress(HandshakeError):
        answer = acceptor.receive(flipped(dialer.opening, 0))
        proof = dialer.receive(flipped(answer, 1))
        acceptor.receive(flipped(proof, 2))
    assert not acceptor.done
