"""Metrics of a communicator, for Prometheus and OpenTelemetry: the extra `metrics` installs what they need."""

from unisono.collectives.calls.metrics import METRICS, Metric, opentelemetry, prometheus, write_textfile

__all__ = ["METRICS", "Metric", "opentelemetry", "prometheus", "write_textfile"]
