"""The arguments of a collective call as the user passed them, and the checks that need no array.

Used by: the dispatcher, the methods of communicators, and `binding`, which turns arguments into bound arrays.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.collectives.arrays.operands import list_of, outs_of
from unisono.collectives.calls.planning import AlgorithmLike
from unisono.errors import UsageError
from unisono.operations import Op

if TYPE_CHECKING:
    from typing_extensions import TypedDict

    class Arguments(TypedDict, total=False):
        """The fields of `CallArguments` except the collective and the arrays."""

        op: OpArgument
        root: int | None
        counts: tuple[Sequence[int], ...] | None
        algorithm: AlgorithmLike
        timeout_s: float | None


OpArgument: TypeAlias = "str | Op | None"


class CallArguments(NamedTuple):
    """The arguments of a collective call as the user passed them; None stands for an argument that is missing.

    Attributes:
        collective: its name in the registry, for example "allgather" for `allgatherv` too.
        x, out: the arrays, or lists of arrays.
        op, root, algorithm, timeout_s: as in `Collectives`.
        counts: rows for each rank: ``(counts,)`` or ``(send_counts, recv_counts)``; None for equal shares.
    """

    collective: str
    x: Any
    out: Any
    op: OpArgument = None
    root: int | None = None
    counts: tuple[Sequence[int], ...] | None = None
    algorithm: AlgorithmLike = None
    timeout_s: float | None = None


def gets_result(collective: str, rank: int, root: int | None) -> bool:
    """Return whether a rank gets a result of a call with this root."""
    return CONTRACTS[collective].has_output(rank, root or 0)


def spread(arguments: CallArguments) -> list[CallArguments]:
    """Return one call for each array of a call on a list of arrays; a call on a single array as it is.

    Raises:
        UsageError: `out` is not a list of as many arrays as `x`, or there are none.
    """
    x, out = arguments.x, arguments.out
    if arguments.counts is not None or CONTRACTS[arguments.collective].input is Cut.TOKEN or list_of(x, out) is None:
        return [arguments]
    pairs = zip(*checked_lists(x, out), strict=True)
    return [arguments._replace(x=source, out=target) for source, target in pairs]


def checked_lists(x: Any, out: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the `x` and the `out` of each array of a call on a list of arrays; one of both may be None for all.

    Raises:
        UsageError: `out` is not a list of as many arrays as `x`, or there are none.
    """
    sources = [None] * len(out) if x is None else x
    if not sources:
        raise UsageError("x is an empty list: pass a list with at least one array")
    _check_elements(sources)
    return sources, outs_of(sources, out)


def _check_elements(x: Sequence[Any]) -> None:
    """Raise `UsageError` if a list that was passed as several arrays holds the elements of one array."""
    for index, element in enumerate(x):
        if isinstance(element, (complex, float, int, np.generic, list, tuple)):
            item = f"x[{index}] is of type {type(element).__name__}"
            raise UsageError(f"a list is several arrays, and {item}: pass numpy.asarray(x) as one array")


def checked_flag(value: bool, name: str) -> bool:
    """Return `value`, which must be True or False.

    Raises:
        UsageError: `value` is something else; the text calls it `name`.
    """
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, not {value!r}")
    return value


def checked_integer(value: int, name: str, least: int, most: int) -> int:
    """Return `value` as an integer from `least` to `most`.

    Raises:
        UsageError: `value` is something else; the text calls it `name`.
    """
    try:
        integer = operator.index(value)
    except TypeError:
        integer = least - 1
    if isinstance(value, bool) or not least <= integer <= most:
        raise UsageError(f"{name} must be an integer, {least} to {most}, not {value!r}")
    return integer
