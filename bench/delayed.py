"""A link with a long delay between network namespaces: interfaces whose packets this process forwards.

Each host gets a second interface. A packet from it reaches another host `delay_s` after it was sent, however many
packets are on the way, or is lost. Needs root and ``/dev/net/tun``.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterator, Sequence

from unisono.bench.namespaces import ip

_NETWORK = "10.213.78"
# Large packets, so that few pass through Python.
_MTU = 65000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_DESTINATION = 19  # the last byte of the receiver's address in an IPv4 header


def delayed_address(host: int) -> str:
    """Return the address of host number `host` on the wire."""
    return f"{_NETWORK}.{host + 1}"


@contextlib.contextmanager
def delayed(namespaces: Sequence[str], delay_s: float, loss: float = 0.0) -> Iterator[None]:
    """Connect hosts by the delayed link, which loses a share `loss` of the packets.

    Raises:
        UsageError, OSError: the interfaces cannot be created.
    """
    with contextlib.ExitStack() as stack:
        ends = []
        for host, namespace in enumerate(namespaces):
            ends.append(_interface(f"un{os.getpid()}t{host}", host, namespace))
            stack.callback(os.close, ends[-1])
        stop, stopping = os.pipe()
        stack.callback(os.close, stop)
        carrier = threading.Thread(target=_carry, args=(ends, stop, delay_s, loss), daemon=True)
        carrier.start()
        stack.callback(carrier.join)
        stack.callback(os.close, stopping)
        yield


def _interface(name: str, host: int, namespace: str) -> int:
    """Create an interface in a namespace; return the file descriptor of its packets."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    ip("link", "set", name, "netns", namespace)
    ip("addr", "add", f"{delayed_address(host)}/24", "dev", name, namespace=namespace)
    ip("link", "set", name, "mtu", str(_MTU), "txqueuelen", "10000", "up", namespace=namespace)
    return descriptor


def _carry(ends: Sequence[int], stop: int, delay_s: float, loss: float) -> None:
    """Forward packets until the other end of `stop` is closed."""
    under_way: list[tuple[float, int, int, bytes]] = []
    dice = random.Random(0)
    numbers = itertools.count()  # keep packets that are due at the same time in order
    while True:
        patience_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select([*ends, stop], [], [], patience_s)
        if stop in readable:
            return
        for end in readable:
            with contextlib.suppress(BlockingIOError):
                packet = os.read(end, _MTU + 100)
                target = packet[_DESTINATION] - 1
                if packet[0] >> 4 == 4 and target < len(ends) and dice.random() >= loss:
                    heapq.heappush(under_way, (time.monotonic() + delay_s, next(numbers), ends[target], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            *_, to_end, packet = heapq.heappop(under_way)
            with contextlib.suppress(OSError):
                os.write(to_end, packet)
