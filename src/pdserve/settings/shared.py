"""The settings that several processes share: the log, the bus, and what gateways and workers have in common.

`none` as a default means that the process decides at its start, from the model, the device or the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.registration import HEARTBEAT_S
from pdserve.settings.field import not_yet, setting
from pdserve.settings.kinds import (
    choice,
    integer,
    name,
    names,
    optional,
    pattern,
    port,
    seconds,
    seconds_or_zero,
    text,
)

_redis_url = pattern(r"(redis|rediss|unix)://\S+", "a URL that starts with redis://, rediss:// or unix://")


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """Every process writes a log."""

    log_level: str = setting(
        "info",
        choice("debug", "info", "warning", "error"),
        "The log shows lines of this severity and above.",
        why="A change of state is worth a line, a single step is not.",
    )
    log_format: str = setting(
        "console",
        choice("console", "json"),
        "The log is written for people (console) or for machines (json).",
        why="A process is first started in a terminal.",
    )


@dataclass(frozen=True, kw_only=True)
class BusSettings(SharedSettings):
    """Processes that use the bus find it, and each other, by these."""

    redis_url: str = setting(
        "redis://127.0.0.1:6379/0",
        _redis_url,
        "The bus is the Redis at this URL.",
        why="A Redis on the same machine listens there unless it is told otherwise.",
    )
    service: str = setting(
        "default",
        name,
        "Processes of one service share this name; every key on the bus begins with it.",
        why="A Redis that carries one service needs no second name.",
    )
    bus_timeout_s: float = setting(
        2.0,
        seconds,
        "Every call to the bus ends within this time.",
        unit="s",
        why="A healthy bus answers in milliseconds.",
    )


@dataclass(frozen=True, kw_only=True)
class ProcessSettings(BusSettings):
    """Gateways and workers share a model, an address and the time limits between them."""

    bus_start_timeout_s: float = setting(
        60.0,
        seconds,
        "A process to which the bus has not answered once in this time after its start ends with the reason.",
        unit="s",
        why="A bus that starts together with its processes is there sooner, and a wrong address never is.",
    )
    model: str = setting(
        "demo",
        text,
        "The model to serve: demo, tiny, a Hugging Face folder, a .gguf file or hf://owner/name.",
        why="The demo model runs without a download.",
    )
    served_model_name: str | None = setting(
        None,
        optional(names),
        "Clients ask for the model by this name, or by any of several, separated by commas; the first is the label of "
        "metrics, and an answer carries the name that was asked for.",
        why="The model's own name is used.",
    )
    chat_template: str | None = setting(
        None,
        optional(text),
        "A Jinja chat template, or the path of a file that holds one, replaces the model's.",
        why="The model's own template is the one that it was trained with.",
    )
    max_model_len: int | None = setting(
        None,
        optional(integer(1)),
        "Prompt and output of one sequence have at most this many tokens together.",
        unit="tokens",
        why="The model's own limit holds.",
    )
    host: str = setting(
        "127.0.0.1",
        text,
        "The process listens on this address.",
        why="Other machines reach it only when an address is chosen for them.",
    )
    metrics_port: int = setting(
        0,
        port,
        "This port serves /metrics, /ready, /health and /debug; 0 takes any free one.",
        why="Many workers share a machine.",
    )
    advertise_host: str | None = setting(
        None,
        optional(text),
        "Other processes reach this one under this host name or address.",
        why="The address that it listens on is right on one machine.",
    )
    heartbeat_s: float = setting(
        HEARTBEAT_S,
        seconds,
        "A process renews its registration this often; without a renewal it expires after three times as long.",
        unit="s",
        why="A process that died is known to be gone after 3 s.",
    )
    kv_lease_s: float = setting(
        10.0,
        seconds,
        "A prefill worker keeps the blocks of a hand-off this long after the decode worker last asked it to.",
        unit="s",
        why="Ten heartbeats outlast a short pause of a process or of the bus.",
    )
    drain_s: float = setting(
        30.0,
        seconds_or_zero,
        "After SIGTERM a process has this long to finish what it has begun.",
        unit="s",
        why="Kubernetes grants the same before it kills a pod.",
    )
    otlp_endpoint: None = not_yet(
        "Spans are sent to this address (OTLP over HTTP).",
        because="this version sends no spans; /metrics and `usage.timing` tell where time goes",
    )

    @property
    def registration_ttl_s(self) -> float:
        """A registration expires after three heartbeats without a renewal."""
        return 3 * self.heartbeat_s
