"""`ShownArrays`: ranks exchange the addresses of their arrays, so that peers read the arrays without a copy.

Only registered memory can be shown. Each rank says for each array whether it is, and all ranks know all answers.
So they agree which arrays are read where they lie and which by images, in every mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from unisono.errors import TransportUnavailableError
from unisono.transports.cuda.memory.registered import RegisteredBlock, Registry

# The addresses in this process of INPUT and OUTPUT of each rank; 0 for an array that is not shown.
Shown: TypeAlias = "tuple[tuple[int, int], ...]"
# The address and the bytes of an array.
Piece: TypeAlias = tuple[int, int]


class ShownArrays:
    """The arrays that the ranks of a communicator have shown each other.

    Args:
        rank: this rank.
        registry: the registered memory of its device.
        exchange: ``exchange(mine)`` returns the values of all ranks, representable as JSON.
    """

    def __init__(self, rank: int, registry: Registry, exchange: Callable[[Any], list[Any]]) -> None:
        self._rank = rank
        self._registry = registry
        self._exchange = exchange
        self._held: list[RegisteredBlock] = []
        self._opened: list[bytes] = []

    def agree(self, calls: Sequence[tuple[Piece, Piece]]) -> list[Shown | None]:
        """Return the addresses of the arrays of all ranks, for each call; None if peers read copies of all arrays.

        Args:
            calls: INPUT and OUTPUT of this rank for each call. All ranks pass the same number of calls.

        Raises:
            PeerLostError, CollectiveTimeoutError, AbortedError, MismatchError: an exchange failed.
        """
        offers = self._exchange([[self._offer(*piece) for piece in call] for call in calls])
        if not any(offer for of_rank in offers for call in of_rank for offer in call):
            return [None] * len(calls)
        shown: list[Shown | None] = []
        try:
            for index, call in enumerate(calls):
                shown.append(tuple(self._addresses(rank, offers[rank][index], call) for rank in range(len(offers))))
        except TransportUnavailableError:  # memory that has been opened stays open until the end
            shown.clear()
        return shown if all(self._exchange(bool(shown))) else [None] * len(calls)

    def close_peers(self) -> None:
        """Close the memory of other ranks. No work of this rank may be under way."""
        while self._opened:
            self._registry.close(self._opened.pop())

    def free(self) -> None:
        """Release the memory of this rank, which all other ranks must have closed."""
        while self._held:
            self._registry.release(self._held.pop())

    def _offer(self, pointer: int, nbytes: int) -> list[Any]:
        block = self._registry.find(pointer, nbytes)
        if block is None:
            return []
        try:
            handle = self._registry.hold(block)
        except TransportUnavailableError:  # a device that exports nothing
            return []
        self._held.append(block)
        return [handle.hex(), pointer - block.allocation.pointer]

    def _addresses(self, rank: int, offers: Sequence[list[Any]], own: tuple[Piece, Piece]) -> tuple[int, int]:
        of_input, of_output = (
            0 if not offer else piece[0] if rank == self._rank else self._open(bytes.fromhex(offer[0])) + offer[1]
            for offer, piece in zip(offers, own, strict=True)
        )
        return of_input, of_output

    def _open(self, handle: bytes) -> int:
        pointer = self._registry.open(handle)
        self._opened.append(handle)
        return pointer
