"""Folders whose files say more, less or other things than their config.json, made from tiny models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def change_config(folder: Path, **fields: Any) -> None:
    """Set fields of config.json; None removes one."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def change_tensors(file: Path, removed: tuple[str, ...] = (), **tensors: torch.Tensor) -> None:
    """Add, replace (`__` stands for a dot) and remove tensors of a safetensors file."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    content = {**load_file(file), **named}
    for name in removed:
        del content[name]
    save_file({name: tensor.contiguous() for name, tensor in content.items()}, file, metadata={"format": "pt"})


def split(folder: Path, to: Path | None = None) -> Path:
    """Write the model of a folder as several shards with their index; returns where."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    target = to or folder
    staging = target / "staging"
    model.save_pretrained(staging, max_shard_size="120KB")
    if to is None:
        (folder / "model.safetensors").unlink()
    for file in staging.glob("model*"):
        shutil.move(file, target / file.name)
    shutil.rmtree(staging)
    return target


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor → file, as the index has it."""
    found: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return found
