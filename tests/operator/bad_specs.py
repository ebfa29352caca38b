"""Specs that break a rule, with the rule's sentence: fed to the operator's own checks and to CEL on a real server."""

from __future__ import annotations

from typing import Any

from pdserve.operator.api import service_schema as said

Json = dict[str, Any]

BAD_SPECS: list[tuple[Json, str]] = [
    ({"spec": {"prefill": {"min": 3, "max": 2}}}, said.MIN_ABOVE_MAX),
    ({"spec": {"decode": {"min": 9, "max": 8}}}, said.MIN_ABOVE_MAX),
    ({"spec": {"decode": {"replicas": 2}}}, said.REPLICAS_NEED_OFF),
    ({"spec": {"prefill": {"replicas": 2}, "scaling": {"mode": "Advise"}}}, said.REPLICAS_NEED_OFF),
    ({"spec": {"budget": {"pods": 1}}}, said.BUDGET_BELOW_MIN),
    (
        {"spec": {"budget": {"accelerators": 1}, "prefill": {"accelerator": {}}, "decode": {"accelerator": {}}}},
        said.ACCELERATOR_BUDGET_BELOW_MIN,
    ),
    ({"spec": {"prefill": {"min": 0, "max": 2}}}, said.ZERO_TOGETHER),
    (
        {"spec": {"disaggregation": {"mode": "Never"}, "failure": {"localPrefill": "Never"}}},
        said.NEVER_WITHOUT_PREFILL,
    ),
    ({"spec": {"transfer": {"portRange": "9000-8000"}}}, said.BAD_PORT_RANGE),
    ({"spec": {"transfer": {"portRange": "1000-1010"}}}, said.BAD_PORT_RANGE),
    ({"spec": {"transfer": {"portRange": "10000-10064"}}}, said.BAD_PORT_RANGE),
    ({"spec": {"ratio": {"min": 2.5, "max": 1}}}, said.RATIO_ORDER),
    ({"spec": {"model": {"source": "demo", "revision": "main"}}}, said.REVISION_NEEDS_HUB),
    ({"spec": {"gateway": {"apiKeysSecretRef": {"name": "keys", "key": "keys.json"}}}}, said.NO_API_KEYS),
    ({"spec": {"observability": {"otlpEndpoint": "http://collector:4318"}}}, said.NO_SPANS),
    ({"name": "9lives"}, said.BAD_NAME),
    ({"name": "a" * 46}, said.BAD_NAME),
]
GOOD_SPECS: list[Json] = [
    {},
    {"spec": {"prefill": {"min": 0}, "decode": {"min": 0, "max": 8}}},
    {"spec": {"scaling": {"mode": "Off"}, "decode": {"replicas": 2}}},
    {"spec": {"budget": {"accelerators": 1}}},
    {"spec": {"budget": {"pods": 2, "accelerators": 1}, "decode": {"accelerator": {}}}},
    {"spec": {"transfer": {"portRange": "10000-10063"}}},
    {"spec": {"ratio": {"min": 1}}},
    {"spec": {"model": {"source": "hf://Qwen/Qwen3-8B", "revision": "main"}}},
    {"name": "a" * 45},
]


def merged(base: Json, change: Json) -> Json:
    """Deep merge."""
    both = dict(base)
    for name, value in change.items():
        both[name] = merged(both.get(name, {}), value) if isinstance(value, dict) else value
    return both
