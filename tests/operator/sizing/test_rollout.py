"""Rollouts, stepped against a model of the Deployment controller: pairs exist, capacity never falls, edits settle."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from deployment_simulator import Deployment

from pdserve.operator.names import DECODE, PREFILL
from pdserve.operator.sizing.rollout import PoolSeen, RolloutSeen, next_step

BROKEN = frozenset({"broken"})


class World:
    """Two pools and a gateway that are stepped until nothing changes."""

    def __init__(self, num_prefill: int, num_decode: int, *, seed: int = 0, budget: int | None = None) -> None:
        self.pools = {PREFILL: Deployment(num_prefill, "a"), DECODE: Deployment(num_decode, "a")}
        self.gateways = ["a"]
        self.wanted = "a"
        self.chance = random.Random(seed)
        self.budget = budget
        self.allows_downtime = False
        self.places_surge = True
        self.is_compatible = False
        self.reason = ""
        self.history: list[tuple[int, int, bool]] = []

    def seen(self) -> RolloutSeen:
        return RolloutSeen(
            pools={role: pool.seen(self.wanted) for role, pool in self.pools.items()},
            is_compatible=self.is_compatible or all(
                pod.template == self.wanted for pool in self.pools.values() for pod in pool.pods
            ),
            num_old_gateways=sum(gateway != self.wanted for gateway in self.gateways),
            pod_budget=self.budget,
            max_skew=1,
            allows_downtime=self.allows_downtime,
        )  # fmt: skip

    def round(self) -> None:
        step = next_step(self.seen())
        self.reason = step.reason
        for role, pool in self.pools.items():
            pool.apply(self.wanted, step.pools[role])
            pool.controller(may_place=self.places_surge or len(pool.pods) < pool.replicas)
            if len(pool.pods) <= pool.replicas or self.places_surge:
                pool.place_waiting()
            elif sum(pod.has_node for pod in pool.pods) < pool.replicas:
                next(pod for pod in pool.pods if not pod.has_node).has_node = True
            pool.start_some(self.chance, BROKEN)
        if not step.holds_gateway and self.has_pair(self.wanted) and self.chance.random() < 0.3:
            self.gateways = [self.wanted]
        self.history.append((self.pools[PREFILL].ready, self.pools[DECODE].ready, self.has_any_pair()))

    def run(self, rounds: int = 200) -> None:
        for _ in range(rounds):
            self.round()
            if self.budget is not None:
                assert sum(len(pool.pods) for pool in self.pools.values()) <= self.budget

    def has_pair(self, template: str) -> bool:
        return all(pool.ready_of(template) for pool in self.pools.values())

    def has_any_pair(self) -> bool:
        """A gateway's own pair: requests go only to workers of the gateway's model."""
        return all(self.has_pair(gateway) for gateway in self.gateways)

    @property
    def templates(self) -> set[str]:
        return {pod.template for pool in self.pools.values() for pod in pool.pods}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (1, 4), (3, 2), (4, 4), (2, 7)])
def test_a_rollout_keeps_capacity_and_pairs_and_ends(num_prefill: int, num_decode: int, seed: int) -> None:
    world = World(num_prefill, num_decode, seed=seed)
    world.wanted = "b"
    world.run()
    assert world.templates == {"b"}
    assert world.reason == "Complete"
    assert min(ready for ready, _, _ in world.history) >= num_prefill
    assert min(ready for _, ready, _ in world.history) >= num_decode
    assert all(has_pair for _, _, has_pair in world.history)


@pytest.mark.parametrize("seed", range(10))
def test_new_pods_that_never_start_leave_the_old_ones_alone(seed: int) -> None:
    world = World(2, 3, seed=seed)
    world.wanted = "broken"
    world.run(50)
    assert world.reason == "RollingOut"
    assert [pool.ready_of("a") for pool in world.pools.values()] == [2, 3]
    world.wanted = "c"
    world.run()
    assert world.templates == {"c"}
    assert all(has_pair for _, _, has_pair in world.history)


@pytest.mark.parametrize("seed", range(10))
def test_three_rapid_edits_end_in_the_last_one_with_two_of_three_decode_workers_at_least(seed: int) -> None:
    world = World(2, 3, seed=seed)
    for template, rounds in (("broken", 2), ("c", seed % 4), ("d", 300)):
        world.wanted = template
        world.run(rounds)
    assert world.templates == {"d"}
    assert min(ready for ready, _, _ in world.history) >= 1
    assert min(ready for _, ready, _ in world.history) >= 2


@pytest.mark.parametrize("midway", range(1, 12))
def test_a_revert_is_a_rollout_with_the_same_care(midway: int) -> None:
    world = World(3, 3, seed=midway)
    world.wanted = "b"
    world.run(midway)
    world.wanted = "a"
    world.run()
    assert world.templates == {"a"}
    assert min(itertools.chain.from_iterable((p, d) for p, d, _ in world.history)) >= 2
    assert all(has_pair for _, _, has_pair in world.history)


@pytest.mark.parametrize("seed", range(10))
def test_without_room_for_a_surge_one_worker_goes_at_a_time(seed: int) -> None:
    world = World(2, 3, seed=seed, budget=5)
    world.wanted = "b"
    world.run(300)
    assert world.templates == {"b"}
    assert all(prefill + decode >= 4 for prefill, decode, _ in world.history)
    assert all(has_pair for _, _, has_pair in world.history)


@pytest.mark.parametrize("seed", range(5))
def test_an_unschedulable_surge_is_no_deadlock(seed: int) -> None:
    world = World(2, 2, seed=seed)
    world.places_surge = False
    world.wanted = "b"
    world.run(300)
    assert world.templates == {"b"}
    assert min(prefill for prefill, _, _ in world.history) >= 1
    assert min(decode for _, decode, _ in world.history) >= 1


def test_the_only_pair_without_room_stays_and_says_so() -> None:
    world = World(1, 1, budget=2)
    world.wanted = "b"
    world.run(50)
    assert world.reason == "NoRoomToSurge"
    assert world.has_pair("a")


def test_downtime_is_taken_only_when_allowed() -> None:
    world = World(1, 1, budget=2)
    world.allows_downtime = True
    world.wanted = "b"
    world.run()
    assert world.templates == {"b"}


@pytest.mark.parametrize("seed", range(5))
def test_compatible_templates_roll_without_waiting_for_gateways(seed: int) -> None:
    world = World(2, 2, seed=seed)
    world.is_compatible = True
    world.gateways = ["other"]
    world.wanted = "b"
    for _ in range(200):
        world.round()
        world.gateways = ["other"]
    assert world.templates == {"b"}


def test_scaling_during_a_rollout_is_followed() -> None:
    world = World(2, 2)
    world.wanted = "b"
    world.run(3)
    world.pools[DECODE].replicas = 4
    world.run()
    assert world.templates == {"b"}
    assert world.pools[DECODE].ready_of("b") == 4


def test_nothing_moves_while_nothing_changes() -> None:
    pool = PoolSeen(2, True, True, 2, 2, 0.0, 0, 0, 0)
    seen = RolloutSeen({PREFILL: pool, DECODE: pool}, True, 0, None, 1, False)
    step = next_step(seen)
    assert step == next_step(seen)
    assert step.reason == "Complete"
    assert not any(s.hold for s in step.pools.values())


def test_the_last_old_worker_waits_for_the_streams_of_old_gateways() -> None:
    pool = PoolSeen(1, True, True, 1, 1, 0.0, 1, 1, 0)
    seen = RolloutSeen({PREFILL: pool, DECODE: pool}, False, 1, None, 1, False)
    assert [step.max_replaced for step in next_step(seen).pools.values()] == [0, 0]
    assert [step.max_replaced for step in next_step(replace(seen, num_old_gateways=0)).pools.values()] == [1, 1]


def pool(wanted: int, new: int, old: int, *, old_ready: int | None = None, unplaced_s: float = 0.0) -> PoolSeen:
    """A pool in the middle of a rollout; all new pods are ready but one without a node."""
    extra = 1 if unplaced_s else 0
    return PoolSeen(wanted, True, True, new + extra, new, unplaced_s, old, old if old_ready is None else old_ready, 0)


def replaced(prefill: PoolSeen, decode: PoolSeen, max_skew: int = 1) -> tuple[int, int]:
    """Old pods of each pool that go now."""
    steps = next_step(RolloutSeen({PREFILL: prefill, DECODE: decode}, False, 0, None, max_skew, False)).pools
    gone = [p.old_total - (p.wanted - steps[role].max_replaced) for role, p in ((PREFILL, prefill), (DECODE, decode))]
    return gone[0], gone[1]


def test_an_old_worker_that_is_not_ready_leaves_no_room_for_another_to_go() -> None:
    assert replaced(pool(2, 1, 2), pool(2, 1, 2)) == (1, 1)
    assert replaced(pool(2, 1, 2, old_ready=1), pool(2, 1, 2)) == (0, 1)


def test_a_pool_that_is_ahead_waits_for_the_other() -> None:
    assert replaced(pool(4, 3, 2), pool(4, 1, 4)) == (0, 1)
    assert replaced(pool(4, 2, 3), pool(4, 2, 3)) == (1, 1)


def test_the_last_ready_old_worker_stays_while_there_is_no_new_pair() -> None:
    without_room = pool(2, 1, 2, old_ready=1, unplaced_s=61.0)
    assert replaced(without_room, pool(1, 0, 1, unplaced_s=61.0), max_skew=2) == (0, 0)
    assert replaced(without_room, pool(2, 1, 2, old_ready=1, unplaced_s=61.0)) == (1, 0)
