"""Turns one GGUF file into a Hugging Face folder with fp32 safetensors. Never run inside a serving process.

Started by `resolve` as `python -m pdserve.models.gguf FILE DIRECTORY`, which prints one line per stage. Quantized
weights are widened once, here, so that every executor starts from the same numbers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, TokenType
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from transformers.utils import logging as transformers_logging

from pdserve.errors import ModelError
from pdserve.models.fields.config_fields import FAMILIES
from pdserve.models.gguf_config import GgufFacts, carried_over, check_keys, unknown_split

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
    "xtc_probability": "xtc_probability",
    "mirostat": "mirostat",
}
"""What a file says about sampling, and what generation_config.json calls it."""
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_LONG_KEYS = ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")
_FOREIGN_FIELDS = ("quantization_config", "_name_or_path", "_model_name_or_path")


def convert(source: Path, destination: Path, progress: Callable[[str], None]) -> Path:
    """Write `destination`, loadable by `AutoModelForCausalLM` and `AutoTokenizer`; returns it."""
    folder, file = str(source.parent), source.name
    facts = read_facts(source)
    for line in _named(facts):
        progress(line)
    progress("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    progress("widening the weights to fp32")
    config = _completed(AutoConfig.from_pretrained(folder, gguf_file=file), facts)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, config=config, dtype=torch.float32)
    progress("writing safetensors")
    _check_tensors(source, model, facts.architecture)
    plain = _as_unquantized(model, tokenizer)
    plain.generation_config.eos_token_id = sorted(
        {*_as_ids(model.config.eos_token_id), *_as_ids(tokenizer.eos_token_id), *end_of_generation_ids(source)}
    )
    for name, value in sampling_of(source).items():
        setattr(plain.generation_config, name, value)
    plain.save_pretrained(destination)
    tokenizer.save_pretrained(destination)
    _name_a_known_tokenizer_class(destination)
    if facts.keys.get("tokenizer.ggml.model") == "llama" and facts.keys.get("tokenizer.ggml.add_space_prefix") is False:
        _without_first_blank(destination / "tokenizer.json")
    return destination


def read_facts(source: Path) -> GgufFacts:
    """A file's metadata, and the tensors that stretch rotary positions."""
    reader = GGUFReader(source)
    keys = {key: field.contents() for key, field in reader.fields.items() if key not in _LONG_KEYS}
    tensors = {t.name: [float(x) for x in t.data.ravel()] for t in reader.tensors if t.name in _ROPE_TENSORS}
    return GgufFacts(keys, tensors)


def _named(facts: GgufFacts) -> Iterator[str]:
    """What is told of unknown keys."""
    if unknown := check_keys(facts):
        yield f"the GGUF file has keys that nothing reads: {', '.join(unknown[:8])}"
    if (kind := unknown_split(facts, GGUF_PRE_TOKENIZER_SPLITS.__contains__)) is not None:
        yield f"tokenizer.ggml.pre is {kind!r}, which is unknown: texts are cut as GPT-2 does"


def _completed(config: Any, facts: GgufFacts) -> Any:
    """The configuration with what transformers left out."""
    fields = config.to_dict()
    missing = carried_over(facts, fields, config.model_type)
    return type(config)(**{**fields, **missing}) if missing else config


def _check_tensors(source: Path, model: Any, architecture: str) -> None:
    """Refuse a file of a known architecture with weights that the model has no place for."""
    if model.config.model_type not in FAMILIES:
        return
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config={})
    names = get_gguf_hf_weights_map(model, processor, architecture)
    for tensor in GGUFReader(source).tensors:
        if tensor.name not in names and tensor.name not in _ROPE_TENSORS:
            raise ModelError(
                f"the GGUF file has the tensor {tensor.name}, for which models of type {model.config.model_type!r} "
                "have no place"
            )


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
        kept = {name: value for name, value in found.items() if name in ("repetition_penalty", "mirostat")}
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


def _without_first_blank(file: Path) -> None:
    """Texts of this SentencePiece tokenizer do not begin with a blank of their own, and lose none when decoded."""
    content = json.loads(file.read_text(encoding="utf-8"))
    if (content.get("pre_tokenizer") or {}).get("type") == "Metaspace":
        content["pre_tokenizer"]["prepend_scheme"] = "never"
    for part, steps, kind in (("normalizer", "normalizers", "Prepend"), ("decoder", "decoders", "Strip")):
        if (content.get(part) or {}).get("type") == "Sequence":
            content[part][steps] = [step for step in content[part][steps] if step["type"] != kind]
        elif (content.get(part) or {}).get("type") == "Metaspace":
            content[part]["prepend_scheme"] = "never"
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Convert FILE into DIRECTORY, the two arguments; one line per stage on stdout."""
    source, destination = argv or sys.argv[1:]
    transformers_logging.set_verbosity_error()
    try:
        convert(Path(source), Path(destination), lambda line: print(line, flush=True))
    except ModelError as error:
        print(error, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
