"""The engine's own promises: endings, leases, aborts, failures, and what can never fit."""

from __future__ import annotations

import random

import pytest
from engine_oracle import make_sequence, run_to_end

from pdserve.engine.executors.fake import FakeExecutor, FakeOptions, hash_token
from pdserve.errors import InvalidRequestError
from pdserve.reasons import SequenceState

VOCAB, EOS, BLOCK_SIZE = 997, frozenset({1, 2}), 4


def _prompt(length, seed=0):
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(5, VOCAB) for _ in range(length)]


@pytest.fixture
def make_fake(make_engine):
    def make(max_model_len=256, **options):
        executor = FakeExecutor(
            FakeOptions(), vocab_size=VOCAB, eos_token_ids=EOS, block_size=BLOCK_SIZE, max_model_len=max_model_len
        )
        return make_engine(executor, **{"eos_token_ids": EOS, **options})

    return make


@pytest.mark.parametrize("is_prefill_only", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 100])
def test_max_tokens_1_gives_exactly_one_token_and_keeps_no_block(length, is_prefill_only, make_fake):
    """PD-27."""
    engine = make_fake(max_num_batched_tokens=16)
    sequence = make_sequence(_prompt(length), 1, is_prefill_only=is_prefill_only)
    engine.add(sequence)
    outputs = run_to_end(engine)
    assert [token for output in outputs for token in output.tokens] == [(sequence, sequence.output_token_ids[0], None)]
    assert outputs[-1].finished == [sequence]
    assert sequence.finish_reason == "length"
    report = engine.check_integrity()
    assert report.by_request == {}
    assert sum(output.num_tokens for output in outputs) == length


@pytest.mark.parametrize("eos", sorted(EOS))
def test_any_end_of_sequence_token_ends_it_with_token_0_too(eos, make_fake):
    """PD-28, SP-07."""
    engine = make_fake()
    sequence = make_sequence(
        _prompt(6), 9, is_prefill_only=True, sampling={"ignore_eos": False, "logit_bias": {eos: 100.0}}
    )
    engine.add(sequence)
    run_to_end(engine)
    assert (sequence.output_token_ids, sequence.finish_reason, sequence.stop_token_id) == ([eos], "stop", eos)
    assert engine.check_integrity().by_request == {}


def test_ignore_eos_and_min_tokens_hold_for_token_0(make_fake):
    """PD-29, SP-06."""
    engine = make_fake()
    bias = {1: 100.0, 2: 90.0}
    ignoring = make_sequence(_prompt(6), 5, sampling={"ignore_eos": True, "logit_bias": bias})
    patient = make_sequence(_prompt(6), 9, sampling={"ignore_eos": False, "min_tokens": 3, "logit_bias": bias})
    for sequence in (ignoring, patient):
        engine.add(sequence)
    run_to_end(engine)
    assert ignoring.output_token_ids == [1] * 5
    assert ignoring.finish_reason == "length"
    assert len(patient.output_token_ids) == 4
    assert not EOS & set(patient.output_token_ids[:3])
    assert patient.stop_token_id == 1


def test_the_context_length_ends_a_sequence(make_fake):
    engine = make_fake(max_model_len=16)
    sequence = make_sequence(_prompt(10), 6)
    engine.add(sequence)
    run_to_end(engine)
    assert sequence.num_tokens == 16
    assert sequence.finish_reason == "length"


@pytest.mark.parametrize(
    ("length", "max_tokens", "options", "message"),
    [
        (60, 5, {}, "60 prompt tokens and 5 output tokens .* context length 64"),
        (33, 5, {"num_blocks": 9}, "KV cache 36 tokens"),
        (37, 1, {"num_blocks": 9}, "KV cache 36 tokens"),
        (0, 1, {}, "no tokens"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(length, max_tokens, options, message, make_fake):
    """PD-09."""
    engine = make_fake(max_model_len=64, **options)
    for arrive in (engine.add, engine.reserve):
        with pytest.raises(InvalidRequestError, match=message):
            arrive(make_sequence(_prompt(length), max_tokens))
    assert not engine.has_work
    assert engine.check_integrity().by_request == {}


def test_what_just_fits_is_served(make_fake):
    engine = make_fake(max_model_len=64, num_blocks=9)
    sequences = [make_sequence(_prompt(33), 4), make_sequence(_prompt(36), 1)]
    sequences.append(make_sequence(_prompt(36, 1), 20, is_prefill_only=True))
    for sequence in sequences:
        engine.add(sequence)
        run_to_end(engine)
    assert [len(s.output_token_ids) for s in sequences] == [4, 1, 1]
    engine.release_lease(sequences[2].key)


def test_token_ids_beyond_the_vocabulary_are_refused(make_fake):
    engine = make_fake()
    for token_id in (-1, VOCAB):
        with pytest.raises(InvalidRequestError, match="token ids"):
            engine.add(make_sequence([5, token_id]))


def test_a_lease_keeps_blocks_through_the_end_and_a_cancel_but_not_its_release(make_fake):
    """PD-18: a late notice harms nobody."""
    engine = make_fake(max_num_batched_tokens=8)
    sequence = make_sequence(_prompt(20), 9, is_prefill_only=True)
    engine.add(sequence)
    engine.step()
    engine.grant_lease(sequence)
    engine.grant_lease(sequence)
    assert engine.check_integrity().by_request[str(sequence.key)] == {"owned": 5, "leased": 5}
    run_to_end(engine)
    assert sequence.state is SequenceState.LEASED
    assert engine.check_integrity().by_request[str(sequence.key)] == {"leased": 5}
    engine.abort(sequence)
    assert engine.check_integrity().by_state["leased"] == 5, "a cancel alone unpins nothing"
    engine.release_lease(sequence.key)
    engine.release_lease(sequence.key)
    assert sequence.state is SequenceState.FINISHED
    assert engine.check_integrity().by_request == {}
    engine.grant_lease(sequence)
    assert engine.check_integrity().by_request == {}


def test_an_abort_in_the_middle_of_a_leased_prompt_leaves_the_lease_to_its_owner(make_fake):
    engine = make_fake(max_num_batched_tokens=8)
    sequence = make_sequence(_prompt(20), 9, is_prefill_only=True)
    engine.add(sequence)
    engine.step()
    engine.grant_lease(sequence)
    engine.abort(sequence)
    assert engine.check_integrity().by_request[str(sequence.key)] == {"leased": 5}
    assert not engine.has_work
    engine.release_lease(sequence.key)
    assert engine.check_integrity().by_request == {}


def test_aborts_in_every_state_give_everything_back(make_fake):
    engine = make_fake(num_blocks=20, max_num_batched_tokens=16)
    running = [make_sequence(_prompt(12, i), 30, arrival_s=float(i)) for i in range(4)]
    for sequence in running:
        engine.add(sequence)
    while not any(sequence.num_preemptions for sequence in running):
        engine.step()
    waiting = make_sequence(_prompt(12, 9), 3)
    engine.add(waiting)
    for sequence in [*running, waiting]:
        engine.abort(sequence)
        engine.abort(sequence)
        engine.check_integrity()
    assert not engine.has_work
    assert engine.block_pool.num_available == 20
    assert {sequence.state for sequence in running} == {SequenceState.FINISHED}


def test_a_step_that_fails_names_its_sequences_and_can_be_repeated(make_fake, monkeypatch):
    engine = make_fake()
    first, second = make_sequence(_prompt(6), 4), make_sequence(_prompt(7), 4)
    for sequence in (first, second):
        engine.add(sequence)
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "run", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert engine.sequences_in_step == [first, second]
    assert first.num_computed_tokens == 0
    engine.check_integrity()
    engine.abort(first)
    run_to_end(engine)
    assert second.output_token_ids[0] == hash_token(second.prompt_token_ids, VOCAB, EOS)
    assert len(second.output_token_ids) == 4


def test_a_step_tells_who_started_progressed_and_ended(make_fake):
    engine = make_fake(max_num_batched_tokens=8)
    sequence = make_sequence(_prompt(20), 2)
    engine.add(sequence)
    outputs = run_to_end(engine)
    assert [bool(output.started) for output in outputs] == [True, False, False, False]
    assert [bool(output.progressed) for output in outputs] == [True, True, True, False]
    assert [output.num_decode_tokens for output in outputs] == [0, 0, 0, 1]
    assert [len(output.tokens) for output in outputs] == [0, 0, 1, 1]
    assert outputs[-1].finished == [sequence]
    assert engine.step().num_tokens == 0
    assert not engine.has_work


def test_tenants_share_nothing(make_fake):
    """PD-50."""
    engine = make_fake()
    for salt, expected in (("a", 0), ("b", 0), ("a", 16), ("b", 16)):
        sequence = make_sequence(_prompt(18), 2, cache_salt=salt)
        engine.add(sequence)
        run_to_end(engine)
        assert sequence.num_cached_tokens == expected
