"""Writes small GGUF files out of transformers models, as programs that convert models do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFWriter, TokenType
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3_text": "gemma3"}
ARCHITECTURES |= {"phi3": "phi3"}
VOCABULARY = ["<|end|>", "<|start|>", *sorted(ByteLevel.alphabet()), "Ġa"]
SHAPE: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def make_model(family: str, **fields: Any) -> Any:
    """A random model whose norms differ from 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**SHAPE, **fields}), dtype=torch.float32, attn_implementation="eager"
    )
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.15)
    model.tie_weights()
    return model.eval()


def write_gguf(
    file: Path,
    model: Any,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    *,
    tokenizer: str = "gpt2",
) -> Path:
    """A file of one model: fp32, with further keys (`rope.scaling.type`, or whole ones) and tensors."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = GGUFWriter(file, architecture)
    own = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rope.dimension_count": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rope.freq_base": float(_theta(config)),
        "vocab_size": config.vocab_size,
    }
    if architecture in ("gemma2", "gemma3"):
        own["attention.sliding_window"] = config.sliding_window
    whole = ("general.", "tokenizer.", "split.")
    for key, value in {**own, **(keys or {})}.items():
        if value is not None:
            _add(writer, key if key.startswith(whole) else f"{architecture}.{key}", value)
    _add_tokenizer(writer, tokenizer)
    _add_tensors(writer, model, architecture)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _theta(config: Any) -> float:
    table = config.rope_parameters
    return (table.get("full_attention") or table)["rope_theta"]


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def _add_tokenizer(writer: GGUFWriter, kind: str) -> None:
    writer.add_tokenizer_model(kind)
    tokens = VOCABULARY
    if kind == "llama":
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(254)), "▁"][: len(VOCABULARY)]
        writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(tokens) - 2))
    if kind == "gpt2":
        writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)


def _add_tensors(writer: GGUFWriter, model: Any, architecture: str) -> None:
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        found = names.get_name(stem)
        assert found is not None, name
        values = tensor.float().numpy()
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = model.config.num_attention_heads if stem.endswith("q_proj") else model.config.num_key_value_heads
            values = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2)
            values = values.reshape(tensor.shape)
        if architecture.startswith("gemma") and stem.endswith("norm"):
            values = values + 1
        writer.add_tensor(f"{found}.{suffix}", np.ascontiguousarray(values))
