"""lm-eval's multiple choice through a service equals its own hf model: cold, cached and in chunks."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from lm_eval_environment import lm_eval_python

from pdserve.local.service import PrivateService

SERVICE: dict[str, Any] = {
    "num": {"prefill": 1, "decode": 1},
    "settings": {"NUM_BLOCKS": 512, "SERVED_MODEL_NAME": "served"},
}
NUM_QUESTIONS = 25
TOLERANCE = 1e-3
TASK = """task: tiny_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
"""
WORDS = ["the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "block", "cache", "雪", "👍"]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one local task: questions of 1 to 60 words, four choices of 1 to 5."""
    folder, rng = tmp_path_factory.mktemp("tasks"), random.Random(5)

    def words(low: int, high: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))

    rows = [
        {"question": words(1, 60), "choices": [words(1, 5) for _ in range(4)], "answer": rng.randrange(4)}
        for _ in range(NUM_QUESTIONS)
    ]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "tiny_choices.yaml").write_text(TASK.format(file=file))
    return folder


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of an lm-eval that looks nothing up and writes nothing elsewhere."""
    home = str(tmp_path_factory.mktemp("hf"))
    switches = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **switches, "HF_HOME": home, "OPENAI_API_KEY": "none", "OMP_NUM_THREADS": "1"}


def output_of(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_multiple_choice_equals_the_hf_model(
    service: PrivateService, http: httpx.Client, tiny_model_dir: Path, tasks: Path, offline: dict[str, str]
) -> None:
    chunked = {**SERVICE["settings"], "MAX_NUM_BATCHED_TOKENS": 16, "MAX_NUM_SEQS": 8}
    with PrivateService(tiny_model_dir, settings=chunked) as other:
        runs = [f"cold={service.url}", f"cached={service.url}", f"chunked={other.url}"]
        command = [
            str(lm_eval_python()),
            str(HERE / "lm_eval_child.py"),
            str(tiny_model_dir),
            str(tasks),
            "tiny_choices",
        ]
        found = json.loads(output_of([*command, *runs], offline).splitlines()[-1])
    longest = _longest_question(tasks)
    again = http.post(f"{service.url}/v1/completions", json={"prompt": longest, "max_tokens": 1}).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the second run found nothing cached"
    expected = found.pop("hf")
    assert len(found) == 2 * len(runs)
    assert len(expected["pairs"]) == 4 * NUM_QUESTIONS
    for name, got in found.items():
        assert got["metrics"] == expected["metrics"], name
        logprobs = [logprob for logprob, _ in expected["pairs"]]
        assert [logprob for logprob, _ in got["pairs"]] == pytest.approx(logprobs, abs=TOLERANCE, rel=0), name
        assert [is_greedy for _, is_greedy in got["pairs"]] == [is_greedy for _, is_greedy in expected["pairs"]], name


def _longest_question(tasks: Path) -> str:
    rows = [json.loads(line) for line in (tasks / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    return max((str(row["question"]) for row in rows), key=len)


def test_the_documented_command_evaluates(
    service: PrivateService, tiny_model_dir: Path, tasks: Path, offline: dict[str, str], tmp_path: Path
) -> None:
    page = (ROOT / "docs/http-api.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```\n(lm-eval .*?)```", page, re.DOTALL)
    line = (
        block.replace("\\\n", " ").replace("http://127.0.0.1:8000", service.url).replace("FOLDER", str(tiny_model_dir))
    )
    line = line.replace("model=demo", "model=served").replace("my_task", "tiny_choices").replace("TASKS", str(tasks))
    program, *arguments = shlex.split(line)
    assert program == "lm-eval"
    command = [str(lm_eval_python()), "-m", "lm_eval", *arguments]
    table = output_of([*command, "--output_path", str(tmp_path)], offline)
    assert re.search(r"tiny_choices\s*\|.*\|acc\s*\|", table), table
