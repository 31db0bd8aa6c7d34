"""Messages over sockets are read piece by piece, up to a limit, and until a deadline."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from unisono.foundation.deadlines import Deadline
from unisono.foundation.wire import Framing, exactly, json_of, more

FRAMING = Framing(struct.Struct("!I"), limit=100)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_more_reads_no_byte_of_the_next_message(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    received = bytearray()
    theirs.sendall(b"ab")
    assert not more(ours, received, 3)
    theirs.sendall(b"cd")
    assert more(ours, received, 3)
    assert (received, ours.recv(10)) == (b"abc", b"d")


@pytest.mark.parametrize("message", [b"", b"x", b"x" * 100])
def test_framed_message_arrives_as_it_was_sent(ends: tuple[socket.socket, socket.socket], message: bytes) -> None:
    ours, theirs = ends
    theirs.sendall(FRAMING.framed(message) + b"next")
    assert FRAMING.receive(ours, Deadline(100.0)) == message
    assert exactly(ours, 4) == b"next"


def test_message_above_the_limit_is_refused_before_its_bytes_arrive(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    theirs.sendall(FRAMING.header.pack(101))
    with pytest.raises(ValueError, match="a message is too long"):
        FRAMING.receive(ours, Deadline(100.0))


def test_message_that_stops_in_the_middle_ends_at_the_deadline(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    theirs.sendall(FRAMING.framed(b"abc")[:-1])
    with pytest.raises(TimeoutError):
        FRAMING.receive(ours, Deadline(0.01))


def test_closed_connection_is_an_error_in_the_middle_of_a_message(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    theirs.sendall(FRAMING.framed(b"abc")[:-1])
    theirs.close()
    with pytest.raises(ConnectionResetError, match="it closed the connection"):
        FRAMING.receive(ours, Deadline(100.0))


def test_message_of_another_shape_names_the_field() -> None:
    assert json_of(b'{"epoch": 3}', {"epoch": int}) == {"epoch": 3}
    with pytest.raises(ValueError, match="epoch cannot be a value of type str"):
        json_of(b'{"epoch": "3"}', {"epoch": int})
