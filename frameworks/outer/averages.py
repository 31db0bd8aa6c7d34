"""Averages of fragments over the ranks of a communicator, in flight while the ranks compute.

Beside each average travels a note (`notes`), by which all ranks see whether any two average something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from unisono import Communicator, MismatchError
from unisono.frameworks.arrays import Array
from unisono.frameworks.gradients.compression import compression_of
from unisono.frameworks.gradients.layout import Piece
from unisono.frameworks.gradients.stages import Flat
from unisono.frameworks.gradients.two_stage_reduction import ReductionQueue
from unisono.frameworks.outer.notes import Note, are_equal, usual
from unisono.frameworks.pending import Pending
from unisono.frameworks.sparse_sums import SparseSums


class Averages:
    """The averages of fragments over all ranks of a communicator. At most one of each fragment is in flight.

    All ranks start them in the same order, and call `wait` in the same order.

    Args:
        world: the ranks.
        memories: by fragment, the flat memory that is averaged in place, float32 or float64.
        pieces: by fragment, where its parameters lie in the memory.
        compression: the argument of a reducer.
        timeout_s: the time limit of each average; None for that of `world`.

    Attributes:
        states: by fragment, and then by their kind, the values that compression keeps; without compression there are no
            kinds.
    """

    def __init__(
        self,
        world: Communicator,
        memories: Sequence[Array],
        pieces: Sequence[Sequence[Piece]],
        compression: str | None,
        timeout_s: float | None,
    ) -> None:
        self._world = world
        self._notes = world.dup()
        form = None if compression is None else compression_of(compression)
        self._comms = [world.dup() for _ in (form.calls if form is not None else "1")]
        self._queue = ReductionQueue()
        kinds = form.state if form is not None else ()
        self.states = [{kind: np.zeros(x.size, np.float32) for kind in kinds} for x in memories]
        if form is None:
            plans = [self._comms[0].plan("allreduce", x, op="avg", out=x, timeout_s=timeout_s) for x in memories]
            self._starts: list[Any] = [partial(plan, wait=False) for plan in plans]
        else:
            sums = SparseSums(self._comms[0], is_own=True)
            self._starts = [
                partial(self._queue.start, form.stages(Flat(self._comms, sums, x, state, parts, "avg", timeout_s)))
                for x, state, parts in zip(memories, self.states, pieces, strict=True)
            ]
        self._timeout_s = timeout_s
        self._flying: dict[int, tuple[Pending, Pending, Array, Note]] = {}

    def start(self, index: int, number: int, checksum: int) -> None:
        """Start the average of fragment `index`. Its memory belongs to this object until `wait` has returned."""
        note = Note(number, checksum)
        bits = note.bits()
        noted = self._notes.allreduce(bits, "bor", out=bits, wait=False, timeout_s=self._timeout_s)
        self._flying[index] = self._starts[index](), noted, bits, note

    def wait(self, index: int) -> None:
        """Wait until the memory of fragment `index` holds the average.

        Raises:
            MismatchError: the ranks have made different numbers of steps, or hold other outer parameters.
            PeerLostError, CollectiveTimeoutError, AbortedError: the call failed.
        """
        average, noted, bits, note = self._flying.pop(index)
        noted.wait()
        average.wait()
        if not are_equal(bits):
            raise self._difference(index, note)

    def nbytes_sent(self) -> int:
        """Return the bytes that this rank has sent so far."""
        every = (*self._comms, self._notes)
        return sum(traffic.sent_nbytes for each in every for traffic in each.stats().values())

    def close(self) -> None:
        """Close the communicators. Averages in flight end with an error."""
        for each in (*self._comms, self._notes):
            each.close()

    def _difference(self, index: int, own: Note) -> MismatchError:
        notes: list[tuple[int, int]] = self._notes.allgather_object(tuple(own))
        column = 0 if len({number for number, _ in notes}) > 1 else 1
        values = [note[column] for note in notes]
        most = usual(values)
        peers = [self._world.world_ranks[rank] for rank, value in enumerate(values) if value != most]
        ranks = f"rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}"
        text = (
            f"{ranks}: another number of steps than the others. All ranks call step() equally often",
            f"fragment {index}: the outer parameters on {ranks} have other bits than on the others. Load the same "
            "checkpoint on all ranks",
        )[column]
        return MismatchError(text, rank=self._world.rank, peer=peers[0])
