"""Metrics of a communicator, for Prometheus and OpenTelemetry: `pip install 'unisono[metrics]'`."""

from unisono.collectives.calls.metrics import METRICS, Metric, opentelemetry, prometheus, write_textfile

__all__ = ["METRICS", "Metric", "opentelemetry", "prometheus", "write_textfile"]
