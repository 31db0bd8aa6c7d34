"""Small text pictures for the errors of the verifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_ROWS = 16  # the most rows of a picture, which has at most four times as many columns


def contributions(title: str, rows: Mapping[str, tuple[int, int]], size: int) -> str:
    """Return a picture with a row for each name and a column for each rank.

    A row is (ranks present, ranks expected), each a set of ranks as bits. `+`: present and expected. `!`: present but
    not expected. `?`: expected but missing. `.`: neither.
    """
    columns = min(size, 4 * _ROWS)
    shown = list(rows)[:_ROWS]
    width = max(len(name) for name in shown)
    lines = [f"\n  {title}"]
    for name in shown:
        present, expected = rows[name]
        marks = "".join(_MARKS[bool(present >> rank & 1), bool(expected >> rank & 1)] for rank in range(columns))
        lines.append(f"    {name:<{width}}  {marks}{'…' if columns < size else ''}")
    if len(rows) > len(shown):
        lines.append("    …")
    return "\n".join(lines)


_MARKS = {(True, True): "+", (True, False): "!", (False, True): "?", (False, False): "."}


def cycle(members: Sequence[str]) -> str:
    """Return the members of a waiting cycle, one below the other; each waits for the next, the last for the first."""
    edges = ["┌→", *["│ "] * (len(members) - 2), "└─"] if len(members) > 1 else ["↺ "]
    return "".join(f"\n  {edge} {member} waits for" for edge, member in zip(edges, members, strict=True))
