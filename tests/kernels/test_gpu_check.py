"""The GPU script, as far as it needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FAST = ["ceilings", "rms_norm", "paged_decode_attention", "block_digest", "decode steps"]


def _run(tmp_path: Path, *options: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.gpu_check",
        "--report",
        str(tmp_path / "report"),
        *options,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s, env=env, cwd=ROOT)


def _steps(tmp_path: Path) -> dict[str, str]:
    found = json.loads((tmp_path / "report" / "gpu-check.json").read_text())
    assert "nothing was measured" in found["environment"]["hardware"]
    return {step["name"]: step["verdict"] for step in found["steps"]}


def test_a_dry_run_executes_steps_without_a_gpu_and_claims_no_times(tmp_path):
    done = _run(tmp_path, "--dry-run", "--only", *FAST, timeout_s=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert _steps(tmp_path) == dict.fromkeys(FAST, "ok")
    text = (tmp_path / "report" / "gpu-check.md").read_text()
    assert " ms" not in text
    assert "GB/s" not in text


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_whole_dry_run_is_ok(tmp_path):
    done = _run(tmp_path, "--dry-run", timeout_s=390)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(_steps(tmp_path)) == 13


def test_a_failed_step_is_written_down_and_does_not_keep_the_next_from_running(tmp_path):
    done = _run(tmp_path, "--dry-run", "--only", "rms_norm", "block_digest", timeout_s=150)
    assert done.returncode == 1
    assert _steps(tmp_path) == {"rms_norm": "failed", "block_digest": "failed"}, "a kernel's shares need the ceilings"
    assert "not ok: rms_norm, block_digest" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU answers")
def test_without_a_gpu_it_says_what_to_do(tmp_path):
    done = _run(tmp_path, timeout_s=60)
    assert done.returncode == 2
    assert "a CUDA GPU is needed, and torch sees none here; --dry-run" in done.stderr
