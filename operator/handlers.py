"""What kopf watches. Each handler names the service that an event concerns, and does nothing else.

Raw events only: kopf then keeps no state in objects, needs no finalizer, and an object is deleted without it.
"""

from __future__ import annotations

from typing import Any

import kopf

from pdserve.operator.cluster.credentials import Credentials, Login
from pdserve.operator.loop import ReconcileLoop
from pdserve.operator.names import GROUP, VERSION, service_of

_WATCH_S = 300
_SILENCE_S = 330
"""A watch that is silent for this long is dead: the server ends each after _WATCH_S."""

_DEBOUNCE_S = 0.2
"""A Deployment's status changes in bursts."""


def make_registry(loop: ReconcileLoop, login: Login) -> kopf.OperatorRegistry:
    """Handlers of one operator, whose watches log in as its other requests do."""
    registry = kopf.OperatorRegistry()
    given: list[Credentials] = []

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.ConnectionInfo:
        """At the start, and again whenever the server refuses what was given last."""
        known = await (login.renew(given.pop()) if given else login.current())
        given.append(known)
        return _connection_info(known)

    @kopf.on.event(GROUP, VERSION, "pdservices", registry=registry)
    async def service_changed(*, namespace: str | None, name: str, **_: Any) -> None:
        await loop.queue.add((str(namespace), name))

    @kopf.on.event(GROUP, VERSION, "scalingpolicies", registry=registry)
    async def policy_changed(*, namespace: str | None, **_: Any) -> None:
        await loop.look_at_all(str(namespace))

    @kopf.on.event("apps", "v1", "deployments", registry=registry, when=_is_ours)
    async def deployment_changed(*, namespace: str | None, labels: Any, **_: Any) -> None:
        service = service_of(labels)
        if service is not None:
            await loop.queue.add((str(namespace), service), _DEBOUNCE_S)

    return registry


def _connection_info(known: Credentials) -> kopf.ConnectionInfo:
    scheme, _, token = (known.authorization or "").partition(" ")
    return kopf.ConnectionInfo(
        server=known.server,
        ca_path=known.authority_file,
        insecure=known.is_insecure,
        certificate_path=known.certificate_file,
        private_key_path=known.key_file,
        scheme=scheme or None,
        token=token or None,
        proxy_url=known.proxy,
        default_namespace=known.namespace,
    )


def _is_ours(labels: Any, **_: Any) -> bool:
    return service_of(labels) is not None


def make_settings() -> kopf.OperatorSettings:
    """Settings with which kopf watches, and does nothing else."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.watching.server_timeout = _WATCH_S
    settings.watching.client_timeout = _SILENCE_S
    settings.watching.connect_timeout = 10
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = [1, 2, 4, 8, 16]
    return settings
