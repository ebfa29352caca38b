"""Metrics of every process: the standard process_* and the state of its bus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from pdserve.bus.bus import Bus
from pdserve.metrics.labels import BUS_LOSSES


class ProcessMetrics(Collector):
    """Reads the bus at the moment of the scrape."""

    def __init__(self, registry: CollectorRegistry, bus: Bus) -> None:
        self._bus = bus
        ProcessCollector(registry=registry)
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """The families of the bus, as the registry asks for them."""
        bus = self._bus
        yield GaugeMetricFamily("pd_bus_up", "Whether the bus answered when last asked.", value=float(bus.is_up))
        yield CounterMetricFamily(
            "pd_bus_reconnects", "Times that the connection to the bus came back.", value=bus.num_reconnects
        )
        lost = CounterMetricFamily(
            "pd_bus_dropped_messages", "Messages that this process never got onto the bus.", labels=["reason"]
        )
        for reason, count in zip(BUS_LOSSES, (bus.num_dropped_messages, bus.num_refused_messages), strict=True):
            lost.add_metric([reason], count)
        yield lost


def render(registry: CollectorRegistry) -> tuple[bytes, str]:
    """The body and the content type of /metrics."""
    return generate_latest(registry), CONTENT_TYPE_LATEST
