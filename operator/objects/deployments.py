"""Deployments of gateway, pools and Redis. Pure.

`spec.replicas` of the pools is not here: another field manager owns it (scaling.py), so that no reconcile ever resets
what a scaler has decided.
"""

from __future__ import annotations

from typing import Any

from pdserve.operator.names import child, labels, selector

Json = dict[str, Any]

HOLD_S = 365 * 24 * 3600
"""`minReadySeconds` during a rollout: no new pod ever counts as available to the Deployment controller, so it removes
an old one only when `maxUnavailable` allows it; rollout.py decides when that is."""
_NO_DEADLINE = 2**31 - 1
_REVISIONS = 2


def deployment(service: str, role: str, template: Json, *, hold: bool = False, max_replaced: int = 0) -> Json:
    """The Deployment of one role.

    Args:
        service: its name.
        role: gateway, prefill or decode.
        template: of its pods.
        hold: whether a rollout is steered by `max_replaced`; else the Deployment controller is on its own: one new pod
            beside the others, and an old one goes only for each new one that is ready.
        max_replaced: with `hold`: old pods that may be missing.
    """
    spec: Json = {
        "selector": {"matchLabels": selector(service, role)},
        "template": template,
        "revisionHistoryLimit": _REVISIONS,
        "progressDeadlineSeconds": _NO_DEADLINE,
        "minReadySeconds": HOLD_S if hold else 0,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": max_replaced}},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": child(service, role), "labels": labels(service, role)},
        "spec": spec,
    }


def without_surge(made: Json) -> Json:
    """The same Deployment for a rollout that may not start a pod before another has gone."""
    strategy = made["spec"]["strategy"]
    rolling = strategy["rollingUpdate"] | {"maxSurge": 0}
    assert rolling["maxUnavailable"] > 0, "a rollout needs room in one direction"
    return made | {"spec": made["spec"] | {"strategy": strategy | {"rollingUpdate": rolling}}}


def with_replicas(made: Json, replicas: int) -> Json:
    """The same Deployment with a number of pods."""
    return made | {"spec": made["spec"] | {"replicas": replicas}}
