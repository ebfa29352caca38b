"""The schema of PDService's status. Written by the operator alone."""

from __future__ import annotations

from pdserve.operator.api.schema_types import Schema, array, choice, integer, node, number, struct, text

MAX_DECISIONS = 20
_MAX_MESSAGE = 1024


def service_status() -> Schema:
    """`status` of a PDService."""
    return struct(
        "What the operator sees and has done.",
        {
            "observedGeneration": integer("Generation of the spec that this status is about."),
            "conditions": node(
                "array",
                "What holds: Ready, GatewayReady, PrefillReady, DecodeReady, TransferHealthy, Progressing, Degraded, …",
                items=_condition(),
                **{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
            ),
            "pools": struct("Numbers of workers by role.", {"prefill": _pool("prefill"), "decode": _pool("decode")}),
            "observed": struct(
                "What clients experience, over the policy's window.",
                {
                    "ttft": _percentiles("Time to first token."),
                    "tpot": _percentiles("Time per output token."),
                    "attainment": number("Share of requests that met both targets.", maximum=1),
                    "requestRate": number("Requests per second."),
                },
            ),
            "decisions": array("The last scaling decisions.", _decision(), max_items=MAX_DECISIONS),
            "kvSignature": text("Which workers may exchange KV blocks: those of equal signature.", maxLength=64),
            "url": text("URL for clients inside the cluster."),
        },
    )


def _condition() -> Schema:
    return struct(
        "One condition of the service.",
        {
            "type": text("Type of the condition.", maxLength=64),
            "status": choice("Whether the condition holds.", "True", "False", "Unknown"),
            "reason": text("Why it holds or does not, as one word for programs.", maxLength=64),
            "message": text(
                "Why it holds or does not, and what to do, as a sentence for people.", maxLength=_MAX_MESSAGE
            ),
            "lastTransitionTime": node("string", "When the status last changed.", format="date-time"),
            "observedGeneration": integer("Generation of the spec that the condition is about."),
        },
        required=("type", "status", "reason", "message", "lastTransitionTime"),
    )


def _pool(role: str) -> Schema:
    return struct(
        f"The {role} workers.",
        {
            "desired": integer("Workers that are wanted."),
            "ready": integer("Workers that serve."),
            "starting": integer("Workers that load the model or wait for a node."),
            "draining": integer("Workers that finish what they have."),
            "updated": integer("Ready workers of the newest template."),
            "display": text("Ready and desired workers, as the column shows them.", maxLength=32),
        },
    )


def _percentiles(what: str) -> Schema:
    return struct(what, {"p50": text("The median.", maxLength=32), "p95": text("The 95th percentile.", maxLength=32)})


def _decision() -> Schema:
    return struct(
        "One change of a pool's size.",
        {
            "time": node("string", "When it was decided.", format="date-time"),
            "pool": choice("Whose size was changed.", "prefill", "decode"),
            "from": integer("Workers before."),
            "to": integer("Workers after."),
            "inputs": text("The numbers that the decision rests on."),
            "rule": text("The rule that decided.", maxLength=64),
            "clampedBy": text("What limited the change.", maxLength=64),
        },
        required=("time", "pool", "from", "to", "rule"),
    )
