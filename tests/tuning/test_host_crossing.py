"""The part of a cost that lies between hosts, against the messages of the plans."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from itertools import chain, repeat

import pytest
from hypothesis import given, settings, strategies as st

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.host_crossing import along
from unisono.algorithms.catalogue.registry import ALGORITHMS
from unisono.algorithms.ir.plan import Plan, Send
from unisono.algorithms.ir.walk import steps_as_run
from unisono.tuning.decide.model import split

CROSSING = [
    algorithm
    for by_name in ALGORITHMS.values()
    for algorithm in by_name.values()
    if algorithm.crossing is not along and not algorithm.mapped
]
LAYOUTS = st.lists(st.integers(1, 5), min_size=2, max_size=6).map(tuple)


def rounds_across_hosts(plans: Sequence[Plan], ranks_per_host: Sequence[int]) -> int:
    """Return in how many rounds a message goes from host to host. Groups of equal numbers are a round."""
    host_of = list(chain.from_iterable(repeat(host, ranks) for host, ranks in enumerate(ranks_per_host)))
    return len(
        {
            number
            for plan in plans
            for _, number, step in steps_as_run(plan)
            if isinstance(step, Send) and host_of[plan.rank] != host_of[step.peer]
        }
    )


def predicted_rounds(algorithm: Algorithm, ranks_per_host: tuple[int, ...], params: dict[str, int]) -> int:
    cost = algorithm.cost_of(sum(ranks_per_host), params)
    assert cost is not None
    inside, across = split(cost, algorithm.crossing_of(ranks_per_host, params))
    assert inside.rounds >= 0
    return across.rounds


@pytest.mark.parametrize("algorithm", CROSSING, ids=lambda each: f"{each.collective}-{each.name}")
@settings(max_examples=30, deadline=None, derandomize=True)
@given(ranks_per_host=LAYOUTS, radix=st.sampled_from((None, 2, 3, 5)))
def test_model_counts_the_rounds_in_which_messages_cross_hosts(
    algorithm: Algorithm, ranks_per_host: tuple[int, ...], radix: int | None
) -> None:
    size = sum(ranks_per_host)
    if algorithm.supports(size) is not None:
        return
    params = {"radix": radix} if radix is not None and "radix" in signature(algorithm.build).parameters else {}
    plans = [algorithm.build(size, rank, **params) for rank in range(size)]
    # In the first rounds of a broadcast in blocks, few ranks send; the model counts messages inside a host as crossing.
    most_above = (size - 1).bit_length() if algorithm.in_blocks else 0
    above = predicted_rounds(algorithm, ranks_per_host, params) - rounds_across_hosts(plans, ranks_per_host)
    assert 0 <= above <= most_above
