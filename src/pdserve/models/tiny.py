"""Tiny random models of several architectures, made on the spot: nothing is downloaded, equal seeds give equal bytes.

Weights are far larger than a trained model's, so that greedy tokens are clear-cut and varied, every bias and
norm weight differs from its neutral value (an executor that forgets one is found out), and special tokens are
practically never sampled by themselves.
"""

from __future__ import annotations

import argparse
import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from pdserve.errors import ModelError
from pdserve.models.tiny_tokenizer import END_OF_TEXT, SPECIAL_TOKENS, TURN_END, write_tokenizer

MAX_MODEL_LEN = 4096
SLIDING_WINDOW = 24
"""Tokens; shorter than the prompts of tests, so that a forgotten window shows."""

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": SPECIAL_TOKENS.index(TURN_END),
    "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
    "dtype": "float32",
}
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": SLIDING_WINDOW, "head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": SLIDING_WINDOW,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 10.0,
    },
    "phi3": {"original_max_position_embeddings": MAX_MODEL_LEN},
}
ARCHITECTURES = tuple(_ARCHITECTURES)

_MATRIX_STD = 0.3
_VECTOR_STD = 0.2
_SPECIAL_TOKEN_SCALE = 0.1
"""Factor on the output rows of special tokens: their logits lie near 0, far below the best of the others."""


def make_model(path: Path, arch: str, seed: int) -> Path:
    """Write a Hugging Face folder that `AutoModelForCausalLM` and `AutoTokenizer` load; returns `path`.

    Raises:
        ModelError: `arch` is none of `ARCHITECTURES`.
    """
    if arch not in _ARCHITECTURES:
        raise ModelError(f"no tiny model of architecture {arch!r}; choose one of {', '.join(ARCHITECTURES)}")
    path.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(path, MAX_MODEL_LEN)
    config = AutoConfig.for_model(arch, **{**_COMMON, **_ARCHITECTURES[arch], "vocab_size": vocab_size})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill(model, seed)
    model.generation_config = GenerationConfig(
        eos_token_id=[SPECIAL_TOKENS.index(TURN_END), SPECIAL_TOKENS.index(END_OF_TEXT)],
        pad_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
    )
    model.save_pretrained(path)
    return path


@torch.no_grad()
def _fill(model: Any, seed: int) -> None:
    """Give every parameter values that depend on its name and the seed alone."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(_MATRIX_STD * noise)
        else:
            neutral = parameter.detach().clone()  # ones or zeros, as the architecture has it
            parameter.copy_(neutral + _VECTOR_STD * noise)
    model.get_output_embeddings().weight[: len(SPECIAL_TOKENS)] *= _SPECIAL_TOKEN_SCALE


def main(argv: list[str] | None = None) -> int:
    """`python -m pdserve.models.tiny DIR`: what `resolve` starts, so that its own process stays free of torch."""
    parser = argparse.ArgumentParser(prog="pdserve.models.tiny")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--arch", default="llama", choices=ARCHITECTURES)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    make_model(arguments.directory, arguments.arch, arguments.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
