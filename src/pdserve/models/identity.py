"""The two identities of a served model, both torch-free and cheap.

*Model fingerprint*: everything that decides which token comes next or what it means (weights, configuration,
tokenizer, chat template). A sequence that has emitted tokens continues only within it. Weights are sampled and
not read: many GB cost milliseconds. Two different models therefore never share a fingerprint by accident, but
it is no protection against forged weights.

*KV signature*: the fingerprint and the geometry of KV blocks. A prefill and a decode worker pair only when
their signatures are equal; the fields stay readable, so that a refusal can say which of them differ.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pdserve.ids import Fingerprint, KvSignature
from pdserve.models.weight_files import find_weights, read_raw_header

KV_LAYOUT_VERSION = 1
"""Raised when the layout `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]` changes."""

_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_WHOLE_FILE_BYTES = 4 << 20
"""Smaller weight files are read whole."""
_SAMPLE_BYTES = 512
_SAMPLES_PER_TENSOR = 3
_SAMPLES_PER_FILE = 512
"""Samples of a weight file without a safetensors header, evenly spaced."""


def model_fingerprint(path: Path) -> Fingerprint:
    """32 hex digits over a Hugging Face folder; equal folders give equal fingerprints on every machine.

    Raises:
        ModelError: there is no such folder, or no weights in it.
    """
    weights = find_weights(path)
    digest = hashlib.blake2b(digest_size=16)
    for name in _TEXT_FILES:
        file = path / name
        if file.is_file():
            _add(digest, name.encode(), file.read_bytes())
    if weights.index is not None:
        _add(digest, weights.index.name.encode(), weights.index.read_bytes())
    for file in weights.files:
        _add(digest, file.name.encode(), file_fingerprint(file).encode())
    return Fingerprint(digest.hexdigest())


def file_fingerprint(file: Path) -> str:
    """32 hex digits over a weight file's size, its safetensors header and samples spread evenly over its tensors."""
    size_bytes = file.stat().st_size
    digest = hashlib.blake2b(digest_size=16)
    digest.update(size_bytes.to_bytes(8, "little"))
    with file.open("rb", buffering=0) as stream:
        if size_bytes <= _WHOLE_FILE_BYTES:
            digest.update(stream.read())
            return digest.hexdigest()
        header = read_raw_header(stream, size_bytes)
        digest.update(header)
        for offset in _sample_offsets(header, size_bytes):
            digest.update(os.pread(stream.fileno(), _SAMPLE_BYTES, offset))
    return digest.hexdigest()


def _sample_offsets(header: bytes, size_bytes: int) -> Iterator[int]:
    """Where to read: the start, middle and end of every tensor, or evenly spaced over the file."""
    if not header:
        step = max(1, (size_bytes - _SAMPLE_BYTES) // (_SAMPLES_PER_FILE - 1))
        yield from range(0, size_bytes, step)
        return
    base = 8 + len(header)
    for name, tensor in json.loads(header).items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            last = max(begin, end - _SAMPLE_BYTES)
            for sample in range(_SAMPLES_PER_TENSOR):
                yield base + begin + (last - begin) * sample // (_SAMPLES_PER_TENSOR - 1)


def _add(digest: hashlib.blake2b, name: bytes, content: bytes) -> None:
    """Lengths first, so that two different lists of parts never give the same bytes."""
    digest.update(len(name).to_bytes(8, "little") + name + len(content).to_bytes(8, "little") + content)


def kv_signature(
    fingerprint: Fingerprint,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: str,
    block_size: int,
    rope: str,
) -> KvSignature:
    """`model=…;layers=2;…;layout=1`: equal strings may exchange KV blocks, see `signature_difference`.

    `rope` is `rope_text(config)`; it may hold any characters.
    """
    fields = {
        "model": fingerprint,
        "layers": num_layers,
        "kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "kv_dtype": kv_dtype.removeprefix("torch."),
        "block_size": block_size,
        "rope": f"{rope[:40]}#{hashlib.blake2b(rope.encode(), digest_size=6).hexdigest()}".replace(";", ","),
        "layout": KV_LAYOUT_VERSION,
    }
    return KvSignature(";".join(f"{name}={value}" for name, value in fields.items()))


def signature_difference(ours: str, theirs: str) -> str:
    """`kv_dtype: float32 here, bfloat16 there; …`, for a refusal; empty when equal."""
    left, right = _signature_fields(ours), _signature_fields(theirs)
    names = [*left, *(name for name in right if name not in left)]
    return "; ".join(
        f"{name}: {left.get(name, 'absent')} here, {right.get(name, 'absent')} there"
        for name in names
        if left.get(name) != right.get(name)
    )


def _signature_fields(signature: str) -> dict[str, str]:
    return dict(part.partition("=")[::2] for part in signature.split(";"))


def rope_text(config: Mapping[str, Any]) -> str:
    """Everything in a config.json that decides how positions turn keys, as canonical JSON."""
    text = config.get("text_config") or config
    names = ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor")
    return json.dumps({name: text[name] for name in names if text.get(name) is not None}, sort_keys=True)
