"""Turns one GGUF file into a Hugging Face folder with fp32 safetensors. Never run inside a serving process.

Started by `resolve` as `python -m pdserve.models.gguf FILE DIRECTORY`, which prints one line per stage. Quantized
weights are widened once, here, so that every executor starts from the same numbers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, TokenType
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

_END_KEYS = ("eos", "eot", "eom")
_END_NAMES = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>"),
        *("</s>", "<eos>", "<｜end▁of▁sentence｜>"),
    )
)
"""Control tokens that programs for GGUF files stop at, whatever the keys say."""
_SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""What a file says about sampling, and what generation_config.json calls it."""
_FOREIGN_FIELDS = ("quantization_config", "_name_or_path", "_model_name_or_path")


def convert(source: Path, destination: Path, progress: Callable[[str], None]) -> Path:
    """Write `destination`, loadable by `AutoModelForCausalLM` and `AutoTokenizer`; returns it."""
    folder, file = str(source.parent), source.name
    progress("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    progress("widening the weights to fp32")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    progress("writing safetensors")
    plain = _as_unquantized(model, tokenizer)
    plain.generation_config.eos_token_id = sorted(
        {*_as_ids(model.config.eos_token_id), *_as_ids(tokenizer.eos_token_id), *end_of_generation_ids(source)}
    )
    plain.generation_config.update(**sampling_of(source))
    plain.save_pretrained(destination)
    tokenizer.save_pretrained(destination)
    _name_a_known_tokenizer_class(destination)
    return destination


def end_of_generation_ids(source: Path) -> set[int]:
    """Every token that a GGUF file says ends an answer: by its keys, or as control token of a known name."""
    fields = GGUFReader(source).fields
    named = (fields.get(f"tokenizer.ggml.{key}_token_id") for key in _END_KEYS)
    ids = {int(field.contents()) for field in named if field is not None}
    tokens, kinds = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.token_type")
    if tokens is None or kinds is None:
        return ids
    control = {
        text: index
        for index, (text, kind) in enumerate(zip(tokens.contents(), kinds.contents(), strict=True))
        if kind == TokenType.CONTROL and text in _END_NAMES
    }
    if {"<|return|>", "<|call|>", "<|end|>"} <= control.keys():
        del control["<|end|>"]  # between the messages of one answer (harmony)
    return ids | set(control.values())


def sampling_of(source: Path) -> dict[str, Any]:
    """How the makers of a GGUF file want it sampled, as fields of generation_config.json."""
    fields = GGUFReader(source).fields
    named = {name: fields.get(f"general.sampling.{key}") for key, name in _SAMPLING_KEYS.items()}
    # Single precision: 0.6 would be read as 0.6000000238.
    found = {name: round(field.contents(), 6) for name, field in named.items() if field is not None}
    if not found:
        return {}
    if found.get("temperature", 1) <= 0:
        kept = {name: value for name, value in found.items() if name == "repetition_penalty"}
        return {**kept, "do_sample": False}
    if "top_k" in found:
        found["top_k"] = max(0, found["top_k"])
    return {**found, "do_sample": True}


def _as_ids(value: object) -> set[int]:
    return {item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)}


def _as_unquantized(model: Any, tokenizer: Any) -> Any:
    """The same weights under a config that does not speak of GGUF: `save_pretrained` refuses the original."""
    fields = {name: value for name, value in model.config.to_dict().items() if name not in _FOREIGN_FIELDS}
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = type(model.config)(**{**fields, **tokens})
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = GenerationConfig(**tokens)
    return plain


def _name_a_known_tokenizer_class(folder: Path) -> None:
    """transformers 5 writes a class name that no other program knows; tokenizer.json says it all anyway."""
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Convert FILE into DIRECTORY, the two arguments; one line per stage on stdout."""
    source, destination = argv or sys.argv[1:]
    transformers_logging.set_verbosity_error()
    convert(Path(source), Path(destination), lambda line: print(line, flush=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
