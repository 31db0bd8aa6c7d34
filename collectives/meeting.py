"""How the ranks of a job meet, whatever it is that they meet by: each then has the job's key and the roster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from unisono.collectives.environment import MPI_WORLD, Launch, agree_on_key
from unisono.options import Options
from unisono.transports.hello import KEY_NBYTES
from unisono.transports.rendezvous import given_store, open_store
from unisono.transports.rendezvous.roster import Member, Roster, Setting, join
from unisono.transports.rendezvous.stores import Store

if TYPE_CHECKING:
    from unisono.transports.mpi_collectives import MpiCollectives


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

    def collectives(self) -> MpiCollectives | None:
        """Return the collectives of MPI over the ranks, if it is there that they meet."""

    def close(self) -> None:
        """Leave. May be called twice."""


class Alone:
    """Where a job of one rank meets."""

    comm = None

    def __init__(self) -> None:
        self.key = os.urandom(KEY_NBYTES)

    def join(self, me: Member, timeout_s: float, settings: Mapping[str, Setting]) -> Roster:
        """See `Meeting.join`."""
        return Roster((me,), settings)

    def collectives(self) -> None:
        """See `Meeting.collectives`."""

    def close(self) -> None:
        """See `Meeting.close`."""


class AtStore:
    """A store in which the ranks meet; where no launcher has given the key, they agree on one there."""

    comm = None

    def __init__(self, store: Store, rank: int, size: int, key: bytes | None, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        try:
            self.key = key or agree_on_key(store, rank, timeout_s)
        except BaseException:
            store.close()
            raise

    def join(self, me: Member, timeout_s: float, settings: Mapping[str, Setting]) -> Roster:
        """See `Meeting.join`."""
        return join(self._store, self._rank, self._size, me, timeout_s, settings=settings)

    def collectives(self) -> None:
        """See `Meeting.collectives`."""

    def close(self) -> None:
        """See `Meeting.close`."""
        self._store.close()


def meeting_of(launch: Launch, options: Options, given: Any) -> Meeting:
    """Return where the ranks meet; `given` is the store or the communicator of mpi4py that the program has, or None.

    Raises:
        UsageError: what is to be used for that cannot be.
        RendezvousError: the others, or rank 0 alone, did not come in time.
    """
    limit_s = options.rendezvous_timeout_s
    if launch.store == MPI_WORLD:
        from unisono.transports.mpi_library import world_of
        from unisono.transports.rendezvous.mpi import MpiMeeting

        return MpiMeeting(world_of(launch.launcher, launch.size) if given is None else given, limit_s)
    if launch.store is not None:
        store = open_store(launch.store, rank=launch.rank, key=launch.key, job=launch.job, timeout_s=limit_s)
    elif given is not None:
        store = given_store(given, launch.rank)
    else:
        return Alone()
    return AtStore(store, launch.rank, launch.size, launch.key, limit_s)
