"""The GPU script, as far as it needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FAST = ["ceilings", "rms_norm", "paged_decode_attention", "block_digest", "decode steps"]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run(*options, timeout_s=...)` starts the script in an empty folder, with another one for temporary files."""
    (tmp_path / "here").mkdir()
    (tmp_path / "temporary").mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "temporary")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

    def run(*options: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_check", *options],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env=env,
            cwd=tmp_path / "here",
        )

    return run


def steps_of(report: Path) -> dict[str, str]:
    """Step → its verdict, in a report that claims no measurement."""
    found = json.loads((report / "gpu-check.json").read_text())
    assert "nothing was measured" in found["environment"]["hardware"]
    return {step["name"]: step["verdict"] for step in found["steps"]}


def test_a_dry_run_executes_steps_without_a_gpu_and_claims_no_times(run, tmp_path):
    done = run("--dry-run", "--report", str(tmp_path / "report"), "--only", *FAST, timeout_s=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps_of(tmp_path / "report") == dict.fromkeys(FAST, "ok")
    text = (tmp_path / "report" / "gpu-check.md").read_text()
    assert " ms" not in text
    assert "GB/s" not in text


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_whole_dry_run_is_ok(run, tmp_path):
    done = run("--dry-run", "--report", str(tmp_path / "report"), timeout_s=390)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(steps_of(tmp_path / "report")) == 13
    assert list((tmp_path / "here").iterdir()) == []


def test_a_failed_step_is_written_down_and_does_not_keep_the_next_from_running(run, tmp_path):
    done = run("--dry-run", "--only", "rms_norm", "block_digest", timeout_s=150)
    assert done.returncode == 1
    assert "not ok: rms_norm, block_digest" in done.stdout
    (report,) = (tmp_path / "temporary").glob("gpu-check-*")
    assert f"report in {report};" in done.stdout
    assert steps_of(report) == {"rms_norm": "failed", "block_digest": "failed"}, "a kernel's shares need the ceilings"
    assert list((tmp_path / "here").iterdir()) == [], "a dry run leaves nothing where it was started"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU answers")
def test_without_a_gpu_it_says_what_to_do(run):
    done = run(timeout_s=60)
    assert done.returncode == 2
    assert "a CUDA GPU is needed, and torch sees none here; --dry-run" in done.stderr
