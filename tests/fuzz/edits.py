"""Inputs of a fuzzer as edits of valid seeds, so that most of them pass the first checks of a parser.

The first byte of an input chooses a seed. 0 stands for none, and the rest is then the text itself. Otherwise the rest
is a list of edits of three bytes: the place, and the value that is put there. A seed of bytes is edited in bytes.
Another seed is edited in its tree, which is then written as JSON.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

# Values at which parsers go wrong. Some are bytes that are not JSON.
_AWKWARD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 255, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1),
    *(1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63), -(1 << 70), 10**300, 0.5, -0.0, 1e308, 1e-320),
    *("", "a", "0", "-1", "ring", "\0", "\x7f", "é" * 300, "[bold]", "[/]", "a" * 5000, "0-4294967295", "../..", "1e9"),
    *([], [[]], [0], [0, 0], [-1], [None], list(range(300)), [[1, 2], [1, 2]], {}, {"": None}, {"a": {"b": {}}}),
)
_AWKWARD_TEXTS = ("NaN", "Infinity", "1e999", '"\\ud800"', "[" * 100_000, "1" * 5000, "01", "{", "", "\ufeff{}")
_MOST_EDITS = 12


def edited(data: bytes, seeds: Sequence[Any]) -> bytes:
    """Return the input of a parser that `data` stands for."""
    if not data or data[0] == 0:
        return data[1:]
    seed = seeds[(data[0] - 1) % len(seeds)]
    edits = [data[at : at + 3] for at in range(1, min(len(data) - 2, 3 * _MOST_EDITS), 3)]
    return _edited_bytes(seed, edits) if isinstance(seed, bytes) else _edited_tree(seed, edits)


def _edited_bytes(seed: bytes, edits: Sequence[bytes]) -> bytes:
    result = bytearray(seed)
    for edit in edits:
        place, kind = edit[0] << 4 | edit[1] >> 4, edit[1] & 15
        place %= len(result) + 1
        if kind < 4:
            number = _AWKWARD[edit[2] % len(_AWKWARD)]
            word = int(number) if isinstance(number, int) else edit[2]
            width = min(1 << kind, len(result) - place)
            result[place : place + width] = (word % (1 << 64)).to_bytes(8, "big")[8 - width :]
        elif kind == 4:
            del result[place:]
        elif kind == 5:
            del result[place : place + edit[2]]
        elif kind == 6:
            result[place:place] = seed[: 4 * edit[2]]
        else:
            result[place : place + 1] = edit[2:]
    return bytes(result)


def _edited_tree(seed: Any, edits: Sequence[bytes]) -> bytes:
    tree, as_text = json.loads(json.dumps([seed])), None
    for edit in edits:
        places = list(_places(tree))
        node, key = places[(edit[0] << 8 | edit[1]) % len(places)]
        number = edit[2] % (len(_AWKWARD) + len(_AWKWARD_TEXTS) + 3)
        if number < len(_AWKWARD):
            node[key] = copy.deepcopy(_AWKWARD[number])
        elif (number := number - len(_AWKWARD)) < len(_AWKWARD_TEXTS):
            node[key], as_text = "@", _AWKWARD_TEXTS[number]
        elif isinstance(node, dict):
            value = node.pop(key)
            if number == len(_AWKWARD_TEXTS):
                node[f"{key}x"] = value
        else:
            node.insert(key, node[key])
    text = json.dumps(tree[0]) if tree else ""
    return (text if as_text is None else text.replace('"@"', as_text)).encode()


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each node of a tree but the root, as its container and its key or index there."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)
