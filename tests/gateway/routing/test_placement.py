"""Windows, pins, and prompts that wait for the decode pool."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import msgspec
import pytest
from dispatching import request
from registrations import decode, pool, prefill

from pdserve.gateway.routing.placement import Placement, Wait
from pdserve.gateway.routing.router import Demand, Disaggregation, Router
from pdserve.registration import WorkerRef, WorkerRegistration


def placement(is_inbox_full: Callable[[WorkerRef], bool] = lambda worker: False, seed: int = 0) -> Placement:
    router = Router("f", Disaggregation(), rng=random.Random(seed))
    return Placement(router, settle_after_s=0.25, is_inbox_full=is_inbox_full)


def demand(num_tokens: int = 20, first_token: int = 0, *, is_local: bool = False, **changes: object) -> Demand:
    tokens = list(range(first_token, first_token + num_tokens))
    return Demand(request(prompt_token_ids=tokens, **changes), is_local)


def worker_id(found: WorkerRegistration | Wait) -> str | Wait:
    return found if isinstance(found, Wait) else found.worker_id


def test_a_prompt_goes_only_while_its_worker_has_room() -> None:
    p, workers = placement(), pool(prefill(window=50), decode(window=1000))
    for number in range(2):
        d = demand(20, first_token=100 * number)
        assert worker_id(p.find_prefill(d, workers, 0.0, set())) == "P"
        p.take_prefill(number, d, workers["P"], 0.0)
    assert p.find_prefill(demand(20, 900), workers, 0.0, set()) is Wait.NO_ROOM
    p.prefill_windows.release(workers["P"].ref, 0)
    assert worker_id(p.find_prefill(demand(20, 900), workers, 0.0, set())) == "P"


def test_a_prompt_larger_than_the_window_goes_when_nothing_of_ours_is_there() -> None:
    p, workers = placement(), pool(prefill(window=50), decode(window=1000))
    big = demand(400)
    assert worker_id(p.find_prefill(big, workers, 0.0, set())) == "P"
    p.take_prefill("big", big, workers["P"], 0.0)
    assert p.find_prefill(demand(1, 900), workers, 0.0, set()) is Wait.NO_ROOM


def test_nobody_overtakes_an_entry_that_waits_for_the_same_worker() -> None:
    p, workers = placement(), pool(prefill(window=50), decode(window=1000))
    p.take_prefill("first", demand(40), workers["P"], 0.0)
    blocked: set[WorkerRef] = set()
    assert p.find_prefill(demand(30, 100), workers, 0.0, blocked) is Wait.NO_ROOM
    assert blocked == {workers["P"].ref}
    assert p.find_prefill(demand(5, 200), workers, 0.0, blocked) is Wait.NO_ROOM


def test_cached_prefixes_take_no_room_and_draw_the_prompt_to_their_worker() -> None:
    workers = pool(prefill("p1"), prefill("p2"), decode(window=1000))
    for seed in range(10):
        p = placement(seed=seed)
        p.take_prefill("a", demand(40), workers["p1"], 0.0)
        p.prefill_windows.release(workers["p1"].ref, "a")
        same = demand(40)
        assert worker_id(p.find_prefill(same, workers, 0.0, set())) == "p1"
        p.take_prefill("b", same, workers["p1"], 0.0)
        assert p.prefill_windows.total(workers["p1"].ref) == 40 - 2 * 16


def test_a_prompt_that_is_scored_is_counted_as_a_whole_and_blames_no_cache() -> None:
    p, workers = placement(), pool(prefill("p1"), decode(window=1000))
    p.take_prefill("a", demand(40), workers["p1"], 0.0)
    p.prefill_windows.release(workers["p1"].ref, "a")
    scored = demand(40)
    scored.request = dataclasses.replace(
        scored.request, sampling=msgspec.structs.replace(scored.request.sampling, prompt_logprobs=1)
    )
    assert p.num_guessed_tokens(scored, workers["p1"]) == 0
    assert p.num_guessed_tokens(Demand(scored.request, is_local=False, output=[5]), workers["p1"]) == 2 * 16
    p.take_prefill("b", scored, workers["p1"], 0.0)
    assert p.prefill_windows.total(workers["p1"].ref) == 40
    p.router.prefixes.note_reported(workers["p1"].ref, p.num_guessed_tokens(scored, workers["p1"]), 0)
    assert p.router.prefixes.credit(workers["p1"].ref) == 1.0


def test_a_prompt_waits_in_the_gateway_while_the_decode_pool_is_full() -> None:
    p = placement()
    workers = pool(prefill(window=10_000), decode(window=14))
    for number in range(2):
        d = demand(20, 100 * number)
        assert worker_id(p.find_prefill(d, workers, 0.0, set())) == "P"
        p.take_prefill(number, d, workers["P"], 0.0)
    third = demand(20, 900)
    assert p.find_prefill(third, workers, 0.0, set()) is Wait.NO_ROOM
    p.take_decode(0, demand(20), workers["D"], 0.0)
    assert p.find_prefill(third, workers, 0.0, set()) is Wait.NO_ROOM
    p.take_decode(1, demand(20), workers["D"], 0.0)
    for number in range(2):
        p.decode_windows.release(workers["D"].ref, number)
    assert worker_id(p.find_prefill(third, workers, 0.0, set())) == "P"


def test_small_prompts_do_not_overtake_a_large_one_that_waits_for_the_decode_pool() -> None:
    p = placement()
    workers = pool(prefill(window=10_000), decode(window=10))
    first = demand(12)
    p.take_prefill("first", first, workers["P"], 0.0)
    p.take_decode("first", first, workers["D"], 0.0)
    blocked: set[WorkerRef] = set()
    assert p.find_prefill(demand(28, 100), workers, 0.0, blocked) is Wait.NO_ROOM
    assert p.find_prefill(demand(4, 200), workers, 0.0, blocked) is Wait.NO_ROOM
    assert worker_id(p.find_prefill(demand(4, 200), workers, 0.0, set())) == "P"


def test_what_a_decode_worker_has_reported_as_used_is_not_subtracted_twice() -> None:
    p, worker = placement(), decode(window=14)
    p.take_decode("a", demand(20), worker, 0.0)
    assert p.find_decode(demand(40, 50), pool(worker), 1.0, prefill()) is Wait.NO_ROOM
    p.refresh(worker, 1.0)
    assert worker_id(p.find_decode(demand(40, 50), pool(worker), 1.0, prefill())) == "D"


def test_an_idle_decode_worker_always_takes_one() -> None:
    p, worker = placement(), decode(window=0)
    assert worker_id(p.find_decode(demand(20), pool(worker), 0.0, prefill())) == "D"
    p.take_decode("a", demand(20), worker, 0.0)
    assert p.find_decode(demand(20, 50), pool(worker), 0.0, prefill()) is Wait.NO_ROOM


def test_a_prompt_that_is_computed_where_it_is_decoded_needs_no_prefill_worker() -> None:
    p, workers = placement(), pool(decode("d1", window=14), decode("d2", window=40))
    assert p.has_workers(demand(is_local=True), workers)
    assert [worker.worker_id for worker in p.computing(demand(is_local=True), workers)] == ["d1", "d2"]
    p.take_decode("a", demand(40), workers["d1"], 0.0)
    for number in range(10):
        local = demand(20, 50 + number, is_local=True)
        assert worker_id(p.find_local(local, workers, 0.0, set())) == "d2", "the other one is full"
    assert p.find_local(demand(is_local=True), pool(prefill()), 0.0, set()) is Wait.NO_PAIR


def test_a_small_local_prompt_does_not_overtake_a_large_one_that_waits() -> None:
    p, workers = placement(), pool(decode(window=10))
    p.take_decode("first", demand(12), workers["D"], 0.0)
    blocked: set[WorkerRef] = set()
    assert p.find_local(demand(28, 100, is_local=True), workers, 0.0, blocked) is Wait.NO_ROOM
    assert p.find_local(demand(4, 200, is_local=True), workers, 0.0, blocked) is Wait.NO_ROOM
    assert worker_id(p.find_local(demand(4, 200, is_local=True), workers, 0.0, set())) == "D"


def test_a_local_prompt_leaves_room_for_hand_offs_on_their_way() -> None:
    p, workers = placement(), pool(prefill(window=10_000), decode(window=14))
    p.take_prefill("on its way", demand(40), workers["P"], 0.0)
    assert p.find_local(demand(20, 50, is_local=True), workers, 0.0, set()) is Wait.NO_ROOM
    p.release_unbound("on its way")
    assert worker_id(p.find_local(demand(20, 50, is_local=True), workers, 0.0, set())) == "D"


def test_a_local_prompt_goes_to_its_pinned_decode_worker_alone() -> None:
    p, workers = placement(), pool(decode("d1"), decode("d2"))
    for number in range(10):
        pinned = demand(20, number, is_local=True, pinned_decode="d2")
        assert worker_id(p.find_local(pinned, workers, 0.0, set())) == "d2"
    missing = demand(is_local=True, pinned_decode="d9")
    assert p.find_local(missing, workers, 0.0, set()) is Wait.NO_PAIR
    assert not p.has_workers(missing, workers)
    missing = Demand(missing.request, missing.is_local, output=[])
    assert not isinstance(p.find_local(missing, workers, 0.0, set()), Wait)


def test_the_last_token_needs_no_room_for_decoding() -> None:
    p = placement()
    workers = pool(prefill(window=1000), decode(window=0))
    p.take_decode("a", demand(20), workers["D"], 0.0)
    assert worker_id(p.find_prefill(demand(20, 50, max_tokens=1), workers, 0.0, set())) == "P"


def test_pairs_of_different_kv_signature_are_never_made() -> None:
    workers = pool(
        prefill("pa", kv_signature="a"),
        prefill("pb", kv_signature="b"),
        decode("da", kv_signature="a", window=10_000),
        decode("db", kv_signature="b", window=10_000),
    )
    for seed in range(200):
        p = placement(seed=seed)
        found = p.find_prefill(demand(20, seed), workers, 0.0, set())
        assert not isinstance(found, Wait)
        partner = p.find_decode(demand(20, seed), workers, 0.0, found)
        assert not isinstance(partner, Wait)
        assert partner.kv_signature == found.kv_signature


def test_without_a_pair_nothing_goes() -> None:
    p = placement()
    for workers in (pool(prefill()), pool(decode()), pool(prefill(), decode(kv_signature="x"))):
        assert p.find_prefill(demand(), workers, 0.0, set()) is Wait.NO_PAIR
        assert not p.has_workers(demand(), workers)
    assert p.has_workers(demand(is_local=True), pool(decode()))


def test_pins_name_the_pair_and_a_missing_pinned_worker_is_no_pair_at_first() -> None:
    workers = pool(prefill("p1"), prefill("p2"), decode("d1"), decode("d2"))
    for seed in range(10):
        p = placement(seed=seed)
        pinned = demand(pinned_prefill="p2", pinned_decode="d1")
        assert worker_id(p.find_prefill(pinned, workers, 0.0, set())) == "p2"
        assert worker_id(p.find_decode(pinned, workers, 0.0, workers["p2"])) == "d1"
    missing = demand(pinned_decode="d9")
    assert p.find_prefill(missing, workers, 0.0, set()) is Wait.NO_PAIR
    missing = Demand(missing.request, missing.is_local, output=[])
    assert not isinstance(p.find_prefill(missing, workers, 0.0, set()), Wait)


def test_a_decode_worker_that_refused_is_not_found_again() -> None:
    workers = pool(prefill(), decode("d1"), decode("d2"))
    p, refused = placement(), {workers["d1"].ref}
    assert worker_id(p.find_decode(demand(), workers, 0.0, workers["P"], refused)) == "d2"
    refused.add(workers["d2"].ref)
    assert p.find_decode(demand(), workers, 0.0, workers["P"], refused) is Wait.ALL_REFUSED
    assert p.find_decode(demand(), pool(prefill()), 0.0, workers["P"], refused) is Wait.NO_PAIR


@pytest.mark.parametrize("full", ["p1", "d1"])
def test_a_worker_with_a_full_inbox_is_left_alone(full: str) -> None:
    workers = pool(prefill("p1"), prefill("p2"), decode("d1"), decode("d2"))
    p = placement(lambda worker: worker.worker_id == full)
    for number in range(10):
        found = p.find_prefill(demand(20, number), workers, 0.0, set())
        assert worker_id(found) != full
        assert worker_id(p.find_decode(demand(20, number), workers, 0.0, workers["p2"])) != full
