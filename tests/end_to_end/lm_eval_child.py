"""In a process of its own, since its libraries take seconds to import and warn: lm-eval on one task, once for each run.

Arguments: folder of the model, folder of the tasks, name of the task, then NAME=URL of each run through a service. The
first run is lm-eval's own `hf` model. Prints one JSON line: by run, metrics and (log-likelihood, is greedy) pairs.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import lm_eval
import torch
from lm_eval.tasks import TaskManager


def run(tasks: TaskManager, task: str, model: str, model_args: dict[str, Any]) -> dict[str, Any]:
    found = lm_eval.simple_evaluate(
        model=model, model_args=model_args, tasks=[task], task_manager=tasks, log_samples=True, bootstrap_iters=0
    )
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    pairs = [[float(loglikelihood), bool(greedy)] for s in samples for (loglikelihood, greedy) in _firsts(s["resps"])]
    metrics = {name: value for name, value in found["results"][task].items() if isinstance(value, float)}
    return {"metrics": metrics, "pairs": pairs}


def _firsts(responses: list[Any]) -> list[Any]:
    """One response of each choice."""
    return [response[0] for response in responses]


def main(folder: str, task_folder: str, task: str, *runs: str) -> None:
    torch.set_num_threads(1)
    tasks = TaskManager(include_path=task_folder, include_defaults=False)
    found = {"hf": run(tasks, task, "hf", {"pretrained": folder, "device": "cpu", "dtype": "float32"})}
    for name_and_url in runs:
        name, url = name_and_url.split("=", 1)
        args = {"model": "served", "base_url": f"{url}/v1/completions", "tokenizer": folder, "num_concurrent": 4}
        found[name] = run(tasks, task, "local-completions", args)
        texts = {**args, "tokenized_requests": False, "batch_size": 3}
        found[f"{name}, texts in batches"] = run(tasks, task, "local-completions", texts)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
