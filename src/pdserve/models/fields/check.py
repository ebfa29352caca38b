"""Reads a folder's files against the tables: refuses what would change answers unread, and names unknown fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pdserve.errors import ModelError
from pdserve.models.fields.config_fields import COMMON, FAMILIES, GENERATION, field_of
from pdserve.models.fields.generation_fields import GENERATION_CONFIG
from pdserve.models.fields.neighbours import Neighbours, asks_nothing
from pdserve.models.fields.rope_fields import REQUIRED, ROPE
from pdserve.models.fields.tokenizer_fields import TOKENIZER_CONFIG
from pdserve.models.fields.treatment import Fields, FolderField, Treatment

Config = Mapping[str, Any]

_QUANTIZATIONS = ("quantization_config", "compression_config", "quantization")
_ROPE_NAMES = ("rope_scaling", "rope_parameters")
_NUM_NAMED = 8
"""Unknown fields that a line names; of more it tells the number."""


def check_folder(path: Path) -> list[str]:
    """Check config.json and tokenizer_config.json; a line for each file with unknown fields.

    generation_config.json is checked by those who sample by it, see `check_generation`.

    Raises:
        ModelError: see `check_config` and `check_tokenizer`.
    """
    lines = []
    for name, check in (("config.json", check_config), ("tokenizer_config.json", check_tokenizer)):
        file = path / name
        content = _read(file) if file.is_file() else {}
        if unknown := check(content, file):
            lines.append(unread_line(file, unknown))
    return lines


def check_config(config: Config, file: Path) -> list[str]:
    """Names of unknown fields, which nothing reads.

    Families beside the ten of the table are only looked at for quantization and rotary positions: transformers knows
    their fields.

    Args:
        config: content of config.json.
        file: its path, for errors.

    Raises:
        ModelError: a field would change answers, and nothing reads it; or rotary positions that mean nothing.
    """
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    for name in _QUANTIZATIONS:
        _refuse_unless_neutral(COMMON[name], name, text.get(name) or config.get(name), file, "this folder")
    family = str(text.get("model_type"))
    _check_rope(text, file, family)
    if family not in FAMILIES:
        return []
    unknown = []
    for name, value in text.items():
        field = field_of(family, name) or GENERATION_CONFIG.get(name) or GENERATION.get(name)
        if field is None:
            unknown.append(name)
        elif value is not None and field.treatment is Treatment.REFUSED:
            told = asks_nothing(name, value, Neighbours(family, text))
            if not (field.asks_nothing(value) if told is None else told):
                raise _refusal(field, name, value, file, f"models of type {family!r}")
    return unknown


def check_generation(content: Config, file: Path) -> list[str]:
    """The same for generation_config.json.

    Raises:
        ModelError: a field would change answers, and nothing reads it.
    """
    return _check(GENERATION_CONFIG, content, file, "; or set GENERATION_CONFIG to off")


def check_tokenizer(content: Config, file: Path) -> list[str]:
    """The same for tokenizer_config.json; a field that ends in `_token` names a control token.

    Raises:
        ModelError: a field would change prompts, and nothing reads it.
    """
    return [name for name in _check(TOKENIZER_CONFIG, content, file) if not name.endswith("_token")]


def unread_line(file: Path, names: list[str]) -> str:
    """What a person is told of unknown fields."""
    shown = ", ".join(names[:_NUM_NAMED]) + (f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else "")
    return f"{file.name} has fields that nothing reads, and the answers are those of a model without them: {shown}"


def _read(file: Path) -> Config:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}; expected a Hugging Face model folder") from error
    if not isinstance(content, dict):
        raise ModelError(f"cannot read {file}: expected a JSON object")
    return content


def _check(fields: Fields, content: Config, file: Path, remedy: str = "") -> list[str]:
    for name, field in fields.items():
        _refuse_unless_neutral(field, name, content.get(name), file, "this folder", remedy)
    return [name for name in content if name not in fields]


def _refuse_unless_neutral(field: FolderField, name: str, value: object, file: Path, of: str, remedy: str = "") -> None:
    if field.treatment is Treatment.REFUSED and not field.asks_nothing(value):
        raise _refusal(field, name, value, file, of, remedy)


def _refusal(field: FolderField, name: str, value: object, file: Path, of: str, remedy: str = "") -> ModelError:
    shown = repr(value)[:60]
    return ModelError(f"{file}: {name} is {shown}, which {of} cannot have: {field.about}; correct the file{remedy}")


# --- rotary positions


def _check_rope(config: Config, file: Path, family: str) -> None:
    found = [(name, config[name]) for name in _ROPE_NAMES if config.get(name)]
    for name, value in found:
        if not isinstance(value, Mapping):
            raise ModelError(f"{file}: {name} is {repr(value)[:60]}; expected an object")
    if len(found) > 1 and not _normal(found[0][1]).items() <= _normal(found[1][1]).items():
        raise ModelError(
            f"{file}: rope_scaling and rope_parameters say different things; put what is meant into rope_parameters"
        )
    if family in FAMILIES:
        for name, value in found:
            for where, table in _tables(name, value):
                _check_table(table, f"{file}: {where}")


def _normal(table: Config) -> dict[str, Any]:
    return {("rope_type" if name == "type" else name): value for name, value in table.items() if value is not None}


def _tables(name: str, value: Config) -> Iterator[tuple[str, Config]]:
    """One of the whole model, or one for each type of layer."""
    nested = {kind: table for kind, table in value.items() if isinstance(table, Mapping)}
    yield from ((f"{name}.{kind}", table) for kind, table in nested.items())
    if not nested:
        yield name, value


def _check_table(table: Config, where: str) -> None:
    kind = table.get("rope_type") or table.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
    if kind not in REQUIRED:
        raise ModelError(f"{where}: rope_type is {kind!r}; expected {', '.join(REQUIRED)}")
    missing = [
        name for name in REQUIRED[kind] if table.get(name) is None and name != "original_max_position_embeddings"
    ]
    if missing:
        raise ModelError(f"{where}: rope_type {kind} needs {', '.join(missing)}")
    if kind == "default" and table.get("factor") not in (None, 1, 1.0):
        raise ModelError(f"{where}: factor is {table['factor']!r} without a rope_type; say which, for example linear")
    if "rope_theta" in table and not isinstance(table["rope_theta"], int | float):
        raise ModelError(f"{where}: rope_theta is {table['rope_theta']!r}; expected a number")
    for name, value in table.items():
        field = ROPE.get(name)
        if field is None or (field.treatment is Treatment.REFUSED and not field.asks_nothing(value)):
            about = field.about if field is not None else "nothing reads it"
            raise ModelError(f"{where}: {name} is {repr(value)[:60]}, which is not served: {about}")
