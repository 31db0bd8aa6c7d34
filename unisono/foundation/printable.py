"""Text that another process, user or file has written, made harmless for a terminal and a log.

A terminal obeys control characters: ``ESC ]0;…`` changes its title, and ``ESC [2J`` clears it. So each reader of such
text passes it through `printable`: errors of peers, flight recorders of other processes, dumps, traces and logs.
"""

from __future__ import annotations

import re
import reprlib
from typing import Any

# C0 except tab and newline, DEL, C1, and the characters that reverse the direction of the text after them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Return `text` with each control character replaced by its code; tabs and newlines stay.

    >>> printable("\x1b[2J, then \u202eback")
    '\\x1b[2J, then \\u202eback'
    """
    return _CONTROL.sub(_code, text)


def printable_values(value: Any) -> Any:
    """Return a value of JSON in which every text, names of fields included, is `printable`."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(name): printable_values(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [printable_values(inner) for inner in value]
    return value


def brief(value: object) -> str:
    """Return the `repr` of a value from a file, with the middle of long texts and the end of long lists left out.

    >>> brief([1] * 1000)
    '[1, 1, 1, 1, 1, 1, ...]'
    """
    try:
        return reprlib.repr(value)
    except ValueError:  # the usual limit of int, which a hexadecimal number of TOML can exceed
        return "a number of too many digits"


def _code(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
