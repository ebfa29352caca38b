"""Which workers go when a pool shrinks: those that start, then those with the least in hand. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.operator.status.pods_seen import PodSeen

FIRST_COST = -1000
"""Of the pod that goes first; the next ones cost more. Pods without the annotation cost 0."""


def victims(pods: Sequence[PodSeen], loads: Mapping[str, float], num: int) -> list[PodSeen]:
    """`num` pods, the first to go first.

    Args:
        pods: of one pool that do not terminate.
        loads: pod name → KV blocks in use, or any measure that grows with what would be lost. A pod that did not
            answer counts as fully loaded: nothing is known of its streams.
        num: how many.
    """
    return sorted(pods, key=lambda pod: (pod.is_ready, loads.get(pod.name, float("inf")), pod.name))[:num]


def load_of(metrics: str) -> float:
    """KV blocks in use and sequences in hand, from a worker's /metrics."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if _counts(line))


def _counts(line: str) -> bool:
    if line.startswith("pd_kv_blocks{"):
        return not any(f'state="{state}"' in line for state in ("free", "cached"))
    return line.startswith(("pd_num_requests_running ", "pd_num_requests_waiting "))
