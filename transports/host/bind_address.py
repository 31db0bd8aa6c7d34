"""The address to listen on, as the option `bind_address` names it: itself, a host name, an interface, or a network."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from unisono.errors import UsageError

if TYPE_CHECKING:
    from ipaddress import IPv4Network, IPv6Network

SETTING = "UNISONO_BIND_ADDRESS"


def address_for(wanted: str) -> str:
    """Return the numeric address of this machine that `wanted` stands for.

    Args:
        wanted: an address or a host name; or an interface, as ``eth1``, of which the first address is taken, those of
            IPv4 first; or a network, as ``10.0.0.0/8`` or ``fd00::/8``, of which the first address here is taken.
            Addresses of IPv6 that mean something on one link only are not taken.

    Raises:
        UsageError: it stands for no address here; the message names those there are.
    """
    if "/" in wanted:
        return _in_network(wanted)
    if is_numeric(wanted):
        return wanted
    if wanted in (name for _, name in socket.if_nameindex()):
        found = [address for name, address in _addresses() if name == wanted]
        if not found:
            raise UsageError(f"{SETTING}={wanted!r} cannot be used: that interface has no address")
        return found[0]
    try:
        return str(socket.getaddrinfo(lookup(wanted), 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4][0])
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no name"
        raise UsageError(
            f"{SETTING}={wanted!r} cannot be listened on: {reason}; it must be an address, a host name, an interface "
            f"or a network of this machine: {_shown()}"
        ) from None


def interface_of(address: str) -> str:
    """Return the name of the interface that has this numeric address; empty for loopback, and if there is none."""
    from ipaddress import ip_address

    if ip_address(address).is_loopback:
        return ""
    return next((name for name, each in _addresses() if each == address.partition("%")[0]), "")


def is_numeric(address: str) -> bool:
    """Return whether this is a numeric address; one of IPv6 may say its zone."""
    # Every rank asks this, and to load ipaddress takes a millisecond.
    for family, number in ((socket.AF_INET, address), (socket.AF_INET6, address.partition("%")[0])):
        with contextlib.suppress(OSError, ValueError):
            socket.inet_pton(family, number)
            return True
    return False


def lookup(host: str) -> str | bytes:
    """Return `host` as the socket module is to be asked for it; text makes it load what names beyond ASCII need."""
    return host.encode() if host.isascii() else host


def _in_network(wanted: str) -> str:
    from ipaddress import ip_network

    try:
        network = ip_network(wanted, strict=False)
    except ValueError:
        raise UsageError(
            f"{SETTING}={wanted!r} cannot be used: a network is written as 10.0.0.0/8 or fd00::/8"
        ) from None
    for _, address in _addresses():
        if _has(network, address):
            return address
    raise UsageError(f"{SETTING}={wanted!r} cannot be used: this machine has no address in it, but {_shown()}")


def _has(network: IPv4Network | IPv6Network, address: str) -> bool:
    from ipaddress import ip_address

    # 0.0.0.0/0 means "any that others can reach", and loopback is none.
    return ip_address(address) in network and not (network.prefixlen == 0 and ip_address(address).is_loopback)


def _addresses() -> Iterator[tuple[str, str]]:
    """Yield the name of an interface and a numeric address of it, for all that can be used; those of IPv4 first."""
    from ipaddress import ip_address

    import ifaddr

    pairs = [(adapter.name, each.ip) for adapter in ifaddr.get_adapters() for each in adapter.ips]
    yield from ((name, ip) for name, ip in pairs if isinstance(ip, str))
    yield from ((name, ip[0]) for name, ip in pairs if not isinstance(ip, str) and not ip_address(ip[0]).is_link_local)


def _shown() -> str:
    return ", ".join(f"{name} {address}" for name, address in _addresses())
