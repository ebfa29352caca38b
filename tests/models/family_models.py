"""Small random models of ten families, as folders: their truth, and what this program makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.loader import load_executor
from pdserve.models.fields.check import check_folder

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
PROMPT = [(7 * i + 3) % 97 for i in range(70)]


def build(folder: Path, family: str) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE))
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.15)
    model.save_pretrained(folder)
    return folder


def changed(folder: Path, **fields: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return folder


@torch.no_grad()
def truth(folder: Path) -> torch.Tensor:
    """Logits of transformers' own forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return model(torch.tensor([PROMPT])).logits[0]


def served(folder: Path) -> torch.Tensor:
    """Logits of the executor that `pdserve up` would choose."""
    check_folder(folder)
    executor = load_executor(folder, device="cpu", dtype="float32")
    executor.allocate_kv_cache(6)
    return executor.run([SequenceSlice(PROMPT, 0, list(range(5)), len(PROMPT))])
