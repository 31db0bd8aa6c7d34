"""The contract of each collective, as data: how INPUT and OUTPUT are cut, and which ranks have them.

`verifier.block_meaning` says what each block of OUTPUT must hold in the end.
"""

from __future__ import annotations

import enum

from unisono.algorithms.ir.plan import Counts
from unisono.foundation.records import record


class Cut(enum.Enum):
    """How the vector of a collective lies in a buffer."""

    VECTOR = "one vector, in any number of blocks that is the same on all ranks"
    TOKEN = "one block of one element"
    SHARE = "one block, the share of one rank"
    SHARES = "one block per rank"


@record
class Contract:
    """The contract of a collective.

    Attributes:
        input, output: how INPUT and OUTPUT are cut; None if there is no OUTPUT.
        reduces: whether contributions are combined and the result is lowered.
        input_at_root, output_at_root: whether only the root has an INPUT or OUTPUT.
        varying: the kinds of counts of INPUT and OUTPUT in the vector form of the collective, such as allgatherv; None
            if it has no such form. A SHARE then has the rank's own count.
        synchronizes: whether a rank may end only after it has heard from all other ranks, directly or through others.
    """

    input: Cut
    output: Cut | None
    reduces: bool = False
    input_at_root: bool = False
    output_at_root: bool = False
    varying: tuple[Counts, Counts] | None = None
    synchronizes: bool = False

    @property
    def has_root(self) -> bool:
        """Whether one rank, the root, has a special role."""
        return self.input_at_root or self.output_at_root

    def has_input(self, rank: int, root: int) -> bool:
        """Return whether `rank` has an INPUT."""
        return rank == root or not self.input_at_root

    def has_output(self, rank: int, root: int) -> bool:
        """Return whether `rank` has an OUTPUT."""
        return self.output is not None and (rank == root or not self.output_at_root)


_RANKS = (Counts.RANKS, Counts.RANKS)

CONTRACTS: dict[str, Contract] = {
    "allreduce": Contract(Cut.VECTOR, Cut.VECTOR, reduces=True),
    "reduce": Contract(Cut.VECTOR, Cut.VECTOR, reduces=True, output_at_root=True),
    "reduce_scatter": Contract(Cut.SHARES, Cut.SHARE, reduces=True, varying=_RANKS),
    "scan": Contract(Cut.VECTOR, Cut.VECTOR, reduces=True),
    "exscan": Contract(Cut.VECTOR, Cut.VECTOR, reduces=True),
    "broadcast": Contract(Cut.VECTOR, Cut.VECTOR, input_at_root=True),
    "scatter": Contract(Cut.SHARES, Cut.SHARE, input_at_root=True, varying=_RANKS),
    "gather": Contract(Cut.SHARE, Cut.SHARES, output_at_root=True, varying=_RANKS),
    "allgather": Contract(Cut.SHARE, Cut.SHARES, varying=_RANKS),
    "alltoall": Contract(Cut.SHARES, Cut.SHARES, varying=(Counts.SEND, Counts.RECEIVE)),
    "barrier": Contract(Cut.TOKEN, None, synchronizes=True),
}

# Vector calls, in which each rank's share has its own length: name of the call → collective that carries it out.
VECTOR_CALLS = {f"{name}v": name for name, contract in CONTRACTS.items() if contract.varying is not None}
