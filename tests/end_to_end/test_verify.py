"""`pdserve verify` says yes to a right service, and the same comparison says no to a wrong one."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.local.service import PrivateService
from pdserve.models.tiny import make_model
from pdserve.verify.plan import Pass, Stage
from pdserve.verify.progress import Progress
from pdserve.verify.verification import Verification


def test_verify_compares_and_ends_with_its_sums(tiny_model_dir: Path) -> None:
    command = [sys.executable, "-m", "pdserve", "verify", "--model", str(tiny_model_dir), "--prompts", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("verify: 28 prompts, ")
    assert last.endswith(" 0 mismatches, 0 ties")
    assert "KV ledgers: in order" in done.stdout


def test_verify_fails_where_there_is_no_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pdserve", "verify", "--model", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "verify: 0 prompts, 0 tokens, 0 mismatches, 0 ties"
    assert "none" in done.stderr


def test_a_service_of_another_model_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same names, vocabulary and template: only the weights differ."""
    ours, theirs = (
        make_model(tmp_path / name / "tiny", arch="llama", seed=seed) for seed, name in ((0, "a"), (9, "b"))
    )
    monkeypatch.setattr(
        "pdserve.verify.verification.PrivateService", lambda path, settings: PrivateService(theirs, settings=settings)
    )
    out = io.StringIO()
    verification = Verification(os.environ, Progress(out))
    verification.run(Stage(str(ours), "auto", "auto", 8, 100, 8, (Pass(4, False, "a"),)))
    assert verification.tally.num_mismatches == 8, out.getvalue()
    assert not verification.is_ok
    assert "MISMATCH" in out.getvalue()
