"""A ScalingPolicy's spec as a frozen dataclass: what this version reads of it, and what it does not. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.operator.api.defaults import problems, with_defaults
from pdserve.operator.api.durations import seconds
from pdserve.operator.api.policy_schema import policy_spec
from pdserve.operator.api.rules import broken_policy_rules
from pdserve.operator.api.spec import SpecError
from pdserve.operator.api.support import POLICY_FIELDS_NOT_READ, set_fields

_SCHEMA = policy_spec()

Json = dict[str, Any]


@dataclass(frozen=True)
class Policy:
    """`spec` of a ScalingPolicy, as far as this version reads it."""

    interval_s: float
    hold_requests: int
    """Requests that each gateway holds while there are no workers."""
    hold_timeout_s: float
    not_supported: tuple[str, ...]
    """Paths of fields that are set and not read."""


def read_policy(spec: Json) -> Policy:
    """Read `spec` of a ScalingPolicy; {} is the default policy.

    Raises:
        SpecError: it breaks the schema or a rule.
    """
    full = with_defaults(_SCHEMA, spec)
    wrong = list(problems(_SCHEMA, full)) or broken_policy_rules(full)
    if wrong:
        raise SpecError("; ".join(wrong))
    return Policy(
        interval_s=seconds(full["interval"]),
        hold_requests=full["scaleToZero"]["holdRequests"],
        hold_timeout_s=seconds(full["scaleToZero"]["holdTimeout"]),
        not_supported=set_fields(_SCHEMA, full, POLICY_FIELDS_NOT_READ),
    )
