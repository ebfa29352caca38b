"""The operator's own settings."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.operator.facts import ClusterFacts
from pdserve.settings import SharedSettings
from pdserve.settings.field import setting
from pdserve.settings.kinds import boolean, optional, port, seconds, text


@dataclass(frozen=True, kw_only=True)
class OperatorSettings(SharedSettings):
    """The operator reconciles PDServices of one namespace, or of all. It has no bus of its own."""

    namespace: str | None = setting(
        None,
        optional(text),
        "PDServices of this namespace are reconciled.",
        why="It is the pod's own namespace, or the kubeconfig's.",
    )
    all_namespaces: bool = setting(
        False, boolean, "PDServices of every namespace are reconciled.", why="It needs rights in the whole cluster."
    )
    image: str = setting(
        ClusterFacts.default_image,
        text,
        "Services that name no image run this one.",
        why="One image serves all roles.",
    )
    metrics_port: int = setting(
        0, port, "This port serves /health and /metrics; 0 takes any free one.", why="Outside a pod no port is needed."
    )
    host: str = setting(
        "0.0.0.0",  # noqa: S104
        text,
        "The process listens on this address.",
        why="Probes come from the node and not from the pod.",
    )
    lease_s: float = setting(
        15.0,
        seconds,
        "Another operator takes over when this one was not heard of for this long.",
        unit="s",
        why="It is longer than a hiccup of the API server.",
    )
    resync_s: float = setting(
        30.0,
        seconds,
        "Every service is looked at this often, whatever events say.",
        unit="s",
        why="A watch can die without a sign.",
    )
