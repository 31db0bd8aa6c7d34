"""Parses sizes as people write them: ``8:64M`` (in steps of 4), ``8:64M:2``, ``1K,64K,1M``, or several of these."""

from __future__ import annotations

from unisono.errors import UsageError
from unisono.options import parse_nbytes

DEFAULT_FACTOR = 4
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in bytes, ascending and without duplicates; the end of a range is always one of them.

    Raises:
        UsageError: a part is neither a size nor a range of sizes.
    """
    return tuple(sorted({size for part in text.split(",") for size in _range(part)}))


def format_size(nbytes: int) -> str:
    """Return `nbytes` in the largest binary unit that divides it: ``"64 KiB"``, ``"8 B"``."""
    for unit, name in UNITS:
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def _range(part: str) -> list[int]:
    first, *rest = part.split(":")
    if not rest:
        return [_size(first)]
    if len(rest) > 2:
        raise UsageError(f"{part!r} is not a range of sizes: write FIRST:LAST or FIRST:LAST:FACTOR")
    size, last = _size(first), _size(rest[0])
    factor = _factor(rest[1]) if len(rest) == 2 else DEFAULT_FACTOR
    if last < size:
        raise UsageError(f"the range {part!r} ends below its start")
    sizes = []
    while size < last:
        sizes.append(size)
        size *= factor
    return [*sizes, last]


def _size(text: str) -> int:
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is not a size: it must be {error}") from None


def _factor(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 1):
        raise UsageError(f"{text!r} is not a factor between sizes: it must be a whole number above 1")
    return int(text)
