"""CUDA executors on a CPU: the same code with eager kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.engine.executors.cuda.device import HostDevice
from pdserve.engine.executors.cuda.executor import CudaExecutor, StepBounds
from pdserve.engine.executors.cuda.kernels import eager_kernels

sys.path.insert(0, str(Path(__file__).parent))  # recorded_device.py


@pytest.fixture
def load_cuda(model_dir: Callable[[str], Path]) -> Callable[..., CudaExecutor]:
    """A CUDA executor with eager kernels on the CPU."""

    def load(arch: str, device=None, *, max_decode_seqs: int = 0, max_model_len: int = 512) -> CudaExecutor:
        return CudaExecutor.load(
            model_dir(arch),
            device or HostDevice(),
            eager_kernels(),
            dtype=torch.float32,
            kv_dtype=torch.float32,
            block_size=4,
            max_model_len=max_model_len,
            bounds=StepBounds(max_decode_seqs, 64),
        )

    return load
