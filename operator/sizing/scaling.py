"""How many workers each pool shall have: observation in, decisions out. Pure, time passed in.

This is the seam of the scaling law. What calls it observes, applies decisions by server-side apply under a field
manager of its own, and records them; what is behind it knows neither a client nor a clock. Without load signals the
law has one rule: a pool has its `min`, or its `replicas` when scaling is Off.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.operator.api.policy import Policy
from pdserve.operator.api.spec import ServiceSpec


@dataclass(frozen=True)
class PoolLoad:
    """One pool as it is now."""

    replicas: int | None
    """`spec.replicas` of the Deployment; None when there is none yet."""
    ready: int
    starting: int
    draining: int


@dataclass(frozen=True)
class Observation:
    """Everything a decision may rest on."""

    pools: dict[str, PoolLoad]


@dataclass(frozen=True)
class Decision:
    """What one pool's size shall be, and why."""

    pool: str
    current: int | None
    wanted: int
    rule: str
    inputs: str
    clamped_by: str = ""
    is_applied: bool = True
    """False when it is only advised."""

    @property
    def is_change(self) -> bool:
        """Whether something has to be done."""
        return self.current != self.wanted

    @property
    def is_resize(self) -> bool:
        """Whether a pool that existed before has been given another size."""
        return self.is_change and self.is_applied and self.current is not None


@dataclass(frozen=True)
class ScalingState:
    """What the law remembers of a service from one decision to the next."""

    decided_s: float | None = None
    basis: tuple[ServiceSpec, Policy, tuple[int | None, ...]] | None = None
    """What people had set at that time: spec, policy, and the pools' replicas."""


def decide(
    observation: Observation, spec: ServiceSpec, policy: Policy, state: ScalingState, now_s: float
) -> tuple[list[Decision], ScalingState]:
    """One decision for each pool whose size is decided here.

    Load counts once per interval, so [] is returned in between; what people change counts at once. With scaling Off
    and no `replicas` nothing but a pool's first size is ever decided: an HPA, KEDA or a person owns the number.
    """
    basis = (spec, policy, tuple(load.replicas for load in observation.pools.values()))
    if state.decided_s is not None and now_s - state.decided_s < policy.interval_s and state.basis == basis:
        return [], state
    decisions = [_decide_pool(role, load, spec) for role, load in observation.pools.items()]
    return [decision for decision in decisions if decision is not None], ScalingState(now_s, basis)


def _decide_pool(role: str, load: PoolLoad, spec: ServiceSpec) -> Decision | None:
    pool = spec.pools[role]
    inputs = f"ready {load.ready}, starting {load.starting}, draining {load.draining}"
    if spec.scaling == "Off":
        if pool.replicas is not None:
            return Decision(role, load.replicas, pool.replicas, "Fixed", f"replicas {pool.replicas}")
        return Decision(role, None, pool.min, "FirstSize", f"min {pool.min}") if load.replicas is None else None
    is_applied = spec.scaling == "Auto" or load.replicas is None
    return Decision(role, load.replicas, pool.min, "Minimum", f"min {pool.min}; {inputs}", is_applied=is_applied)
