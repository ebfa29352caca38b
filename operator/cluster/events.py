"""Posts Kubernetes Events about a PDService: what `kubectl describe` shows. Only what has changed is ever posted."""

from __future__ import annotations

import secrets
from typing import Any

from pdserve.log import get_logger
from pdserve.operator.clock import Clock
from pdserve.operator.cluster.credentials import ClusterError
from pdserve.operator.cluster.kube import Kube, path_of
from pdserve.operator.names import API_VERSION, FIELD_MANAGER
from pdserve.operator.status.conditions import shorten
from pdserve.operator.status.reasons import Reason

logger = get_logger(__name__)


class Events:
    """Events about PDServices, posted one at a time."""

    def __init__(self, kube: Kube, clock: Clock) -> None:
        self._kube, self._clock = kube, clock

    async def post(self, service: dict[str, Any], reason: Reason, message: str, *, is_warning: bool) -> None:
        """Post one event. That it cannot be posted is logged, and stops nothing."""
        metadata, now = service["metadata"], self._clock.now_text()
        namespace = metadata["namespace"]
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{secrets.token_hex(8)}", "namespace": namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": "PDService",
                "name": metadata["name"],
                "namespace": namespace,
                "uid": metadata["uid"],
            },
            "type": "Warning" if is_warning else "Normal",
            "reason": reason,
            "message": shorten(message),
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "source": {"component": FIELD_MANAGER},
        }
        logger.info("%s/%s %s: %s", namespace, metadata["name"], reason, message)
        try:
            await self._kube.create(path_of("v1", "Event", namespace), event)
        except ClusterError as error:
            logger.warning("event not posted: %s", error)
