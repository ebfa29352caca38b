"""Which executor is chosen, why, and the sentences that say what to change."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch
from engine_oracle import make_sequence, run_to_end

from pdserve.engine import loader
from pdserve.engine.executors.base import KvCacheSpec
from pdserve.engine.loader import choose_executor, choose_num_blocks, free_memory_bytes, load_executor
from pdserve.errors import ModelError, SettingError
from pdserve.kernels.cpu import ops as cpu_ops

CPU = torch.device("cpu")
SPEC = KvCacheSpec(num_layers=2, block_size=4, num_kv_heads=1, head_dim=8, dtype=torch.float32)  # 512 bytes a block


@pytest.mark.parametrize("name", ["transformers", "fake"])
def test_a_loaded_executor_runs(name, model_dir, make_engine):
    executor = load_executor(model_dir("llama"), executor=name, device="cpu", block_size=4, max_model_len=64, threads=1)
    assert (executor.name, executor.max_model_len) == (name, 64)
    engine = make_engine(executor)
    sequence = make_sequence([10, 11, 12], 3)
    engine.add(sequence)
    run_to_end(engine)
    assert len(sequence.output_token_ids) == 3


def test_auto_takes_the_cpu_kernels_where_they_serve_the_model_and_says_why(model_dir, monkeypatch, caplog):
    monkeypatch.setattr(loader, "_cpu_obstacle", lambda path: None)
    assert choose_executor(model_dir("llama"), "auto", CPU).name == "cpu"
    monkeypatch.setattr(loader, "_cpu_obstacle", lambda path: "soft-capped attention is not in the kernels")
    with caplog.at_level(logging.WARNING, "pdserve"):
        choice = choose_executor(model_dir("gemma2"), "auto", CPU)
    assert (choice.name, choice.reason) == ("transformers", "soft-capped attention is not in the kernels")
    assert "slower" in caplog.text
    with pytest.raises(SettingError, match="transformers or auto, because soft-capped"):
        choose_executor(model_dir("gemma2"), "cpu", CPU)


def test_the_cpu_kernels_can_be_switched_off(model_dir, monkeypatch):
    monkeypatch.setenv("PDS_CPU_KERNELS", "off")
    assert choose_executor(model_dir("llama"), "auto", CPU).name == "transformers"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU answers")
@pytest.mark.parametrize("settings", [{"executor": "cuda"}, {"device": "cuda"}, {"device": "cuda:1"}])
def test_cuda_without_a_gpu_says_what_to_use(settings, model_dir):
    with pytest.raises(SettingError, match="torch sees none here; use auto"):
        load_executor(model_dir("llama"), **settings)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"executor": "gpu"}, "EXECUTOR"),
        ({"executor": "cuda", "device": "cpu"}, "DEVICE"),
        ({"dtype": "float8"}, "DTYPE"),
        ({"kv_dtype": "fp8"}, "KV_DTYPE"),
        ({"executor": "transformers", "quantization": "int8"}, "QUANTIZATION"),
        ({"executor": "transformers", "deterministic": True}, "DETERMINISTIC"),
        ({"executor": "transformers", "max_model_len": 10**6}, "MAX_MODEL_LEN"),
        ({"executor": "fake", "max_model_len": 10**6}, "MAX_MODEL_LEN"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(settings, name, model_dir):
    with pytest.raises(SettingError) as failure:
        load_executor(model_dir("llama"), **{"device": "cpu", **settings})
    assert failure.value.name == name


@pytest.mark.parametrize("name", ["auto", "transformers", "fake"])
def test_a_folder_without_a_model_is_a_model_error(name, tmp_path):
    with pytest.raises(ModelError):
        load_executor(tmp_path, executor=name, device="cpu")


def test_the_kv_cache_has_its_own_dtype(model_dir):
    executor = load_executor(model_dir("llama"), executor="transformers", device="cpu", kv_dtype="bfloat16")
    assert executor.allocate_kv_cache(3).dtype is torch.bfloat16
    assert executor.kv_cache.shape == (3, *executor.kv_spec.block_shape)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_blocks": 77, "kv_memory_bytes": 10**6}, 77),
        ({"kv_memory_bytes": 512 * 10 + 511}, 10),
        ({"kv_memory_fraction": 0.5}, 100),
        ({}, 50),
        ({"device_type": "cuda"}, 180),
    ],
)
def test_the_number_of_blocks_is_as_set_else_what_fits(values, expected):
    arguments = {
        "num_blocks": None,
        "kv_memory_bytes": None,
        "kv_memory_fraction": None,
        "free_bytes": 512 * 200,
        **values,
    }
    assert choose_num_blocks(SPEC, **arguments) == expected


def test_memory_without_room_for_blocks_names_the_setting():
    arguments = {"num_blocks": None, "kv_memory_bytes": 600, "kv_memory_fraction": None, "free_bytes": 10**9}
    with pytest.raises(SettingError, match=r"KV_MEMORY_BYTES.*512 bytes"):
        choose_num_blocks(SPEC, **arguments)


def test_free_memory_is_a_sensible_number_of_bytes():
    assert 2**20 < free_memory_bytes(CPU) < 2**50


@pytest.mark.skipif(cpu_ops.why_unavailable() is not None, reason=str(cpu_ops.why_unavailable()))
@pytest.mark.parametrize("sharing", ["off", "on"])
def test_the_cpu_executor_starts_without_transformers(model_dir, tmp_path, sharing):
    """Its import alone would double the time to the first answer."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from pdserve.settings import PrefillSettings, load\n"
        "from pdserve.worker.load import load_model\n"
        "from pdserve.worker.stages import StartStages\n"
        "import pdserve.prefill_worker.main, pdserve.decode_worker.main\n"
        "model = load_model(load(PrefillSettings, sys.argv[1:]), StartStages(0.0))\n"
        "print(model.engine.executor.name, sorted({'transformers', 'triton', 'scipy', 'sympy'} & set(sys.modules)))\n"
    )
    arguments = ["--model", str(model_dir("llama")), "--executor", "cpu", "--share-weights", sharing]
    command = [sys.executable, "-c", code, *arguments]
    environment = {**os.environ, "PDS_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1:] == ["cpu []"], done.stdout + done.stderr
    assert len(list(tmp_path.glob("packed/*.packed"))) == (sharing == "on")
