"""Communicators over a transport of an installed package: how it is opened, with what Unisono has opened before."""

from __future__ import annotations

import numpy as np

from unisono.collectives.calls.planning import HostLayout
from unisono.collectives.communicator import Communicator
from unisono.deadlines import Deadline
from unisono.options import Options
from unisono.transports.executors.generic import GenericExecutor
from unisono.transports.executors.native import NativeExecutor
from unisono.transports.links.session import Session
from unisono.transports.message.plugin_loading import Bootstrap, factory_of, open_transport
from unisono.transports.message.supervised import WatchedTransport


def open_executor(name: str, session: Session, native: NativeExecutor, options: Options) -> GenericExecutor:
    """Return the executor of all ranks over the transport `name`; all ranks call it.

    Args:
        name: that of an installed transport.
        session: this rank's, which has met the others.
        native: of all ranks over our own links, by which the bootstrap's exchanges and objects go; it is closed with
            what is returned.
        options: `rendezvous_timeout_s` is how long opening may take.

    Raises:
        UsageError, TransportUnavailableError: it cannot be had here.
        PeerLostError: it cannot on another rank, which says why.
    """
    everyone = tuple(range(native.size))
    deadline = Deadline(options.rendezvous_timeout_s)
    meeting = Communicator(native, HostLayout((everyone,), "tcp"), options)

    def exchange(data: bytes) -> list[bytes]:
        mine = np.frombuffer(data, np.uint8)
        counts = meeting.allgather(np.array([mine.size]), timeout_s=deadline.left_s()).ravel().tolist()
        told = meeting.allgatherv(mine, counts, timeout_s=deadline.left_s()).tobytes()
        ends = np.cumsum(counts).tolist()
        return [told[end - count : end] for end, count in zip(ends, counts, strict=True)]

    bootstrap = Bootstrap(native.rank, native.size, native.members, exchange, deadline.when)
    transport = open_transport(name, factory_of(name), bootstrap)
    try:
        exchange(b"")  # so that all have it, or none
    except BaseException:
        transport.close()
        raise
    return GenericExecutor(WatchedTransport(transport, session.control), native)
