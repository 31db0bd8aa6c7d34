"""The types of arrays that calls take, for type checkers. `adapters` decides at run time which arrays a call accepts.

A result has the type of the array that it is the result of, for every library. The exception is a plain buffer, whose
result is a numpy array. So a signature accepts buffers only where the call makes no result array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Buffer


class SupportsDLPack(Protocol):
    """Arrays of numpy, torch, JAX, TensorFlow, CuPy and others."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class SupportsArrayInterface(Protocol):
    """Arrays in the memory of the host."""

    @property
    def __array_interface__(self) -> Any: ...


class SupportsCudaArrayInterface(Protocol):
    """Arrays in the memory of a GPU."""

    @property
    def __cuda_array_interface__(self) -> Any: ...


LibraryArray: TypeAlias = SupportsDLPack | SupportsArrayInterface | SupportsCudaArrayInterface
ArrayOrBuffer: TypeAlias = "LibraryArray | Buffer"

Array = TypeVar("Array", bound=LibraryArray)
# An array, or a list or tuple of several.
Arrays = TypeVar("Arrays", bound=LibraryArray | Sequence[LibraryArray])
Target = TypeVar("Target", bound=ArrayOrBuffer)
