"""Pieces of lanes that builders of several files use."""

from __future__ import annotations

from collections.abc import Callable

from unisono.algorithms.plan import Group, Lane, Repeat


def idle(groups: int) -> Lane:
    """Return `groups` empty groups, which keep the numbers of the groups that follow in step with other ranks."""
    return (Repeat(groups, (Group(()),)),) if groups > 0 else ()


def in_windows(count: int, window: int, batch: Callable[[int, int], Group]) -> Lane:
    """Return the lane that carries out `count` like exchanges, at most `window` of them at a time.

    `batch(first, number)` returns the group of the exchanges first … first + number - 1, whose peers and spans advance
    by `window` exchanges.
    """
    full, rest = divmod(count, window)
    lane: Lane = (Repeat(full, (batch(0, window),)),) if full else ()
    return (*lane, batch(full * window, rest)) if rest else lane
