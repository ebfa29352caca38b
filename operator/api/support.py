"""Fields that the API accepts and this version does not act on: an object that sets one is told so by a condition.

Every other field has an effect; a test changes each of them, and looks for it. Pure.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from pdserve.operator.api.schema_types import Schema

POLICY_FIELDS_NOT_READ = frozenset(
    {
        "window",
        "upTolerance",
        "downTolerance",
        "stabilizationUp",
        "stabilizationDown",
        "maxStepUp",
        "maxStepDown",
        "cooldown",
        "utilization.prefill",
        "utilization.decode",
        "burstQuantile",
        "coldStart",
        "scaleToZero.after",
        "metrics.source",
        "metrics.url",
        "metrics.staleAfter",
    }
)
"""Paths below `spec` of a ScalingPolicy: load does not change the size of a pool yet."""
SERVICE_FIELDS_NOT_READ = frozenset({"prefill.max", "decode.max", "ratio.min", "ratio.max", "slo.attainment"})
"""Paths below `spec` of a PDService, for the same reason. `max` counts as set when it differs from `min`."""

_REMARK = " Accepted, and not supported by this version."


def leaves(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """(path, node) of every field that has no fields of its own; items of lists are no fields."""
    for name, node in schema["properties"].items():
        here = f"{path}.{name}" if path else name
        if "properties" in node:
            yield from leaves(node, here)
        else:
            yield here, node


def with_remarks(schema: Schema, not_read: frozenset[str]) -> Schema:
    """The schema, in which the descriptions of these fields say that they are not supported."""
    marked = copy.deepcopy(schema)
    for path, node in leaves(marked):
        if path in not_read:
            node["description"] += _REMARK
    return marked


def set_fields(schema: Schema, spec: dict[str, Any], paths: frozenset[str]) -> tuple[str, ...]:
    """Those of the paths that a spec sets, in the order of the schema.

    An API server fills defaults in, so a value counts as set when it differs from its field's default.
    """
    return tuple(
        path for path, node in leaves(schema) if path in paths and _value(spec, path) not in (None, node.get("default"))
    )


def _value(spec: dict[str, Any], path: str) -> Any:
    value: Any = spec
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
