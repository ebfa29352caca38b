"""A ScalingPolicy's spec as a frozen dataclass. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.operator.api.defaults import problems, with_defaults
from pdserve.operator.api.durations import seconds
from pdserve.operator.api.policy_schema import policy_spec
from pdserve.operator.api.rules import broken_policy_rules
from pdserve.operator.api.spec import SpecError

_SCHEMA = policy_spec()

Json = dict[str, Any]


@dataclass(frozen=True)
class Policy:
    """All of `spec`."""

    interval_s: float
    window_s: float
    up_tolerance: float
    down_tolerance: float
    stabilization_up_s: float
    stabilization_down_s: float
    max_step_up: int
    max_step_down: int
    cooldown_s: float
    utilization: dict[str, float]
    """By role."""
    burst_quantile: float
    cold_start_s: float
    zero_after_s: float
    hold_requests: int
    hold_timeout_s: float
    metrics_source: str
    metrics_url: str | None
    stale_after_s: float


def read_policy(spec: Json) -> Policy:
    """From `spec` of a ScalingPolicy; {} is the default policy.

    Raises:
        SpecError: it breaks the schema or a rule.
    """
    full = with_defaults(_SCHEMA, spec)
    wrong = list(problems(_SCHEMA, full)) or broken_policy_rules(full)
    if wrong:
        raise SpecError("; ".join(wrong))
    zero, metrics = full["scaleToZero"], full["metrics"]
    return Policy(
        interval_s=seconds(full["interval"]),
        window_s=seconds(full["window"]),
        up_tolerance=full["upTolerance"],
        down_tolerance=full["downTolerance"],
        stabilization_up_s=seconds(full["stabilizationUp"]),
        stabilization_down_s=seconds(full["stabilizationDown"]),
        max_step_up=full["maxStepUp"],
        max_step_down=full["maxStepDown"],
        cooldown_s=seconds(full["cooldown"]),
        utilization=dict(full["utilization"]),
        burst_quantile=full["burstQuantile"],
        cold_start_s=seconds(full["coldStart"]),
        zero_after_s=seconds(zero["after"]),
        hold_requests=zero["holdRequests"],
        hold_timeout_s=seconds(zero["holdTimeout"]),
        metrics_source=metrics["source"],
        metrics_url=metrics.get("url"),
        stale_after_s=seconds(metrics["staleAfter"]),
    )
