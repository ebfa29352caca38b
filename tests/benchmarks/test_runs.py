"""Benchmarks run, on tiny sizes: their figures mean nothing here, their shape does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.peers.compare import HERE, Engine
from benchmarks.peers.protocol import prompt_of
from transformers import AutoModelForCausalLM

from pdserve.kernels.cpu import ops as cpu_ops
from pdserve.transfer.pulls.pull import SHARED_READ_BYTES

ROOT = Path(__file__).parents[2]


def run(*arguments, home):
    command = [sys.executable, "-m", *map(str, arguments), "--json", home / "figures.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((home / "figures.json").read_text())["rows"]
    return rows, done.stdout.splitlines()[-1]


def test_hand_off_reads_in_every_way_and_compares_with_raw_nixl(tmp_path):
    arguments = ("--only", "transfer", "--blocks", "3", "--block-bytes", SHARED_READ_BYTES // 2, "--rounds", "2")
    rows, headline = run("benchmarks.hand_off", *arguments, home=tmp_path)
    assert len([row for row in rows if row["metric"] == "rate"]) == 6
    assert [len(row["runs"]) for row in rows if row["metric"] == "share of raw NIXL"] == [2, 2]
    assert all(row["value"] > 0 for row in rows)
    assert "of raw NIXL's rate" in headline


def test_service_measures_its_cases(tmp_path, tiny_model_dir):
    arguments = ("--model", tiny_model_dir, "--cases", "scaling,interference", "--scale", 0.1)
    rows, headline = run("benchmarks.service", *arguments, home=tmp_path)
    values = {row["metric"]: row["value"] for row in rows}
    assert values["16 streams / 1 stream"] == pytest.approx(values["16 streams"] / values["1 stream"])
    assert values["TTFT of the last prompt"] > 0
    assert "targets met" in headline


@pytest.mark.skipif(cpu_ops.why_unavailable() is not None, reason=str(cpu_ops.why_unavailable()))
def test_an_engine_in_a_process_of_its_own_computes_the_model(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("PDS_HOME", str(tmp_path))
    (tmp_path / "peers").mkdir()
    prompt = [5, 6, 7, 8, 9, 10, 11]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=6, min_new_tokens=6, do_sample=False)
    command = [sys.executable, str(HERE / "run_ours.py"), str(tiny_model_dir), "fp32", "1"]
    with Engine("pdserve", command, {"OMP_NUM_THREADS": "1"}) as engine:
        assert engine.ask("greedy", prompt, 6) == expected[0, len(prompt) :].tolist()
        assert len(engine.ask("decode", 2, 20, 3)) == 3


def test_a_failing_engine_says_why_and_where_its_output_is(tmp_path, monkeypatch):
    monkeypatch.setenv("PDS_HOME", str(tmp_path))
    (tmp_path / "peers").mkdir()
    engine = Engine("pdserve", [sys.executable, str(HERE / "run_ours.py"), str(tmp_path), "fp32", "1"], {})
    with pytest.raises(Exception, match=r"pdserve: ModelError: .*; its output is in .*pdserve\.log"):
        engine.__enter__()


def test_prompts_differ_from_their_first_token_on():
    prompts = [prompt_of(number, 50) for number in range(300)]
    assert len({prompt[0] for prompt in prompts}) == 300
    assert all(len(prompt) == 50 for prompt in prompts)
