"""What a transport of a third party is given to open itself, and how it is found and opened."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, cast

from unisono.entry_points import entry_points
from unisono.errors import TransportUnavailableError, UnisonoError, UsageError
from unisono.options import TRANSPORTS_GROUP, installed_transports
from unisono.transports.contracts.transport import MessageTransport

# What whoever gets a transport may call, and read.
_METHODS = (
    *("subgroup", "announce", "absent", "post_send", "post_recv", "arrived", "departed"),
    *("progress", "traffic", "abort", "close"),
)
_ATTRIBUTES = ("name", "rank", "size", "capabilities", "mapped", "members")


class Bootstrap(NamedTuple):
    """What a factory of a transport is given.

    Attributes:
        rank, size: this rank, and the number of ranks.
        members: the number in the job of each rank.
        exchange: tells every rank some bytes and returns what all have told, by rank. It blocks until all have, or
            raises at the deadline; all ranks call it equally often. What it carries is authenticated.
        deadline: when the transport must be open, by `time.monotonic`.
    """

    rank: int
    size: int
    members: tuple[int, ...]
    exchange: Callable[[bytes], list[bytes]]
    deadline: float

    @property
    def remaining_s(self) -> float:
        """The seconds that are left; 0 if none are."""
        return max(0.0, self.deadline - time.monotonic())


Factory = Callable[[Bootstrap], MessageTransport]


def _open_ucx(bootstrap: Bootstrap) -> MessageTransport:
    from unisono.transports.ucx import python_links  # what is not used is not loaded

    return python_links.open_links(bootstrap)


_OURS: dict[str, Factory] = {"ucx_core": _open_ucx}


def factory_of(name: str) -> Factory:
    """Return the factory of a transport that carries all messages: ours, or an installed one.

    Raises:
        UsageError: there is none of this name.
        TransportUnavailableError: it cannot be imported.
    """
    if name in _OURS:
        return _OURS[name]
    found = next((each for each in entry_points(group=TRANSPORTS_GROUP) if each.name == name), None)
    if found is None:
        there = ", ".join(installed_transports()) or "none"
        raise UsageError(f"no installed package has a transport {name!r}: there is {there}")
    try:
        return cast("Factory", found.load())
    except Exception as error:
        raise _unusable(name, f"cannot be imported from {found.value!r}", error) from error


def open_transport(name: str, factory: Factory, bootstrap: Bootstrap) -> MessageTransport:
    """Return the transport that a factory makes.

    Raises:
        TransportUnavailableError: it raises, or returns what is no transport for this rank; so does an error of Unisono
            that it lets through, as what it is.
    """
    try:
        made = factory(bootstrap)
    except UnisonoError:
        raise
    except Exception as error:
        raise _unusable(name, "cannot be opened", error) from error
    lacks = [each for each in (*_METHODS, *_ATTRIBUTES) if not hasattr(made, each)]
    if lacks:
        raise TransportUnavailableError(
            f"transport {name!r} cannot be used: its factory returned {made!r}, which lacks {', '.join(lacks)}"
        )
    wanted, found = bootstrap[:3], (made.rank, made.size, tuple(made.members))
    if found != wanted:
        raise TransportUnavailableError(
            f"transport {name!r} cannot be used: it is for (rank, size, members) {found}, wanted was {wanted}"
        )
    return made


def _unusable(name: str, how: str, error: Exception) -> TransportUnavailableError:
    return TransportUnavailableError(f"transport {name!r} {how}: {type(error).__name__}: {error}")
