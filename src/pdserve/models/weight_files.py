"""Which files of a model folder hold its weights, and which tensor lies where: one rule for every executor. Torch-free.

The rule is that of transformers: the file that `transformers_weights` in config.json names, else a whole
model.safetensors, else the shards of model.safetensors.index.json, else pytorch_model.bin or its shards. What else
lies in the folder is not read. A tensor comes from the file that the index names, also where another file has one of
the same name. A weight file of another name counts when it is the only one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pdserve.errors import ModelError

INDEX_SUFFIX = ".index.json"
_USUAL_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_MAX_HEADER_BYTES = 100 << 20
"""Limit of the safetensors format."""


@dataclass(frozen=True)
class WeightFiles:
    """The weights of one folder."""

    files: tuple[Path, ...]
    """By name; each is there."""
    index: Path | None
    """What lists the shards; None: one whole file."""
    file_of: dict[str, str]
    """Tensor → file name, as the index has it; empty without an index."""

    @property
    def is_safetensors(self) -> bool:
        """Whether the tensors can be read without unpickling."""
        return self.files[0].suffix == ".safetensors"

    @property
    def first(self) -> Path:
        """What the rule found: the index, or the whole file."""
        return self.index or self.files[0]

    def tensors(self) -> dict[str, Path]:
        """Tensor → file for safetensors weights, from the index or the only file's header.

        Raises:
            ModelError: a file is truncated or unreadable, or lacks a tensor that the index promises.
        """
        headers = {file.name: (file, safetensors_header(file)) for file in self.files}
        if self.index is None:
            file, header = headers[self.files[0].name]
            return dict.fromkeys(header, file)
        for tensor, name in self.file_of.items():
            if tensor not in headers[name][1]:
                raise ModelError(f"{headers[name][0]} lacks the tensor {tensor}, which {self.index.name} says is there")
        return {tensor: headers[name][0] for tensor, name in self.file_of.items()}

    def strays(self) -> list[str]:
        """Tensors of a shard that the index does not place there: they are not read."""
        if self.index is None:
            return []
        return [
            tensor
            for file in self.files
            for tensor in safetensors_header(file)
            if self.file_of.get(tensor) != file.name
        ]


def find_weights(path: Path) -> WeightFiles:
    """Apply the rule to a folder; opens the index alone.

    Raises:
        ModelError: there are no weights, the index is unreadable, or a file that it names is missing.
    """
    named = _named_by_config(path)
    names = (named,) if named else _USUAL_NAMES
    found = next((path / name for name in names if (path / name).is_file()), None)
    if found is None:
        if named:
            raise ModelError(f"{path} lacks {named}, which transformers_weights in its config.json names")
        return _without_usual_names(path)
    if not found.name.endswith(INDEX_SUFFIX):
        return WeightFiles((found,), None, {})
    file_of = _weight_map(found)
    files = tuple(path / name for name in sorted(set(file_of.values())))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{path} lacks the weight file {missing[0]}{more}, which {found.name} names: copy it again")
    return WeightFiles(files, found, file_of)


def check_weights(path: Path) -> None:
    """Find out in milliseconds whether weights can be read, before anything starts to load.

    Raises:
        ModelError: a file or a tensor is missing, or a file is truncated.
    """
    weights = find_weights(path)
    if weights.is_safetensors:
        weights.tensors()


def safetensors_header(file: Path) -> dict[str, Any]:
    """Tensor → dtype, shape and offsets.

    Raises:
        ModelError: the file is no safetensors file, or shorter than its header says.
    """
    try:
        size_bytes = file.stat().st_size
        with file.open("rb") as stream:
            raw = read_raw_header(stream, size_bytes)
        header = json.loads(raw) if raw else None
        if not isinstance(header, dict):
            raise ModelError(f"{file} ({size_bytes} bytes) is no safetensors file, or truncated: copy it again")
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        expected = 8 + len(raw) + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    if size_bytes < expected:
        raise ModelError(f"{file} is truncated: {size_bytes} bytes, its header says {expected}; copy it again")
    return tensors


def read_raw_header(stream: BinaryIO | Any, size_bytes: int) -> bytes:
    """The JSON header of an opened file of this size, or nothing when it is of another format."""
    length = int.from_bytes(stream.read(8), "little")
    header: bytes = stream.read(length) if length < min(size_bytes, _MAX_HEADER_BYTES) else b""
    return header if header.startswith(b"{") else b""


def _named_by_config(path: Path) -> str | None:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # the reader of the configuration says what is wrong with it
    named = config.get("transformers_weights") if isinstance(config, dict) else None
    if named is None:
        return None
    endings = (".safetensors", ".safetensors.index.json")
    if not isinstance(named, str) or not named.endswith(endings) or Path(named).name != named:
        raise ModelError(
            f"{path}/config.json: transformers_weights must name a file of the folder that ends in "
            f"{' or '.join(endings)}, not {named!r}"
        )
    return named


def _without_usual_names(path: Path) -> WeightFiles:
    """A folder with one weight file of another name."""
    for suffix in (".safetensors", ".bin", ".gguf"):
        found = sorted(file for file in path.glob(f"*{suffix}") if file.is_file())
        if len(found) == 1:
            return WeightFiles(tuple(found), None, {})
        if found:
            names = ", ".join(file.name for file in found[:3])
            raise ModelError(
                f"{path} has {len(found)} weight files ({names} …) but neither model.safetensors nor "
                "model.safetensors.index.json, which says what lies where: copy it, too"
            )
    raise ModelError(f"no weights in {path}: expected a folder with model.safetensors or its shards and their index")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {index}: {error}; copy it again") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map of tensors and files; copy it again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or Path(name).suffix not in (".safetensors", ".bin"):
            raise ModelError(f"{index}: weight_map puts {tensor} into {name!r}; expected a file of the same folder")
    return weight_map
