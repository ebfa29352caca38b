"""Loads a transformers model with all of its weights, or says which tensors do not fit; used by two executors.

transformers fills what a checkpoint lacks with random values, and leaves out what its configuration does not mention:
here each is an error, because another executor of the same folder would answer otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from pdserve.engine.executors.stock.attention_route import ATTENTION_NAME
from pdserve.errors import ModelError
from pdserve.log import get_logger
from pdserve.models.weight_files import find_weights

logger = get_logger(__name__)

_PLAIN_OUTPUT = {"output_attentions": False, "output_hidden_states": False, "return_dict": True}
"""Whatever a folder says of it: what a forward pass returns is for this program to say."""
_FOUND_BY_TRANSFORMERS = ("model.safetensors", "model.safetensors.index.json")


def load_model(path: Path, dtype: torch.dtype) -> Any:
    """The causal model of a local folder, on the CPU, in eval mode, with our attention.

    Raises:
        ModelError: weights are missing, truncated, of another shape, or more than the configuration has room for.
    """
    weights = find_weights(path)
    tensors = weights.tensors() if weights.is_safetensors else {}
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION_NAME, "output_loading_info": True}
    try:
        if tensors and (weights.first.name not in _FOUND_BY_TRANSFORMERS or weights.strays()):
            config = AutoConfig.from_pretrained(path, local_files_only=True, **_PLAIN_OUTPUT)
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            model, report = model_class.from_pretrained(None, config=config, state_dict=_read(tensors), **options)
        else:
            model, report = AutoModelForCausalLM.from_pretrained(
                path, local_files_only=True, **options, **_PLAIN_OUTPUT
            )
    except Exception as error:  # whatever a configuration makes of transformers' own code
        raise ModelError(f"cannot load the weights of {path}: {first_line(error)}") from error
    _check(path, model, report)
    return model.eval()


def _read(tensors: dict[str, Path]) -> dict[str, Any]:
    """Slices that transformers materializes one by one."""
    opened: dict[Path, Any] = {file: safe_open(file, framework="pt") for file in set(tensors.values())}
    return {name: opened[file].get_slice(name) for name, file in tensors.items()}


def _check(path: Path, model: Any, report: dict[str, Any]) -> None:
    if report["missing_keys"]:
        raise ModelError(f"{path} lacks the tensor {_some(report['missing_keys'])}, which its config.json asks for")
    modules = {name for name, _ in model.named_modules()}
    places = {name: {name.rpartition(".")[0], _layer(name)} for name in report["unexpected_keys"]}
    denied = [name for name in places if places[name] & modules and name.endswith((".weight", ".bias"))]
    if denied:
        raise ModelError(
            f"{path} has the tensor {_some(denied)}, for which its config.json leaves no room: "
            "correct the configuration (for example model_type, attention_bias or mlp_bias)"
        )
    if report["unexpected_keys"]:
        logger.warning("tensors of %s that its architecture does not use: %s", path, _some(report["unexpected_keys"]))


def _layer(name: str) -> str:
    """The layer that a tensor is of: `model.layers.3`; empty for others."""
    found = re.match(r"(?:.+\.)?layers\.\d+", name)
    return found[0] if found else ""


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} (and {len(others)} more)" if others else first


def first_line(error: BaseException) -> str:
    """What an error of a library says, without its advice."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
