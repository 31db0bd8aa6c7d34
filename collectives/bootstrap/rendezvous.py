"""How the ranks of a job meet, whatever it is that they meet by: each then has the job's key and the roster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from unisono.collectives.bootstrap.environment import ENV, MPI_WORLD, Launch, agree_on_key
from unisono.options import Options
from unisono.transports.links.handshake import KEY_NBYTES
from unisono.transports.rendezvous import (
    given_store,
    host_and_port,
    next_prefix,
    open_store,
    store_of_process_group,
)
from unisono.transports.rendezvous.roster import Member, Roster, Setting, give_up, join
from unisono.transports.rendezvous.stores import Store
from unisono.transports.rendezvous.tcp_store import StoreServer

if TYPE_CHECKING:
    from unisono.transports.mpi.collectives import MpiCollectives


# How long rank 0, when it serves the store and gives up, lets the others read why.
_LINGER_S = 2.0


class Meeting(Protocol):
    """A place where the ranks meet.

    Attributes:
        key: the job's.
        comm: the communicator of mpi4py, of our own, that the ranks meet by, or None.
    """

    key: bytes
    comm: Any

    def join(self, me: Member, timeout_s: float, settings: Mapping[str, Setting]) -> Roster:
        """Meet the other ranks; see `roster.join`."""

    def end(self) -> None:
        """Leave nothing that a stranger could read: all ranks have met. What `collectives` returned stays usable."""

    def give_up(self, reason: str) -> None:
        """Tell the others, as far as that can be done, that this rank does not come."""

    def collectives(self) -> MpiCollectives | None:
        """Return the collectives of MPI over the ranks, if it is there that they meet."""

    def close(self) -> None:
        """Leave. May be called twice."""


class SingleRank:
    """Where a job of one rank meets."""

    comm = None

    def __init__(self) -> None:
        self.key = os.urandom(KEY_NBYTES)

    def join(self, me: Member, timeout_s: float, settings: Mapping[str, Setting]) -> Roster:
        """See `Meeting.join`."""
        return Roster((me,), settings)

    def end(self) -> None:
        """See `Meeting.end`."""

    def give_up(self, reason: str) -> None:
        """See `Meeting.give_up`."""

    def collectives(self) -> None:
        """See `Meeting.collectives`."""

    def close(self) -> None:
        """See `Meeting.close`."""


class StoreRendezvous:
    """A store in which the ranks meet; where no launcher has given the key, they agree on one there.

    `server` serves the store, if this process does so for the meeting alone.
    """

    comm = None

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        key: bytes | None,
        timeout_s: float,
        server: StoreServer | None = None,
    ) -> None:
        self._store = store
        self._server = server
        self._rank = rank
        self._size = size
        try:
            self.key = key or agree_on_key(store, rank, timeout_s)
        except BaseException:
            self.close()
            raise

    def join(self, me: Member, timeout_s: float, settings: Mapping[str, Setting]) -> Roster:
        """See `Meeting.join`."""
        return join(self._store, self._rank, self._size, me, timeout_s, settings=settings)

    def end(self) -> None:
        """See `Meeting.end`."""
        self._store.clear()
        self.close()

    def give_up(self, reason: str) -> None:
        """See `Meeting.give_up`."""
        give_up(self._store, self._rank, self._size, reason)
        self._store.close()
        if self._server is not None:
            self._server.close(linger_s=_LINGER_S, clients=self._size)

    def collectives(self) -> None:
        """See `Meeting.collectives`."""

    def close(self) -> None:
        """See `Meeting.close`."""
        self._store.close()
        if self._server is not None:
            self._server.close()


def meeting_of(launch: Launch, options: Options, given: Any) -> Meeting:
    """Return where the ranks meet; `given` is the store or the communicator of mpi4py that the program has, or None.

    Raises:
        UsageError: what is to be used for that cannot be.
        RendezvousError: the others, or rank 0 alone, did not come in time.
    """
    limit_s = options.rendezvous_timeout_s
    if launch.store == MPI_WORLD:
        from unisono.transports.mpi.library import world_of
        from unisono.transports.rendezvous.mpi import MpiMeeting

        return MpiMeeting(world_of(launch.launcher, launch.size) if given is None else given, limit_s)
    if launch.launcher == ENV and (of_torch := store_of_process_group(launch.rank, launch.size)) is not None:
        return StoreRendezvous(given_store(of_torch, launch.rank), launch.rank, launch.size, launch.key, limit_s)
    if launch.store is not None:
        return _at_url(launch, launch.store, limit_s)
    if given is None:
        return SingleRank()
    return StoreRendezvous(given_store(given, launch.rank), launch.rank, launch.size, launch.key, limit_s)


def _at_url(launch: Launch, url: str, limit_s: float) -> StoreRendezvous:
    prefix, server = next_prefix(url, rank=launch.rank, job=launch.job), None
    if launch.served_host is not None:
        _, port = host_and_port(url)
        server = StoreServer(launch.served_host, port, key=launch.key, job=launch.job, prefix=prefix)
    try:
        store = open_store(url, prefix, key=launch.key, job=launch.job, timeout_s=limit_s)
    except BaseException:
        if server is not None:
            server.close()
        raise
    return StoreRendezvous(store, launch.rank, launch.size, launch.key, limit_s, server)
