"""Tiny models of every served architecture, their stock twins as the oracle, and engines around both."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve.engine.engine import Engine
from pdserve.engine.executors.base import Executor
from pdserve.engine.executors.stock.executor import TransformersExecutor
from pdserve.models.tiny import make_model

sys.path.insert(0, str(Path(__file__).parent))  # build_engine.py, engine_oracle.py

from build_engine import build_engine

BLOCK_SIZE = 4


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and other tests want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the tiny model of an architecture, made once."""
    root = tmp_path_factory.mktemp("architectures")
    return functools.cache(lambda arch: make_model(root / arch, arch, 1))


@pytest.fixture(scope="session")
def stock_model(model_dir: Callable[[str], Path]) -> Callable[[str], torch.nn.Module]:
    """The unchanged transformers model: the independent truth."""

    @functools.cache
    def load(arch: str) -> torch.nn.Module:
        folder = model_dir(arch)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    return load


@pytest.fixture
def load_executor(model_dir: Callable[[str], Path]) -> Callable[..., TransformersExecutor]:
    """A fresh transformers executor for an architecture."""

    def load(arch: str, block_size: int = BLOCK_SIZE) -> TransformersExecutor:
        return TransformersExecutor.load(
            model_dir(arch),
            dtype=torch.float32,
            kv_dtype=torch.float32,
            device=torch.device("cpu"),
            block_size=block_size,
            max_model_len=512,
        )

    return load


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """An engine around an executor; every engine made proves its ledger when the test ends."""
    made = []

    def make(executor: Executor, **options) -> Engine:
        made.append(build_engine(executor, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.check_integrity()
