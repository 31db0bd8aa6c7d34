"""Every collective method, on real ranks and over the generic executor, against numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import Phase, given, settings, strategies as st
from support.collective_calls import COLLECTIVES, cases, check_refusals, run_case
from support.ranks import LocalRanks, Ranks, ranks_fixture

from unisono.collectives.communicator import Communicator
from unisono.testing import Case

# A failure ends the ranks. So shrinking an example would start them again each time, and is turned off.
GENERATE = [Phase.explicit, Phase.generate]
JOBS = [(size, transport) for size in range(1, 6) for transport in ("shm", "tcp")]


ranks = ranks_fixture(*JOBS)


def run_cases(world: Communicator, several: Sequence[Case]) -> list[str]:
    return [run_case(world, case) for case in several]


@pytest.mark.contract  # with every combination, because each has only a few random cases
@pytest.mark.parametrize("collective", COLLECTIVES)
@settings(max_examples=4, deadline=None, derandomize=True, phases=GENERATE)
@given(data=st.data())
def test_every_collective_equals_numpy_on_real_ranks(ranks: Ranks, collective: str, data: Any) -> None:
    # One job makes several calls, because sending a task to the ranks takes most of the time of a single call.
    several = data.draw(st.lists(cases(collective), min_size=4, max_size=4))
    for case, outcomes in zip(several, zip(*ranks.run_calls(run_cases, several), strict=True), strict=True):
        check_refusals(case, list(outcomes), ranks.size, ranks.transport)


@pytest.mark.parametrize("collective", COLLECTIVES)
@settings(max_examples=10, deadline=None, derandomize=True, phases=GENERATE)
@given(size=st.integers(1, 4), data=st.data())
def test_every_collective_equals_numpy_on_the_generic_executor(collective: str, size: int, data: Any) -> None:
    case = data.draw(cases(collective))
    check_refusals(case, LocalRanks(size, 8).run_calls(run_case, case), size, "local")
