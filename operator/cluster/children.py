"""Applies what has changed of a service's children, deletes what is not wanted any more, and touches nothing else.

What was applied last is remembered as a digest, in an annotation on the server and here; equal digests mean that
nothing is sent.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable
from typing import Any

from pdserve.operator.cluster.kube import ConflictError, Kube, path_of, path_of_object
from pdserve.operator.facts import ClusterFacts, Owner
from pdserve.operator.names import FIELD_MANAGER, REDIS, child, label_selector, labels
from pdserve.operator.objects.plan import applied_digest
from pdserve.operator.objects.redis import PASSWORD_KEY

Json = dict[str, Any]


class Children:
    """The objects that one service is made of, as they were applied."""

    def __init__(self, kube: Kube, owner: Owner, facts: ClusterFacts) -> None:
        self._kube, self._owner, self._facts = kube, owner, facts
        self._applied: dict[str, str] = {}
        """Path → digest of what was applied."""
        self._has_secret = False

    async def read(self) -> None:
        """Learn what exists: at the first look at a service, and now and then against changes by hand."""
        self._applied = {}
        for api_version, kind in self._kinds():
            path = path_of(api_version, kind, self._owner.namespace)
            for item in await self._kube.list(path, label_selector(self._owner.name), is_cached=True):
                self._applied[f"{path}/{item['metadata']['name']}"] = applied_digest(item) or ""

    async def apply(self, item: Json) -> bool:
        """Whether anything had to be sent. The item is `finished` (plan.py)."""
        path, digest = path_of_object(item), applied_digest(item)
        assert digest is not None, path
        if self._applied.get(path) == digest:
            return False
        await self._kube.apply(item, FIELD_MANAGER)
        self._applied[path] = digest
        return True

    def note_live(self, deployments: Iterable[Json]) -> None:
        """Deployments are listed at every look: what they were applied with is known better than remembered."""
        prefix = path_of("apps/v1", "Deployment", self._owner.namespace)
        for path in [path for path in self._applied if path.startswith(prefix)]:
            del self._applied[path]
        for item in deployments:
            self._applied[f"{prefix}/{item['metadata']['name']}"] = applied_digest(item) or ""

    async def delete_all_but(self, wanted: Iterable[Json]) -> list[str]:
        """Delete children that no plan names any more; their paths."""
        kept = {path_of_object(item) for item in wanted}
        unwanted = [path for path in self._applied if path not in kept]
        for path in unwanted:
            await self._kube.delete(path)
            del self._applied[path]
        return unwanted

    async def ensure_password(self) -> None:
        """The managed Redis has a password of its own, drawn once; creating needs no right to read Secrets."""
        if self._has_secret:
            return
        name = child(self._owner.name, REDIS)
        metadata = {"name": name, "namespace": self._owner.namespace, "ownerReferences": [self._owner.reference]}
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata | {"labels": labels(self._owner.name, REDIS)},
            "stringData": {PASSWORD_KEY: secrets.token_urlsafe(24)},
        }
        with contextlib.suppress(ConflictError):  # it has been there since an earlier life of the operator
            await self._kube.create(path_of("v1", "Secret", self._owner.namespace), secret)
        self._has_secret = True

    def forget_password(self) -> None:
        """Its Secret is missing: draw another one at the next look."""
        self._has_secret = False

    def _kinds(self) -> list[tuple[str, str]]:
        kinds = [
            ("v1", "ServiceAccount"),
            ("v1", "ConfigMap"),
            ("v1", "Service"),
            ("apps/v1", "Deployment"),
            (self._facts.disruption_budget_api, "PodDisruptionBudget"),
            ("networking.k8s.io/v1", "NetworkPolicy"),
        ]
        if self._facts.has_pod_monitors:
            kinds.append(("monitoring.coreos.com/v1", "PodMonitor"))
        if self._facts.has_prometheus_rules:
            kinds.append(("monitoring.coreos.com/v1", "PrometheusRule"))
        return kinds
