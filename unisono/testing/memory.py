"""Arrays at a chosen place in memory, surrounded by guard bytes that must not change."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_GUARD = 128
_ALIGNMENT = 64
_FILL = 0xA5


class Guarded:
    """An array in memory of its own. At first, each of its bytes and of the guard bytes around it is 0xA5.

    Attributes:
        array: contiguous in the requested order, `offset` bytes after an address that is divisible by 64.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, offset: int = 0, order: str = "C") -> None:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._memory = np.full(nbytes + 2 * _GUARD + _ALIGNMENT + offset, _FILL, np.uint8)
        self._start = _GUARD + -self._memory.ctypes.data % _ALIGNMENT + offset
        self._end = self._start + nbytes
        flat: NDArray[Any] = self._memory[self._start : self._end].view(dtype)
        self.array: NDArray[Any] = flat.reshape(shape[::-1]).T if order == "F" else flat.reshape(shape)

    @classmethod
    def of(cls, values: NDArray[Any], offset: int = 0, order: str = "C") -> Guarded:
        """Return a guarded copy of `values`."""
        guarded = cls(values.shape, values.dtype, offset, order)
        guarded.array[...] = values
        return guarded

    def is_intact(self) -> bool:
        """Return whether the guard bytes are unchanged."""
        around = np.concatenate([self._memory[: self._start], self._memory[self._end :]])
        return bool((around == _FILL).all())


def laid_out(values: NDArray[Any], layout: str, offset: int = 0) -> tuple[NDArray[Any], Guarded]:
    """Return a copy of `values` in the memory order `layout` ("C", "F" or "strided"), and its guard."""
    if layout == "strided":
        guard = Guarded.of(np.stack([values, values], axis=-1), offset)
        return guard.array[..., 0], guard
    guard = Guarded.of(values, offset, layout)
    return guard.array, guard
