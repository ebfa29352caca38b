"""Stages of a worker's start add up to the age of its process."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from pdserve.local.service import PrivateService
from pdserve.worker.stages import StartStages, process_age_s


def test_stages_follow_each_other_and_add_up():
    now_s = [100.0]
    stages = StartStages(1.5, lambda: now_s[0])
    for stage, at_s in (("model", 100.25), ("weights", 102.25), ("model", 102.5)):
        now_s[0] = at_s
        stages.done(stage)
    assert stages.seconds == {"imports": 1.5, "model": 0.5, "weights": 2.0}
    assert stages.total_s == 4.0
    assert str(stages) == "4.00 s (imports 1.50, model 0.50, weights 2.00)"


def test_a_process_knows_its_age():
    first_s = process_age_s()
    assert 0 < first_s < 36_000
    assert process_age_s() >= first_s


def test_a_worker_tells_its_stages_when_it_serves(tiny_model_dir: Path):
    settings = {"EXECUTOR": "fake", "NUM_BLOCKS": 64}
    with PrivateService(tiny_model_dir, num={"gateway": 0, "decode": 0}, settings=settings) as service:
        log = service.process("prefill").last_lines()
        metrics = httpx.get(service.process("prefill").metrics_url).text
    line = re.search(r"pdserve-stage: serving prefill at http://\S+ after [\d.]+ s \((.*)\)", log)
    assert line is not None, log
    seconds = {stage: float(value) for stage, _, value in (part.rpartition(" ") for part in line[1].split(", "))}
    assert list(seconds) == ["imports", "model", "weights", "KV cache", "warm-up", "bus", "transport", "HTTP"]
    load_s = re.search(r"^pd_model_load_seconds (\S+)$", metrics, re.MULTILINE)
    assert load_s is not None, metrics
    loading_s = seconds["model"] + seconds["weights"] + seconds["KV cache"] + seconds["warm-up"]
    assert float(load_s[1]) == pytest.approx(loading_s, abs=0.1)
