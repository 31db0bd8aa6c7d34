"""Neighbourhoods: the ranks that one rank sends to and receives from in a neighbourhood collective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from unisono.foundation.records import record


@record
class Neighbourhood:
    """The neighbours of one rank, in the order of the blocks of its buffers.

    A rank may occur several times, and may be the rank itself. Several edges between two ranks are matched in order:
    the first that the sender lists in `destinations` belongs to the first that the receiver lists in `arrivals`.

    Attributes:
        sources: for each block of OUTPUT, the rank that sends it; None if no rank does.
        destinations: for each block of INPUT, the rank to which it is sent; None if it is sent to no rank.
        arrivals: the indices of all `sources`, in the order in which edges are matched; None for ascending order.
    """

    sources: tuple[int | None, ...]
    destinations: tuple[int | None, ...]
    arrivals: tuple[int, ...] | None = None

    def received(self) -> Mapping[int, Sequence[int]]:
        """Return, for each source, the indices of its blocks of OUTPUT in the order in which edges are matched."""
        order = range(len(self.sources)) if self.arrivals is None else self.arrivals
        return _by_rank((self.sources[index], index) for index in order)

    def sent(self) -> Mapping[int, Sequence[int]]:
        """Return, for each destination, the indices of its blocks of INPUT in the order in which edges are matched."""
        return _by_rank((rank, index) for index, rank in enumerate(self.destinations))


def _by_rank(pairs: Iterable[tuple[int | None, int]]) -> Mapping[int, Sequence[int]]:
    indices: defaultdict[int, list[int]] = defaultdict(list)
    for rank, index in pairs:
        if rank is not None:
            indices[rank].append(index)
    return indices
