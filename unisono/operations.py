"""Reduction operations as data: lift, combine, lower.

An operation works on a state. Every contribution is *lifted* into a state once. States are *combined* pairwise, in any
order that the plan chooses. Each element of the result is *lowered* from the final state exactly once. A sum has
trivial lift and lower steps. An average is a sum whose lowering divides by the number of contributions.

The plan says where lowering happens (the `lower` mark of its steps), and the verifier proves that it happens once. So
an executor needs no code for single operations. Lifting is local to a rank and happens before a plan sees the
contribution.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import field, replace
from numbers import Number
from typing import Any

from unisono.dtypes import DType
from unisono.errors import UsageError
from unisono.foundation.records import record


class Combine(enum.IntEnum):
    """How two states are combined into one. The native core uses the same numbers."""

    SUM = 0
    PROD = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    LAND = 7
    LOR = 8
    LXOR = 9
    MINLOC = 10
    MAXLOC = 11
    FUNCTION = 12  # a Python function; the native core never gets such an operation


class Lower(enum.IntEnum):
    """How the final state is turned into an element of the result."""

    IDENTITY = 0
    DIVIDE_BY_SIZE = 1
    TRUTH = 2


@record
class Op:
    """A reduction operation.

    Attributes:
        name: the value of the argument ``op=``.
        combine: how states are combined. min and max propagate NaN, as numpy.minimum does; integers wrap.
        lower: how a state is turned into a result. Integer division truncates towards zero, as in C and NCCL. The
            result of TRUTH is 0 or 1, even of a single contribution.
        kinds: the kinds of dtype for which the operation is defined.
        commutative: whether operands may change places. All built-in operations are commutative.
        function: the function that combines two arrays, if `combine` is FUNCTION; otherwise None.
        factor: the factor of this rank's contribution when it is lifted, or None. Each rank may have another factor, so
            comparisons ignore it.
    """

    name: str
    combine: Combine
    lower: Lower
    kinds: frozenset[str]
    commutative: bool = True
    function: Callable[[Any, Any], Any] | None = None
    factor: complex | None = field(default=None, compare=False)

    @classmethod
    def premul_sum(cls, factor: complex) -> Op:
        """Return a sum in which each contribution is multiplied by its rank's `factor`.

        The product is computed in the accumulation dtype and rounded once. For integer dtypes the factor must be an
        integer in their range, and for real dtypes a real number. If `out` is `x`, only the result is written to it.

        Raises:
            UsageError: the factor is not a number. A call also raises it if the factor does not suit its dtype.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.allreduce(np.ones(2), un.Op.premul_sum(world.rank + 1)).tolist(), 2)
        [[3.0, 3.0], [3.0, 3.0]]
        """
        if not isinstance(factor, Number):
            raise UsageError(f"the factor of premul_sum must be a number, not {factor!r}")
        return replace(_PREMUL_SUM, factor=factor)

    @classmethod
    def from_function(cls, fn: Callable[[Any, Any], Any], commutative: bool = True) -> Op:
        """Return the reduction by ``fn(a, b)``, a Python function.

        The function gets two flat numpy arrays of the same length and dtype: the same part of the contributions of two
        ranks, or of combined contributions. `a` is from lower ranks than `b`. It returns an array of that length and
        dtype, or an object that numpy can convert to one, in which each element combines the two elements at its index.
        Examples are the universal functions of numpy with two arguments.

        The function must be associative, and return the same on all ranks. It must not write to its arguments, which
        are read-only, and must not keep them. It must make no calls on the communicator that calls it. It is never
        called for 0 elements or with 1 rank. A call that waits runs it in the calling thread, and any other call in
        another thread.

        Contributions are combined by a balanced tree in the order of ranks, and in a scan one after the other. So
        results are reproducible, and `fn` need not be commutative. If `fn` raises on a rank, the call there raises
        `AbortedError` from that exception. On the other ranks the calls in flight, or else the next call, raise
        `AbortedError` with the rank and the text. If the result of `fn` is not like its arguments, the call raises
        `UsageError`, and the other ranks `AbortedError`.

        Args:
            fn: the function. Its qualified name must be the same on all ranks.
            commutative: whether its arguments may change places; the same on all ranks. The results do not depend on
                it.

        Raises:
            UsageError: `fn` cannot be called, or `commutative` is neither True nor False.

        >>> import numpy as np, unisono as un
        >>> def first_nonzero(a, b):
        ...     return np.where(a != 0, a, b)
        >>> def combined(world):
        ...     x = np.array([[0, 2, 0], [1, 3, 0]][world.rank])
        ...     return world.allreduce(x, un.Op.from_function(first_nonzero, commutative=False)).tolist()
        >>> un.launch(combined, 2)
        [[1, 2, 0], [1, 2, 0]]
        >>> un.reduce_local(np.array([3.0]), np.array([4.0]), op=un.Op.from_function(np.hypot))
        array([5.])
        """
        if not callable(fn):
            raise UsageError(f"from_function needs a function of two arrays, not {fn!r}")
        if not isinstance(commutative, bool):
            raise UsageError(f"commutative must be True or False, not {commutative!r}")
        # The parentheses keep the name apart from the names in the table.
        name = f"{_name_of(fn)}()" if commutative else f"{_name_of(fn)}() in rank order"
        return cls(name, Combine.FUNCTION, Lower.IDENTITY, _LOGICAL, commutative, fn)

    def check(self, dtype: DType) -> None:
        """Raise `UsageError` if the operation is not defined for `dtype`."""
        if dtype.kind not in self.kinds:
            kinds = f"op {self.name!r} is not defined for {dtype.name}: it takes {', '.join(sorted(self.kinds))}"
            about = [(ops, advice) for kind, ops, advice in _ADVICE if dtype.kind in kind]
            advice = next((advice for ops, advice in about if ops is None or self.name in ops), None)
            raise UsageError(f"{kinds}; {advice}" if advice else kinds)


def _name_of(fn: Callable[..., Any]) -> str:
    if isinstance(fn, functools.partial):
        return _name_of(fn.func)
    name: str = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__qualname__
    return name


_REAL = frozenset({"integer", "float", "float8"})
_ARITHMETIC = _REAL | {"complex"}
_ORDERED = _REAL | {"bool"}
_BITS = frozenset({"integer", "bool"})
_LOGICAL = _ARITHMETIC | {"bool"}
_PAIRS = frozenset({"complex"})

_PREMUL_SUM = Op("premul_sum", Combine.SUM, Lower.IDENTITY, _ARITHMETIC)

OPERATIONS: dict[str, Op] = {
    "sum": Op("sum", Combine.SUM, Lower.IDENTITY, _ARITHMETIC),
    "prod": Op("prod", Combine.PROD, Lower.IDENTITY, _ARITHMETIC),
    "min": Op("min", Combine.MIN, Lower.IDENTITY, _ORDERED),
    "max": Op("max", Combine.MAX, Lower.IDENTITY, _ORDERED),
    "avg": Op("avg", Combine.SUM, Lower.DIVIDE_BY_SIZE, _ARITHMETIC),
    "band": Op("band", Combine.BAND, Lower.IDENTITY, _BITS),
    "bor": Op("bor", Combine.BOR, Lower.IDENTITY, _BITS),
    "bxor": Op("bxor", Combine.BXOR, Lower.IDENTITY, _BITS),
    "land": Op("land", Combine.LAND, Lower.TRUTH, _LOGICAL),
    "lor": Op("lor", Combine.LOR, Lower.TRUTH, _LOGICAL),
    "lxor": Op("lxor", Combine.LXOR, Lower.TRUTH, _LOGICAL),
    "minloc": Op("minloc", Combine.MINLOC, Lower.IDENTITY, _PAIRS),
    "maxloc": Op("maxloc", Combine.MAXLOC, Lower.IDENTITY, _PAIRS),
}

# Kinds of dtype, operations that are not defined for them (None: all), and the advice in the error.
_ADVICE: tuple[tuple[frozenset[str], frozenset[str] | None, str], ...] = (
    (
        frozenset({"date"}),
        frozenset({"min", "max"}),
        "dates are only moved: reduce the view x.view('int64'), in which NaT is the smallest number",
    ),
    (
        frozenset({"date"}),
        None,
        "dates are only moved: they have no sum and no average; subtract a date, and reduce the int64 view of that",
    ),
    (
        frozenset({"duration"}),
        frozenset({"avg"}),
        "durations are only moved, and an average of integers has no meaning: sum x.view('int64'), and divide the sum",
    ),
    (
        frozenset({"duration"}),
        None,
        "durations are only moved: reduce the view x.view('int64'), in which NaT is the smallest number",
    ),
    (frozenset({"text"}), None, "texts are only moved: gather them, and combine them there"),
    (
        frozenset({"structure"}),
        None,
        "structures are only moved, as bytes: reduce each field separately, or gather them, and combine them there",
    ),
    (
        frozenset({"bool"}),
        frozenset({"sum", "prod", "avg", "premul_sum"}),
        "count with astype('int64'), or use lor, land or lxor",
    ),
    (
        frozenset({"complex"}),
        frozenset({"min", "max"}),
        "complex numbers have no order: reduce their absolute values, or the real and the imaginary parts",
    ),
    (
        frozenset({"float", "float8", "complex"}),
        frozenset({"band", "bor", "bxor"}),
        "reduce a view of unsigned integers, or use land, lor or lxor",
    ),
    (
        _LOGICAL,
        frozenset({"minloc", "maxloc"}),
        "pass values + 1j * indices, or a view of pairs (value, index) of floats as complex numbers",
    ),
)


def operation(name: str | Op) -> Op:
    """Return the operation of this name. An `Op` is returned unchanged.

    Raises:
        UsageError: there is no such operation; the message lists all operations.
    """
    if isinstance(name, Op):
        return name
    op = OPERATIONS.get(name) if isinstance(name, str) else None
    if op is None:
        others = "Op.premul_sum(factor), or Op.from_function(fn)"
        raise UsageError(f"op must be one of {', '.join(OPERATIONS)}, {others}; got {name!r}{_suggestion(name)}")
    return op


# Names of the same operations in other libraries.
_SYNONYMS = {
    **dict.fromkeys(("add", "plus"), "sum"),
    **dict.fromkeys(("mul", "multiply", "product"), "prod"),
    **dict.fromkeys(("amin", "minimum"), "min"),
    **dict.fromkeys(("amax", "maximum"), "max"),
    **dict.fromkeys(("average", "mean"), "avg"),
    **dict.fromkeys(("and_", "bitwise_and"), "band"),
    **dict.fromkeys(("or_", "bitwise_or"), "bor"),
    **dict.fromkeys(("xor", "bitwise_xor"), "bxor"),
    **dict.fromkeys(("all", "logical_and"), "land"),
    **dict.fromkeys(("any", "logical_or"), "lor"),
    "logical_xor": "lxor",
    "argmin": "minloc",
    "argmax": "maxloc",
}


def _suggestion(op: object) -> str:
    """Return the end of an error about a wrong `op`: the operation that was probably meant, or nothing.

    >>> _suggestion("Mean"), _suggestion(max), _suggestion("median")
    ("; did you mean 'avg'?", "; did you mean 'max'?", '')
    """
    import difflib

    text = op if isinstance(op, str) else getattr(op, "__name__", None) or getattr(op, "name", "")
    words = {name: name for name in OPERATIONS} | _SYNONYMS
    near = difflib.get_close_matches(str(text).lower().removeprefix("mpi_"), words, n=1, cutoff=0.85)
    return f"; did you mean {words[near[0]]!r}?" if near else ""
