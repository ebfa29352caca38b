"""Which worker: identity first, then the better of two."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from registrations import decode, pool, prefill

from pdserve.gateway.routing.router import DecodeLoad, Disaggregation, PrefillLoad, Router
from pdserve.registration import Role, WorkerRegistration, WorkerState


def router(seed: int = 0, **changes: object) -> Router:
    return Router("f", Disaggregation(), rng=random.Random(seed), **changes)  # type: ignore[arg-type]


def queue_of(worker: WorkerRegistration) -> PrefillLoad:
    return PrefillLoad(num_queued_tokens=worker.load.waiting_tokens, num_uncached_tokens=10)


def batch_of(worker: WorkerRegistration) -> DecodeLoad:
    load = worker.load
    return DecodeLoad(load.num_running + load.num_waiting, load.num_available_blocks, 5)


def test_only_ready_workers_of_this_model_are_candidates() -> None:
    workers = pool(
        prefill("ok"),
        prefill("draining", state=WorkerState.DRAINING),
        prefill("other", fingerprint="g"),
        decode("d"),
    )
    assert [worker.worker_id for worker in router().ready(workers, Role.PREFILL)] == ["ok"]


def test_workers_without_a_partner_of_equal_kv_signature_are_no_pair() -> None:
    workers = pool(
        prefill("p1", kv_signature="a"),
        prefill("p2", kv_signature="b"),
        decode("d1", kv_signature="a"),
        decode("d2", kv_signature="c"),
    )
    prefills, decodes = router().pairs(workers)
    assert ([w.worker_id for w in prefills], [w.worker_id for w in decodes]) == (["p1"], ["d1"])
    assert router().pairs(pool(prefill(), decode(kv_signature="x"))) == ([], [])


def test_the_shorter_queue_wins_in_time_not_in_tokens() -> None:
    slow = prefill("slow", waiting_tokens=100, tokens_per_s=100.0)
    fast = prefill("fast", waiting_tokens=500, tokens_per_s=10_000.0)
    assert router().choose_prefill([slow, fast], queue_of, 0.0) is fast


def test_an_unmeasured_rate_is_taken_as_the_others_mean() -> None:
    measured = prefill("measured", waiting_tokens=100, tokens_per_s=50.0)
    fresh = prefill("fresh", waiting_tokens=0)
    assert router().choose_prefill([measured, fresh], queue_of, 0.0) is fresh


def test_a_cached_prefix_wins_when_the_queues_are_equal_and_loses_against_a_much_longer_queue() -> None:
    workers = [prefill(f"p{i}") for i in range(8)]

    def load_with(queued: int) -> object:
        return lambda worker: PrefillLoad(queued if worker is workers[5] else 0, 10 if worker is workers[5] else 1000)

    for seed in range(20):
        assert router(seed).choose_prefill(workers, load_with(0), 0.0) is workers[5]  # type: ignore[arg-type]
        assert router(seed).choose_prefill(workers, load_with(5000), 0.0) is not workers[5]  # type: ignore[arg-type]


def test_equal_costs_go_to_the_same_node_then_to_the_same_zone() -> None:
    far = decode("far", node="n2", zone="z2")
    zone = decode("zone", node="n3", zone="z1")
    near = decode("near", node="n1", zone="z1")
    source = prefill(node="n1", zone="z1")
    for seed in range(20):
        assert router(seed).choose_decode([far, near], batch_of, 0.0, source) is near
        assert router(seed).choose_decode([far, zone], batch_of, 0.0, source) is zone


def test_a_smaller_batch_and_a_faster_step_win() -> None:
    busy, idle = decode("busy", num_running=32, step_s=0.02), decode("idle", num_running=2, step_s=0.02)
    slow = decode("slow", num_running=2, step_s=0.2)
    assert router().choose_decode([busy, idle], batch_of, 0.0, None) is idle
    assert router().choose_decode([busy, slow], batch_of, 0.0, None) is busy


def test_a_nearly_full_decode_worker_loses_against_an_equal_one_with_room() -> None:
    full, roomy = decode("full", num_available_blocks=5), decode("roomy", num_available_blocks=500)
    assert router().choose_decode([full, roomy], batch_of, 0.0, None) is roomy


def test_the_better_of_two_random_ones_spreads_equal_workers_and_shuns_the_worst() -> None:
    workers = [decode(f"d{i}", num_running=50 if i == 0 else 1) for i in range(5)]
    one = router(1)
    chosen = Counter(one.choose_decode(workers, batch_of, 0.0, None).worker_id for _ in range(500))  # type: ignore[union-attr]
    assert "d0" not in chosen
    assert min(chosen[f"d{i}"] for i in range(1, 5)) > 50


def test_a_failed_worker_is_avoided_only_for_a_while_and_only_while_another_exists() -> None:
    one = router(avoid_s=5.0)
    bad, good = decode("bad"), decode("good", num_running=30)
    one.avoid(bad.ref, None, now_s=0.0)
    assert one.choose_decode([bad, good], batch_of, 1.0, None) is good
    assert one.choose_decode([bad], batch_of, 1.0, None) is bad
    assert one.choose_decode([bad, good], batch_of, 5.1, None) is bad


def test_a_failed_pair_is_avoided_as_a_pair() -> None:
    one = router()
    p1, p2 = prefill("p1"), prefill("p2")
    bad, good = decode("bad"), decode("good", num_running=30)
    one.avoid(bad.ref, p1.ref, now_s=0.0)
    assert one.choose_decode([bad, good], batch_of, 1.0, p1) is good
    assert one.choose_decode([bad, good], batch_of, 1.0, p2) is bad


def test_a_new_generation_carries_no_mark_of_the_old_one() -> None:
    one = router()
    one.avoid(decode("d").ref, None, now_s=0.0)
    assert not one.is_avoided(decode("d", generation="2").ref, None, 1.0)


@pytest.mark.parametrize("seed", range(3))
def test_nobody_to_choose_from_is_none(seed: int) -> None:
    assert router(seed).choose_prefill([], queue_of, 0.0) is None
    assert router(seed).choose_decode([], batch_of, 0.0, None) is None
