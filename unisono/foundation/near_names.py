"""The nearest name to one that does not exist, for the texts of errors."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Return a hint with the nearest of `names`, behind `prefix`, for the end of a sentence; empty if none is near.

    >>> did_you_mean("transport", ["transports", "tls"]), did_you_mean("x", ["tls"])
    ('; did you mean transports?', '')
    """
    import difflib  # slow to import, and seldom needed

    lower = {each.lower(): each for each in names}
    near = difflib.get_close_matches(name.lower(), lower, n=1)
    return f"; did you mean {prefix}{lower[near[0]]}?" if near else ""
