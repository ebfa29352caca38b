"""What the gateway must know of a model: read from the files of its folder, without torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import ModelError, SettingError
from pdserve.ids import Fingerprint
from pdserve.models.context_length import context_length
from pdserve.models.generation_config import USUAL, SamplingDefaults
from pdserve.models.identity import model_fingerprint


@dataclass(frozen=True)
class ModelCard:
    """A served model, as seen from outside the engine."""

    path: Path
    served_names: tuple[str, ...]
    """The names that clients may put into `model`; the first stands in metrics, and in answers to who names none."""
    vocab_size: int
    """Rows of the embedding: token ids are in [0, vocab_size). May exceed the tokenizer's own."""
    max_model_len: int
    """Tokens of prompt and output together."""
    eos_token_ids: frozenset[int]
    """Ends of sequence, turn and message; the union over config, generation_config and tokenizer: each is an end."""
    chat_template: str | None
    """Jinja source; None: the model cannot chat."""
    fingerprint: Fingerprint
    sampling_defaults: SamplingDefaults = USUAL
    """What requests that are silent are sampled with; the gateway alone sets it."""

    @property
    def served_name(self) -> str:
        """The first of its names."""
        return self.served_names[0]

    @classmethod
    def load(
        cls,
        path: Path,
        served_name: str | None = None,
        chat_template: str | None = None,
        max_model_len: int | None = None,
    ) -> ModelCard:
        """Read a Hugging Face folder.

        Args:
            path: the folder.
            served_name: one or several, separated by commas; else the folder's name.
            chat_template: Jinja source, or the path of a file with it; replaces the model's own.
            max_model_len: tokens; else the model's context length.

        Raises:
            ModelError: a file is missing or unreadable.
            SettingError: `max_model_len` exceeds the model's context length.
        """
        config = _read_json(path / "config.json")
        text = {**config, **(config.get("text_config") or {})}
        generation = _read_json(path / "generation_config.json", optional=True)
        tokenizer = _read_json(path / "tokenizer_config.json", optional=True)
        eos = {
            *_ids(text.get("eos_token_id")),
            *_ids(generation.get("eos_token_id")),
            *_tokenizer_end_ids(path, tokenizer),
        }
        if not isinstance(text.get("vocab_size"), int):
            raise ModelError(f"{path / 'config.json'} has no vocab_size: not a causal language model")
        return cls(
            path=path,
            served_names=tuple(served_name.split(",")) if served_name else (path.resolve().name,),
            vocab_size=text["vocab_size"],
            max_model_len=_max_model_len(text, max_model_len),
            eos_token_ids=frozenset(eos),
            chat_template=_given_template(chat_template) or _own_template(path, tokenizer),
            fingerprint=model_fingerprint(path),
        )


def _read_json(file: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}; expected a Hugging Face model folder") from error
    if not isinstance(content, dict):
        raise ModelError(f"cannot read {file}: expected a JSON object")
    return content


def _ids(value: object) -> Iterator[int]:
    """Token ids are written as a number, a list, or not at all."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and item >= 0:
            yield item


def _max_model_len(config: dict[str, Any], wanted: int | None) -> int:
    context = context_length(config)
    if context is None and wanted is None:
        raise ModelError("the model's config.json does not tell its context length; set MAX_MODEL_LEN")
    if wanted is not None and context is not None and wanted > context:
        raise SettingError("MAX_MODEL_LEN", wanted, f"at most the model's context length, {context}")
    return wanted or context or 0


def _tokenizer_end_ids(path: Path, tokenizer_config: dict[str, Any]) -> set[int]:
    """The tokenizer's ends of sequence, turn and message: their names where it lists them, their ids wherever."""
    names = _end_names(_read_json(path / "special_tokens_map.json", optional=True)) | _end_names(tokenizer_config)
    listed = tokenizer_config.get("added_tokens_decoder") or {}
    ids = {_token_text(token): int(index) for index, token in listed.items()}
    if not names <= ids.keys():
        content = _read_json(path / "tokenizer.json", optional=True)
        vocab = content.get("model", {}).get("vocab", {})
        if isinstance(vocab, list):  # Unigram: [[token, score], …]
            vocab = {entry[0]: index for index, entry in enumerate(vocab)}
        ids = {**vocab, **{token["content"]: token["id"] for token in content.get("added_tokens", [])}, **ids}
    return {ids[name] for name in names if name in ids}


def _end_names(config: dict[str, Any]) -> set[str]:
    extra = config.get("extra_special_tokens")
    places = (config, extra if isinstance(extra, dict) else {})
    found = (_token_text(place.get(name)) for place in places for name in ("eos_token", "eot_token", "eom_token"))
    return {name for name in found if name}


def _token_text(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _given_template(template: str | None) -> str | None:
    """A template with a brace or a line break is the source itself, everything else names a file."""
    if not template or "{" in template or "\n" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except OSError as error:
        raise SettingError("CHAT_TEMPLATE", template, "Jinja source or the path of a readable file") from error


def _own_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """Newer folders have a file of its own; older ones a string, or a list of named templates."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = _read_json(path / "chat_template.json", optional=True).get("chat_template")
    found = found or tokenizer_config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default") or next(iter(named.values()), None)
    return found if isinstance(found, str) else None
