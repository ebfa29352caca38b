"""The transformers executor against the stock eager model, and its refusals."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3nTextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    Lfm2Config,
    MambaConfig,
    Phi3Config,
    Qwen3NextConfig,
    T5Config,
)

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.executors.model_support import check_supported, longest_context
from pdserve.engine.executors.stock.attention_route import ATTENTION_NAME
from pdserve.engine.executors.stock.executor import TransformersExecutor
from pdserve.errors import ModelError, SettingError
from pdserve.models.tiny import ARCHITECTURES

TOLERANCE = 2e-4  # logits of the tiny models reach some tens; float32 in another order of summation


@pytest.mark.parametrize("arch", ARCHITECTURES)
@torch.no_grad()
def test_mixed_batches_over_shuffled_blocks_give_the_logits_of_the_stock_model(arch, load_executor, stock_model):
    executor, stock = load_executor(arch), stock_model(arch)
    executor.allocate_kv_cache(64)
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(64, generator=generator).tolist()
    texts = [torch.randint(5, executor.vocab_size, (length,), generator=generator).tolist() for length in (50, 7, 33)]
    tables = [[order.pop() for _ in range(14)] for _ in texts]
    computed = [0, 0, 0]
    chunks = [[20, 7, 1], [1, 0, 9], [28, 0, 22], [1, 0, 1]]  # prefill chunks and single tokens side by side
    for chunk in chunks:
        batch, expected = [], []
        for index, num_tokens in enumerate(chunk):
            if num_tokens == 0:
                continue
            start, end = computed[index], computed[index] + num_tokens
            samples = index != 1 or end == len(texts[1])
            batch.append(SequenceSlice(texts[index][start:end], start, tables[index], samples))
            computed[index] = end
            if samples:
                expected.append(stock(torch.tensor([texts[index][:end]])).logits[0, -1])
        logits = executor.run(batch)
        torch.testing.assert_close(logits, torch.stack(expected), atol=TOLERANCE, rtol=TOLERANCE)
    assert computed == [50, 7, 33]


def test_a_step_in_which_nothing_samples_returns_no_rows(load_executor):
    executor = load_executor("llama")
    executor.allocate_kv_cache(4)
    assert executor.run([SequenceSlice([5, 6, 7], 0, [2], samples=False)]).shape == (0, executor.vocab_size)


def test_two_models_in_one_process_keep_their_caches_apart(load_executor):
    first, second = load_executor("llama"), load_executor("llama")
    first.allocate_kv_cache(4)
    second.allocate_kv_cache(4)
    first.run([SequenceSlice([5, 6, 7], 0, [2], samples=True)])
    assert first.kv_cache[2].abs().sum() > 0
    assert second.kv_cache.abs().sum() == 0


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (DeepseekV3Config(), "MLA"),
        (MambaConfig(), "state-space"),
        (Lfm2Config(), "conv|state"),
        (Qwen3NextConfig(), "linear_attention|hybrid"),
        (Gemma3nTextConfig(), "shares KV"),
        (T5Config(), "encoder-decoder"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_models_whose_kv_does_not_fit_the_layout_are_refused_by_name(config, reason):
    with pytest.raises(ModelError, match=reason) as failure:
        check_supported(config)
    assert config.get_text_config().model_type in str(failure.value)


def test_attention_sinks_are_found_by_the_probe():
    config = GptOssConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    with pytest.raises(ModelError, match="s_aux"):
        TransformersExecutor(model.eval(), kv_dtype=torch.float32, block_size=4, max_model_len=64)


def test_an_architecture_without_a_table_of_its_own_is_served_by_the_probe_alone(tmp_path):
    config = GPTNeoXConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    executor = TransformersExecutor.load(
        tmp_path,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        device=torch.device("cpu"),
        block_size=4,
        max_model_len=None,
    )
    executor.allocate_kv_cache(8)
    assert (executor.kv_spec.num_kv_heads, executor.kv_spec.head_dim, executor.max_model_len) == (4, 8, 64)
    tokens = list(range(3, 20))
    with torch.no_grad():
        stock = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
        expected = stock(torch.tensor([tokens])).logits[0, -1:]
    logits = executor.run([SequenceSlice(tokens, 0, [6, 1, 7, 0, 3], samples=True)])
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_folder_without_a_model_says_so(tmp_path):
    with pytest.raises(ModelError, match="not a readable model folder"):
        TransformersExecutor.load(
            tmp_path,
            dtype=torch.float32,
            kv_dtype=torch.float32,
            device=torch.device("cpu"),
            block_size=4,
            max_model_len=None,
        )


def test_a_context_beyond_the_models_is_a_setting_error(model_dir):
    config = AutoConfig.from_pretrained(model_dir("llama"))
    assert longest_context(config, 100) == 100
    with pytest.raises(SettingError, match="MAX_MODEL_LEN"):
        longest_context(config, config.max_position_embeddings + 1)


def test_rope_that_depends_on_the_longest_sequence_is_served_only_where_it_does_not():
    factors = [1.0] * 48
    config = Phi3Config(
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": 4096,
        },
    )
    assert longest_context(config, None) == longest_context(config, 131072) == 4096
    assert longest_context(config, 1000) == 1000
    with pytest.raises(SettingError, match="at most 4096"):
        longest_context(config, 5000)
