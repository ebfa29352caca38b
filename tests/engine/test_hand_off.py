"""Prefill on one engine, decode on another, KV copied block by block: the text is transformers.generate's."""

from __future__ import annotations

import random

import pytest
from engine_oracle import assert_greedy, make_sequence, run_to_end

from pdserve.engine.executors.fake import FakeExecutor, FakeOptions, hash_token
from pdserve.errors import NoCapacityError
from pdserve.models.tiny import ARCHITECTURES
from pdserve.reasons import SequenceState

BLOCK_SIZE, VOCAB, EOS = 4, 997, frozenset({1})


def _prompt(length, seed=0, vocab_size=VOCAB):
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(5, vocab_size) for _ in range(length)]


def _twin(sequence, max_tokens):
    """The decode worker's own sequence of the same attempt."""
    twin = make_sequence(
        list(sequence.prompt_token_ids), max_tokens, num_original_prompt_tokens=sequence.num_original_prompt_tokens
    )
    twin.key, twin.sampling = sequence.key, sequence.sampling
    return twin


def _prefill(engine, prompt, max_tokens, **options):
    sequence = make_sequence(prompt, max_tokens, is_prefill_only=True, **options)
    engine.add(sequence)
    run_to_end(engine)
    return sequence


def _copy(source, target, sent, received, num_cached):
    """What the transport does: whole blocks, none of those that are cached already."""
    count = len(sent.block_table)
    assert len(received.block_table) >= count
    for index in range(num_cached, count):
        target.kv_cache[received.block_table[index]] = source.kv_cache[sent.block_table[index]]
    return count - num_cached


def _hand_off(prefill, decode, prompt, max_tokens):
    sent = _prefill(prefill, prompt, max_tokens)
    received = _twin(sent, max_tokens)
    num_cached = decode.reserve(received)
    num_copied = _copy(prefill, decode, sent, received, num_cached)
    assert decode.chain_hashes(received) == prefill.chain_hashes(sent)
    token0 = sent.output_token_ids[0]
    assert decode.activate(received, token0, None) is None
    prefill.release_lease(sent.key)
    return received, num_copied


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_residue_of_the_block_size_decodes_as_one_worker_would(arch, load_executor, stock_model, make_engine):
    """PD-13, and the decode side computes no prompt token itself (PD-39)."""
    prefill = make_engine(load_executor(arch), num_blocks=64, max_num_batched_tokens=8, max_num_seqs=8)
    decode = make_engine(load_executor(arch), num_blocks=256, max_num_seqs=16)
    decode.kv_cache.fill_(7.0)  # a slot that was not received would be seen
    vocab_size = prefill.executor.vocab_size
    sequences = []
    for length in range(1, 3 * BLOCK_SIZE + 2):
        sequences.append(_hand_off(prefill, decode, _prompt(length, vocab_size=vocab_size), 6)[0])
    outputs = run_to_end(decode)
    assert sum(output.num_tokens for output in outputs) == 5 * len(sequences), "only tokens 1 to 5 are computed"
    ties = sum(assert_greedy(stock_model(arch), s.prompt_token_ids, s.output_token_ids) for s in sequences)
    assert ties <= 1
    assert prefill.check_integrity().by_state["leased"] == 0


def test_hand_offs_joined_by_local_prompts_and_preempted_on_the_decode_side(load_executor, stock_model, make_engine):
    prefill = make_engine(load_executor("mistral"), max_num_batched_tokens=16)
    decode = make_engine(load_executor("mistral"), num_blocks=40, max_num_batched_tokens=32, max_num_seqs=8)
    vocab_size = prefill.executor.vocab_size
    sequences, outputs = [], []
    for number, length in enumerate([30, 9, 17, 41]):
        sequences.append(_hand_off(prefill, decode, _prompt(length, vocab_size=vocab_size), 24)[0])
        local = make_sequence(_prompt(5 + number, 1, vocab_size), 12, arrival_s=float(number))
        decode.add(local)
        sequences.append(local)
        outputs.append(decode.step())
    outputs += run_to_end(decode)
    assert sum(len(output.preempted) for output in outputs) > 0
    assert sum(assert_greedy(stock_model("mistral"), s.prompt_token_ids, s.output_token_ids) for s in sequences) <= 1


@pytest.fixture
def make_fake(make_engine):
    def make(**options):
        executor = FakeExecutor(
            FakeOptions(), vocab_size=VOCAB, eos_token_ids=EOS, block_size=BLOCK_SIZE, max_model_len=512
        )
        return make_engine(executor, **options)

    return make


def _assert_text(sequence):
    text = list(sequence.prompt_token_ids)
    for token_id in sequence.output_token_ids:
        assert token_id == hash_token(text, VOCAB, EOS)
        text.append(token_id)


def test_a_prompt_that_the_decode_side_knows_is_not_read_again(make_fake):
    """PD-41: whole blocks are pinned; with a prompt of full blocks nothing at all is copied."""
    prefill, decode = make_fake(), make_fake()
    first, num_copied = _hand_off(prefill, decode, _prompt(12), 4)
    assert num_copied == 3
    second, num_copied = _hand_off(prefill, decode, _prompt(12), 4)
    assert num_copied == 0
    assert second.num_cached_tokens == 12
    third, num_copied = _hand_off(prefill, decode, [*_prompt(12), 9], 4)
    assert num_copied == 1
    run_to_end(decode)
    for sequence in (first, second, third):
        _assert_text(sequence)


@pytest.mark.parametrize("damage", ["missing", "foreign", "shifted"])
def test_wrong_kv_changes_the_fake_text(damage, make_fake):
    prefill, decode = make_fake(), make_fake()
    sent = _prefill(prefill, _prompt(10), 4)
    received = _twin(sent, 4)
    decode.reserve(received)
    _copy(prefill, decode, sent, received, 0)
    victim = decode.kv_cache[received.block_table[1]]
    if damage == "missing":
        victim.zero_()
    elif damage == "foreign":
        victim[..., 0] += 1
    else:
        victim.copy_(decode.kv_cache[received.block_table[0]].clone())
    decode.activate(received, sent.output_token_ids[0], None)
    run_to_end(decode)
    with pytest.raises(AssertionError):
        _assert_text(received)


def test_blocks_of_a_chain_that_was_not_proven_are_never_cached(make_fake):
    prefill, decode = make_fake(), make_fake()
    sent = _prefill(prefill, _prompt(12), 6)
    received = _twin(sent, 6)
    decode.reserve(received)
    _copy(prefill, decode, sent, received, 0)
    decode.activate(received, sent.output_token_ids[0], None, is_chain_proven=False)
    run_to_end(decode)
    _assert_text(received)
    assert decode.check_integrity().by_state["cached"] == 0


def test_reserving_is_all_or_nothing_and_keeps_the_watermark(make_fake):
    decode = make_fake(num_blocks=10, watermark_blocks=2)
    first = make_sequence(_prompt(16), 4)
    assert decode.reserve(first) == 0
    assert len(first.block_table) == 5
    assert first.state is SequenceState.RECEIVING
    too_much = make_sequence(_prompt(12, 1), 4)
    with pytest.raises(NoCapacityError, match="watermark"):
        decode.reserve(too_much)
    assert decode.check_integrity().by_state["receiving"] == 5
    assert too_much.block_table == []
    assert decode.reserve(make_sequence(_prompt(8, 2), 4)) == 0
    assert decode.check_integrity().by_state["free"] == 2


def test_a_prompt_that_fills_the_pool_is_taken_by_an_idle_decode_worker(make_fake):
    prefill, decode = make_fake(), make_fake(num_blocks=10, watermark_blocks=2)
    sequence, _ = _hand_off(prefill, decode, _prompt(36), 5)
    run_to_end(decode)
    _assert_text(sequence)


def test_a_hand_off_never_overtakes_preempted_sequences(make_fake):
    decode = make_fake(num_blocks=12, watermark_blocks=0)
    running = [make_sequence(_prompt(16, i), 20, arrival_s=float(i)) for i in range(2)]
    for sequence in running:
        decode.add(sequence)
    while not decode.step().preempted:
        pass
    with pytest.raises(NoCapacityError, match="preempted"):
        decode.reserve(make_sequence(_prompt(2, 9), 4))
    run_to_end(decode)
    assert decode.reserve(make_sequence(_prompt(2, 9), 4)) == 0


@pytest.mark.parametrize("quarantine", [False, True])
def test_a_failed_hand_off_is_computed_here_and_token_0_is_not_sampled_again(quarantine, make_fake):
    prefill, decode = make_fake(), make_fake()
    sent = _prefill(prefill, _prompt(18), 6)
    received = _twin(sent, 6)
    decode.reserve(received)
    assert decode.recompute(received, sent.output_token_ids[0], None, quarantine=quarantine) is None
    report = decode.check_integrity()
    assert report.by_state["receiving"] == 0
    assert report.by_state["quarantined"] == (6 if quarantine else 0)
    outputs = run_to_end(decode)
    assert sum(len(output.tokens) for output in outputs) == 5
    _assert_text(received)
    decode.release_quarantine(received.key)
    assert decode.check_integrity().by_state["quarantined"] == 0


@pytest.mark.parametrize("quarantine", [False, True])
def test_a_cancelled_hand_off_gives_its_blocks_back_unless_a_read_may_still_write(quarantine, make_fake):
    """PD-01, PD-03."""
    prefill, decode = make_fake(), make_fake(num_blocks=16)
    _hand_off(prefill, decode, _prompt(12), 2)
    run_to_end(decode)
    received = make_sequence([*_prompt(12), 5, 6, 7], 4)
    assert decode.reserve(received) == 3
    decode.abort(received, quarantine=quarantine)
    decode.abort(received, quarantine=quarantine)
    report = decode.check_integrity()
    assert report.by_state["owned"] == report.by_state["receiving"] == 0
    assert report.by_state["quarantined"] == (2 if quarantine else 0), "prefix hits are never written: not quarantined"
    decode.release_quarantine(received.key)
    decode.release_quarantine(received.key)
    assert decode.block_pool.num_available == 16
    assert received.state is SequenceState.FINISHED


def test_received_sequences_that_wait_for_a_place_in_the_batch_are_cancelled_without_a_trace(make_fake):
    """PD-03: one runs, twenty are received and wait; all are cancelled."""
    prefill, decode = make_fake(num_blocks=512), make_fake(num_blocks=512, max_num_seqs=1)
    long, _ = _hand_off(prefill, decode, _prompt(8), 100)
    others = [_hand_off(prefill, decode, _prompt(9, i), 50)[0] for i in range(20)]
    assert decode.step().num_tokens == 1, "the batch stays within max_num_seqs"
    for sequence in others:
        decode.abort(sequence)
    report = decode.check_integrity()
    assert list(report.by_request) == [str(long.key)]
    run_to_end(decode)
    _assert_text(long)


def test_a_token_0_that_ends_the_sequence_is_told_at_once(make_fake):
    prefill, decode = make_fake(), make_fake()
    sent = _prefill(prefill, _prompt(9), 6)
    for stop, expected in (({"max_tokens": 1}, "length"), ({"stop_token_ids": tuple(sent.output_token_ids)}, "stop")):
        received = make_sequence(_prompt(9), stop.pop("max_tokens", 6), sampling=stop)
        decode.reserve(received)
        output = decode.activate(received, sent.output_token_ids[0], None)
        assert output.finished == [received]
        assert output.tokens == [(received, sent.output_token_ids[0], None)]
        assert received.finish_reason == expected
        assert not decode.has_work


def test_sampled_text_is_the_same_with_and_without_a_hand_off(load_executor, make_engine):
    """PD-38: seed, choice and output index decide, wherever the token is drawn."""
    prefill, decode, alone = (make_engine(load_executor("qwen2")) for _ in range(3))
    sampling = {"temperature": 1.3, "top_p": 0.95, "seed": 77, "presence_penalty": 0.5, "logprobs": 2}
    prompt = _prompt(21, vocab_size=prefill.executor.vocab_size)
    sent = _prefill(prefill, prompt, 15, choice=2, sampling=sampling)
    received = _twin(sent, 15)
    _copy(prefill, decode, sent, received, decode.reserve(received))
    decode.activate(received, sent.output_token_ids[0], None)
    after_hand_off = _logprobs(run_to_end(decode), received)
    single = make_sequence(prompt, 15, choice=2, sampling=sampling)
    alone.add(make_sequence(prompt[:7], 15, sampling=sampling | {"seed": 1}))  # a neighbour in the batch
    alone.add(single)
    undisturbed = _logprobs(run_to_end(alone), single)
    assert received.output_token_ids == single.output_token_ids
    assert len(undisturbed) == 15
    assert after_hand_off == pytest.approx(undisturbed[1:], abs=1e-3)


def _logprobs(outputs, sequence):
    tokens = [token for output in outputs for token in output.tokens]
    return [logprobs.logprob for owner, _, logprobs in tokens if owner is sequence]


def test_kv_caches_of_unequal_pools_hand_off(make_fake):
    prefill, decode = make_fake(num_blocks=16), make_fake(num_blocks=128)
    assert prefill.kv_cache.shape[1:] == decode.kv_cache.shape[1:]
    sequence, _ = _hand_off(prefill, decode, _prompt(30), 9)
    run_to_end(decode)
    _assert_text(sequence)
