"""Triton's kernels inside the engine, interpreted: in processes of their own, because Triton decides at its import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pdserve.engine.loader import load_executor
from pdserve.errors import SettingError

SCRIPT = Path(__file__).parents[1] / "interpreted_logits.py"
TOLERANCE = 1e-5  # float32 in another order of summation, relative to the largest logit


def _run(*command: str, timeout_s: float, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("arch", ["qwen3", "gemma2"], ids=["fused", "stock-modules-window-softcap"])
def test_logits_are_those_of_the_stock_model(arch, model_dir):
    printed = _run(str(SCRIPT), str(model_dir(arch)), timeout_s=150)
    assert float(printed.split()[-1]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pdserve_verify_passes_with_every_kernel_interpreted(model_dir, tmp_path):
    command = ["-m", "pdserve", "verify", "--model", str(model_dir("llama")), "--executor", "triton-interpreter"]
    printed = _run(*command, "--prompts", "2", timeout_s=590, PDS_HOME=str(tmp_path))
    assert " 0 mismatches" in printed.splitlines()[-1]


def test_a_process_that_has_loaded_triton_says_what_to_set(model_dir):
    __import__("triton")
    with pytest.raises(SettingError, match="set TRITON_INTERPRET=1 in its environment"):
        load_executor(model_dir("llama"), executor="triton-interpreter")


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"kv_dtype": "bfloat16"}], ids=str)
def test_bfloat16_is_refused_with_a_sentence(settings, model_dir):
    with pytest.raises(SettingError, match="float32 or float16, because Triton's interpreter computes it wrongly"):
        load_executor(model_dir("llama"), executor="triton-interpreter", **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU answers")
def test_the_cuda_executor_without_a_gpu_says_what_to_use(model_dir):
    with pytest.raises(SettingError, match="a CUDA GPU, and torch sees none here; use auto or transformers"):
        load_executor(model_dir("llama"), executor="cuda")


def test_the_interpreter_runs_on_the_cpu_alone(model_dir, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SettingError, match="cpu or auto, because EXECUTOR=triton-interpreter"):
        load_executor(model_dir("llama"), executor="triton-interpreter", device="cuda")
