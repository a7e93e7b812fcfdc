"""The plugin's metrics by prometheus_client, which is imported at the first scrape."""

from collections.abc import Iterable
from typing import cast

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

__all__ = [
    "CounterMetricFamily",
    "GaugeMetricFamily",
    "HistogramMetricFamily",
    "Metric",
    "process_metrics",
    "render",
]


class _Collected:
    """What the library's writers take for a registry."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def process_metrics() -> Iterable[Metric]:
    """CPU, memory and open files of this process, under the names that every exporter uses."""
    return ProcessCollector(registry=None).collect()


def render(metrics: Iterable[Metric], *, newer: bool) -> tuple[bytes, str]:
    """The metrics as text, and its content type.

    OpenMetrics for those who ask for it, as Prometheus does; the older format for others.
    """
    collected = cast(Collector, _Collected(metrics))
    if newer:
        body: bytes = exposition.generate_latest(collected)  # type: ignore[no-untyped-call]  # has none
        return body, exposition.CONTENT_TYPE_LATEST
    return generate_latest(collected), CONTENT_TYPE_PLAIN_0_0_4
