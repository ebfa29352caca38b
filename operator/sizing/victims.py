"""Which workers go when a pool shrinks: those that start, then those with the least in hand. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from pdserve.operator.status.pods_seen import PodSeen
from pdserve.readiness import Readiness, ReadyReason

FIRST_COST = -1000
"""Deletion cost of the pod that goes first; the next ones cost more. Pods without the annotation cost 0."""


def victims(pods: Sequence[PodSeen], answers: Mapping[str, Readiness], num: int) -> list[PodSeen]:
    """Choose `num` pods; the first to go first.

    Args:
        pods: of one pool that do not terminate.
        answers: pod name → what its /ready says.
        num: how many.
    """
    return sorted(pods, key=lambda pod: (pod.is_ready, load_of(answers.get(pod.name)), pod.name))[:num]


def load_of(answer: Readiness | None) -> float:
    """KV blocks in use plus sequences in hand: a measure that grows with what would be lost.

    A pod that did not answer, or in no known form, counts as fully loaded: nothing is known of its streams.
    """
    if answer is None or answer.reason is ReadyReason.UNKNOWN:
        return inf
    load = answer.load
    return load.num_used_blocks + load.num_running + load.num_waiting
