"""Rewrites the tables of metrics.md: every metric of every process, out of what /metrics says. `make docs`

A test compares the two, and another one the tables with the /metrics of processes that run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from generated import rewrite, table, with_part
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from pdserve.bus.bus import Bus
from pdserve.metrics import GatewayMetrics, ProcessMetrics, WorkerMetrics, render
from pdserve.operator.telemetry import Telemetry

DOCUMENT = Path(__file__).with_name("metrics.md")
OPEN_LABELS = {"model": "the served name", "block_size": "tokens", "num_blocks": "blocks"}
"""Labels whose one value is a fact about the process; the values of all others are a closed set."""
_UNITS = {
    "_seconds": "s",
    "_bytes": "bytes",
    "_ratio": "ratio",
    "_tokens": "tokens",
    "_tokens_dropped": "tokens",
    "_requests": "requests",
    "_blocks": "blocks",
    "_fds": "files",
    "_info": "always 1",
    "_up": "0 or 1",
    "_draining": "0 or 1",
    "_leader": "0 or 1",
}
"""How a name ends, `_total` apart, and its unit; anything else counts what its help says."""
_HEAD = ("name", "type", "unit", "labels and their values", "what it says")

Row = tuple[str, str, str, str, str]


def expositions() -> dict[str, str]:
    """What /metrics of each process says at its start, by the heading of its table."""
    gateway, worker = CollectorRegistry(), CollectorRegistry()
    for registry in (gateway, worker):
        ProcessMetrics(registry, Bus("redis://127.0.0.1:6379", "none", timeout_s=1))
    GatewayMetrics(gateway, model="none")
    WorkerMetrics(worker).set_cache_config(block_size=1, num_blocks=1)
    return {
        "Gateway": render(gateway)[0].decode(),
        "Prefill and decode workers": render(worker)[0].decode(),
        "Operator": Telemetry().text().decode(),
    }


def rows(exposition: str) -> Iterator[Row]:
    """A line of the table for each metric in the text of /metrics; the times of creation are left out."""
    for family in text_string_to_metric_families(exposition):
        if family.name.endswith("_created"):
            continue
        values: dict[str, list[str]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label != "le" and value not in values.setdefault(label, []):
                    values[label].append(value)
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = "; ".join(f"`{label}`: {OPEN_LABELS.get(label) or ', '.join(set_)}" for label, set_ in values.items())
        yield f"`{name}`", family.type, _unit(family.name), labels, family.documentation


def _unit(name: str) -> str:
    return next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "number")


def tables() -> str:
    """Markdown: a heading and a table per process."""
    return "\n\n".join(f"## {process}\n\n{table(_HEAD, rows(text))}" for process, text in expositions().items())


def updated(document: str) -> str:
    """The document with its tables as they should be."""
    return with_part(document, "metrics", tables())


if __name__ == "__main__":
    rewrite(DOCUMENT, updated)
