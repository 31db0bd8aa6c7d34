"""The store of a local job. The launcher serves it, and reports ranks that ended before they joined the job."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from unisono.errors import RendezvousError
from unisono.forks import closed_in_child
from unisono.launchers.process import Exit, above_standard_streams
from unisono.transports.rendezvous import next_prefix, open_store, open_waiting_place
from unisono.transports.rendezvous.roster import has_arrived
from unisono.transports.rendezvous.stores import Store
from unisono.transports.rendezvous.tcp_store import StoreServer

HOST = "127.0.0.1"
ANSWER_TIMEOUT_S = 5.0


class JobStore:
    """A store on a free port of the loopback interface, for one job with a new id and a new key.

    Attributes:
        url: the URL of the store.
        job: the id of the job, 16 bytes.
        torch_port: a free port for the store of torch.distributed, which rank 0 serves if the program uses it.
    """

    def __init__(self) -> None:
        """Start the server of the store.

        Raises:
            RendezvousError: no port can be listened on.
        """
        self.job = os.urandom(16)
        self._key = os.urandom(32)
        self._reserved = _reserved_port()
        self.torch_port: int = self._reserved.getsockname()[1]
        try:
            self._server = StoreServer(HOST, 0, key=self._key, job=self.job)
        except BaseException:
            self._reserved.close()
            raise
        self._reader: Store | None = None
        self._waiting_place: Store | None = None
        self.url = self._server.url

    @contextmanager
    def key_pipe(self) -> Iterator[int]:
        """Yield a descriptor from which the key of the job can be read once. The rank must be started in the block."""
        reader, writer = os.pipe()
        reader = above_standard_streams(reader)
        try:
            os.write(writer, self._key)
            os.close(writer)
            yield reader
        finally:
            os.close(reader)

    def rank_ended(self, ended: Exit) -> None:
        """If the rank ended before it joined the job, make the other ranks fail with an error that says so."""
        if not self.has_arrived(ended.rank):
            self._server.fail(f"rank {ended.rank} {ended} before it called un.init()")

    def close(self) -> None:
        """Stop the server."""
        for store in (self._reader, self._waiting_place):
            if store is not None:
                store.close()
        self._server.close()
        self._reserved.close()

    def has_arrived(self, rank: int) -> bool:
        """Return whether the rank has taken part in the first rendezvous, or is about to."""
        try:
            if self._reader is None:
                # This process opens the store for the first time, so it sees the keys of each rank's first opening.
                prefix = next_prefix(self.url, rank=rank, job=self.job)
                self._reader = open_store(self.url, prefix, key=self._key, job=self.job, timeout_s=ANSWER_TIMEOUT_S)
            return has_arrived(self._reader, rank)
        except RendezvousError:
            return False

    def has_joined(self, pid: int) -> bool:
        """Return whether a process that was started anew has met the members of the running job."""
        from unisono.transports.links.joiners import joined

        try:
            if self._waiting_place is None:
                self._waiting_place = open_waiting_place(self.url, self._key, self.job, ANSWER_TIMEOUT_S)
            self._waiting_place.get(joined(pid), 0.0)
        except RendezvousError:
            return False
        return True


def _reserved_port() -> socket.socket:
    """Return a socket that reserves a port for another process until the socket is closed.

    The kernel does not give the port to a process that asks for any free port. A process that names the port can listen
    there if it sets SO_REUSEADDR, as torch does, because this socket does not listen.
    """
    holder = closed_in_child(socket.socket())
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder
