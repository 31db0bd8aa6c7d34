"""Numbers in files of schedules, within limits, with errors that name the place."""

from __future__ import annotations

from unisono.errors import UsageError

MOST_RANKS = 1024
MOST_CHUNKS = 1 << 16


def checked(number: object, name: str, least: int, most: int) -> int:
    """Return an integer, or a text of one, that lies between `least` and `most`.

    Raises:
        UsageError: it is something else.
    """
    try:
        value = int(number) if isinstance(number, (int, str)) and not isinstance(number, bool) else None
    except ValueError:
        value = None
    if value is None:
        raise UsageError(f"{name} must be an integer, not {number!r}")
    if not least <= value <= most:
        raise UsageError(f"{name} is {value}, and must be {least} to {most}")
    return value
