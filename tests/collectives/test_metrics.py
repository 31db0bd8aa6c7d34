"""The metrics of communicators, read by the libraries of Prometheus and OpenTelemetry."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unisono as un
from unisono import metrics
from unisono.collectives.bootstrap import init

pytest.importorskip("prometheus_client")
pytest.importorskip("opentelemetry.sdk")

X = np.ones(1000, np.float32)
Samples = dict[tuple[str, ...], float]


def by_prometheus(world: un.Communicator) -> dict[str, Samples]:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    metrics.prometheus(world, registry)
    world.allreduce(X, algorithm="ring")
    world.allreduce(X, algorithm="ring")
    return {
        family.name: {tuple(sample.labels.values()): sample.value for sample in family.samples}
        for family in registry.collect()
    }


def by_opentelemetry(world: un.Communicator) -> dict[str, Samples]:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    metrics.opentelemetry(world, MeterProvider([reader]).get_meter("test"))
    world.allreduce(X, algorithm="ring")
    world.allreduce(X, algorithm="ring")
    data: Any = reader.get_metrics_data()
    return {
        metric.name: {tuple(point.attributes.values()): point.value for point in metric.data.data_points}
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
    }


@pytest.mark.parametrize("exported", [by_prometheus, by_opentelemetry])
def test_both_exporters_have_the_same_names_labels_and_values(exported: Any) -> None:
    first, second = un.launch(exported, 2)
    assert set(first) == set(second) == {metric.name for metric in metrics.METRICS}
    assert first["unisono_calls"] == {("0", "allreduce", "ring"): 2}
    assert first["unisono_call_bytes"] == {("0", "allreduce", "ring"): 8000}
    assert first["unisono_sent_bytes"] == {("0", "1", "shm"): 8000}
    assert second["unisono_received_bytes"] == {("1", "0", "shm"): 8000}
    assert all(value >= 0 for samples in first.values() for value in samples.values())


def write(world: un.Communicator, folder: str) -> str:
    world.barrier()
    return metrics.write_textfile(world, folder, interval_s=1000).read_text()


def test_a_text_file_has_the_counters_of_its_rank(tmp_path: Path) -> None:
    texts = un.launch(write, 2, str(tmp_path / "made"))
    for rank, text in enumerate(texts):
        assert f'unisono_calls_total{{algorithm="dissemination",collective="barrier",rank="{rank}"}} 1.0' in text
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == [
        "unisono-rank-0.prom",
        "unisono-rank-1.prom",
    ]


def test_a_file_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with un.init(un.Options()) as world, pytest.raises(un.UsageError, match="cannot be written"):
        metrics.write_textfile(world, tmp_path / "file")


def test_the_option_writes_the_text_file_or_says_why_not(tmp_path: Path) -> None:
    jobs_of_other_tests = set(init._jobs)
    with un.init(un.Options(metrics=str(tmp_path / "made"))):
        assert (tmp_path / "made" / "unisono-rank-0.prom").exists()
    (tmp_path / "file").touch()
    with pytest.raises(un.UsageError, match="metrics cannot be written"):
        un.init(un.Options(metrics=str(tmp_path / "file")))
    assert init._jobs == jobs_of_other_tests


def test_a_communicator_that_is_garbage_has_no_metrics() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    world = un.init(un.Options())
    metrics.prometheus(world, registry)
    world.barrier()
    assert b"unisono_calls_total{" in generate_latest(registry)
    world.close()
    del world
    gc.collect()
    assert b"unisono_calls_total{" not in generate_latest(registry)


@pytest.mark.parametrize(
    ("export", "library"),
    [(metrics.prometheus, "prometheus_client"), (metrics.opentelemetry, "opentelemetry.metrics")],
)
def test_a_missing_library_is_named(export: Any, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with un.init(un.Options()) as world, pytest.raises(un.UsageError, match=r"\[metrics\]"):
        export(world)
