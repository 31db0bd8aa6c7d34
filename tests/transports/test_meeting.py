"""The links of ranks to rank 0, while ranks meet."""

from __future__ import annotations

import socket

import pytest
from support.deadlines import DEADLINE_S

from unisono.foundation.deadlines import Deadline
from unisono.transports.links.link_messages import receive
from unisono.transports.links.meeting import Gathering


def test_rank_that_connects_after_another_has_failed_learns_why() -> None:
    gathering = Gathering()
    first, late = socket.socketpair(), socket.socketpair()
    assert gathering.admit(1, first[0])
    gathering.close("rank 2 has ended")
    assert gathering.admit(3, late[0])
    for _, link in (first, late):
        assert receive(link, Deadline(DEADLINE_S)) == {"error": "rank 2 has ended"}
        with pytest.raises(OSError, match=r"closed|reset|ended"):
            receive(link, Deadline(DEADLINE_S))
        link.close()


def test_rank_that_connects_again_after_all_have_begun_is_left_to_the_caller() -> None:
    gathering = Gathering()
    ours, theirs = socket.socketpair()
    again, other = socket.socketpair()
    added = []
    assert gathering.admit(1, ours)
    gathering.begin(lambda peer, link: added.append((peer, link)), None)
    assert added == [(1, ours)]
    assert receive(theirs, Deadline(DEADLINE_S)) == {"begin": True}
    assert not gathering.admit(1, again)
    assert again.fileno() >= 0
    for link in (ours, theirs, again, other):
        link.close()
