"""How both pools go from one template to another, one worker at a time and in pairs. Pure.

Nothing is remembered between steps: each is computed from the pods that exist, so a restarted operator goes on where
another one stopped, a revert is a rollout like any other, and edits in quick succession end in the last one.

During a rollout the Deployments are held (deployments.py): new pods come up beside the old ones, and an old one goes
only when a step says so. It says so when

- every new pod of its pool is ready, and one worker less still leaves as many ready as wanted (with room for a surge;
  without, one less, and only while both pools are otherwise complete);
- afterwards prefill and decode workers of equal KV signature still exist;
- its pool is not ahead of the other by more than `max_skew`;
- the last old worker of a pool goes only when the other pool is down to its last one too, and all gateways of the old
  model are gone with their streams.

Gateways change when half of either pool is new. Pods that never started are no loss and go at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from pdserve.operator.names import DECODE, POOLS, PREFILL
from pdserve.operator.status.reasons import Reason

UNSCHEDULABLE_S = 60.0
"""A new pod without a node for this long: there is no room for a surge."""


@dataclass(frozen=True)
class PoolSeen:
    """One pool's Deployment and its pods, those that terminate left out."""

    wanted: int
    exists: bool
    is_current: bool
    """The Deployment carries the wanted template."""
    new_total: int
    new_ready: int
    new_unschedulable_s: float
    """How long a new pod has been without a node."""
    old_total: int
    old_ready: int
    old_broken: int
    """Never started, or crashed."""

    @property
    def ready(self) -> int:
        """Workers that serve, old or new."""
        return self.new_ready + self.old_ready

    @property
    def share(self) -> float:
        """Ready workers of the new template, as a share of the wanted ones."""
        return self.new_ready / max(1, self.wanted)

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to do."""
        return self.is_current and self.old_total == 0 and self.new_ready >= self.wanted


@dataclass(frozen=True)
class RolloutSeen:
    """Everything a step depends on."""

    pools: dict[str, PoolSeen]
    is_compatible: bool
    """Old and new workers may exchange KV blocks."""
    num_old_gateways: int
    """Gateway pods of an older template, those that drain included."""
    pod_budget: int | None
    """Most workers of both pools together; None without a limit."""
    max_skew: int
    allows_downtime: bool


@dataclass(frozen=True)
class PoolStep:
    """How to apply a pool's Deployment now."""

    is_applied: bool = True
    """False when it stays as it is."""
    hold: bool = False
    has_surge: bool = True
    max_replaced: int = 0


@dataclass(frozen=True)
class RolloutStep:
    """What to do in this look."""

    pools: dict[str, PoolStep]
    holds_gateway: bool
    reason: Reason
    """COMPLETE, STARTING, ROLLING_OUT or NO_ROOM_TO_SURGE."""
    message: str


def next_step(seen: RolloutSeen) -> RolloutStep:
    """The next step; the same again until something has changed."""
    if not any(_is_rolling(pool) for pool in seen.pools.values()):
        is_complete = all(pool.is_complete for pool in seen.pools.values())
        reason, message = _COMPLETE if is_complete else _STARTING
        return RolloutStep({role: PoolStep() for role in POOLS}, False, reason, message)
    surges = _surges(seen)
    movers = _movers(seen, surges)
    steps = {role: _pool_step(pool, surges[role], role in movers) for role, pool in seen.pools.items()}
    holds_gateway = not seen.is_compatible and any(
        pool.new_ready < ceil(pool.wanted / 2) for pool in seen.pools.values()
    )
    if _is_stuck(seen, surges, movers):
        return RolloutStep(steps, holds_gateway, Reason.NO_ROOM_TO_SURGE, _NO_ROOM)
    return RolloutStep(steps, holds_gateway, Reason.ROLLING_OUT, "Workers of the newest template replace older ones.")


_COMPLETE = (Reason.COMPLETE, "Every worker is of the newest template.")
_STARTING = (Reason.STARTING, "Workers start.")
_NO_ROOM = (
    "There is no room for a second worker beside the only one of a pool: free a node or raise the budget, or set "
    "rollout.allowDowntime to replace it all the same. The previous revision keeps serving."
)


def _is_rolling(pool: PoolSeen) -> bool:
    return pool.exists and (not pool.is_current or pool.old_total > 0)


def _surges(seen: RolloutSeen) -> dict[str, bool]:
    """Which pools may have one pod more than wanted."""
    if seen.pod_budget is None:
        return dict.fromkeys(POOLS, True)
    room = seen.pod_budget - sum(pool.wanted for pool in seen.pools.values())
    smaller_first = sorted(POOLS, key=lambda role: (seen.pools[role].wanted, role != PREFILL))
    return {role: rank < room for rank, role in enumerate(smaller_first)}


def _has_room(pool: PoolSeen, may_surge: bool) -> bool:
    return may_surge and pool.new_unschedulable_s < UNSCHEDULABLE_S


def _movers(seen: RolloutSeen, surges: dict[str, bool]) -> set[str]:
    """Pools of which one old worker goes now. Without room for a surge one pool moves at a time: the one behind."""
    able = [role for role in POOLS if _may_replace(role, seen, surges)]
    if all(_has_room(seen.pools[role], surges[role]) for role in POOLS) or not able:
        return set(able)
    return {min(able, key=lambda role: (seen.pools[role].share, role != PREFILL))}


def _may_replace(role: str, seen: RolloutSeen, surges: dict[str, bool]) -> bool:
    pool, other = seen.pools[role], seen.pools[_other(role)]
    if not pool.old_total:
        return False
    if _has_room(pool, surges[role]):
        is_enough = pool.is_current and pool.new_ready == pool.new_total and pool.ready - 1 >= pool.wanted
    else:
        at_least = 0 if seen.allows_downtime else 1
        is_enough = pool.ready - 1 >= max(at_least, pool.wanted - 1) and other.ready >= other.wanted
        if is_enough and seen.allows_downtime and pool.wanted == 1:
            return True
    return (
        is_enough
        and _keeps_a_pair(pool, other, seen)
        and _is_in_step(pool, other, seen)
        and _may_lose_last(pool, other, seen)
    )


def _keeps_a_pair(pool: PoolSeen, other: PoolSeen, seen: RolloutSeen) -> bool:
    new_pair = pool.new_ready >= 1 and other.new_ready >= 1
    old_pair = pool.old_ready >= 2 and other.old_ready >= 1
    return seen.is_compatible or new_pair or old_pair


def _is_in_step(pool: PoolSeen, other: PoolSeen, seen: RolloutSeen) -> bool:
    """Not further ahead than max_skew; a pool whose share of new workers is the smaller one never waits for this."""
    if not _is_rolling(other):
        return True
    ahead = (pool.new_ready + 1) / max(1, pool.wanted) - min(1.0, other.share)
    return ahead <= seen.max_skew / max(1, pool.wanted, other.wanted) + 1e-9 or pool.share <= other.share


def _may_lose_last(pool: PoolSeen, other: PoolSeen, seen: RolloutSeen) -> bool:
    if pool.old_total > 1 or seen.is_compatible:
        return True
    return other.old_total <= 1 and other.new_ready >= 1 and pool.new_ready >= 1 and seen.num_old_gateways == 0


def _pool_step(pool: PoolSeen, may_surge: bool, moves: bool) -> PoolStep:
    if not pool.exists:
        return PoolStep()
    old_target = max(0, pool.old_total - max(pool.old_broken, 1 if moves else 0))
    max_replaced = max(0, pool.wanted - old_target)
    if not may_surge and (max_replaced == 0 or not (pool.is_current or moves or pool.old_broken)):
        return PoolStep(is_applied=False)
    return PoolStep(hold=True, has_surge=may_surge, max_replaced=max_replaced)


def _is_stuck(seen: RolloutSeen, surges: dict[str, bool], movers: set[str]) -> bool:
    """Nothing moves, nothing starts, nothing ends, and a pool without room is the reason."""
    pools = seen.pools
    lacks_room = any(pool.old_total and not _has_room(pool, surges[role]) for role, pool in pools.items())
    starts = any(pool.new_ready < pool.new_total and not pool.new_unschedulable_s for pool in pools.values())
    recovers = any(pool.ready < pool.wanted for pool in pools.values())
    gateways_change = seen.num_old_gateways > 0 and all(pool.new_ready for pool in pools.values())
    return lacks_room and not (movers or starts or recovers or gateways_change)


def _other(role: str) -> str:
    return DECODE if role == PREFILL else PREFILL
