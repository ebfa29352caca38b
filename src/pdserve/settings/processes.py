"""The settings of each process: one frozen dataclass each; what several need stands in a common base.

`none` as a default means "decided at start from the model, the device or the machine".
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.settings.field import setting
from pdserve.settings.kinds import (
    boolean,
    choice,
    integer,
    optional,
    pattern,
    port,
    ratio,
    seconds,
    seconds_or_zero,
    size_bytes,
    text,
)

_redis_url = pattern(r"(redis|rediss|unix)://\S+", "a URL that starts with redis://, rediss:// or unix://")
_name = pattern(r"[A-Za-z0-9][A-Za-z0-9_.-]*", "letters, digits, '-', '_' and '.'")


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """What every process needs: the bus and its own log."""

    redis_url: str = setting(
        "redis://127.0.0.1:6379/0", _redis_url, "The bus.", why="A Redis on this machine's standard port."
    )
    service: str = setting("default", _name, "Name of the service: prefix of every bus key.", why="One per Redis.")
    bus_timeout_s: float = setting(
        2.0, seconds, "Every call to the bus ends within this.", unit="s", why="A healthy bus answers in milliseconds."
    )
    log_level: str = setting(
        "info", choice("debug", "info", "warning", "error"), "Least severe log lines shown.", why="Changes, not steps."
    )
    log_format: str = setting(
        "console", choice("console", "json"), "Log lines for people or for machines.", why="First seen in a terminal."
    )


@dataclass(frozen=True, kw_only=True)
class ProcessSettings(SharedSettings):
    """What gateways and workers share."""

    model: str = setting(
        "demo",
        text,
        "demo, tiny, a Hugging Face folder, a .gguf file or hf://owner/name.",
        why="Runs without a download.",
    )
    served_model_name: str | None = setting(
        None, optional(text), "Name of the model in the API.", why="The model's own name."
    )
    chat_template: str | None = setting(
        None, optional(text), "Jinja chat template, or the path of one.", why="The model's own."
    )
    max_model_len: int | None = setting(
        None,
        optional(integer(1)),
        "Prompt and output tokens of a sequence, at most.",
        unit="tokens",
        why="The model's.",
    )
    host: str = setting("127.0.0.1", text, "Address to listen on.", why="Nobody else's until said so.")
    metrics_port: int = setting(
        0, port, "Port of /metrics, /ready, /health and /debug; 0 = any free one.", why="Many workers share a machine."
    )
    advertise_host: str | None = setting(
        None, optional(text), "Host name by which other processes reach this one.", why="The address listened on."
    )
    heartbeat_s: float = setting(
        1.0, seconds, "Between registrations; one expires after three.", unit="s", why="A dead worker counts after 3 s."
    )
    kv_lease_s: float = setting(
        10.0, seconds, "P keeps blocks this long after D's last renewal.", unit="s", why="Ten heartbeats."
    )
    drain_s: float = setting(
        30.0, seconds_or_zero, "After SIGTERM, for what is in hand.", unit="s", why="Kubernetes' grace period."
    )
    seed: int | None = setting(
        None, optional(integer(0, 2**63 - 1)), "Fixes every seed that is drawn.", why="Drawn from the system."
    )
    deterministic: bool = setting(
        False, boolean, "Results independent of batch, chunks, cache hits and worker.", why="Costs speed."
    )
    otlp_endpoint: str | None = setting(
        None, optional(text), "Where spans are sent (OTLP over HTTP).", why="No collector, no spans."
    )

    @property
    def registration_ttl_s(self) -> float:
        """A registration's life: three heartbeats."""
        return 3 * self.heartbeat_s


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(ProcessSettings):
    """HTTP in, tokens out."""

    metrics_port: int = setting(
        0, port, "Port of its own for /metrics, /ready, /health and /debug; 0 = that of the API.",
        why="Only gateways that share a port need one.",
    )  # fmt: skip
    port: int = setting(8000, port, "Port of the API; 0 = any free one.", why="What clients of such servers try first.")
    disaggregation: str = setting(
        "auto",
        choice("auto", "always", "never"),
        "Prompts are computed by prefill workers; with never by decode workers, with auto the short ones are.",
        why="Short ones only when MIN_REMOTE_TOKENS says which.",
    )
    min_remote_tokens: int = setting(
        0, integer(0), "With DISAGGREGATION=auto decode workers compute shorter prompts themselves; 0 = none.",
        unit="tokens", why="Decoding is disturbed by no prompt.",
    )  # fmt: skip
    local_prefill: str = setting(
        "auto", choice("auto", "never"), "Whether decode workers may compute prompts; as theirs.", why="As theirs."
    )
    request_deadline_s: float = setting(
        600.0, seconds, "A request ends by then.", unit="s", why="Long answers on a CPU take minutes."
    )
    progress_timeout_s: float = setting(
        20.0, seconds, "A started sequence without news for this long is re-dispatched.", unit="s",
        why="Longer than a hand-off timeout, shorter than a client's patience.",
    )  # fmt: skip
    redispatch_wait_s: float = setting(
        30.0, seconds, "A started request waits this long for a new pair.", unit="s", why="A worker restarts in 5-30 s."
    )
    max_attempts: int = setting(
        3, integer(1), "Dispatches of one sequence.", why="A third worker is not worth killing for one request."
    )
    max_queue_requests: int = setting(
        1024, integer(1), "Requests queued here; more are answered 429.", unit="requests", why="Seconds of work."
    )
    max_queue_tokens: int = setting(
        1_000_000, integer(1), "Prompt tokens queued here; more are answered 429.", unit="tokens", why="Bounds memory."
    )
    hold_requests: int = setting(
        0, integer(0), "Requests held while no worker exists (scale from zero); 0 = answer 503.", unit="requests",
        why="Holding helps only where something scales up.",
    )  # fmt: skip
    hold_timeout_s: float = setting(
        120.0, seconds, "A held request is answered 503 after this.", unit="s", why="A pod with a cached model starts."
    )
    max_body_bytes: int = setting(
        8 * 1024 * 1024, size_bytes, "Largest request body.", unit="bytes", why="Four bytes a token, 2M tokens."
    )
    sse_keepalive_s: float = setting(
        15.0, seconds, "Between comment lines on a silent stream.", unit="s", why="Below the 30-60 s of most proxies."
    )
    client_stall_timeout_s: float = setting(
        30.0, seconds, "A client that reads nothing for this long is cancelled.", unit="s", why="A phone in a tunnel."
    )
    stream_buffer_bytes: int = setting(
        1024 * 1024, size_bytes, "Unread events kept per client.", unit="bytes", why="Minutes of one stream's text."
    )
    resume_grace_s: float = setting(
        30.0, seconds_or_zero, "A resumable request outlives its client this long.", unit="s", why="A page reload."
    )
    stream_ttl_s: float = setting(
        600.0, seconds, "Events of a resumable request are kept this long.", unit="s", why="As the request's deadline."
    )
    timeline_ttl_s: float = setting(
        600.0, seconds, "Timelines of finished requests are kept this long.", unit="s", why="Time to look at one."
    )
    api_keys_file: str | None = setting(
        None,
        optional(text),
        "API keys. This version checks none, and refuses to start with one.",
        why="On one machine nobody else can ask.",
    )
    ttft_slo_s: float = setting(
        2.0, seconds, "Target for the first token.", unit="s", why="A reader's patience; a GPU service sets less."
    )
    tpot_slo_s: float = setting(
        0.1, seconds, "Target for the mean time per output token.", unit="s", why="Faster than most people read."
    )
    handoff_slo_s: float = setting(
        0.5, seconds, "Target for the gap between the first two tokens.", unit="s", why="5 x TPOT_SLO_S.",
        derive=lambda values: 5 * values["TPOT_SLO_S"],
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(ProcessSettings):
    """What both roles need: an engine, a block pool and a transport."""

    worker_id: str | None = setting(
        None, optional(_name), "Name of this worker, unique in its service.", why="Made from role and process."
    )
    node: str | None = setting(None, optional(text), "Node this worker runs on, for placement.", why="The host name.")
    zone: str = setting("", pattern(r"\S*", "text without spaces"), "Zone of the node.", why="One zone.")
    executor: str = setting(
        "auto",
        choice("auto", "transformers", "cpu", "cuda", "triton-interpreter", "fake"),
        "What runs the model.",
        why="The fastest usable.",
    )
    device: str = setting(
        "auto", pattern(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N"), "Where it runs.", why="A GPU if present."
    )
    dtype: str = setting(
        "auto", choice("auto", "float32", "bfloat16", "float16"), "Type of weights and activations.",
        why="The model's on a GPU, float32 on a CPU.",
    )  # fmt: skip
    quantization: str = setting("none", choice("none", "int8", "fp8"), "Of the weights.", why="The model as published.")
    share_weights: str = setting(
        "auto", choice("auto", "on", "off"), "Workers of one machine map packed CPU weights from one file in PDS_HOME.",
        why="Own copies are a little faster: shared where one takes a quarter of the memory.",
    )  # fmt: skip
    kv_dtype: str = setting(
        "auto", choice("auto", "float32", "bfloat16", "float16", "fp8"), "Type of the KV cache.", why="As DTYPE."
    )
    block_size: int = setting(
        16, integer(1, 1024), "Tokens of one KV block.", unit="tokens", why="Little waste, few descriptors."
    )
    num_blocks: int | None = setting(
        None, optional(integer(2)), "KV blocks of this worker.", unit="blocks", why="What fits into the KV memory."
    )
    kv_memory_bytes: int | None = setting(
        None, optional(size_bytes), "KV memory, when NUM_BLOCKS is not set.", unit="bytes", why="The fraction below."
    )
    kv_memory_fraction: float | None = setting(
        None, optional(ratio), "Share of the free memory used for KV.", unit="ratio", why="Depends on the device."
    )
    max_num_seqs: int = setting(64, integer(1), "Sequences in one step.", unit="sequences", why="TPOT before rate.")
    max_num_batched_tokens: int = setting(
        512,
        integer(1),
        "Token budget of one step.",
        unit="tokens",
        why="One chunk is one hand-off: small ones overlap.",
    )
    max_wait_s: float = setting(
        10.0,
        seconds,
        "After this long a sequence goes before younger and shorter ones.",
        unit="s",
        why="No starvation.",
    )
    prefix_cache: bool = setting(True, boolean, "Reuse KV blocks of equal prefixes.", why="Always verified.")
    threads: int | None = setting(
        None, optional(integer(1)), "CPU threads of the engine.", unit="threads", why="The cores of this process."
    )
    integrity: str = setting(
        "full", choice("full", "off"), "Digest of every transferred block.", why="Never text from foreign KV."
    )
    transport: str = setting(
        "auto", choice("auto", "nixl", "tcp"), "How KV blocks travel.", why="NIXL where its READs are one-sided."
    )
    transfer_host: str | None = setting(
        None, optional(text), "Address the transport listens on.", why="As HOST."
    )  # fmt: skip
    transfer_port: int = setting(0, port, "Port of the tcp transport; 0 = any free one.", why="Many share a machine.")
    quarantine_s: float = setting(
        20.0, seconds, "Blocks of an unfinished READ wait this long before the transport is remade.", unit="s",
        why="2 x KV_LEASE_S.", derive=lambda values: 2 * values["KV_LEASE_S"],
    )  # fmt: skip
    handoff_timeout_s: float = setting(
        15.0, seconds, "A hand-off without progress fails after this.", unit="s", why="Below PROGRESS_TIMEOUT_S."
    )
    prefill_timeout_s: float = setting(
        300.0, seconds, "A prompt in prefill fails after this.", unit="s", why="A long prompt on a CPU."
    )
    step_timeout_s: float = setting(
        60.0, seconds, "A step that takes longer fails /health.", unit="s", why="No step takes that long: it is wedged."
    )
    fake_ttft_s: float = setting(
        0.0, seconds_or_zero, "Fake executor: duration of a prefill.", unit="s", why="Tests wait for nothing."
    )
    fake_itl_s: float = setting(
        0.0, seconds_or_zero, "Fake executor: duration of a decode step.", unit="s", why="Tests wait for nothing."
    )
    fake_burst: int = setting(
        1, integer(1), "Fake executor: tokens per message.", unit="tokens", why="As the real ones."
    )
    fake_start_s: float = setting(
        0.0, seconds_or_zero, "Fake executor: duration of the start.", unit="s", why="Tests wait for nothing."
    )
    fake_script: str = setting(
        "hash", text, "Fake executor: echo, hash, or a JSON file of token ids.", why="Depends on the prompt alone."
    )

    @property
    def renewal_s(self) -> float:
        """Between two lease renewals: a heartbeat, or less where the lease is short."""
        return min(self.heartbeat_s, self.kv_lease_s / 3)


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(WorkerSettings):
    """Chunked prefill under a token budget; offers KV blocks under a lease."""

    prefill_step_s: float | None = setting(
        0.5, optional(seconds), "A step is cut to about this: a short prompt waits for its end.", unit="s",
        why="A CPU computes 200 tokens in it, enough for full speed; a GPU never takes so long.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(WorkerSettings):
    """Admits hand-offs and runs continuous batching."""

    local_prefill: str = setting(
        "auto",
        choice("auto", "never"),
        "Whether a failed hand-off is computed here.",
        why="Time, not a failed request.",
    )
    tpot_slo_s: float | None = setting(
        0.25, optional(seconds), "No hand-off joins, and prompt chunks are cut, when a decode step would exceed this.",
        unit="s", why="A full batch on two laptop cores; a GPU service sets less.",
    )  # fmt: skip
    step_interval_s: float | None = setting(
        None, optional(seconds), "While prompts are computed for this worker, steps begin at least this far apart.",
        unit="s", why="For cores shared with prefill: `pdserve up` sets it below TPOT_SLO_S.",
    )  # fmt: skip


PROCESSES: tuple[type[SharedSettings], ...] = (GatewaySettings, PrefillSettings, DecodeSettings)
NAMES_READ_ELSEWHERE = frozenset({"HOME", "FAULTS", "PRODUCTION", "CONFIG", "CPU_KERNELS", "KUBE_BINARIES", "TRACES"})
"""Names of the environment (`PDS_…`) that are no field of any process: cache folder, test hooks, `--config`, the
switch of the CPU kernels, and where tests find large inputs."""
