"""Objects for Prometheus and Grafana, for clusters that know their kinds. Pure."""

from __future__ import annotations

import json
from typing import Any

from pdserve.operator.api.spec import ServiceSpec
from pdserve.operator.names import child, labels

Json = dict[str, Any]

_MONITORING = "monitoring.coreos.com/v1"


def pod_monitor(service: str) -> Json:
    """Every pod of the service is scraped at its port named `metrics`."""
    wanted = {name: value for name, value in labels(service).items() if not name.endswith("managed-by")}
    return {
        "apiVersion": _MONITORING,
        "kind": "PodMonitor",
        "metadata": {"name": service, "labels": labels(service)},
        "spec": {
            "selector": {"matchLabels": wanted},
            "podTargetLabels": ["pdserve.dev/role", "app.kubernetes.io/instance"],
            "podMetricsEndpoints": [{"port": "metrics", "path": "/metrics", "interval": "15s"}],
        },
    }


def prometheus_rule(spec: ServiceSpec, namespace: str) -> Json:
    """Alerts on what clients notice, and nothing else."""
    pods = f'namespace="{namespace}",pod=~"{spec.name}-gateway-.*"'
    ttft = f"sum(rate(pd_time_to_first_token_seconds_bucket{{{pods}}}[5m])) by (le)"
    rules = [
        _alert(
            "PDServiceFirstTokenSlow",
            f"histogram_quantile({spec.percentile / 100:g}, {ttft}) > {spec.ttft_s:g}",
            f"{spec.name}: time to first token is above its target of {spec.ttft_s:g} s.",
        ),
        _alert(
            "PDServiceSheds",
            f"sum(rate(pd_shed_total{{{pods}}}[5m])) > 0",
            f"{spec.name} turns requests away: it needs more workers, or a higher max.",
        ),
    ]
    return {
        "apiVersion": _MONITORING,
        "kind": "PrometheusRule",
        "metadata": {"name": spec.name, "labels": labels(spec.name)},
        "spec": {"groups": [{"name": f"pdserve-{spec.name}", "rules": rules}]},
    }


def _alert(name: str, expression: str, summary: str) -> Json:
    return {
        "alert": name,
        "expr": expression,
        "for": "5m",
        "labels": {"severity": "warning"},
        "annotations": {"summary": summary},
    }


def dashboard(service: str, namespace: str) -> Json:
    """A ConfigMap that Grafana's sidecar picks up by its label."""
    gateway = f'namespace="{namespace}",pod=~"{service}-gateway-.*"'
    workers = f'namespace="{namespace}",pod=~"{service}-(prefill|decode)-.*"'
    panels = [
        _quantiles("Time to first token", "pd_time_to_first_token_seconds", gateway),
        _quantiles("Time per output token", "pd_time_per_output_token_seconds", gateway),
        _panel("Requests per second", {"requests": f"sum(rate(pd_requests_total{{{gateway}}}[1m]))"}, "reqps"),
        _panel("Queued requests", {"queued": f"sum(pd_queue_requests{{{gateway}}})"}, "short"),
        _panel("KV cache used", {"{{pod}}": f"pd_kv_cache_usage_ratio{{{workers}}}"}, "percentunit"),
        _panel("Sequences running", {"{{pod}}": f"pd_num_requests_running{{{workers}}}"}, "short"),
    ]
    for index, panel in enumerate(panels):
        panel["gridPos"] = {"h": 8, "w": 12, "x": 12 * (index % 2), "y": 8 * (index // 2)}
        panel["id"] = index + 1
    board = {"title": f"pdserve / {namespace} / {service}", "panels": panels, "refresh": "10s", "schemaVersion": 39}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": child(service, "dashboard"), "labels": labels(service) | {"grafana_dashboard": "1"}},
        "data": {f"pdserve-{namespace}-{service}.json": json.dumps(board, sort_keys=True)},
    }


def _quantiles(title: str, metric: str, pods: str) -> Json:
    per_bucket = f"sum(rate({metric}_bucket{{{pods}}}[1m])) by (le)"
    return _panel(title, {f"p{q}": f"histogram_quantile({q / 100:g}, {per_bucket})" for q in (50, 95)}, "s")


def _panel(title: str, queries: dict[str, str], unit: str) -> Json:
    targets = [{"expr": query, "legendFormat": legend, "refId": legend} for legend, query in queries.items()]
    return {"title": title, "type": "timeseries", "targets": targets, "fieldConfig": {"defaults": {"unit": unit}}}
