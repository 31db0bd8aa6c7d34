from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from unisono.errors import UsageError
from unisono.tuning.simulator.training import TrainingForecast, simulate_training

ONE = TrainingForecast(compute_s=1.0, buckets_s=(0.1, 0.1), backward=0.5)


def step_s(training: TrainingForecast, size: int = 8, steps: int = 100) -> float:
    return simulate_training(training, size, steps).step_s


def test_training_step_without_overlap_adds_all_reductions() -> None:
    assert step_s(ONE._replace(overlap=False)) == pytest.approx(1.2)


def test_training_step_with_overlap_adds_only_the_remaining_reductions() -> None:
    assert step_s(ONE) == pytest.approx(1.1)
    # The first bucket is ready at 0.75 and reduced at 1.15. So the second bucket waits for it.
    assert step_s(ONE._replace(buckets_s=(0.4, 0.1))) == pytest.approx(1.25)


def test_lag_hides_reductions_that_are_shorter_than_computing() -> None:
    assert step_s(ONE._replace(lag=1), steps=1000) == pytest.approx(1.0, rel=1e-3)
    assert step_s(ONE._replace(lag=1, buckets_s=(1.5,)), steps=1000) == pytest.approx(1.5, rel=2e-3)
    assert step_s(ONE._replace(lag=0, buckets_s=(1.5,))) == pytest.approx(2.5)


def test_lag_does_not_hide_a_rank_that_is_always_slow() -> None:
    for lag in (0, 1, 3):
        assert step_s(ONE._replace(slow=(0.125, 1.5), lag=lag, buckets_s=()), steps=400) <= 1.5 + 1e-9
        assert step_s(ONE._replace(slow=(0.125, 1.5), lag=lag), steps=400) == pytest.approx(1.5, abs=0.11)


def test_simulated_training_groups_do_not_wait_for_each_other() -> None:
    slow = ONE._replace(slow=(0.125, 2.0), overlap=False)
    assert step_s(slow) == pytest.approx(2.2)
    assert step_s(slow._replace(groups=4)) == pytest.approx((2.2 + 3 * 1.2) / 4)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(spread=st.floats(0, 0.3), size=st.integers(1, 64), lag=st.integers(0, 3), bucket_s=st.floats(0, 2))
def test_more_lag_and_overlap_never_cost_time(spread: float, size: int, lag: int, bucket_s: float) -> None:
    training = TrainingForecast(1.0, (bucket_s, bucket_s), spread=spread, lag=lag)
    result = step_s(training, size, 20)
    assert step_s(training._replace(lag=lag + 1), size, 20) <= result * (1 + 1e-12)
    assert result <= step_s(training._replace(overlap=False), size, 20) * (1 + 1e-12)
    assert simulate_training(training, size, 20) == simulate_training(training, size, 20)


@pytest.mark.parametrize(
    ("training", "size", "steps"),
    [
        (ONE._replace(compute_s=-1.0), 8, 1),
        (ONE._replace(buckets_s=(-0.1,)), 8, 1),
        (ONE._replace(groups=3), 8, 1),
        (ONE, 8, 0),
        (ONE, 0, 1),
    ],
)
def test_simulate_training_refuses_wrong_arguments(training: TrainingForecast, size: int, steps: int) -> None:
    with pytest.raises(UsageError, match="cannot simulate"):
        simulate_training(training, size, steps)
