"""Meeting by MPI: a key from rank 0 by a broadcast, and the roster by an allgather; no server and no store.

All operations are nonblocking ones of MPI on a communicator of our own, so that a rank that never comes costs the
others their time limit and not more. The key passes over MPI's own network, which docs/security.md states as a trust.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from unisono.deadlines import Deadline
from unisono.transports.links.handshake import KEY_NBYTES
from unisono.transports.mpi.collectives import MpiCollectives
from unisono.transports.mpi.library import complete, duplicate, free
from unisono.transports.rendezvous.roster import Member, Roster, Setting, entry_of, roster_of, roster_record


class MpiMeeting:
    """The ranks of a communicator of mpi4py, which all make the same calls here in the same order.

    Args:
        comm: an intracommunicator; it is duplicated.
        timeout_s: seconds to wait for the others.

    Attributes:
        comm: the duplicate.
        key: the job's key, from rank 0.

    Raises:
        RendezvousError: the others did not come in time, or MPI failed.
    """

    def __init__(self, comm: Any, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        self.comm = duplicate(comm, deadline)
        self._rank, self._size = self.comm.Get_rank(), self.comm.Get_size()
        key = np.frombuffer(os.urandom(KEY_NBYTES), np.uint8).copy()
        complete(self.comm.Ibcast(key, 0), deadline, key)
        self.key = key.tobytes()

    def join(self, me: Member, timeout_s: float, settings: Mapping[str, Setting]) -> Roster:
        """Return the roster, equal on all ranks; the settings are adopted from rank 0, as by `roster.join`.

        Raises:
            RendezvousError: the others did not come in time, or run other versions; or MPI failed.
        """
        deadline = Deadline(timeout_s)
        mine = {"entry": entry_of(me, self._size).decode(), "settings": dict(settings)}
        entry = np.frombuffer(json.dumps(mine).encode(), np.uint8)
        lengths = np.zeros(self._size, np.int32)
        length = np.array([entry.size], np.int32)
        complete(self.comm.Iallgather(length, lengths), deadline, length, lengths)
        entries = np.zeros(int(lengths.sum()), np.uint8)
        counted = (entries, lengths.tolist())
        complete(self.comm.Iallgatherv(entry, counted), deadline, entry, counted)
        texts = np.split(entries, np.cumsum(lengths)[:-1])
        records = [json.loads(text.tobytes()) for text in texts]
        record = roster_record([each["entry"].encode() for each in records], records[0]["settings"])
        return roster_of(record, self._size)

    def collectives(self) -> MpiCollectives:
        """Return MPI's own collectives over the duplicate."""
        return MpiCollectives(self.comm)

    def end(self) -> None:
        """Do nothing: the key was in no place that others could look into, and the duplicate stays in use."""

    def give_up(self, reason: str) -> None:
        """Do nothing: the others wait in operations of MPI, and give up at their time limit."""

    def close(self) -> None:
        """Free the duplicate, of which nothing may be in use. May be called twice."""
        comm, self.comm = self.comm, None
        if comm is not None:
            free(comm)
