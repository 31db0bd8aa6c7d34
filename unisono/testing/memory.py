"""Arrays that lie at a given place in memory, with bytes around them that must not change."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_GUARD = 128
_ALIGNMENT = 64
_FILL = 0xA5


class Guarded:
    """An array of its own memory, of which each byte is 0xA5 at first, and so are those around it.

    Attributes:
        array: contiguous, in the given order, `offset` bytes beyond an address that is divisible by 64.
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
        made = cls(values.shape, values.dtype, offset, order)
        made.array[...] = values
        return made

    def is_intact(self) -> bool:
        """Return whether the bytes around the array are what they were."""
        around = np.concatenate([self._memory[: self._start], self._memory[self._end :]])
        return bool((around == _FILL).all())


def laid_out(values: NDArray[Any], layout: str, offset: int = 0) -> tuple[NDArray[Any], Guarded]:
    """Return a copy of `values` that lies in memory as `layout` says, "C", "F" or "strided", and what guards it."""
    if layout == "strided":
        guard = Guarded.of(np.stack([values, values], axis=-1), offset)
        return guard.array[..., 0], guard
    guard = Guarded.of(values, offset, layout)
    return guard.array, guard
