"""Variants: an algorithm with parameters, as people write it: "ring", "knomial(radix=3)"."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any, NamedTuple


class Variant(NamedTuple):
    """An algorithm by name, and parameters by name, in the order of their names.

    >>> [str(parsed(text)) for text in ("knomial( radix = 3 )", "ring", "mpi.native")]
    ['knomial(radix=3)', 'ring', 'mpi.native']
    """

    algorithm: str
    params: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.params)
        return f"{self.algorithm}({given})" if given else self.algorithm

    def having(self, **params: Any) -> Variant:
        """Return the variant with these parameters instead of its own of the same names; None takes one away."""
        every = {**dict(self.params), **params}
        return Variant(self.algorithm, tuple(sorted((name, of) for name, of in every.items() if of is not None)))


def is_rules(text: str) -> bool:
    """Return whether a text has the rules of `tuning.forcing`, and does not name one variant."""
    return ":" in text


@lru_cache(maxsize=1024)
def parsed(text: str) -> Variant:
    """Return the variant that `text` names.

    Raises:
        ValueError: it is none.
    """
    try:
        found = ast.parse(text, mode="eval").body
        if isinstance(found, ast.Call) and not found.args:
            params = {str(each.arg): ast.literal_eval(each.value) for each in found.keywords}
            return Variant(_name(found.func), tuple(sorted(params.items())))
        return Variant(_name(found))
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        pass
    raise ValueError("an algorithm, such as ring or knomial(radix=3)")


def _name(found: ast.expr) -> str:
    """Return a name, such as ``ring``, or that of a library's algorithm, such as ``mpi.native``."""
    if isinstance(found, ast.Attribute):
        return f"{_name(found.value)}.{found.attr}"
    if isinstance(found, ast.Name):
        return found.id
    raise ValueError("no name")
