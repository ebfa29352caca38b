"""The checks that CEL makes on servers that have it, for those that have not, and some that CEL cannot make.

Each returns the sentence that the CEL rule shows. A test feeds both with the same objects. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from pdserve.operator.api import service_schema as said
from pdserve.operator.api.policy_schema import PROMETHEUS_NEEDS_URL

Spec = dict[str, Any]

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,43}[a-z0-9])?")


def broken_rules(name: str, spec: Spec) -> list[str]:
    """Sentences about a PDService (defaults applied); empty when it is good."""
    return [message for message, holds in _RULES if not holds(spec)] + (
        [] if _NAME.fullmatch(name) else [said.BAD_NAME]
    )


def broken_policy_rules(spec: Spec) -> list[str]:
    """Sentences about a ScalingPolicy (defaults applied)."""
    metrics = spec["metrics"]
    return [PROMETHEUS_NEEDS_URL] if metrics["source"] == "prometheus" and "url" not in metrics else []


def _pools(spec: Spec) -> Iterator[Spec]:
    yield spec["prefill"]
    yield spec["decode"]


def _min_at_most_max(spec: Spec) -> bool:
    return all(pool["min"] <= pool.get("max", pool["min"]) for pool in _pools(spec))


def _replicas_only_when_off(spec: Spec) -> bool:
    return spec["scaling"]["mode"] == "Off" or not any("replicas" in pool for pool in _pools(spec))


def _fits_pod_budget(spec: Spec) -> bool:
    limit = spec.get("budget", {}).get("pods")
    return bool(limit is None or sum(pool["min"] for pool in _pools(spec)) <= limit)


def _fits_accelerator_budget(spec: Spec) -> bool:
    limit = spec.get("budget", {}).get("accelerators")
    return bool(limit is None or sum(pool["min"] for pool in _pools(spec) if "accelerator" in pool) <= limit)


def _zero_together(spec: Spec) -> bool:
    return bool((spec["prefill"]["min"] == 0) == (spec["decode"]["min"] == 0))


def _prefills_somewhere(spec: Spec) -> bool:
    return bool(spec["disaggregation"]["mode"] != "Never" or spec["failure"]["localPrefill"] == "Auto")


def _port_range(spec: Spec) -> bool:
    first, last = map(int, spec["transfer"]["portRange"].split("-"))
    return 1024 <= first < last <= min(65535, first + 63)


def _ratio_order(spec: Spec) -> bool:
    ratio = spec.get("ratio", {})
    return bool(ratio.get("min", 0) <= ratio.get("max", float("inf")))


def _without_api_keys(spec: Spec) -> bool:
    return "apiKeysSecretRef" not in spec["gateway"]


def _without_spans(spec: Spec) -> bool:
    return "otlpEndpoint" not in spec["observability"]


def _revision_of_the_hub(spec: Spec) -> bool:
    return "revision" not in spec["model"] or spec["model"]["source"].startswith("hf://")


_RULES: tuple[tuple[str, Callable[[Spec], bool]], ...] = (
    (said.MIN_ABOVE_MAX, _min_at_most_max),
    (said.REPLICAS_NEED_OFF, _replicas_only_when_off),
    (said.BUDGET_BELOW_MIN, _fits_pod_budget),
    (said.ACCELERATOR_BUDGET_BELOW_MIN, _fits_accelerator_budget),
    (said.ZERO_TOGETHER, _zero_together),
    (said.NEVER_WITHOUT_PREFILL, _prefills_somewhere),
    (said.BAD_PORT_RANGE, _port_range),
    (said.RATIO_ORDER, _ratio_order),
    (said.REVISION_NEEDS_HUB, _revision_of_the_hub),
    (said.NO_API_KEYS, _without_api_keys),
    (said.NO_SPANS, _without_spans),
)
