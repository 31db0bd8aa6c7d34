"""Which of the processes that wait enter a swarm next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unisono.swarm import needs
from unisono.swarm.needs import Needs
from unisono.swarm.views import NO_BARS, Member, View

A, B, C, D, E = (Member(name.lower(), name, "127.0.0.1", port) for port, name in enumerate("ABCDE", 1))
VIEW = View("view", 1, "", 1, (A, B), NO_BARS)


def membership() -> Any:
    """Return the membership of A, as far as `Needs` reads it: all members answer, and nothing has failed."""
    peers = SimpleNamespace(lost=frozenset, replies=dict)
    none: dict[str, Any] = {name: set() for name in ("leaving", "expelled", "slow", "suspects")}
    return SimpleNamespace(
        me=A, peers=peers, failure="", is_frozen=False, settings=SimpleNamespace(min_size=None), **none
    )


def joiners(of: Needs) -> list[str]:
    need = of.need(VIEW, has_failed=False)
    return [] if need is None else [member.name for member in need.joiners]


def test_processes_that_could_not_be_met_enter_one_by_one_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(needs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    some = Needs(membership())
    some.offer([C, D])
    assert joiners(some) == ["C", "D"]
    some.refuse(C, 4.0)
    some.refuse(D, 5.0)
    assert joiners(some) == []
    now[0] += 6.0
    assert joiners(some) == ["C"]
    some.refuse(C, 4.0)
    assert joiners(some) == ["D"]
    some.offer([C, D, E])
    assert joiners(some) == ["E"]
    some.offer([B, E])
    some.offer([B, C, D, E])  # C and D have registered anew
    assert joiners(some) == ["C", "D", "E"]


def test_a_process_that_is_a_member_does_not_enter() -> None:
    some = Needs(membership())
    some.offer([A, B])
    assert joiners(some) == []
