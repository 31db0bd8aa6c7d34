"""Hypothesis strategies for the calls of executors. Each executor's tests choose the numbers of elements."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from support.executor_contract import Case

from unisono.dtypes import DTYPES
from unisono.testing.cases import REDUCTIONS

_PLACES = {"segments": st.integers(1, 5), "in_place": st.booleans(), "offset": st.integers(0, 3)}


def allreduce_cases(algorithms: Sequence[str], counts: st.SearchStrategy[int]) -> st.SearchStrategy[Case]:
    """Return allreduces by any of the algorithms, of any dtype and operation."""

    def cases_of(reduction: tuple[str, str]) -> st.SearchStrategy[Case]:
        dtype, op = (st.just(name) for name in reduction)
        return st.builds(Case, algorithm=st.sampled_from(algorithms), dtype=dtype, op=op, count=counts, **_PLACES)

    return st.sampled_from(REDUCTIONS).flatmap(cases_of)


def broadcast_cases(counts: st.SearchStrategy[int]) -> st.SearchStrategy[Case]:
    """Return broadcasts of any dtype, whose root is still to be set."""
    return st.builds(
        Case,
        collective=st.just("broadcast"),
        algorithm=st.just("binomial"),
        dtype=st.sampled_from(list(DTYPES)),
        op=st.none(),
        count=counts,
        **_PLACES,
    )
