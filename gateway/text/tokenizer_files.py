"""Reads a folder's tokenizer: tokenizer.json, and what tokenizer_config.json adds to it, as transformers does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from pdserve.errors import ModelError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FURTHER_TOKENS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model folder.

    Tokens that tokenizer_config.json lists and tokenizer.json lacks, or has with other flags, are added. What a text
    begins and ends with is tokenizer.json's.

    Raises:
        ModelError: the folder has no readable tokenizer.json.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{path} has no tokenizer.json; save the model with a fast tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    config = _read_json(path / "tokenizer_config.json")
    try:
        _add_tokens(tokenizer, config, read_special_tokens(path))
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ModelError(f"{path / 'tokenizer_config.json'} has tokens that cannot be read: {error}") from error
    return tokenizer


def read_special_tokens(path: Path) -> dict[str, str]:
    """Names of special tokens as templates use them: bos_token, eos_token, …, and those of this model alone."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        content = _read_json(path / name)
        named = {key: value for key, value in content.items() if key in _NAMED_TOKENS}
        own = {key: value for key, value in content.items() if key.endswith("_token") and _text(value) is not None}
        for key in _FURTHER_TOKENS:
            more = content.get(key)
            own |= more if isinstance(more, dict) else {}
        for key, token in (own | named).items():
            text = _text(token)
            if text is not None:
                found[key] = text
            else:
                found.pop(key, None)
    return found


def read_control_tokens(path: Path) -> frozenset[str]:
    """Tokens that the folder itself lists as control tokens of chats."""
    listed = _read_json(path / "tokenizer_config.json").get("chat_control_tokens")
    return frozenset(item for item in listed if isinstance(item, str)) if isinstance(listed, list) else frozenset()


def _add_tokens(tokenizer: Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    present = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    listed = [_added(token) for _, token in sorted((config.get("added_tokens_decoder") or {}).items(), key=_by_id)]
    specials = [AddedToken(text, special=True, normalized=False) for text in (*named.values(), *_unnamed(config))]
    known = present | {token.content: token for token in listed}
    wanted = [token for token in listed if _flags(present.get(token.content)) != _flags(token)]
    tokenizer.add_tokens(wanted + [token for token in specials if token.content not in known])


def _by_id(item: tuple[str, Any]) -> int:
    return int(item[0])


def _added(token: Any) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    return AddedToken(token["content"], **{flag: bool(token[flag]) for flag in _FLAGS if flag in token})


def _flags(token: AddedToken | None) -> tuple[bool, ...] | None:
    return None if token is None else tuple(getattr(token, flag) for flag in _FLAGS)


def _unnamed(config: dict[str, Any]) -> Iterator[str]:
    for key in _FURTHER_TOKENS:
        more = config.get(key)
        for token in more if isinstance(more, list) else []:
            if (text := _text(token)) is not None:
                yield text


def _text(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    return content if isinstance(content, dict) else {}
