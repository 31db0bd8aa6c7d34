"""Resolves the option `bind_address`, which is an address, a host name, an interface or a network, to an address."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from unisono.errors import UsageError

if TYPE_CHECKING:
    from ipaddress import IPv4Network, IPv6Network

SETTING = "UNISONO_BIND_ADDRESS"
HOW_TO_REACH = (
    f"set {SETTING} on all ranks, or the option bind_address if the program passes it, to the network between the "
    "hosts, such as 10.0.0.0/8, or to an interface, such as eth0, and let firewalls admit TCP "
    "connections between the hosts"
)


def address_for(bind_address: str) -> str:
    """Return the numeric address of this machine that `bind_address` means.

    Args:
        bind_address: an address or a host name. Or an interface, such as ``eth1``, which means its first address, IPv4
            before IPv6. Or a network, such as ``10.0.0.0/8`` or ``fd00::/8``, which means the first address of this
            machine in it. Link-local addresses of IPv6 do not count.

    Raises:
        UsageError: it means no address of this machine; the message lists the addresses.
    """
    if "/" in bind_address:
        return _in_network(bind_address)
    if is_numeric(bind_address):
        return bind_address
    if bind_address in (name for _, name in socket.if_nameindex()):
        addresses = [address for name, address in _addresses() if name == bind_address]
        if not addresses:
            raise UsageError(f"{SETTING}={bind_address!r} cannot be used: that interface has no address")
        return addresses[0]
    try:
        host = lookup(bind_address)
        return str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4][0])
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a valid name"
        raise not_listened_on(bind_address, reason or str(error)) from None


def not_listened_on(bind_address: str, reason: str) -> UsageError:
    """Return the error for an address on which this machine cannot listen; it names the addresses of the machine."""
    return UsageError(
        f"{SETTING}={bind_address!r} cannot be listened on: {reason}; it must be an address, a host name, an interface "
        f"or a network of this machine: {_shown()}"
    )


def interface_of(address: str) -> str:
    """Return the name of the interface with this numeric address; empty for loopback, or if no interface has it."""
    from ipaddress import ip_address

    if ip_address(address).is_loopback:
        return ""
    return next((name for name, candidate in _addresses() if candidate == address.partition("%")[0]), "")


def is_numeric(address: str) -> bool:
    """Return whether `address` is numeric. An IPv6 address may have a zone."""
    # Every rank calls this, and the module ipaddress takes a millisecond to load.
    for family, number in ((socket.AF_INET, address), (socket.AF_INET6, address.partition("%")[0])):
        with contextlib.suppress(OSError, ValueError):
            socket.inet_pton(family, number)
            return True
    return False


def lookup(host: str) -> str | bytes:
    """Return `host` in the form to pass to the socket module: as bytes if it is ASCII, which loads no IDNA codec."""
    return host.encode() if host.isascii() else host


def _in_network(bind_address: str) -> str:
    from ipaddress import ip_network

    try:
        network = ip_network(bind_address, strict=False)
    except ValueError:
        raise UsageError(
            f"{SETTING}={bind_address!r} cannot be used: write a network as 10.0.0.0/8 or fd00::/8"
        ) from None
    for _, address in _addresses():
        if _has(network, address):
            return address
    raise UsageError(f"{SETTING}={bind_address!r} cannot be used: this machine has no address in it, but {_shown()}")


def _has(network: IPv4Network | IPv6Network, address: str) -> bool:
    from ipaddress import ip_address

    # 0.0.0.0/0 means any address that other hosts can reach, and loopback is not one.
    return ip_address(address) in network and not (network.prefixlen == 0 and ip_address(address).is_loopback)


def _addresses() -> Iterator[tuple[str, str]]:
    """Yield the usable addresses of this machine as (interface, numeric address), IPv4 before IPv6."""
    from ipaddress import ip_address

    import ifaddr

    pairs = [(adapter.name, address.ip) for adapter in ifaddr.get_adapters() for address in adapter.ips]
    yield from ((name, ip) for name, ip in pairs if isinstance(ip, str))
    yield from ((name, ip[0]) for name, ip in pairs if not isinstance(ip, str) and not ip_address(ip[0]).is_link_local)


def _shown() -> str:
    return ", ".join(f"{name} {address}" for name, address in _addresses())
