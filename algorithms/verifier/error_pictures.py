"""Small text pictures that errors of the verifier end with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_ROWS = 16  # at most so many rows, and so many times four columns


def contributions(title: str, rows: Mapping[str, tuple[int, int]], size: int) -> str:
    """Return a row per name with a column per rank; a row is (set of ranks, those expected), as bits.

    `+`: there, as expected; `!`: there, and not expected; `?`: expected, and not there; `.`: neither.
    """
    columns = min(size, 4 * _ROWS)
    shown = list(rows)[:_ROWS]
    width = max(len(name) for name in shown)
    lines = [f"\n  {title}"]
    for name in shown:
        there, expected = rows[name]
        marks = "".join(_MARKS[bool(there >> rank & 1), bool(expected >> rank & 1)] for rank in range(columns))
        lines.append(f"    {name:<{width}}  {marks}{'…' if columns < size else ''}")
    if len(rows) > len(shown):
        lines.append("    …")
    return "\n".join(lines)


_MARKS = {(True, True): "+", (True, False): "!", (False, True): "?", (False, False): "."}


def cycle(members: Sequence[str]) -> str:
    """Return the members of a waiting cycle, one under the other: each waits for the next, the last for the first."""
    edges = ["┌→", *["│ "] * (len(members) - 2), "└─"] if len(members) > 1 else ["↺ "]
    return "".join(f"\n  {edge} {member} waits for" for edge, member in zip(edges, members, strict=True))
