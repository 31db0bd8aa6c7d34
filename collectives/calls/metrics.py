"""Metrics of a communicator, for Prometheus and OpenTelemetry: the extra `metrics` installs both.

Nothing is exported unless the program, or the option `metrics`, asks for it. Both exporters read `Communicator.stats`
whenever they are asked, so calls do not become slower. The names, labels and units are those of `METRICS` in both; by
their conventions, Prometheus adds the suffix ``_total``.

>>> import unisono as un
>>> from prometheus_client import CollectorRegistry, generate_latest
>>> from unisono import metrics
>>> registry = CollectorRegistry()
>>> with un.init(un.Options()) as world:
...     metrics.prometheus(world, registry)
...     world.barrier()
...     "unisono_calls_total{" in generate_latest(registry).decode()
True
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.errors import UsageError
from unisono.foundation import log
from unisono.foundation.installing import install_command

if TYPE_CHECKING:
    from unisono.collectives.calls.statistics import Statistics
    from unisono.collectives.communicator import Communicator

_log = log.get("calls")

Labels = tuple[str, ...]
# How often `write_textfile` writes.
_INTERVAL_S = 15.0


class Metric(NamedTuple):
    """A counter.

    Attributes:
        name: its name.
        unit: its unit in OpenTelemetry; "1" for a number.
        help: what it counts.
        labels: the names of its labels, besides ``rank``.
        values: returns its values by labels.
    """

    name: str
    unit: str
    help: str
    labels: Labels
    values: Callable[[Statistics], Iterable[tuple[Labels, float]]]


def _of_calls(attribute: str) -> Callable[[Statistics], Iterable[tuple[Labels, float]]]:
    def values(stats: Statistics) -> Iterator[tuple[Labels, float]]:
        sums: dict[Labels, float] = {}
        for row in stats.calls:
            labels = row.collective, row.algorithm
            sums[labels] = sums.get(labels, 0) + getattr(row, attribute)
        yield from sums.items()

    return values


def _of_traffic(attribute: str) -> Callable[[Statistics], Iterable[tuple[Labels, float]]]:
    def values(stats: Statistics) -> Iterator[tuple[Labels, float]]:
        for peer, traffic in stats.items():
            yield (str(peer), traffic.transport), getattr(traffic, attribute)

    return values


_CALL: Labels = ("collective", "algorithm")
_PEER: Labels = ("peer", "transport")
METRICS = (
    Metric("unisono_calls", "1", "Collective calls.", _CALL, _of_calls("calls")),
    Metric("unisono_call_bytes", "By", "Bytes of the vectors of collective calls.", _CALL, _of_calls("nbytes")),
    Metric("unisono_call_seconds", "s", "Time of collective calls, from start to end.", _CALL, _of_calls("seconds")),
    Metric("unisono_sent_messages", "1", "Messages sent to a rank.", _PEER, _of_traffic("sent_messages")),
    Metric("unisono_sent_bytes", "By", "Bytes sent to a rank.", _PEER, _of_traffic("sent_nbytes")),
    Metric("unisono_received_messages", "1", "Messages received from a rank.", _PEER, _of_traffic("received_messages")),
    Metric("unisono_received_bytes", "By", "Bytes received from a rank.", _PEER, _of_traffic("received_nbytes")),
    Metric("unisono_wait_seconds", "s", "Time in which calls waited for a rank.", _PEER, _of_traffic("waited_s")),
)


def prometheus(world: Communicator, registry: Any = None) -> None:
    """Add the metrics of a communicator to a registry of `prometheus_client`, by default to its global one.

    Each scrape reads the counters then. A communicator that is garbage has no metrics. Any thread may call this.

    Raises:
        UsageError: `prometheus_client` is not installed.
    """
    client = _library("prometheus_client")
    (registry or client.REGISTRY).register(_Collector(world, client))


def write_textfile(world: Communicator, directory: str | os.PathLike[str], interval_s: float = _INTERVAL_S) -> Path:
    """Write the metrics of a communicator to ``unisono-rank-N.prom`` in a directory, now and every `interval_s` s.

    The textfile collector of Prometheus' node exporter reads such files. A file is replaced as a whole. A thread writes
    it until the communicator is closed or garbage, or the program ends. The directory is made if it is missing.

    Raises:
        UsageError: `prometheus_client` is not installed, or the file cannot be written.
    """
    client = _library("prometheus_client")
    registry = client.CollectorRegistry()
    prometheus(world, registry)
    path = Path(directory) / f"unisono-rank-{world.launch_ranks[world.rank]}.prom"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        client.write_to_textfile(str(path), registry)
    except OSError as error:
        raise UsageError(f"metrics cannot be written to {str(path)!r}: {error.strerror}") from None
    alive = weakref.ref(world)

    def write_again() -> None:
        pause = threading.Event()
        while not pause.wait(interval_s) and _is_open(alive()):
            try:
                client.write_to_textfile(str(path), registry)
            except OSError as error:
                _log.warning("metrics cannot be written to %s: %s", path, error.strerror)

    threading.Thread(target=write_again, name="unisono-metrics", daemon=True).start()
    return path


def opentelemetry(world: Communicator, meter: Any = None) -> None:
    """Add the metrics of a communicator to a meter of OpenTelemetry, by default to one of the global meter provider.

    Each collection reads the counters then. Any thread may call this.

    Raises:
        UsageError: `opentelemetry` is not installed.
    """
    library = _library("opentelemetry.metrics")
    meter = meter or library.get_meter("unisono")
    alive = weakref.ref(world)

    def observe(metric: Metric) -> list[Any]:
        return [library.Observation(value, labels) for labels, value in _values(metric, alive())]

    for metric in METRICS:
        callback = partial(lambda metric, _options: observe(metric), metric)
        meter.create_observable_counter(metric.name, [callback], metric.unit, metric.help)


class _Collector:
    """A custom collector of `prometheus_client`."""

    def __init__(self, world: Communicator, client: Any) -> None:
        self._world = weakref.ref(world)
        self._family = client.metrics_core.CounterMetricFamily

    def collect(self) -> Iterator[Any]:
        """Yield each metric with its values now."""
        for metric in METRICS:
            family = self._family(metric.name, metric.help, labels=("rank", *metric.labels))
            for labels, value in _values(metric, self._world()):
                family.add_metric(tuple(labels.values()), value)
            yield family

    def describe(self) -> list[Any]:
        """Return nothing, so that the registry does not call `collect` when the collector is added."""
        return []


def _values(metric: Metric, world: Communicator | None) -> Iterator[tuple[dict[str, str], float]]:
    """Yield the values of a metric by labels; none if the communicator is garbage. Ranks have their launch ranks."""
    if world is not None:
        rank, names = world.launch_ranks[world.rank], world.launch_ranks
        for labels, value in metric.values(world.stats()):
            by_name = dict(zip(metric.labels, labels, strict=True))
            if "peer" in by_name:
                by_name["peer"] = str(names[int(by_name["peer"])])
            yield {"rank": str(rank), **by_name}, value


def _is_open(world: Communicator | None) -> bool:
    return world is not None and not world.is_closed


def _library(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0].replace("_", "-")
        raise UsageError(f"metrics need the package {package}: {install_command('metrics')}") from None
