"""Variants: an algorithm with parameters, as people write it, such as "ring" or "knomial(radix=3)"."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any, NamedTuple

# The parameter of every variant that goes to no builder: the bytes of a block that travel at once.
SEGMENT = "segment_nbytes"
# The parameter of algorithms in blocks: the number of blocks.
BLOCKS = "blocks"
# The parameter of every variant that `composition.rank_order` uses: the ranks in the order of their positions.
ORDER = "order"


class Variant(NamedTuple):
    """The name of an algorithm, and (parameter, value) pairs in the order of the parameters' names.

    >>> [str(parsed(text)) for text in ("knomial( radix = 3 )", "ring", "mpi.native")]
    ['knomial(radix=3)', 'ring', 'mpi.native']
    """

    algorithm: str
    params: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.params)
        return f"{self.algorithm}({arguments})" if arguments else self.algorithm

    def having(self, **params: Any) -> Variant:
        """Return a copy with these parameters set or replaced; the value None removes a parameter."""
        merged = {**dict(self.params), **params}
        return Variant(
            self.algorithm, tuple(sorted((name, value) for name, value in merged.items() if value is not None))
        )


def is_rules(text: str) -> bool:
    """Return whether `text` is a list of rules for `tuning.decide.forced_rules`, and not one variant."""
    return ":" in text


@lru_cache(maxsize=1024)
def parsed(text: str) -> Variant:
    """Return the variant that `text` names.

    Raises:
        ValueError: `text` names no variant. The message completes a sentence such as "name …".
    """
    try:
        expression = ast.parse(text, mode="eval").body
        if isinstance(expression, ast.Call) and not expression.args:
            params = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in expression.keywords}
            return Variant(_name(expression.func), tuple(sorted(params.items())))
        return Variant(_name(expression))
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        pass
    raise ValueError("an algorithm, such as ring or knomial(radix=3)")


def _name(expression: ast.expr) -> str:
    """Return a name such as ``ring``, or the dotted name of a vendor algorithm such as ``mpi.native``."""
    if isinstance(expression, ast.Attribute):
        return f"{_name(expression.value)}.{expression.attr}"
    if isinstance(expression, ast.Name):
        return expression.id
    raise ValueError("the name of an algorithm must be a Python name, such as ring")
