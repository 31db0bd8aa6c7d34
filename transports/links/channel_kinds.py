"""`CHANNELS`: the table of the transports of the native core.

A new transport is a folder with its opener, its number in `Purpose`, and a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from unisono.transports.links.handshake import Purpose
from unisono.transports.links.opener import Opener, OpenerContext
from unisono.transports.shm.opener import SharedMemoryOpener
from unisono.transports.tagged.opener import FabricOpener
from unisono.transports.tcp.opener import TcpOpener


class ChannelKind(NamedTuple):
    """One transport of the native core: its opener, and the facts that the session needs.

    Attributes:
        make_opener: makes the opener of a session.
        is_authenticated: whether only the two ranks, which have proved that they hold the key, can send on a channel.
        is_shared_memory: whether channels are shared memory, which both ranks must be able to map.
        reaches_all: whether it reaches every rank.
        dials_tcp: whether it needs TCP sockets, also between ranks of one host.
        advice: what an error recommends if a channel cannot be opened, with {} for the setting `transports`; or empty.
    """

    make_opener: Callable[[OpenerContext], Opener]
    is_authenticated: bool = True
    is_shared_memory: bool = False
    reaches_all: bool = False
    dials_tcp: bool = False
    advice: str = ""


CHANNELS: Mapping[str, ChannelKind] = {
    "shm": ChannelKind(
        SharedMemoryOpener, is_shared_memory=True, advice="; tcp alone does without shared memory: set {} to tcp"
    ),
    "tcp": ChannelKind(TcpOpener, reaches_all=True, dials_tcp=True),
    "ucx": ChannelKind(partial(FabricOpener, name="ucx"), is_authenticated=False),
    "mpi": ChannelKind(partial(FabricOpener, name="mpi"), is_authenticated=False),
}
"""The transports of the native core, by the names in the option `transports`."""

AUTHENTICATED = tuple(name for name, kind in CHANNELS.items() if kind.is_authenticated)
UNAUTHENTICATED = tuple(name for name, kind in CHANNELS.items() if not kind.is_authenticated)
SHARED_MEMORY = tuple(name for name, kind in CHANNELS.items() if kind.is_shared_memory)
REACHING_ALL = tuple(name for name, kind in CHANNELS.items() if kind.reaches_all)


def transport_of(purpose: Purpose) -> str:
    """Return the name of the transport whose channels a connection of this purpose opens."""
    return purpose.name.lower()


def purpose_of(transport: str) -> Purpose:
    """Return the purpose of connections that open channels of a transport."""
    return Purpose[transport.upper()]


def dials_tcp(purpose: Purpose) -> bool:
    """Return whether a connection must be TCP, also between ranks of one host."""
    kind = CHANNELS.get(transport_of(purpose))
    return purpose is Purpose.TCP_RESUME or (kind is not None and kind.dials_tcp)
