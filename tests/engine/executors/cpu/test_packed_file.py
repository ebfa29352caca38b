"""Packed weights shared through a file: the same logits, packed once, never half a file, never another model's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cpu_models import build, load, tokens

from pdserve.engine.executors.base import SequenceSlice
from pdserve.engine.executors.cpu import packed_file
from pdserve.engine.executors.cpu.packed_file import WeightSharing, open_or_pack
from pdserve.kernels.cpu import ops as cpu_ops

needs_kernels = pytest.mark.skipif(cpu_ops.why_unavailable() is not None, reason=str(cpu_ops.why_unavailable()))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "shared", attention_bias=True)


def _sharing(folder: Path, mode: str = "on", available_bytes: int = 1 << 40) -> WeightSharing:
    return WeightSharing(mode, folder, available_bytes)


def _logits(executor) -> torch.Tensor:
    return executor.run([SequenceSlice(tokens(40), 0, list(range(8)), samples=True)]).clone()


@needs_kernels
@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}, {"quantization": "int8"}],
    ids=["fp32", "bf16", "int8"],
)
def test_shared_weights_give_the_very_logits_of_own_ones_when_packed_and_when_found(model_dir, tmp_path, options):
    own = _logits(load(model_dir, **options))
    packed = load(model_dir, sharing=_sharing(tmp_path), **options)
    assert torch.equal(_logits(packed), own)
    (file,) = tmp_path.glob("*.packed")
    before = file.stat()
    found = load(model_dir, sharing=_sharing(tmp_path), **options)
    assert torch.equal(_logits(found), own)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "not packed again"


@needs_kernels
def test_other_types_and_changed_weights_are_other_files_and_older_ones_go(model_dir, tmp_path):
    load(model_dir, sharing=_sharing(tmp_path))
    load(model_dir, sharing=_sharing(tmp_path), quantization="int8")
    names = {file.name for file in tmp_path.glob("*.packed")}
    assert len(names) == 2
    (weights,) = model_dir.glob("*.safetensors")
    stat = weights.stat()
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    load(model_dir, sharing=_sharing(tmp_path))
    after = {file.name for file in tmp_path.glob("*.packed")}
    assert len(after) == 2
    assert len(after & names) == 1


@needs_kernels
@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"quantization": "int8"}], ids=["bf16", "int8"])
def test_a_file_is_never_mapped_by_a_process_that_reads_another_layout(model_dir, tmp_path, monkeypatch, options):
    logits = []
    for isa in ("portable", ""):  # widens single values; the best one here, which may multiply pairs
        monkeypatch.setenv("PDS_CPU_ISA", isa)
        own = load(model_dir, **options)
        shared = load(model_dir, sharing=_sharing(tmp_path), **options)
        logits.append(_logits(shared))
        assert torch.equal(logits[-1], _logits(own))
    torch.testing.assert_close(*logits, rtol=0.05, atol=0.05)


@needs_kernels
def test_a_file_is_used_when_copies_would_crowd_the_memory(model_dir, tmp_path):
    executor = load(model_dir, sharing=_sharing(tmp_path, "auto", 1 << 40))
    assert not list(tmp_path.iterdir())
    load(model_dir, sharing=_sharing(tmp_path, "off", 1))
    assert not list(tmp_path.iterdir())
    load(model_dir, sharing=_sharing(tmp_path, "auto", 3 * executor.weight_bytes))
    assert len(list(tmp_path.glob("*.packed"))) == 1


@needs_kernels
def test_without_room_on_the_disk_weights_are_not_shared(model_dir, tmp_path, monkeypatch, caplog):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_file.os, "posix_fallocate", full)
    executor = load(model_dir, sharing=_sharing(tmp_path))
    assert _logits(executor).isfinite().all()
    assert "not shared" in caplog.text
    assert not list(tmp_path.glob("*.packed"))


def test_packing_that_failed_leaves_no_file(tmp_path):
    def fail(_: object) -> None:
        raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        open_or_pack(tmp_path / "a-1.packed", 4096, fail)
    assert not (tmp_path / "a-1.packed").exists()
    assert open_or_pack(tmp_path / "a-1.packed", 4096, lambda memory: None).is_filled


def test_a_file_of_the_wrong_size_is_packed_again(tmp_path):
    file = tmp_path / "a-1.packed"
    file.write_bytes(b"cut short")
    assert open_or_pack(file, 4096, lambda memory: None).num_bytes == file.stat().st_size == 4096


_PACK_SLOWLY = """
import os, sys, time
from pathlib import Path
from pdserve.engine.executors.cpu.packed_file import open_or_pack
folder = Path(sys.argv[1])
def pack(memory):
    (folder / f"{os.getpid()}.mark").touch()
    time.sleep(0.2)
open_or_pack(folder / "a-1.packed", 4096, pack)
"""


def test_of_several_processes_one_packs(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", _PACK_SLOWLY, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert len(list(tmp_path.glob("*.mark"))) == 1
