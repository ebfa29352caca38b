"""Reads the ScalingPolicy that a service refers to; one that cannot be used leaves the last known one in effect."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.operator.api.policy import Policy, read_policy
from pdserve.operator.api.spec import SpecError
from pdserve.operator.cluster.kube import GoneError, Kube, path_of
from pdserve.operator.names import API_VERSION


@dataclass(frozen=True)
class PolicyInEffect:
    """The policy that counts now, and why it is not the one that was asked for."""

    policy: Policy
    problem: str | None = None


class Policies:
    """The ScalingPolicy of one service."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube, self._namespace = kube, namespace
        self._last: Policy | None = None

    async def read(self, name: str | None) -> PolicyInEffect:
        """The policy of this name; without a name the default one."""
        if name is None:
            return PolicyInEffect(read_policy({}))
        path = path_of(API_VERSION, "ScalingPolicy", self._namespace, name)
        try:
            self._last = read_policy((await self._kube.get(path)).get("spec") or {})
        except (GoneError, SpecError) as error:
            kind = "does not exist" if isinstance(error, GoneError) else f"is refused ({error})"
            known = "the last known one" if self._last else "the default policy"
            problem = f"ScalingPolicy {name} {kind}: {known} is in effect."
            return PolicyInEffect(self._last or read_policy({}), problem)
        return PolicyInEffect(self._last)
