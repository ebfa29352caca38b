"""Prometheus metrics of each process, in a registry that is handed in: no globals, so tests and processes never mix.

Labels come from closed sets (`labels.py`) that exist from the start with value 0: a series never appears
late, and no request can add one. Gauges are set from real state, never counted up and down.

    buckets.py   histogram borders
    labels.py    the closed sets
    process.py   every process: process_*, the bus
    gateway.py   the gateway's
    worker.py    both roles' engines
    transfer.py  KV transfers, inside WorkerMetrics
"""

from pdserve.metrics.gateway import GatewayMetrics
from pdserve.metrics.process import ProcessMetrics, render
from pdserve.metrics.transfer import TransferMetrics
from pdserve.metrics.worker import WorkerMetrics

__all__ = ["GatewayMetrics", "ProcessMetrics", "TransferMetrics", "WorkerMetrics", "render"]
