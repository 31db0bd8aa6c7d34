"""Opens a plugin transport (a transport of an installed package) with the help of Unisono's own links."""

from __future__ import annotations

import numpy as np

from unisono.collectives.calls.planning import HostLayout
from unisono.collectives.communicator import Communicator
from unisono.foundation.deadlines import Deadline
from unisono.options import Options
from unisono.transports.executors.call_records import CallRecords
from unisono.transports.executors.generic import GenericExecutor
from unisono.transports.executors.native import NativeExecutor
from unisono.transports.links.session import Session
from unisono.transports.message.plugin import Bootstrap
from unisono.transports.message.plugin_loading import factory_of, open_transport
from unisono.transports.message.supervised import SupervisedTransport


def open_executor(name: str, session: Session, native: NativeExecutor, options: Options) -> GenericExecutor:
    """Return the executor of all ranks over the transport `name`. All ranks call this.

    Args:
        name: the name of an installed transport.
        session: the session of this rank, which has met the others.
        native: the executor of all ranks over Unisono's own links. It carries the exchanges of the bootstrap, and later
            objects. The returned executor closes it.
        options: `rendezvous_timeout_s` limits the time for opening.

    Raises:
        UsageError, TransportUnavailableError: this rank cannot open the transport.
        PeerLostError: another rank cannot open it; the message says why.
    """
    everyone = tuple(range(native.size))
    deadline = Deadline(options.rendezvous_timeout_s)
    bootstrap_comm = Communicator(native, HostLayout((everyone,), "tcp"), options)

    def exchange(data: bytes) -> list[bytes]:
        mine = np.frombuffer(data, np.uint8)
        counts = bootstrap_comm.allgather(np.array([mine.size]), timeout_s=deadline.remaining_s()).ravel().tolist()
        received = bootstrap_comm.allgatherv(mine, counts, timeout_s=deadline.remaining_s()).tobytes()
        ends = np.cumsum(counts).tolist()
        return [received[end - count : end] for end, count in zip(ends, counts, strict=True)]

    bootstrap = Bootstrap(native.rank, native.size, native.members, exchange, deadline.when)
    transport = open_transport(name, factory_of(name), bootstrap)
    try:
        exchange(b"")  # fails if another rank has not opened it: all ranks have the transport, or none
    except BaseException:
        transport.close()
        raise
    records = CallRecords(session.control, everyone)
    return GenericExecutor(SupervisedTransport(transport, session.control), native, records)
