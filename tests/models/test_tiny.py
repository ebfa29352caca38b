"""Tiny models load like any other, are the same for the same seed, and have outputs worth comparing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pdserve.errors import ModelError
from pdserve.models.tiny import ARCHITECTURES, SLIDING_WINDOW, make_model
from pdserve.models.tiny_tokenizer import SPECIAL_TOKENS, build_tokenizer

PROMPTS = ("hello world", "The quick brown fox 😀", "what is the capital of " * 8)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / request.param, request.param, seed=1)


def test_equal_seeds_give_equal_bytes_and_others_do_not(tmp_path: Path) -> None:
    first, same, other = (make_model(tmp_path / str(i), "llama", seed) for i, seed in enumerate((3, 3, 4)))
    names = sorted(file.name for file in first.iterdir())
    assert all((first / name).read_bytes() == (same / name).read_bytes() for name in names)
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_greedy_tokens_are_clear_cut_varied_and_never_special(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    gaps: list[float] = []
    tokens: list[int] = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        result = model.generate(
            **inputs, max_new_tokens=48, do_sample=False, output_scores=True, return_dict_in_generate=True
        )
        best, second = torch.stack(result.scores)[:, 0].topk(2).values.unbind(1)
        gaps += (best - second).tolist()
        tokens += result.sequences[0, inputs.input_ids.shape[1] :].tolist()
    assert len(tokens) == 48 * len(PROMPTS)
    assert min(tokens) >= len(SPECIAL_TOKENS)
    assert len(set(tokens)) > len(tokens) / 3
    assert sum(gap < 1e-4 for gap in gaps) <= 1


def test_norm_weights_and_biases_differ_from_their_neutral_value(model_dir: Path) -> None:
    vectors = {name: tensor for name, tensor in load_file(model_dir / "model.safetensors").items() if tensor.dim() == 1}
    assert vectors
    for name, tensor in vectors.items():
        assert tensor.std() > 0.1, name


def test_the_sliding_window_matters_beyond_its_length(tmp_path: Path) -> None:
    path = make_model(tmp_path / "mistral", "mistral", seed=1)
    windowed = AutoModelForCausalLM.from_pretrained(path).eval()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "sliding_window": None}))
    full = AutoModelForCausalLM.from_pretrained(path).eval()
    ids = torch.arange(10, 10 + SLIDING_WINDOW + 20)[None]
    with torch.inference_mode():
        difference = (windowed(ids).logits - full(ids).logits).abs().amax(-1)[0]
    assert difference[:SLIDING_WINDOW].max() < 1e-4
    assert difference[-1] > 1e-2


def test_the_tokenizer_round_trips_any_text_and_keeps_special_tokens_whole() -> None:
    tokenizer = build_tokenizer()
    for text in ("", "a    b", "hello\n\n  world", "naïve 😀 漢字 \u200d\x00", "THE the  the"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_start|>hi<|im_end|>").ids[0] == 1
    assert tokenizer.encode("<|im_start|>hi<|im_end|>").ids[-1] == 2
    assert 300 <= tokenizer.get_vocab_size() <= 500


def test_an_emoji_is_several_tokens_and_a_common_word_is_one() -> None:
    tokenizer = build_tokenizer()
    assert len(tokenizer.encode("😀").ids) == 4
    for word in ("the", " the", " what", "assistant", " block"):
        assert tokenizer.encode(word).tokens == [word.replace(" ", "Ġ")]


def test_the_chat_template_ends_with_the_assistants_turn(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="llama, qwen2"):
        make_model(tmp_path / "x", "bert", 0)
    assert not (tmp_path / "x").exists()
