"""Choices at numbers of ranks without measurements, on simulated clusters with known times."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from unisono.algorithms.catalogue.algorithm import Cost
from unisono.algorithms.catalogue.registry import ALGORITHMS
from unisono.bench.studies.selection import main, read
from unisono.errors import UsageError
from unisono.tuning.decide.model import predicted_s
from unisono.tuning.decide.rank_interpolation import (
    Interpolation,
    MeasuredPoint,
    Round,
    Steps,
    combined,
    regret,
    survivors,
)
from unisono.tuning.machine.parameters import Link

CLUSTERS = (Link("fast", 2e-6, 3e-7, 1e-10), Link("slow", 2e-5, 1e-6, 1e-9))
NAMES = ("ring", "recursive_doubling", "rabenseifner")
SIZES = (4, 8, 16, 32, 64)
BYTES = tuple(8 << (4 * power) for power in range(6))


def cost_of(collective: str, name: str, size: int) -> Cost | None:
    return ALGORITHMS[collective][name].cost_of(size, {}) if name in NAMES else None


def measured(size: int, nbytes: int, link: Link, noise: float, seed: int) -> Round:
    """Return a round of measurements.

    Jobs differ in speed at random, and the algorithms of a job differ only by `noise`.
    """
    chance = np.random.default_rng([seed, size, nbytes])
    job = math.exp(chance.normal(0, 0.3))
    point = MeasuredPoint("allreduce", nbytes, size)
    times = {}
    for name in NAMES:
        cost = cost_of("allreduce", name, size)
        assert cost is not None
        times[name] = job * predicted_s(cost, nbytes, link) * math.exp(chance.normal(0, noise))
    return Round(point, times)


@pytest.mark.parametrize("held", SIZES[1:-1])
@pytest.mark.parametrize("link", CLUSTERS, ids=lambda link: link.name)
def test_interpolation_is_near_the_best_at_unmeasured_rank_counts(link: Link, held: int) -> None:
    others = [measured(size, nbytes, link, 0.03, 1) for size in SIZES if size != held for nbytes in BYTES]
    interpolation, steps = Interpolation(others), Steps(others, cost_of)
    regrets = []
    for nbytes in BYTES:
        point, seconds = measured(held, nbytes, link, 0.0, 2)
        both = combined([interpolation.predict(point, NAMES), steps.predict(point, NAMES)])
        regrets.append(math.log(regret(min(both, key=both.__getitem__), seconds)))
        assert min(seconds, key=seconds.__getitem__) in survivors(both, NAMES, 2.0)
    assert math.exp(sum(regrets) / len(regrets)) < 1.06


def test_interpolation_ignores_the_absolute_speed_of_a_job() -> None:
    rounds = [
        Round(MeasuredPoint("allreduce", 64, 8), {"a": 1.0, "b": 2.0}),
        Round(MeasuredPoint("allreduce", 64, 32), {"a": 30.0, "b": 20.0}),
    ]
    slower = [rounds[0], Round(rounds[1].point, {name: 1000 * seconds for name, seconds in rounds[1].seconds.items()})]
    for size, best in ((8, "a"), (32, "b")):
        predicted = Interpolation(slower).predict(MeasuredPoint("allreduce", 64, size), ("a", "b"))
        assert min(predicted, key=predicted.__getitem__) == best


def test_unmeasured_algorithm_has_no_prediction_and_survives() -> None:
    rounds = [Round(MeasuredPoint("allreduce", 64, 8), {"a": 1.0, "b": 4.0, "c": 2.0})]
    predicted = Interpolation(rounds).predict(MeasuredPoint("allreduce", 64, 16), ("a", "b", "new"))
    assert set(predicted) == {"a", "b"}
    assert survivors(predicted, ("a", "b", "new"), 1.5) == ["a", "new"]
    assert Interpolation(rounds).predict(MeasuredPoint("reduce", 64, 16), ("a", "b")) == {}
    assert Steps(rounds, cost_of).predict(MeasuredPoint("allreduce", 64, 16), ("a",)) == {}


def test_link_step_is_inferred_from_times_of_collectives() -> None:
    link = Link("x", 5e-6, 0.0, 1e-9, reduce_per_byte_s=0.0)
    steps = Steps([measured(size, nbytes, link, 0.0, 3) for size in SIZES for nbytes in BYTES], cost_of)
    for nbytes in (64, 4096, 1 << 18):
        assert steps.steps["allreduce"].at(nbytes) == pytest.approx(link.step_s(nbytes), rel=0.35)


def test_predictions_are_combined_relative_to_their_best() -> None:
    steps = combined([{"a": 10.0, "b": 40.0}, {"b": 1.0, "c": 2.0}])
    assert steps == {"a": 1.0, "b": pytest.approx(2.0), "c": pytest.approx(2.0)}


# The benchmark.

HEADER = "system,timestamp,test,coll,nodes,tasks_per_node,p,lib,algo,count_int32,median_us\n"


def data(path: Path) -> Path:
    """Write measurements in the format of the benchmark. The library's own choice is always the ring."""
    link = Link("x", 5e-6, 1e-6, 1e-10)
    lines = [HEADER]
    for size in SIZES:
        for nbytes in BYTES:
            times = measured(size, nbytes, link, 0.02, 5).seconds
            for name, seconds in (*((f"{name}_ompi", times[name]) for name in NAMES), ("default_ompi", times["ring"])):
                lines.append(f"here,now,0,ALLREDUCE,{size},1,{size},lib,{name},{nbytes // 4},{seconds * 1e6}\n")
    path.write_text("".join(lines))
    return path


def test_interpolation_bench_scores_and_writes_every_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "points.jsonl"
    assert main(["--data", str(data(tmp_path / "data.csv")), "--out", str(out), "--json"]) == 0
    scores = {row["name"]: row for row in json.loads(capsys.readouterr().out)["all algorithms"]}
    assert scores["the library's own choice"]["geomean"] > 1.5
    assert scores["both"]["geomean"] < 1.06
    assert scores["both, then measuring"]["geomean"] < 1.02
    assert 0 < scores["both, then measuring"]["time_share"] < 1
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(kept) == 2 * len(SIZES) * len(BYTES)
    assert all(row["regret_both"] >= 1 for row in kept)


def test_interpolation_bench_refuses_invalid_data_with_the_line(tmp_path: Path) -> None:
    file = tmp_path / "data.csv"
    with pytest.raises(UsageError, match=r"data\.csv cannot be read: No such file"):
        read(file)
    file.write_text("coll,p\n")
    with pytest.raises(UsageError, match="no column 'tasks_per_node'"):
        read(file)
    file.write_text(f"{HEADER}here,now,0,ALLREDUCE,4,1,four,lib,ring_ompi,2,1.0\n")
    with pytest.raises(UsageError, match=r"data\.csv, line 2: expected whole numbers and a time"):
        read(file)
    with pytest.raises(SystemExit) as end:
        main(["--data", str(file)])
    assert end.value.code == 2
