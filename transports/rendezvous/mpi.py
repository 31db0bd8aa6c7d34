"""The rendezvous by MPI: rank 0 broadcasts the key, and an allgather collects the roster. It needs no server or store.

All operations are nonblocking operations of MPI on a duplicated communicator. So if a rank never comes, the others fail
at their time limit. The key travels over MPI's network, and docs/security.md states that trust.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from unisono.errors import RendezvousError
from unisono.foundation.deadlines import Deadline
from unisono.foundation.json_checks import checked, parsed_json
from unisono.transports.links.handshake import KEY_NBYTES
from unisono.transports.mpi.collectives import MpiCollectives
from unisono.transports.mpi.library import complete, duplicate, free
from unisono.transports.rendezvous.roster import Roster, RosterMember, Setting, entry_of, roster_of, roster_record


class MpiRendezvous:
    """The rendezvous of the ranks of a communicator of mpi4py. All ranks make the same calls in the same order.

    Args:
        comm: an intracommunicator, which is duplicated.
        timeout_s: seconds to wait for the others.

    Attributes:
        comm: the duplicate.
        key: the job's key, from rank 0.

    Raises:
        RendezvousError: the other ranks did not come in time, or MPI failed.
    """

    def __init__(self, comm: Any, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        self.comm = duplicate(comm, deadline)
        self._rank, self._size = self.comm.Get_rank(), self.comm.Get_size()
        key = np.frombuffer(os.urandom(KEY_NBYTES), np.uint8).copy()
        complete(self.comm.Ibcast(key, 0), deadline, key)
        self.key = key.tobytes()

    def join(self, me: RosterMember, timeout_s: float, settings: Mapping[str, Setting]) -> Roster:
        """Return the roster, equal on all ranks, with the settings of rank 0.

        Raises:
            RendezvousError: the other ranks did not come in time or run other versions, or MPI failed.
        """
        deadline = Deadline(timeout_s)
        record = {"entry": entry_of(me, self._size).decode(), "settings": dict(settings)}
        entry = np.frombuffer(json.dumps(record).encode(), np.uint8)
        lengths = np.zeros(self._size, np.int32)
        length = np.array([entry.size], np.int32)
        complete(self.comm.Iallgather(length, lengths), deadline, length, lengths)
        entries = np.zeros(int(lengths.sum()), np.uint8)
        counted = (entries, lengths.tolist())
        complete(self.comm.Iallgatherv(entry, counted), deadline, entry, counted)
        texts = np.split(entries, np.cumsum(lengths)[:-1])
        try:
            records = [checked(parsed_json(text.tobytes()), {"entry": str, "settings": dict}) for text in texts]
        except ValueError as error:
            raise RendezvousError(f"a rank has sent no entry of a roster by MPI: {error}") from None
        roster = roster_record([record["entry"].encode() for record in records], records[0]["settings"])
        return roster_of(roster, self._size)

    def collectives(self) -> MpiCollectives:
        """Return MPI's own collectives over the duplicate."""
        return MpiCollectives(self.comm)

    def end(self) -> None:
        """Do nothing: no value remains anywhere that must be removed, and the duplicate stays in use."""

    def give_up(self, reason: str) -> None:
        """Do nothing: the other ranks wait in operations of MPI until their time limit."""

    def report_failure(self, reason: str) -> None:
        """Do nothing: the other ranks wait for links until their time limit."""

    def failure(self) -> str:
        return ""

    def close(self) -> None:
        """Free the duplicate, on which no operation may be pending. May be called twice."""
        comm, self.comm = self.comm, None
        if comm is not None:
            free(comm)
