"""prometheus_client without what it brings along.

Its package imports, for its own HTTP server and push client, ssl, http.server, wsgiref and urllib:
2.2 MiB and 10 ms, of which the plugin needs nothing. So its modules are imported under a package
whose `__init__` has not run: 0.2 MiB and 3 ms. Whoever imports prometheus_client later gets all of
it, these modules included. Imported at the first scrape.
"""

import importlib.util
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.openmetrics import exposition
    from prometheus_client.process_collector import ProcessCollector
    from prometheus_client.registry import Collector
else:
    hidden = "prometheus_client" not in sys.modules
    if hidden:
        sys.modules["prometheus_client"] = importlib.util.module_from_spec(
            importlib.util.find_spec("prometheus_client")
        )
    try:
        from prometheus_client.metrics_core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
            Metric,
        )
        from prometheus_client.openmetrics import exposition
        from prometheus_client.process_collector import ProcessCollector
    finally:
        if hidden:
            del sys.modules["prometheus_client"]

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


def render(metrics: Iterable[Metric], accept: str) -> tuple[bytes, str]:
    """The metrics as text, and its content type.

    OpenMetrics for those who ask for it, as Prometheus does; the older format for others.
    """
    collected = cast("Collector", _Collected(metrics))
    if "application/openmetrics-text" in accept:
        body: bytes = exposition.generate_latest(collected)  # type: ignore[no-untyped-call]  # has none
        return body, exposition.CONTENT_TYPE_LATEST
    # The whole library, only where something scrapes that does not know OpenMetrics: 2 MiB.
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

    return generate_latest(collected), CONTENT_TYPE_PLAIN_0_0_4
