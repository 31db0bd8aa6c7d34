"""The rendezvous of a job: through a store, by MPI, or alone. Afterwards each rank has the key and the roster.

Used by: `init`, `shrink`, `grow` and `join`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from unisono.collectives.bootstrap.environment import ENV, MPI_WORLD, TORCH, Launch, agree_on_key
from unisono.options import Options
from unisono.transports.links.handshake import KEY_NBYTES
from unisono.transports.rendezvous import (
    host_and_port,
    next_prefix,
    open_store,
    store_of_process_group,
    torch_store_of,
)
from unisono.transports.rendezvous.roster import Roster, RosterMember, Setting, failure, give_up, join, report_failure
from unisono.transports.rendezvous.stores import Store
from unisono.transports.rendezvous.tcp_store import StoreServer
from unisono.transports.tcp.tls import TlsPolicy

if TYPE_CHECKING:
    from unisono.transports.mpi.collectives import MpiCollectives


# How long rank 0, which serves the store, keeps it open after it gave up, so that the others can read the reason.
_LINGER_S = 2.0


class Rendezvous(Protocol):
    """The way in which the ranks of a job find each other.

    Attributes:
        key: the key of the job.
        comm: a communicator of mpi4py, duplicated for Unisono, if the ranks meet by MPI; otherwise None.
    """

    key: bytes
    comm: Any

    def join(self, me: RosterMember, timeout_s: float, settings: Mapping[str, Setting]) -> Roster:
        """Publish this rank and return the roster of all ranks; see `roster.join`."""

    def end(self) -> None:
        """Remove everything that others could read, once all ranks have met. `collectives` stays usable."""

    def give_up(self, reason: str) -> None:
        """Tell the other ranks, if that is still possible, that this rank will not come."""

    def report_failure(self, reason: str) -> None:
        """Tell the other ranks, if that is possible, that this rank cannot connect to them."""

    def failure(self) -> str:
        """Return the `reason` that a rank has reported; empty if none has."""

    def collectives(self) -> MpiCollectives | None:
        """Return the collectives of MPI over the ranks, if the ranks meet by MPI; otherwise None."""

    def close(self) -> None:
        """Release the connections. May be called twice."""


class SingleRank:
    """The rendezvous of a job of one rank."""

    comm = None

    def __init__(self) -> None:
        self.key = os.urandom(KEY_NBYTES)

    def join(self, me: RosterMember, timeout_s: float, settings: Mapping[str, Setting]) -> Roster:
        return Roster((me,), settings)

    def end(self) -> None:
        """Do nothing: a single rank has published nothing."""

    def give_up(self, reason: str) -> None:
        """Do nothing: there is no other rank."""

    def report_failure(self, reason: str) -> None:
        """Do nothing: there is no other rank."""

    def failure(self) -> str:
        return ""

    def collectives(self) -> None:
        """Return None."""

    def close(self) -> None:
        """Do nothing: a single rank has no connections."""


class StoreRendezvous:
    """The rendezvous through a store. Without a key from the launcher, the ranks agree on one there.

    `server` serves the store, if this process does so for the rendezvous alone.
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

    def join(self, me: RosterMember, timeout_s: float, settings: Mapping[str, Setting]) -> Roster:
        return join(self._store, self._rank, self._size, me, timeout_s, settings=settings)

    def end(self) -> None:
        self._store.clear()
        self.close()

    def give_up(self, reason: str) -> None:
        give_up(self._store, self._rank, self._size, reason)
        self._store.close()
        if self._server is not None:
            self._server.close(linger_s=_LINGER_S, clients=self._size)

    def report_failure(self, reason: str) -> None:
        report_failure(self._store, reason)

    def failure(self) -> str:
        return failure(self._store)

    def collectives(self) -> None:
        """Return None."""

    def close(self) -> None:
        self._store.close()
        if self._server is not None:
            self._server.close()


def rendezvous_of(launch: Launch, options: Options, passed: Any) -> Rendezvous:
    """Return the rendezvous of a job. `passed` is the store or mpi4py communicator that the program passed, or None.

    Raises:
        UsageError: the store or MPI cannot be used.
        TransportUnavailableError: TLS cannot be used.
        RendezvousError: rank 0 or other ranks did not arrive in time.
    """
    limit_s = options.rendezvous_timeout_s
    if launch.store == MPI_WORLD:
        from unisono.transports.mpi.library import world_of
        from unisono.transports.rendezvous.mpi import MpiRendezvous

        return MpiRendezvous(world_of(launch.launcher, launch.size) if passed is None else passed, limit_s)
    torch_store = store_of_process_group(launch.rank, launch.size) if launch.launcher == ENV else None
    if torch_store is None and launch.store is not None and not launch.store.startswith(TORCH):
        return _at_url(launch, launch.store, limit_s, TlsPolicy(options.tls))
    if torch_store is None:
        torch_store = launch.store or passed
    if torch_store is None:
        return SingleRank()
    store = torch_store_of(torch_store, launch.rank, launch.size, limit_s)
    return StoreRendezvous(store, launch.rank, launch.size, launch.key, limit_s)


def _at_url(launch: Launch, url: str, limit_s: float, tls: TlsPolicy) -> StoreRendezvous:
    prefix, server = next_prefix(url, rank=launch.rank, job=launch.job), None
    if launch.served_host is not None:
        _, port = host_and_port(url)
        server = StoreServer(launch.served_host, port, key=launch.key, job=launch.job, prefix=prefix)
    try:
        store = open_store(url, prefix, key=launch.key, job=launch.job, timeout_s=limit_s, tls=tls)
    except BaseException:
        if server is not None:
            server.close()
        raise
    return StoreRendezvous(store, launch.rank, launch.size, launch.key, limit_s, server)
