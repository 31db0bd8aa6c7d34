"""The types of arguments, for annotations: buffers, counts, and specifications of buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, SupportsIndex

from unisono.compat.mpi4py.memory.access import BottomType, InPlaceType
from unisono.compat.mpi4py.memory.datatype import Datatype


class SupportsBuffer(Protocol):
    """An object with the buffer protocol."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """Return a view of the memory."""


class SupportsDLPack(Protocol):
    """An array with the protocol DLPack."""

    def __dlpack__(self, /, *, stream: Any = None) -> Any:
        """Return a capsule of the array."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the kind and the number of the device."""


class SupportsCAI(Protocol):
    """An array with the CUDA array interface."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The description of the array."""


Aint = SupportsIndex
Count = SupportsIndex
Displ = SupportsIndex
Offset = SupportsIndex
Buffer = SupportsBuffer | SupportsDLPack | SupportsCAI
Bottom = BottomType | None
InPlace = InPlaceType | None
TypeSpec = Datatype | str
_Counts = Sequence[SupportsIndex]
_Placed = tuple[_Counts, _Counts]
BufSpecB = (
    Buffer | tuple[Buffer, Count] | tuple[Buffer, TypeSpec] | tuple[Buffer, Count, TypeSpec] | list[Any]
)  # fmt: skip
BufSpec = BufSpecB | tuple[Bottom, Count, Datatype]
BufSpecV = (
    Buffer | tuple[Buffer, _Counts] | tuple[Buffer, _Placed] | tuple[Buffer, TypeSpec]
    | tuple[Buffer, _Counts | _Placed, TypeSpec] | tuple[Buffer, _Counts, _Counts, TypeSpec]
    | tuple[Bottom, _Placed, Datatype] | tuple[Bottom, _Counts, _Counts, Datatype] | list[Any]
)  # fmt: skip
BufSpecW = (
    tuple[Buffer, Sequence[Datatype]] | tuple[Buffer, _Placed, Sequence[Datatype]]
    | tuple[Buffer, _Counts, _Counts, Sequence[Datatype]] | tuple[Bottom, _Placed, Sequence[Datatype]]
    | tuple[Bottom, _Counts, _Counts, Sequence[Datatype]] | list[Any]
)  # fmt: skip
TargetSpec = Displ | tuple[()] | tuple[Displ] | tuple[Displ, Count] | tuple[Displ, Count, TypeSpec] | list[Any]
