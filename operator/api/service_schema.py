"""The schema of PDService: every field with its description, default and limits. The one source of all three.

`crds.py` makes the CustomResourceDefinition of it, `defaults.py` applies and checks it where there is no API server.
"""

from __future__ import annotations

from pdserve.operator.api.schema_types import (
    Rule,
    Schema,
    array,
    choice,
    duration,
    free_form,
    integer,
    number,
    secret_key,
    struct,
    switch,
    text,
    text_map,
)
from pdserve.operator.api.support import SERVICE_FIELDS_NOT_READ, with_remarks

MIN_ABOVE_MAX = "min must not be greater than max"
REPLICAS_NEED_OFF = "replicas may only be set when scaling.mode is Off; use min and max"
BUDGET_BELOW_MIN = "budget.pods must be at least prefill.min + decode.min"
ACCELERATOR_BUDGET_BELOW_MIN = "budget.accelerators must be at least prefill.min + decode.min"
ZERO_TOGETHER = "min is 0 for both pools or for none: one pool alone serves nothing"
NEVER_WITHOUT_PREFILL = "disaggregation.mode Never needs decode workers that prefill: failure.localPrefill must be Auto"
BAD_PORT_RANGE = "transfer.portRange must be FIRST-LAST with 1024 <= FIRST < LAST <= 65535 and at most 64 ports"
REVISION_NEEDS_HUB = "model.revision is for models from the hub: model.source must start with hf://"
BAD_NAME = "metadata.name must start with a letter, use only a-z, 0-9 and -, and have at most 45 characters"
RATIO_ORDER = "ratio.min must not be greater than ratio.max"
NO_API_KEYS = (
    "gateway.apiKeysSecretRef is not supported by this version, which checks no API keys: leave it out, and let a "
    "proxy in front of the service check them"
)
NO_SPANS = "observability.otlpEndpoint is not supported by this version, which sends no spans: leave it out"

_POOL_RULE = Rule("!has(self.max) || self.min <= self.max", MIN_ABOVE_MAX)
OBJECT_RULES = (Rule("self.metadata.name.matches('^[a-z]([-a-z0-9]{0,43}[a-z0-9])?$')", BAD_NAME),)
"""Rules of the whole object: children are Services, whose names are stricter and longer."""
SERVICE_RULES = (
    Rule(
        "self.scaling.mode == 'Off' || (!has(self.prefill.replicas) && !has(self.decode.replicas))", REPLICAS_NEED_OFF
    ),
    Rule(
        "!has(self.budget) || !has(self.budget.pods) || self.prefill.min + self.decode.min <= self.budget.pods",
        BUDGET_BELOW_MIN,
    ),
    Rule(
        "!has(self.budget) || !has(self.budget.accelerators) || !(has(self.prefill.accelerator) || "
        "has(self.decode.accelerator)) || (has(self.prefill.accelerator) ? self.prefill.min : 0) + "
        "(has(self.decode.accelerator) ? self.decode.min : 0) <= self.budget.accelerators",
        ACCELERATOR_BUDGET_BELOW_MIN,
    ),
    Rule("(self.prefill.min == 0) == (self.decode.min == 0)", ZERO_TOGETHER),
    Rule("self.disaggregation.mode != 'Never' || self.failure.localPrefill == 'Auto'", NEVER_WITHOUT_PREFILL),
)


def service_spec() -> Schema:
    """The schema of `spec` of a PDService."""
    return with_remarks(_spec(), SERVICE_FIELDS_NOT_READ)


def _spec() -> Schema:
    return struct(
        "What to serve, how fast, and with how much.",
        {
            "model": _model(),
            "image": text("Container image of every role. Default: the operator's own PDS_IMAGE."),
            "imagePullSecrets": array(
                "Secrets with registry credentials.",
                struct(
                    "One Secret with registry credentials.",
                    {"name": text("Name of the Secret.", maxLength=253)},
                    required=("name",),
                ),
            ),
            "slo": _slo(),
            "gateway": _gateway(),
            "prefill": _pool("prefill", batched_tokens=2048),
            "decode": _pool("decode", batched_tokens=512),
            "budget": struct(
                "Never exceeded, not even while workers are replaced.",
                {
                    "accelerators": integer("Accelerators of both pools together.", minimum=1),
                    "pods": integer("Prefill and decode pods together.", minimum=1),
                },
            ),
            "ratio": struct(
                "Limits of prefill workers per decode worker.",
                {
                    "min": number("At least this many prefill workers for each decode worker."),
                    "max": number("At most this many prefill workers for each decode worker."),
                },
                rules=(Rule("!has(self.min) || !has(self.max) || self.min <= self.max", RATIO_ORDER),),
            ),
            "disaggregation": struct(
                "When prefill and decode run in different workers.",
                {
                    "mode": choice(
                        "Who computes prompts. Always: prefill workers. Never: decode workers, without a hand-off. "
                        "Auto: prefill workers, but for prompts shorter than minRemoteTokens.",
                        "Auto",
                        "Always",
                        "Never",
                        default="Auto",
                    ),
                    "minRemoteTokens": integer(
                        "Shorter prompts are computed by the decode worker (mode Auto, failure.localPrefill Auto). "
                        "Default: none is."
                    ),
                },
                is_defaulted=True,
            ),
            "failure": struct(
                "What happens to a request whose worker fails.",
                {
                    "maxAttempts": integer(
                        "Dispatches of one sequence to workers, at most; the first counts.", 3, minimum=1, maximum=10
                    ),
                    "deadline": duration("A request ends within this time, whatever happens.", "10m"),
                    "localPrefill": choice(
                        "Whether a decode worker may compute a prompt itself, as when a hand-off fails.",
                        "Auto",
                        "Never",
                        default="Auto",
                    ),
                },
                is_defaulted=True,
            ),
            "transfer": _transfer(),
            "scaling": struct(
                "Who decides on the number of workers.",
                {
                    "mode": choice(
                        "Auto: the operator, between min and max. Advise: it says what it would do. Off: not the "
                        "operator; an HPA, KEDA or a person may own the Deployments' replicas.",
                        "Auto",
                        "Advise",
                        "Off",
                        default="Auto",
                    ),
                    "policyRef": text(
                        "Name of a ScalingPolicy in this namespace. Default: its defaults.", maxLength=253
                    ),
                },
                is_defaulted=True,
            ),
            "rollout": struct(
                "How workers are replaced when their template changes.",
                {
                    "maxSkew": integer(
                        "Replaced workers that one pool may be ahead of the other, in workers of the larger pool.",
                        1,
                        minimum=1,
                        maximum=64,
                    ),
                    "allowDowntime": switch(
                        "Replace the only worker of a pool although there is no room for a second one beside it.",
                        default=False,
                    ),
                },
                is_defaulted=True,
            ),
            "redis": struct(
                "The Redis server that carries messages. Default: one that the operator runs.",
                {
                    "urls": array(
                        "URL of an external Redis; the password belongs into authSecretRef.",
                        text(
                            "redis://HOST:PORT/DB or rediss://HOST:PORT/DB.",
                            pattern=r"^rediss?://[^@\s]+$",
                            maxLength=512,
                        ),
                        max_items=1,
                        minItems=1,
                    ),
                    "authSecretRef": secret_key("Password of the external Redis."),
                },
                is_defaulted=True,
            ),
            "observability": struct(
                "Objects for monitoring, made when the cluster knows their kinds.",
                {
                    "podMonitor": switch("A PodMonitor and a PrometheusRule.", default=True),
                    "dashboards": switch("A ConfigMap with a Grafana dashboard.", default=True),
                    "otlpEndpoint": text(
                        "Where spans are sent (OTLP over HTTP). Not supported by this version: a spec that sets it is "
                        "refused."
                    ),
                },
                rules=(Rule("!has(self.otlpEndpoint)", NO_SPANS),),
                is_defaulted=True,
            ),
        },
        required=("model",),
        rules=SERVICE_RULES,
    )


def _model() -> Schema:
    return struct(
        "The model to serve.",
        {
            "source": text(
                "hf://OWNER/NAME, pvc://CLAIM/FOLDER, a path inside the image, demo or tiny.",
                pattern=r"^(hf://[^/\s]+/[^/\s@]+|pvc://[a-z0-9.-]+(/\S*)?|/\S+|demo|tiny)$",
                maxLength=512,
            ),
            "revision": text("Branch, tag or commit of a model from the hub.", maxLength=128),
            "servedName": text("Name of the model in the API. Default: the model's own.", maxLength=256),
            "dtype": choice(
                "Type of weights and activations.", "auto", "float32", "bfloat16", "float16", default="auto"
            ),
            "quantization": choice("How the weights are quantized.", "none", "int8", "fp8", default="none"),
            "maxModelLen": integer("Prompt and output tokens of a sequence, at most. Default: the model's.", minimum=1),
            "cache": struct(
                "Where downloaded and converted models are kept. Default: an empty volume for each pod.",
                {
                    "pvc": text("PersistentVolumeClaim that all pods mount (ReadWriteMany).", maxLength=253),
                    "size": text(
                        "Limit of the empty volume, such as 40Gi.", pattern=r"^[0-9]+(Mi|Gi|Ti)$", maxLength=16
                    ),
                },
                is_defaulted=True,
            ),
            "authSecretRef": secret_key("Access token of the hub."),
        },
        required=("source",),
        rules=(Rule("!has(self.revision) || self.source.startsWith('hf://')", REVISION_NEEDS_HUB),),
    )


def _slo() -> Schema:
    return struct(
        "What counts as fast enough; targets for scaling and for the goodput metrics.",
        {
            "ttft": duration("Time to first token.", "2s"),
            "tpot": duration("Mean time per output token after the first.", "100ms"),
            "percentile": integer("Percentile that the two targets are for.", 95, minimum=50, maximum=99),
            "attainment": number("Share of requests that must meet both targets.", 0.95, maximum=1),
        },
        is_defaulted=True,
    )


def _gateway() -> Schema:
    return struct(
        "The gateways: they take HTTP requests and stream answers.",
        {
            "replicas": integer("Number of gateway pods.", 1, minimum=1, maximum=64),
            "queue": struct(
                "What may wait in each gateway; more is answered with status 429.",
                {
                    "maxRequests": integer("Requests that wait, at most.", 1024, minimum=1),
                    "maxTokens": integer("Prompt tokens of the requests that wait, at most.", 1_000_000, minimum=1),
                },
                is_defaulted=True,
            ),
            "apiKeysSecretRef": secret_key(
                "File of API keys. Not supported by this version: a spec that sets it is refused."
            ),
            "resources": free_form("Container resources. Default: requests of half a core and 512 MiB."),
            "drainSeconds": integer("Time for streams to end when a gateway stops.", 60, maximum=3600),
            "podTemplate": free_form("Laid over the pod template that the operator makes (strategic merge)."),
        },
        rules=(Rule("!has(self.apiKeysSecretRef)", NO_API_KEYS),),
        is_defaulted=True,
    )


def _pool(role: str, batched_tokens: int) -> Schema:
    return struct(
        f"The {role} workers.",
        {
            "min": integer("Number of workers, at least.", 1, maximum=1024),
            "max": integer("Number of workers, at most. Default: min.", maximum=1024),
            "replicas": integer("Fixed number of workers. Only with scaling.mode Off.", maximum=1024),
            "engine": _engine(batched_tokens),
            "resources": free_form("Container resources. Default: requests of one core and 2 GiB."),
            "accelerator": struct(
                "A GPU for each worker. Default: none, workers run on the CPU.",
                {
                    "resource": text("Name of the extended resource.", "nvidia.com/gpu", maxLength=253),
                    "count": integer("Accelerators of each worker: one in this version.", 1, minimum=1, maximum=1),
                },
            ),
            "rdma": struct(
                "RDMA devices for each worker; without them KV travels over tcp.",
                {"resource": text("Extended resource, such as rdma/hca_shared_devices_a.", maxLength=253)},
                required=("resource",),
            ),
            "nodeSelector": text_map("Labels of usable nodes."),
            "tolerations": array("Taints to tolerate.", free_form("One toleration.")),
            "podTemplate": free_form("Laid over the pod template that the operator makes (strategic merge)."),
            "drainSeconds": integer("Time for what is in hand when a worker stops.", 60, maximum=3600),
            "startSeconds": integer("Time for the model to load before a worker counts as failed.", 900, minimum=10),
        },
        rules=(_POOL_RULE,),
        is_defaulted=True,
    )


def _engine(batched_tokens: int) -> Schema:
    return struct(
        "Settings of the engine that runs the model.",
        {
            "executor": choice("What runs the model.", "auto", "transformers", "cpu", "cuda", "fake", default="auto"),
            "maxBatchedTokens": integer("Token budget of one step.", batched_tokens, minimum=1),
            "maxSequences": integer("Sequences in one step.", 64, minimum=1),
            "kvMemoryFraction": number("Share of the free memory used for KV.", maximum=1),
            "kvDtype": choice("Type of the KV cache.", "auto", "float32", "bfloat16", "float16", "fp8", default="auto"),
            "numBlocks": integer("Number of KV blocks, instead of the fraction.", minimum=2),
            "blockSize": integer("Tokens of one KV block.", 16, minimum=1, maximum=1024),
            "prefixCache": switch("Reuse KV blocks of equal prefixes.", default=True),
            "threads": integer("CPU threads. Default: the cores of the container.", minimum=1),
        },
        is_defaulted=True,
    )


def _transfer() -> Schema:
    return struct(
        "How KV blocks travel from prefill to decode workers.",
        {
            "transport": choice("auto is nixl with RDMA and tcp without.", "auto", "nixl", "tcp", default="auto"),
            "lease": duration("A prefill worker keeps blocks this long after the last renewal.", "10s"),
            "portRange": text(
                "Ports of the transport, opened between prefill and decode workers.",
                "18500-18515",
                pattern=r"^[0-9]{4,5}-[0-9]{4,5}$",
                maxLength=11,
            ),
        },
        rules=(
            Rule(
                # A server checks the default {} of this object, too, before the defaults inside it.
                "!has(self.portRange) || int(self.portRange.split('-')[0]) >= 1024 && "
                "int(self.portRange.split('-')[1]) <= 65535 && "
                "int(self.portRange.split('-')[0]) < int(self.portRange.split('-')[1]) && "
                "int(self.portRange.split('-')[1]) - int(self.portRange.split('-')[0]) < 64",
                BAD_PORT_RANGE,
            ),
        ),
        is_defaulted=True,
    )
