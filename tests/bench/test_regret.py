"""The regret of choices: by hand on few numbers, and with times recorded on a real machine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import geometric_mean, median

import pytest
from click.testing import CliRunner

from unisono.bench.studies.judgement import HINDSIGHT, SizeTimes, crossovers, of_model, rises, summary
from unisono.bench.studies.regret import StudySettings
from unisono.bench.studies.replay import RECORDED, main, predictions, read, regrets

CHOICES = {"table": "good", "model": "bad", "thresholds": "good", "rings": "bad"}


def point(nbytes: int, one_s: float, other_s: float, predicted: tuple[float, float] = (1.0, 1.0)) -> SizeTimes:
    times = {"good": [one_s] * 4, "bad": [other_s] * 4}
    return SizeTimes("shm", "allreduce", nbytes, times, CHOICES, dict(zip(times, predicted, strict=True)))


def test_regret_is_chosen_time_divided_by_best_time() -> None:
    place = point(8, 2.0, 3.0)
    assert [place.regret(selector) for selector in ("table", "model", HINDSIGHT)] == pytest.approx([1.0, 1.5, 1.0])


def test_regret_is_scored_on_other_rounds_than_hindsight_chooses_by() -> None:
    place = SizeTimes("shm", "allreduce", 8, {"good": [2.0] * 4, "bad": [1.0, 4.0, 1.0, 4.0]}, CHOICES, {})
    assert place.regret("table") == pytest.approx(math.sqrt(2.0 / 4.0))  # 2 over 4, and 2 over 2
    assert place.regret(HINDSIGHT) == pytest.approx(math.sqrt(2.0 / 4.0 * 1.0 / 2.0))


def test_prediction_errors_ignore_disturbed_rounds() -> None:
    times = {"good": [2.0, 90.0, 2.0, 1.0], "bad": [3.0] * 4}
    place = SizeTimes("shm", "allreduce", 8, times, CHOICES, {"good": 2.2})
    assert place.errors() == pytest.approx([0.1])


def test_rises_are_those_computed_by_hand() -> None:
    assert rises([(1, 0.5), (4, 0.25), (16, 1.0 / 4), (64, 4.0)]) == pytest.approx([32.0])
    assert rises([(1, 0.5), (16, 8.0)], 2.0) == pytest.approx([4.0])
    assert rises([(1, 0.5), (4, 0.9)]) == rises([(1, 2.0), (4, 0.5)]) == []


def test_crossover_error_is_infinite_when_no_crossover_is_predicted() -> None:
    measured = [(1, 1.0, 2.0), (16, 2.0, 1.0), (256, 4.0, 1.0)]
    near = [
        point(*row, predicted) for row, predicted in zip(measured, [(1.0, 4.0), (1.0, 1.1), (4.0, 1.0)], strict=True)
    ]
    none = [point(*row, (1.0, 2.0)) for row in measured]
    assert crossovers(near) == pytest.approx([4.6], rel=0.2)
    assert crossovers(none) == [math.inf]
    assert "of 1 crossovers 0% predicted within 2×" in of_model(near)
    assert of_model([point(8, 1.0, 1.0)]).endswith("no crossovers")


def test_crossover_may_be_predicted_anywhere_where_neither_is_faster() -> None:
    measured = [(1, 1.0, 2.0), (4, 1.0, 1.01), (64, 1.01, 1.0), (256, 2.0, 1.0)]
    for place, off in ((8, 1.0), (40, 1.0), (1024, 1024 / 64)):
        points = [point(*row, (row[0] / place, 1.0)) for row in [*measured, (4096, 2.0, 1.0)]]
        assert crossovers(points) == pytest.approx([off], rel=0.1), place


def test_crossover_predicted_in_the_opposite_direction_does_not_count() -> None:
    points = [point(1, 1.0, 2.0, (2.0, 1.0)), point(16, 2.0, 1.0, (1.0, 2.0))]
    assert crossovers(points) == [math.inf]


def test_noise_between_two_variants_is_no_crossover() -> None:
    times = {"good": [1.0, 2.0, 1.0, 2.0], "bad": [2.0, 1.0, 2.0, 1.0]}
    noise = [SizeTimes("shm", "allreduce", nbytes, times, CHOICES, {"good": 1.0, "bad": 2.0}) for nbytes in (8, 64)]
    assert crossovers(noise) == []


def test_regret_summary_covers_all_points() -> None:
    rows = summary([point(8, 1.0, 2.0), point(64, 1.0, 8.0)])
    assert rows["model"]["geomean"] == pytest.approx(4.0)
    assert rows["model"]["max"] == pytest.approx(8.0)
    assert rows["table"] == {"geomean": 1.0, "p90": 1.0, "max": 1.0, "within 5 %": 1.0}


def test_points_are_whole_elements_for_every_rank() -> None:
    asked = StudySettings(3, 1.0, "8:64", (1, 25, 100), 4, ("allgather",), "1gbit", 1, "any")
    assert asked.points() == [("allgather", 12), ("allgather", 24), ("allgather", 96)]


def test_table_tuned_in_a_quarter_of_a_sweep_is_near_the_best() -> None:
    (recorded,) = read(RECORDED)
    recorded.calibrate()
    ratios = [regret for seed in (1, 2) for regret in regrets(recorded, 0.25 * recorded.sweep_s(), seed)]
    assert geometric_mean(ratios) <= 1.04
    assert sorted(ratios)[round(0.9 * len(ratios))] <= 1.15


def test_model_is_near_the_recorded_times() -> None:
    (recorded,) = read(RECORDED)
    recorded.calibrate()
    calibrated = sorted({nbytes for rows in recorded.times_s.values() for nbytes in rows})[::2]
    predicted = [prediction for prediction in predictions(recorded) if prediction.nbytes not in calibrated]
    assert median(error for row in predicted for error in row.errors()) <= 0.12


def test_model_predicts_most_recorded_crossovers() -> None:
    (recorded,) = read(RECORDED)
    recorded.calibrate()
    factors = crossovers(predictions(recorded))
    assert len(factors) >= 60
    assert sum(factor <= 2 for factor in factors) >= 0.65 * len(factors)
    assert sum(factor <= 4 for factor in factors) >= 0.85 * len(factors)


def test_regret_command_reports_a_replay_of_recorded_times(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps(row) + "\n" for row in rows if row["nbytes"] < 100_000))
    result = CliRunner().invoke(main, ["--recorded", str(few), "--seeds", "1"])
    assert result.exit_code == 0, result.output
    assert "4 ranks, shm: regret of tables" in result.output
    assert "median error of the model" in result.output
