"""A schedule while a file is read: its events and moves, and the names and chunks that all formats share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.algorithms.schedules.moves import Cell, Move, Place, Schedule
from unisono.errors import UsageError

# Names of collectives in files, where they differ from ours.
_COLLECTIVES = {"reducescatter": "reduce_scatter", "all_reduce": "allreduce", "all_gather": "allgather"}
# Collectives that no format of schedules has.
_UNKNOWN = ("barrier", "scan", "exscan")


def collective_named(name: object) -> str:
    """Return our name of a collective of a file.

    Raises:
        UsageError: there is no such collective, so that nothing could be proved.
    """
    collective = _COLLECTIVES.get(str(name), str(name))
    if collective not in CONTRACTS or collective in _UNKNOWN:
        raise UsageError(
            f"the schedule is for the collective {name!r}, whose results Unisono cannot check: it checks those of "
            f"{', '.join(sorted(CONTRACTS.keys() - _UNKNOWN))}"
        )
    return collective


def chunks_of(collective: str, size: int, counts: Sequence[Mapping[str, int]]) -> int:
    """Return the number of chunks of a vector, or of a rank's share, from the number of chunks of each buffer.

    Raises:
        UsageError: the ranks have no equal shares.
    """
    whole = max(max(of_rank["i"], of_rank["o"]) for of_rank in counts)
    contract = CONTRACTS[collective]
    shares = size if Cut.SHARES in (contract.input, contract.output) else 1
    if whole == 0 or whole % shares:
        raise UsageError(f"the buffers have {whole} chunks, of which {shares} shares cannot have equally many")
    return whole // shares


class Building:
    """The events and moves that have been read."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._before: list[list[int]] = []
        self._moves: list[Move] = []

    def add_event(self, where: str, before: Sequence[int]) -> int:
        """Add an event behind others, and return its number; `where` is its place in the file."""
        self.events.append(where)
        self._before.append(list(before))
        return len(self.events) - 1

    def order(self, first: int, second: int) -> None:
        """Note that one event directly precedes another one."""
        self._before[second].append(first)

    def move(self, source: Place, target: Place, at: tuple[int, int], own: Sequence[Cell] | None = None) -> None:
        """Add a move, which reads and writes `at` two events; see `Move`."""
        self._moves.append(Move(source, target, *at, None if own is None else tuple(own)))

    def schedule(self, name: object, collective: str, size: int, chunks: int, *, in_place: bool) -> Schedule:
        """Return the schedule."""
        before = tuple(map(tuple, self._before))
        return Schedule(str(name), collective, size, in_place, chunks, tuple(self.events), before, tuple(self._moves))
