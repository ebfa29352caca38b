"""The operator's own settings."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.operator.facts import ClusterFacts
from pdserve.settings import SharedSettings
from pdserve.settings.field import setting
from pdserve.settings.kinds import boolean, optional, port, seconds, text


@dataclass(frozen=True, kw_only=True)
class OperatorSettings(SharedSettings):
    """Reconciles PDServices of one namespace, or of all. It has no bus of its own."""

    namespace: str | None = setting(
        None, optional(text), "Namespace to look after.", why="The pod's own, or the kubeconfig's."
    )
    all_namespaces: bool = setting(False, boolean, "Look after every namespace.", why="Least privilege.")
    image: str = setting(
        ClusterFacts.default_image, text, "Image of services that name none.", why="One image for all roles."
    )
    metrics_port: int = setting(0, port, "Port of /health and /metrics; 0 = any free one.", why="None is needed.")
    host: str = setting("0.0.0.0", text, "Address to listen on.", why="Probes come from the node.")  # noqa: S104
    lease_s: float = setting(
        15.0, seconds, "Another operator takes over after this.", unit="s", why="Longer than a hiccup of the API."
    )
    resync_s: float = setting(
        30.0, seconds, "Every service is looked at this often, whatever events say.", unit="s",
        why="Watches can die silently.",
    )  # fmt: skip
