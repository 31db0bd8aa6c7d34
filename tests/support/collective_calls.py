"""Hypothesis strategies for calls of every collective, and the refusals to expect. `unisono.testing` checks results."""

from __future__ import annotations

from hypothesis import strategies as st
from support.harness import message_algorithms

import unisono as un
from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.dtypes import DTYPES
from unisono.testing import Case, check_case
from unisono.testing.cases import BY_FUNCTION, COLLECTIVES as ALL, COUNTED, OFFSETS, PREFIXES, REDUCTIONS, RESTS
from unisono.testing.functions import FUNCTIONS
from unisono.tuning.decide.choice import Question, choose

COLLECTIVES = tuple(name for name in ALL if name != "barrier")
MOST_RANKS = 5


def cases(collective: str) -> st.SearchStrategy[Case]:
    """Return calls of one method of the communicator."""
    name = collective.removesuffix("v")
    reductions = [(dtype, op) for dtype, op in (*REDUCTIONS, *BY_FUNCTION) if name not in PREFIXES or op != "avg"]
    if CONTRACTS[name].reduces:
        return st.sampled_from(reductions).flatmap(lambda reduction: _cases(collective, *reduction))
    return st.sampled_from(list(DTYPES)).flatmap(lambda dtype: _cases(collective, dtype, "sum"))


def _cases(collective: str, dtype: str, op: str) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        collective=st.just(collective),
        dtype=st.just(dtype),
        op=st.just(op),
        root=st.integers(0, MOST_RANKS - 1),
        rows=st.sampled_from([0, 1, 2, 3, 5000]),
        counts=st.tuples(*[st.sampled_from([0, 0, 1, 2, 3, 4000])] * MOST_RANKS),
        rest=st.sampled_from(RESTS),
        way=st.sampled_from(["new", "out", "plan"] + ["in place"] * (collective != "alltoallv")),
        layout=st.sampled_from(["C", "C", "F", "strided"]),
        offset=st.sampled_from(OFFSETS),
        wait=st.booleans(),
        algorithm=st.none()
        if op in FUNCTIONS
        else st.sampled_from([None, *message_algorithms(collective.removesuffix("v"))]),
    )


def is_refused(case: Case, size: int, link: str) -> bool:
    """Return whether the tuner refuses the algorithm of `case` among `size` ranks over `link`."""
    everyone = (tuple(range(size)),)
    question = Question(
        *(case.name, 0, size, link),
        algorithm=case.algorithm or "auto",
        varying=case.collective in COUNTED,
        hosts=everyone,
        inside=link,
    )
    try:
        choose(question)
    except un.NoAlgorithmError:
        return True
    return False


def run_case(world: un.Communicator, case: Case) -> str:
    """Make a call and check its result on this rank; return the class of the error if the call was refused, else ""."""
    try:
        check_case(world, case)
    except (un.NoAlgorithmError, un.UsageError) as error:
        return type(error).__name__
    return ""


def check_refusals(case: Case, errors: list[str], size: int, link: str) -> None:
    """Assert that the results of `run_case`, by rank, are the expected refusals."""
    refusal = "NoAlgorithmError" if is_refused(case, size, link) else ""
    for rank, error in enumerate(errors):
        # No algorithm runs an alltoall in place.
        wrong = case.collective == "alltoall" and case.way == "in place" and 0 not in case.shape(size, rank)
        assert error == (refusal or ("UsageError" if wrong else "")), f"rank {rank}, {case}"
