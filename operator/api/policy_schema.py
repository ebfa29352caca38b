"""The schema of ScalingPolicy: how eagerly pools grow and shrink. Shared by services."""

from __future__ import annotations

from pdserve.operator.api.schema_types import Rule, Schema, choice, duration, integer, number, struct, text
from pdserve.operator.api.support import POLICY_FIELDS_NOT_READ, with_remarks

PROMETHEUS_NEEDS_URL = "metrics.url is needed when metrics.source is prometheus"


def policy_spec() -> Schema:
    """The schema of `spec` of a ScalingPolicy."""
    return with_remarks(_spec(), POLICY_FIELDS_NOT_READ)


def _spec() -> Schema:
    return struct(
        "Everything has a default; a PDService without a policyRef uses the defaults.",
        {
            "interval": duration("Time between two decisions.", "5s"),
            "window": duration("Metrics are averaged over this time.", "60s"),
            "upTolerance": number("Load above the target by this share starts growth.", 0.1, maximum=10),
            "downTolerance": number("Load below the target by this share starts shrinking.", 0.2, maximum=1),
            "stabilizationUp": duration("A need to grow must last this long.", "0s"),
            "stabilizationDown": duration("The largest need of this long counts before shrinking.", "300s"),
            "maxStepUp": integer("Workers added at once, at most.", 4, minimum=1),
            "maxStepDown": integer("Workers removed at once, at most.", 1, minimum=1),
            "cooldown": duration("Time between two changes of one pool in opposite directions.", "60s"),
            "utilization": struct(
                "Share of a pool's capacity that is planned for.",
                {
                    "prefill": number("Share of a prefill worker's capacity.", 0.7, minimum=0.05, maximum=1),
                    "decode": number("Share of a decode worker's capacity.", 0.8, minimum=0.05, maximum=1),
                },
                is_defaulted=True,
            ),
            "burstQuantile": number("Quantile of the offered load that counts as a burst.", 0.95, maximum=1),
            "coldStart": duration("Time from a new pod to a ready worker, until it has been measured.", "60s"),
            "scaleToZero": struct(
                "What happens to services whose min is 0.",
                {
                    "after": duration("Both pools go to zero after being idle for this long.", "10m"),
                    "holdRequests": integer(
                        "Requests that each gateway holds while there are no workers.", 100, minimum=1
                    ),
                    "holdTimeout": duration("A held request is answered 503 after this.", "120s"),
                },
                is_defaulted=True,
            ),
            "metrics": struct(
                "Where the numbers come from.",
                {
                    "source": choice(
                        "scrape asks the pods; prometheus asks a server.", "scrape", "prometheus", default="scrape"
                    ),
                    "url": text("URL of the Prometheus server."),
                    "staleAfter": duration("Numbers that are older count as no data: nothing shrinks.", "30s"),
                },
                rules=(
                    Rule("!has(self.source) || self.source != 'prometheus' || has(self.url)", PROMETHEUS_NEEDS_URL),
                ),
                is_defaulted=True,
            ),
        },
        is_defaulted=True,
    )
