"""Finds the factory of a plugin transport, calls it, and checks its result."""

from __future__ import annotations

from typing import cast

from unisono.errors import TransportUnavailableError, UnisonoError, UsageError
from unisono.foundation.entry_points import entry_points
from unisono.options import TRANSPORTS_GROUP, installed_transports
from unisono.transports.contracts.transport import MessageTransport
from unisono.transports.message.plugin import Bootstrap, Factory

# The members of `MessageTransport`.
_METHODS = (
    *("subgroup", "announce", "absent", "post_send", "post_recv", "arrived", "departed"),
    *("progress", "traffic", "abort", "close"),
)
_ATTRIBUTES = ("name", "rank", "size", "capabilities", "mapped", "members")


def _open_ucx(bootstrap: Bootstrap) -> MessageTransport:
    from unisono.transports.ucx import python_links  # loaded only where it is used

    return python_links.open_links(bootstrap)


_OURS: dict[str, Factory] = {"ucx_core": _open_ucx}


def factory_of(name: str) -> Factory:
    """Return the factory of a transport that carries all messages of a job: one of Unisono's, or an installed one.

    Raises:
        UsageError: there is no transport of this name.
        TransportUnavailableError: the factory cannot be imported.
    """
    if name in _OURS:
        return _OURS[name]
    entry_point = next((entry for entry in entry_points(group=TRANSPORTS_GROUP) if entry.name == name), None)
    if entry_point is None:
        installed = ", ".join(installed_transports()) or "none"
        raise UsageError(f"no installed package has a transport {name!r}; installed transports: {installed}")
    try:
        return cast("Factory", entry_point.load())
    except Exception as error:
        raise _unusable(name, f"cannot be imported from {entry_point.value!r}", error) from error


def open_transport(name: str, factory: Factory, bootstrap: Bootstrap) -> MessageTransport:
    """Return the transport that a factory opens for one rank. An error of Unisono that the factory raises passes.

    Raises:
        TransportUnavailableError: the factory raises another error, or returns no transport for this rank.
    """
    try:
        transport = factory(bootstrap)
    except UnisonoError:
        raise
    except Exception as error:
        raise _unusable(name, "cannot be opened", error) from error
    missing = [member for member in (*_METHODS, *_ATTRIBUTES) if not hasattr(transport, member)]
    if missing:
        raise TransportUnavailableError(
            f"transport {name!r} cannot be used: its factory returned {transport!r}, which lacks {', '.join(missing)}"
        )
    expected, actual = bootstrap[:3], (transport.rank, transport.size, tuple(transport.members))
    if actual != expected:
        raise TransportUnavailableError(
            f"transport {name!r} cannot be used: its factory returned one for (rank, size, members) {actual} "
            f"instead of {expected}"
        )
    return transport


def _unusable(name: str, problem: str, error: Exception) -> TransportUnavailableError:
    return TransportUnavailableError(f"transport {name!r} {problem}: {type(error).__name__}: {error}")
