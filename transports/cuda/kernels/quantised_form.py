"""The layout of a quantised array in memory: the codes, and then the scales of the blocks.

A row of codes for each rank lies in one array, which one collective exchanges. Each row begins at a multiple of 16
bytes, so that a thread stores the codes of 16 bytes of elements by one instruction.
"""

from __future__ import annotations

from unisono.dtypes import DType

# The number of elements that share a scale.
QUANTISED_BLOCK = 128
_UNIT = 16


def scales_offset(codes: DType, count: int) -> int:
    """Return the bytes from the first code of an array of `count` elements to its first scale."""
    return _rounded(count * codes.itemsize)


def quantised_nbytes(codes: DType, count: int) -> int:
    """Return the bytes of a quantised array of `count` elements. Codes of 16 bits have no scales."""
    blocks = -(-count // QUANTISED_BLOCK) if codes.itemsize == 1 else 0
    return scales_offset(codes, count) + _rounded(4 * blocks)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _UNIT) * _UNIT
