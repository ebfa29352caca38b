"""Fingerprint and KV signature: equal exactly when they must be, cheap, and readable when they differ."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pdserve.errors import ModelError
from pdserve.models.identity import (
    file_fingerprint,
    kv_signature,
    model_fingerprint,
    rope_text,
    signature_difference,
)


@pytest.fixture
def copy(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "copy"))


def flip_byte(file: Path, offset: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte[0] ^ 1]))


def test_a_copy_elsewhere_is_the_same_model(tiny_model_dir: Path, copy: Path) -> None:
    assert model_fingerprint(copy) == model_fingerprint(tiny_model_dir)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    ],
)
def test_one_bit_in_any_file_that_matters_is_another_model(copy: Path, name: str) -> None:
    before = model_fingerprint(copy)
    flip_byte(copy / name, (copy / name).stat().st_size // 2)
    assert model_fingerprint(copy) != before


def test_files_that_do_not_matter_do_not_count(copy: Path) -> None:
    before = model_fingerprint(copy)
    (copy / "README.md").write_text("hello")
    (copy / "training_args.bin").write_bytes(b"x")  # beside safetensors no other weights are read
    assert model_fingerprint(copy) == before


def test_a_removed_template_is_another_model(copy: Path) -> None:
    before = model_fingerprint(copy)
    (copy / "chat_template.jinja").unlink()
    assert model_fingerprint(copy) != before


def test_text_moved_between_files_is_another_model(copy: Path) -> None:
    (copy / "vocab.json").write_bytes(b"ab")
    (copy / "merges.txt").write_bytes(b"c")
    before = model_fingerprint(copy)
    (copy / "vocab.json").write_bytes(b"a")
    (copy / "merges.txt").write_bytes(b"bc")
    assert model_fingerprint(copy) != before


@pytest.fixture(scope="module")
def big_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 tensors of 1 MiB: sampled, not read."""
    file = tmp_path_factory.mktemp("big") / "model.safetensors"
    noise = np.random.default_rng(0)
    save_file({f"layer{i}.weight": noise.standard_normal((512, 512), dtype=np.float32) for i in range(16)}, file)
    return file


@pytest.mark.parametrize("where", ["start", "middle", "end"])
@pytest.mark.parametrize("tensor", [0, 7, 15])
def test_every_tensor_of_a_large_file_is_sampled(big_weights: Path, tmp_path: Path, tensor: int, where: str) -> None:
    changed = Path(shutil.copy(big_weights, tmp_path))
    content = changed.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    begin, end = header[f"layer{tensor}.weight"]["data_offsets"]
    offset = {"start": begin, "middle": (begin + end) // 2, "end": end - 1}[where]
    flip_byte(changed, 8 + length + offset)
    assert file_fingerprint(changed) != file_fingerprint(big_weights)


def test_tensors_that_swap_names_are_another_model(big_weights: Path, tmp_path: Path) -> None:
    content = big_weights.read_bytes()
    swapped = content.replace(b"layer3.", b"layerX.").replace(b"layer4.", b"layer3.").replace(b"layerX.", b"layer4.")
    (tmp_path / "model.safetensors").write_bytes(swapped)
    assert file_fingerprint(tmp_path / "model.safetensors") != file_fingerprint(big_weights)


def test_a_large_file_of_another_format_is_sampled_evenly(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(os.urandom(6 << 20))
    before = file_fingerprint(file)
    flip_byte(file, 0)
    assert file_fingerprint(file) != before


def test_half_a_gigabyte_takes_less_than_a_second(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    size_bytes = 540_000_000
    header = json.dumps({f"t{i}": {"data_offsets": [i * 10**6, (i + 1) * 10**6]} for i in range(540)}).encode()
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + size_bytes)  # sparse: the disk holds nothing
    start_s = time.perf_counter()
    file_fingerprint(file)
    assert time.perf_counter() - start_s < 1.0


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no weights"):
        model_fingerprint(tmp_path)


def test_only_the_files_that_are_read_count(copy: Path) -> None:
    before = model_fingerprint(copy)
    for name in ("a.bin", "b.safetensors", "model.safetensors.index.json"):
        (copy / name).write_bytes(b"x")
    assert model_fingerprint(copy) == before


GEOMETRY = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "kv_dtype": "float32", "block_size": 16, "rope": "r"}


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("num_layers", 3, "layers: 2 here, 3 there"),
        ("num_kv_heads", 4, "kv_heads: 2 here, 4 there"),
        ("head_dim", 32, "head_dim: 16 here, 32 there"),
        ("kv_dtype", "bfloat16", "kv_dtype: float32 here, bfloat16 there"),
        ("block_size", 32, "block_size: 16 here, 32 there"),
    ],
)
def test_a_refusal_says_which_field_differs(field: str, value: object, told: str) -> None:
    ours, theirs = kv_signature("f", **GEOMETRY), kv_signature("f", **{**GEOMETRY, field: value})
    assert ours != theirs
    assert signature_difference(ours, theirs) == told


def test_long_rope_settings_that_differ_late_differ() -> None:
    long = "x" * 100
    ours, theirs = (kv_signature("f", **{**GEOMETRY, "rope": long + end}) for end in ("a", "b"))
    assert ours != theirs
    assert signature_difference(ours, theirs).startswith("rope: ")


def test_all_differences_are_told_and_none_when_equal() -> None:
    ours = kv_signature("f", **GEOMETRY)
    theirs = kv_signature("g", **{**GEOMETRY, "head_dim": 8})
    assert signature_difference(ours, theirs) == "model: f here, g there; head_dim: 16 here, 8 there"
    assert signature_difference(ours, ours) == ""


def test_a_signature_of_another_version_is_still_readable() -> None:
    assert signature_difference(kv_signature("f", **GEOMETRY), "garbage").count("absent there") == 8


def test_the_dtypes_library_prefix_does_not_matter() -> None:
    assert kv_signature("f", **{**GEOMETRY, "kv_dtype": "torch.float32"}) == kv_signature("f", **GEOMETRY)


def test_rope_text_ignores_order_and_everything_else() -> None:
    first = rope_text({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 2}, "hidden_size": 1})
    assert first == rope_text({"rope_scaling": {"factor": 2, "type": "yarn"}, "rope_theta": 1e4, "hidden_size": 2})
    assert first != rope_text({"rope_theta": 1e4})
