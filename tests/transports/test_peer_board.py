"""Boards, by which ranks exchange facts about their devices. A reader sees each word whole."""

from __future__ import annotations

import pytest

from unisono.transports.cuda.peers.peer_board import RING, Board, mark_of

DIGEST = 0xFEDCBA9876543210


@pytest.mark.parametrize("number", [0, 5, RING, 1 << 40])
def test_board_signal_is_one_word_and_never_seen_in_part(number: int) -> None:
    board, record = Board.new(3, 1), number + 3
    before = board._words.tolist()
    board.signal(1, 2, number, record, DIGEST)
    assert sum(one != other for one, other in zip(before, board._words.tolist(), strict=True)) == 1
    assert board.signalled(1, 2, number) == (record % RING, mark_of(DIGEST))
    for channel, peer, other in ((0, 2, number), (1, 1, number), (1, 2, number + 1), (1, 2, number + RING)):
        assert board.signalled(channel, peer, other) is None
    board.close()


def test_board_marks_distinguish_calls() -> None:
    marks = {mark_of(DIGEST + bit) for bit in (0, 1, 2, 1 << 20)}
    assert len(marks) == 4
