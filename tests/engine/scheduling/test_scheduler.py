"""Scheduling under a virtual clock: no starvation, no head-of-line blocking, progress under memory pressure."""

from __future__ import annotations

import itertools
import random

import pytest
from build_engine import build_engine
from engine_oracle import make_sequence, run_to_end
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.executors.fake import FakeExecutor, FakeOptions, hash_token
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.errors import SettingError
from pdserve.reasons import SequenceState

VOCAB, EOS, BLOCK_SIZE = 997, frozenset({1}), 4


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make_fake_engine(make_engine, clock):
    """An engine whose tokens are a known function of the text so far."""

    def make(**options):
        executor = FakeExecutor(
            FakeOptions(), vocab_size=VOCAB, eos_token_ids=EOS, block_size=BLOCK_SIZE, max_model_len=4096
        )
        return make_engine(executor, **{"clock": clock, "max_wait_s": 100.0, **options})

    return make


def _prompt(length, seed=0):
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(5, VOCAB) for _ in range(length)]


def _assert_text(sequence):
    text = list(sequence.prompt_token_ids)
    for token_id in sequence.output_token_ids:
        assert token_id == hash_token(text, VOCAB, EOS)
        text.append(token_id)


def _add_all(engine, sequences):
    for sequence in sequences:
        engine.add(sequence)
    return sequences


def test_a_short_prompt_is_not_stuck_behind_a_long_one(make_fake_engine):
    """SC-03: the first token of a short prompt comes with the next step, the long one advances all the same."""
    engine = make_fake_engine(num_blocks=1024, max_num_batched_tokens=64)
    long = make_sequence(_prompt(3000), 2)
    engine.add(long)
    engine.step()
    short = make_sequence(_prompt(20), 2)
    engine.add(short)
    before = long.num_computed_tokens
    output = engine.step()
    assert [token[0] for token in output.tokens] == [short]
    assert long.num_computed_tokens - before >= 32
    run_to_end(engine)
    _assert_text(long)


def test_a_long_prompt_advances_under_a_stream_of_short_ones(make_fake_engine):
    engine = make_fake_engine(num_blocks=4096, max_num_batched_tokens=64, max_num_seqs=64)
    long = make_sequence(_prompt(640), 1)
    engine.add(long)
    num_steps = 0
    while long.finish_reason is None:
        _add_all(engine, [make_sequence(_prompt(16, seed=(num_steps, i)), 1) for i in range(8)])
        engine.step()
        num_steps += 1
        assert num_steps <= 640 / 32 + 1
    for sequence in [*engine.scheduler.waiting, *engine.scheduler.running]:
        engine.abort(sequence)


def test_small_requests_overtake_a_large_one_that_does_not_fit_until_it_has_aged(make_fake_engine, clock):
    """SC-04."""
    engine = make_fake_engine(num_blocks=20, watermark_blocks=0)
    running = make_sequence(_prompt(40), 30, arrival_s=0.0)
    engine.add(running)
    engine.step()
    clock.now_s = 1.0
    large = make_sequence(_prompt(60), 1, arrival_s=1.0)
    small = make_sequence(_prompt(8), 1, arrival_s=1.0)
    _add_all(engine, [large, small])
    assert engine.step().finished == [small]
    clock.now_s = 102.0  # the large one has aged, but the running one still holds its blocks
    later = make_sequence(_prompt(8, seed=1), 1, arrival_s=101.5)
    engine.add(later)
    assert later not in engine.step().started
    outputs = run_to_end(engine)
    order = [sequence for output in outputs for sequence in output.started]
    assert order == [large, later]


def test_low_priority_is_served_after_its_ageing_bound(make_fake_engine, clock):
    engine = make_fake_engine(max_num_seqs=1, max_num_batched_tokens=32)
    low = make_sequence(_prompt(8), 1, priority=5, arrival_s=0.0)
    engine.add(low)
    for number in range(200):
        clock.now_s = number * 1.0
        engine.add(make_sequence(_prompt(8, seed=number), 1, priority=0, arrival_s=clock.now_s))
        if low in engine.step().finished:
            break
    assert 99.0 <= clock.now_s <= 101.0
    run_to_end(engine)


def test_a_sequence_without_a_block_never_harms_its_mates(make_fake_engine):
    """SC-06, SC-09: eight sequences outgrow the pool; all end with their own text."""
    engine = make_fake_engine(num_blocks=24)
    sequences = _add_all(engine, [make_sequence(_prompt(8, seed=i), 40, arrival_s=float(i)) for i in range(8)])
    outputs = run_to_end(engine)
    assert sum(len(output.preempted) for output in outputs) > 0
    for sequence in sequences:
        assert len(sequence.output_token_ids) == 40
        _assert_text(sequence)


def test_a_severely_undersized_pool_still_finishes_everything_in_order_of_age(make_fake_engine):
    """SC-02, PD-08, PD-23: each sequence alone nearly fills the pool; preemptions stay bounded."""
    engine = make_fake_engine(num_blocks=40, watermark_blocks=1)
    sequences = [make_sequence(_prompt(12, seed=i), 140, arrival_s=float(i)) for i in range(12)]
    _add_all(engine, sequences)
    outputs = run_to_end(engine, 4000)
    oldest = sequences[0]
    assert oldest.num_preemptions == 0, "the oldest is never the victim"
    assert all(len(s.output_token_ids) == 140 for s in sequences)
    assert sum(len(output.preempted) for output in outputs) > 0
    assert max(s.num_preemptions for s in sequences) <= len(sequences)
    for sequence in sequences:
        _assert_text(sequence)


def test_one_failed_allocation_preempts_one_victim_and_never_the_same_one_twice_in_a_row(make_fake_engine):
    """PD-24."""
    engine = make_fake_engine(num_blocks=16, watermark_blocks=0, prefix_cache=False)
    sequences = [make_sequence(_prompt(15, seed=i), 30, arrival_s=float(i)) for i in range(4)]
    _add_all(engine, sequences)
    victims = []
    for output in run_to_end(engine):
        assert len(output.preempted) <= 1, "all four cross a block border in the same step: one victim serves them"
        victims += output.preempted
    assert victims
    assert sequences[0] not in victims
    assert all(a is not b for a, b in itertools.pairwise(victims))


def test_blocks_pinned_by_a_lease_make_no_victim(make_fake_engine):
    """PD-22, PD-24: preempting a leased prompt would yield nothing, so the one in need sits out."""
    engine = make_fake_engine(num_blocks=12, max_num_batched_tokens=32)
    old = make_sequence(_prompt(12), 20, arrival_s=0.0)
    engine.add(old)
    engine.step()
    prompt = make_sequence(_prompt(32, seed=1), 20, arrival_s=1.0, is_prefill_only=True)
    engine.add(prompt)
    engine.step()
    assert prompt.state is SequenceState.RUNNING
    engine.grant_lease(prompt)
    stalled = 0
    for _ in range(8):
        output = engine.step()
        assert not output.preempted
        stalled += output.num_stalled
    assert stalled > 0
    assert prompt.state is SequenceState.LEASED
    engine.release_lease(prompt.key)
    run_to_end(engine)
    _assert_text(old)


def test_prompts_under_pressure_are_only_ready_with_all_their_blocks(make_fake_engine):
    """PD-22: sixteen prompts, a pool for two; each leased prompt's KV is complete and right."""
    engine = make_fake_engine(num_blocks=12, max_num_batched_tokens=16)
    sequences = [make_sequence(_prompt(17 + i % 5, seed=i), 9, is_prefill_only=True) for i in range(16)]
    _add_all(engine, sequences)
    done = []
    for _ in range(200):
        for sequence, token_id, _logprobs in engine.step().tokens:
            assert len(sequence.block_table) == -(-sequence.num_prompt_tokens // BLOCK_SIZE)
            assert token_id == hash_token(sequence.prompt_token_ids, VOCAB, EOS)
            engine.check_integrity()
            done.append(sequence)
            engine.release_lease(sequence.key)
    assert sorted(map(id, done)) == sorted(map(id, sequences))
    assert engine.check_integrity().by_state["leased"] == 0


def test_a_failed_allocation_leaves_nothing_behind(make_fake_engine, monkeypatch):
    """SC-07: an exception in the middle of admission; then traffic goes on with the whole pool."""
    engine = make_fake_engine(num_blocks=16)
    warm = make_sequence(_prompt(20), 1)
    engine.add(warm)
    run_to_end(engine)
    sequence = make_sequence([*_prompt(20), 9, 9], 1)
    engine.add(sequence)
    with monkeypatch.context() as patch:
        patch.setattr(BlockPool, "take", lambda *_: (_ for _ in ()).throw(RuntimeError("injected")))
        with pytest.raises(RuntimeError, match="injected"):
            engine.step()
        engine.check_integrity()
    assert engine.block_pool.num_available == 16
    run_to_end(engine)
    assert sequence.num_cached_tokens == 20
    _assert_text(sequence)


def test_a_follower_waits_for_a_prefix_in_flight_but_not_beyond_its_bound(make_fake_engine, clock):
    engine = make_fake_engine(num_blocks=512, max_num_batched_tokens=16)
    prompt = _prompt(160)
    leader = make_sequence(prompt, 1, arrival_s=0.0)
    follower = make_sequence([*prompt[:100], 7], 1, arrival_s=0.0)
    stranger = make_sequence(_prompt(8), 1, arrival_s=0.0)
    _add_all(engine, [leader, follower, stranger])
    assert engine.step().started == [leader, stranger]
    while leader.num_computed_tokens < 100:
        assert follower.state is SequenceState.WAITING
        engine.step()
    run_to_end(engine)
    assert follower.num_cached_tokens == 100

    prompt = _prompt(160, seed=1)
    for is_aged in (False, True):
        clock.now_s = 50.0
        leader = make_sequence([*prompt, int(is_aged) + 5], 1, arrival_s=50.0, cache_salt=str(is_aged))
        follower = make_sequence(prompt[:8], 1, arrival_s=50.0, cache_salt=str(is_aged))
        _add_all(engine, [leader, follower])
        clock.now_s = 1000.0 if is_aged else 50.0
        started = engine.step().started
        assert started == ([leader, follower] if is_aged else [leader]), "an aged sequence waits for nobody"
        run_to_end(engine)
        _assert_text(follower)


def test_cancelled_prompts_leave_the_queue_before_they_are_computed(make_fake_engine):
    """PD-26, PD-45."""
    engine = make_fake_engine(num_blocks=4096, max_num_batched_tokens=64)
    long = _add_all(engine, [make_sequence(_prompt(2000, seed=i), 1) for i in range(10)])
    engine.step()
    for sequence in long:
        engine.abort(sequence)
    short = make_sequence(_prompt(20), 1)
    engine.add(short)
    assert engine.step().num_tokens == 20
    assert short.finish_reason == "length"
    assert engine.check_integrity().by_state["owned"] == 0


def test_a_budget_below_the_number_of_sequences_is_refused_by_name(make_fake_engine):
    with pytest.raises(SettingError, match="MAX_NUM_BATCHED_TOKENS"):
        make_fake_engine(max_num_seqs=8, max_num_batched_tokens=7)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_any_mix_of_arrivals_cancellations_and_leases_ends_with_the_right_text_and_an_empty_ledger(seed):
    rng = random.Random(seed)
    executor = FakeExecutor(
        FakeOptions(), vocab_size=VOCAB, eos_token_ids=EOS, block_size=BLOCK_SIZE, max_model_len=4096
    )
    now = Clock()
    engine = build_engine(
        executor,
        num_blocks=rng.randrange(16, 40),
        max_num_seqs=rng.randrange(1, 7),
        max_num_batched_tokens=rng.randrange(8, 40),
        max_wait_s=rng.choice([3.0, 30.0]),
        prefix_cache=rng.random() < 0.7,
        eos_token_ids=EOS,
        watermark_blocks=rng.randrange(3),
        clock=now,
    )
    alive, finished, leased = [], [], []
    shared = _prompt(24, seed)
    for number in range(150):
        now.now_s += 1.0
        if number < 80 and rng.random() < 0.3:
            prompt = shared[: rng.randrange(1, 24)] + _prompt(rng.randrange(1, 12), seed + number)
            sequence = make_sequence(
                prompt,
                rng.randrange(1, 12),
                arrival_s=now.now_s,
                priority=rng.randrange(3),
                cache_salt=rng.choice(["", "a"]),
                is_prefill_only=rng.random() < 0.3,
            )
            engine.add(sequence)
            alive.append(sequence)
        if alive and rng.random() < 0.05:
            engine.abort(alive.pop(rng.randrange(len(alive))))
        if leased and rng.random() < 0.5:
            engine.release_lease(leased.pop(0).key)
        output = engine.step()
        for sequence in output.finished:
            alive.remove(sequence)
            finished.append(sequence)
        for sequence in [s for s in alive if s.state is SequenceState.LEASED]:
            alive.remove(sequence)
            leased.append(sequence)
            finished.append(sequence)
        engine.check_integrity()
    for sequence in leased:
        engine.release_lease(sequence.key)
    for sequence in finished:
        _assert_text(sequence)
    for _ in range(300):
        for sequence in engine.step().tokens:
            if sequence[0].state is SequenceState.LEASED:
                engine.release_lease(sequence[0].key)
    assert not engine.has_work
    report = engine.check_integrity()
    assert report.by_state["owned"] == report.by_state["leased"] == 0
