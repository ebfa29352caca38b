"""Posts Kubernetes Events about a PDService: what `kubectl describe` shows. Only what has changed is ever posted."""

from __future__ import annotations

import datetime
import secrets
from typing import Any

from pdserve.log import get_logger
from pdserve.operator.cluster.credentials import ClusterError
from pdserve.operator.cluster.kube import Kube, path_of
from pdserve.operator.names import API_VERSION
from pdserve.operator.status.conditions import shorten

logger = get_logger(__name__)


def now_text() -> str:
    """The time as the API writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def post_event(kube: Kube, service: dict[str, Any], reason: str, message: str, *, is_warning: bool) -> None:
    """One event. That it cannot be posted is logged, and stops nothing."""
    metadata, now = service["metadata"], now_text()
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
        "source": {"component": "pdserve-operator"},
    }
    logger.info("%s/%s %s: %s", namespace, metadata["name"], reason, message)
    try:
        await kube.create(path_of("v1", "Event", namespace), event)
    except ClusterError as error:
        logger.warning("event not posted: %s", error)
