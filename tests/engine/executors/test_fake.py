"""The fake executor: its text, its timing, its script, and the bytes it leaves in the KV cache."""

from __future__ import annotations

import json

import pytest
import torch
from engine_oracle import make_sequence, run_to_end

from pdserve.engine.executors.fake import FakeExecutor, FakeOptions, hash_token
from pdserve.errors import SettingError

VOCAB, EOS = 100, frozenset({1, 2})


@pytest.fixture
def slept():
    return []


@pytest.fixture
def make(make_engine, slept):
    def build(options, **engine_options):
        executor = FakeExecutor(
            options, vocab_size=VOCAB, eos_token_ids=EOS, block_size=4, max_model_len=256, sleep=slept.append
        )
        return make_engine(executor, **{"eos_token_ids": EOS, **engine_options})

    return build


def _options(script="hash", **values):
    return FakeOptions.read(**{"ttft_s": 0.0, "itl_s": 0.0, "burst": 1, "start_s": 0.0, "script": script, **values})


def _run(engine, prompt, max_tokens=8, **options):
    sequence = make_sequence(prompt, max_tokens, sampling={"ignore_eos": False, "temperature": 1.0}, **options)
    engine.add(sequence)
    run_to_end(engine)
    return sequence


def test_hash_text_is_a_function_of_the_text_before_and_never_an_end(make):
    engine = make(_options(), max_num_batched_tokens=16)
    prompts = [list(range(5, 5 + length)) for length in (1, 4, 21, 60)]
    for prompt in prompts:
        sequence = _run(engine, prompt, 30)
        text = list(prompt)
        for token_id in sequence.output_token_ids:
            assert token_id == hash_token(text, VOCAB, EOS)
            text.append(token_id)
        assert len(sequence.output_token_ids) == 30
        assert not EOS & set(sequence.output_token_ids)
    assert len(set(sequence.output_token_ids)) > 10


def test_slots_hold_token_and_position_readably(make):
    engine = make(_options())
    sequence = make_sequence([50, 60, 70, 80, 90], 9, is_prefill_only=True)
    engine.add(sequence)
    run_to_end(engine)
    slots = engine.kv_cache[sequence.block_table][:, 0, 0, :, 0].flatten(0, 1)
    assert slots[:5, 0].tolist() == [50, 60, 70, 80, 90]
    assert slots[:5, 1].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(engine.kv_cache[:, :, 0], engine.kv_cache[:, :, 1])
    assert slots[5:].abs().sum() == 0
    engine.release_lease(sequence.key)


def test_echo_repeats_the_original_prompt(make):
    engine = make(_options("echo"))
    assert _run(engine, [7, 8, 9], 7).output_token_ids == [7, 8, 9, 7, 8, 9, 7]
    later = _run(engine, [7, 8, 9, 7], 7, num_original_prompt_tokens=3)
    assert later.output_token_ids == [8, 9, 7, 8, 9, 7]


def test_a_script_is_followed_by_request_and_then_ends(make, tmp_path):
    file = tmp_path / "script.json"
    file.write_text(json.dumps({"mine": [10, 11], "*": [20]}))
    engine = make(_options(str(file)))
    assert _run(engine, [5], request_id="mine").output_token_ids == [10, 11, 1]
    assert _run(engine, [5], request_id="other").output_token_ids == [20, 1]
    file.write_text(json.dumps([30, 31, 32]))
    assert _run(make(_options(str(file))), [5], 2).output_token_ids == [30, 31]
    file.write_text(json.dumps([[40], [50]]))
    engine = make(_options(str(file)))
    firsts = {_run(engine, [number], 1).output_token_ids[0] for number in range(5, 25)}
    assert firsts == {40, 50}


@pytest.mark.parametrize("content", ["[1, ", "7", "[]", '{"a": 3}', '[["x"]]', None])
def test_a_script_that_is_none_says_what_was_expected(content, tmp_path):
    file = tmp_path / "script.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingError, match="FAKE_SCRIPT"):
        _options(str(file))


def test_time_passes_once_for_a_prompt_and_once_for_each_later_step(make, slept):
    engine = make(_options(ttft_s=0.5, itl_s=0.1, start_s=3.0))
    assert slept == [3.0]
    _run(engine, [5, 6, 7], 4)
    assert slept[1:] == [0.5, 0.1, 0.1, 0.1]


def test_bursts_keep_the_mean_time_between_tokens(make, slept):
    engine = make(_options(itl_s=0.1, burst=4))
    _run(engine, [5, 6, 7], 13)
    assert slept[2:] == pytest.approx([0.0, 0.0, 0.0, 0.4] * 3)


def test_a_logit_bias_outdoes_the_chosen_token(make):
    engine = make(_options())
    sequence = make_sequence([5, 6], 3, sampling={"logit_bias": {42: 100.0}})
    engine.add(sequence)
    run_to_end(engine)
    assert sequence.output_token_ids == [42, 42, 42]
