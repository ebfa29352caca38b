"""The settings of a gateway: HTTP in, tokens out."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.settings.field import not_yet, setting
from pdserve.settings.kinds import choice, integer, optional, port, seconds, size_bytes
from pdserve.settings.shared import ProcessSettings


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(ProcessSettings):
    """A gateway owns requests: their queue, their time limits, and the streams to their clients."""

    metrics_port: int = setting(
        0,
        port,
        "A port of its own serves /metrics, /ready, /health and /debug; 0 serves them on the port of the API.",
        why="Only gateways that share the port of the API need another one.",
    )
    port: int = setting(
        8000, port, "This port serves the API; 0 takes any free one.", why="Clients of such servers try it first."
    )
    disaggregation: str = setting(
        "auto",
        choice("auto", "always", "never"),
        "Prefill workers compute every prompt (always), none (never), or all but the short ones (auto).",
        why="What counts as short is decided by MIN_REMOTE_TOKENS, by default nothing.",
    )
    min_remote_tokens: int = setting(
        0,
        integer(0),
        "With DISAGGREGATION=auto a decode worker computes prompts that are shorter than this by itself.",
        unit="tokens",
        why="With 0 no prompt disturbs the sequences that are being decoded.",
    )
    local_prefill: str = setting(
        "auto",
        choice("auto", "never"),
        "With never the gateway asks no decode worker to compute a prompt.",
        why="It must say the same as LOCAL_PREFILL of the decode workers, and their default is auto.",
    )
    generation_config: str = setting(
        "auto",
        choice("auto", "off"),
        "The model's generation_config.json gives the sampling parameters of requests that name none (auto), or not.",
        why="Models are published with the values under which they write well; a request's own ones win.",
    )
    request_deadline_s: float = setting(
        600.0,
        seconds,
        "A request ends by this time, with an error if it has to.",
        unit="s",
        why="A long answer takes minutes on a CPU.",
    )
    progress_timeout_s: float = setting(
        20.0,
        seconds,
        "A sequence that has started and is not heard of for this long is dispatched again.",
        unit="s",
        why="It is longer than HANDOFF_TIMEOUT_S and shorter than the patience of a client.",
    )
    redispatch_wait_s: float = setting(
        30.0,
        seconds,
        "A sequence that has started waits this long for other workers when it lost its own.",
        unit="s",
        why="A worker restarts in 5 to 30 s.",
    )
    max_attempts: int = setting(
        3,
        integer(1),
        "A request fails when this many dispatches of one of its sequences ended by a fault.",
        why="A request that broke two workers shall not break many more.",
    )
    max_queue_requests: int = setting(
        1024,
        integer(1),
        "At most this many requests wait in this gateway; further ones are answered 429.",
        unit="requests",
        why="A longer queue is more than workers can answer in time.",
    )
    max_queue_tokens: int = setting(
        1_000_000,
        integer(1),
        "At most this many prompt tokens wait in this gateway; further requests are answered 429.",
        unit="tokens",
        why="Few long prompts fill memory as well as many short ones.",
    )
    hold_requests: int = setting(
        0,
        integer(0),
        "At most this many requests wait while no worker exists; with 0 they are answered 503.",
        unit="requests",
        why="Waiting helps only where workers are started on demand.",
    )
    hold_timeout_s: float = setting(
        120.0,
        seconds,
        "A request that waited this long for a first worker is answered 503.",
        unit="s",
        why="A pod whose model is cached starts within it.",
    )
    max_body_bytes: int = setting(
        8 * 1024 * 1024,
        size_bytes,
        "A request body is no larger than this.",
        unit="bytes",
        why="At four bytes a token it holds two million of them.",
    )
    sse_keepalive_s: float = setting(
        15.0,
        seconds,
        "A stream that has nothing to say sends a comment line this often.",
        unit="s",
        why="Most proxies close a silent connection after 30 to 60 s.",
    )
    client_stall_timeout_s: float = setting(
        30.0,
        seconds,
        "A request is cancelled when its client has read nothing for this long.",
        unit="s",
        why="A phone that passes a tunnel comes back within it.",
    )
    idle_timeout_s: float = setting(
        75.0,
        seconds,
        "A connection on which no request comes is closed after this time.",
        unit="s",
        why="Proxies reuse connections that were idle for 60 s; behind one that keeps them longer, set more.",
    )
    stream_buffer_bytes: int = setting(
        1024 * 1024,
        size_bytes,
        "Events that a client has not read yet are kept up to this size.",
        unit="bytes",
        why="It holds minutes of the text of one stream.",
    )
    seed: int | None = setting(
        None,
        optional(integer(0, 2**63 - 1)),
        "Requests that bring no seed get theirs from a sequence of numbers that begins here.",
        why="Seeds are drawn from the system, so that equal requests get different answers.",
    )
    ttft_slo_s: float = setting(
        2.0,
        seconds,
        "The target for the first token is a border of its histogram.",
        unit="s",
        why="Readers wait this long without a second thought; a GPU service sets less.",
    )
    tpot_slo_s: float = setting(
        0.1,
        seconds,
        "The target for the mean time per output token is a border of its histogram.",
        unit="s",
        why="It is faster than most people read.",
    )
    handoff_slo_s: float = setting(
        0.5,
        seconds,
        "The target for the gap between the first two tokens is a border of its histogram.",
        unit="s",
        why="It is 5 x TPOT_SLO_S: a hand-off may cost what five tokens cost.",
        derive=lambda values: 5 * values["TPOT_SLO_S"],
    )
    api_keys_file: None = not_yet(
        "Requests must bring an API key out of this file.",
        because="this version does not check API keys; let a proxy in front of it do that",
    )
    resume_grace_s: None = not_yet(
        "A resumable request outlives its client this long.",
        unit="s",
        because="this version cannot resume a stream; a request ends with its client",
    )
    stream_ttl_s: None = not_yet(
        "Events of a resumable request are kept this long.",
        unit="s",
        because="this version cannot resume a stream and keeps no events",
    )
    timeline_ttl_s: None = not_yet(
        "Timelines of finished requests are kept this long.",
        unit="s",
        because="this version keeps no timelines; `usage.timing` in an answer tells where its time went",
    )
