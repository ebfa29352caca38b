"""Chooses and loads the executor, and says which and why. The only place that knows all executors.

Executors are imported when chosen: the fake one never loads transformers, and the CPU one may be absent.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from pdserve.engine.executors.base import Executor, KvCacheSpec
from pdserve.engine.executors.cpu.packed_file import WeightSharing
from pdserve.engine.executors.fake import FakeExecutor, FakeOptions
from pdserve.errors import ModelError, SettingError
from pdserve.log import get_logger
from pdserve.models.card import ModelCard

if TYPE_CHECKING:
    from pdserve.engine.executors.cuda.device import Device

logger = get_logger(__name__)

DEFAULT_FRACTION = {"cuda": 0.9, "cpu": 0.25}
"""Share of the free memory that the KV cache takes: a GPU is ours alone, a machine's memory has other users."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Choice:
    """Which executor, and why."""

    name: str
    """transformers | cpu | cuda | triton-interpreter | fake."""
    reason: str


@dataclass(frozen=True, slots=True)
class _Request:
    """What to load, with every `auto` resolved."""

    model_path: Path
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    block_size: int
    max_model_len: int | None
    threads: int | None
    quantization: str
    fake: FakeOptions
    max_decode_seqs: int
    max_batched_tokens: int
    sharing: WeightSharing | None


def load_executor(
    model_path: Path,
    *,
    executor: str = "auto",
    dtype: str = "auto",
    kv_dtype: str = "auto",
    device: str = "auto",
    block_size: int = 16,
    max_model_len: int | None = None,
    threads: int | None = None,
    quantization: str = "none",
    deterministic: bool = False,
    fake: FakeOptions | None = None,
    max_decode_seqs: int = 64,
    max_batched_tokens: int = 512,
    sharing: WeightSharing | None = None,
) -> Executor:
    """Load a model folder into the executor that fits.

    Args:
        model_path: a local Hugging Face folder.
        executor: auto | transformers | cpu | cuda | triton-interpreter | fake.
        dtype: auto | float32 | bfloat16 | float16, of weights and activations.
        kv_dtype: the same, of the KV cache; auto: as `dtype`.
        device: auto | cpu | cuda | cuda:N.
        block_size: tokens in a KV block.
        max_model_len: context length, tokens; None: the model's.
        threads: CPU threads; None: as torch chooses.
        quantization: none | int8 | fp8, of the weights.
        deterministic: demand results that depend on neither batch, chunks nor worker.
        fake: timing and mode of the fake executor.
        max_decode_seqs: sequences of a decode step, for CUDA graphs; 0: this worker does not decode.
        max_batched_tokens: token budget of a step.
        sharing: whether the CPU executor's weights lie in a file that other workers map too; None: not.

    Raises:
        SettingError: a value does not fit the machine or the executor.
        ModelError: the model cannot be read or served.
    """
    place = _resolve_device(device, executor)
    choice = choose_executor(model_path, executor, place)
    weights = _resolve_dtype("DTYPE", dtype, torch.bfloat16 if place.type == "cuda" else torch.float32)
    request = _Request(
        model_path=model_path,
        dtype=weights,
        kv_dtype=_resolve_dtype("KV_DTYPE", kv_dtype, weights),
        device=place,
        block_size=block_size,
        max_model_len=max_model_len,
        threads=threads,
        quantization=quantization,
        fake=fake or FakeOptions(),
        max_decode_seqs=max_decode_seqs,
        max_batched_tokens=max_batched_tokens,
        sharing=sharing,
    )
    logger.info("executor %s (%s), %s on %s", choice.name, choice.reason, weights, place)
    if threads is not None and place.type == "cpu":
        torch.set_num_threads(threads)
    loaded = _LOADERS[choice.name](request)
    if deterministic and not loaded.is_deterministic:
        raise SettingError("DETERMINISTIC", True, f"an executor that is: cpu, not {choice.name} ({choice.reason})")
    return loaded


def choose_executor(model_path: Path, wanted: str, device: torch.device) -> Choice:
    """Which executor `wanted` means here, and why; loads no weights.

    Raises:
        SettingError: `wanted` is not one, or cannot run here.
    """
    if wanted in ("transformers", "fake", "triton-interpreter"):
        return Choice(wanted, "as set")
    if wanted == "cuda" or (wanted == "auto" and device.type == "cuda"):
        return Choice("cuda", "as set" if wanted == "cuda" else "a GPU is present")
    if wanted not in ("auto", "cpu"):
        raise SettingError("EXECUTOR", wanted, "auto, transformers, cpu, cuda, triton-interpreter or fake")
    if device.type != "cpu":
        raise SettingError("EXECUTOR", wanted, f"an executor for DEVICE={device}: cuda, transformers or auto")
    obstacle = _cpu_obstacle(model_path)
    if obstacle is None:
        return Choice("cpu", "its kernels serve this model")
    if wanted == "cpu":
        raise SettingError("EXECUTOR", wanted, f"transformers or auto, because {obstacle}")
    logger.warning("the slower transformers executor serves this model, because %s", obstacle)
    return Choice("transformers", obstacle)


def choose_num_blocks(
    spec: KvCacheSpec,
    *,
    num_blocks: int | None,
    kv_memory_bytes: int | None,
    kv_memory_fraction: float | None,
    free_bytes: int,
    device_type: str = "cpu",
) -> int:
    """Number of KV blocks: as set, else what fits into the KV memory.

    Raises:
        SettingError: not one block fits; names the setting that decided.
    """
    if num_blocks is not None:
        return num_blocks
    if kv_memory_bytes is not None:
        name, value, size_bytes = "KV_MEMORY_BYTES", kv_memory_bytes, kv_memory_bytes
    else:
        fraction = kv_memory_fraction if kv_memory_fraction is not None else DEFAULT_FRACTION[device_type]
        name, value, size_bytes = "KV_MEMORY_FRACTION", fraction, int(free_bytes * fraction)  # type: ignore[assignment]
    count = size_bytes // spec.block_bytes
    if count < 2:
        raise SettingError(name, value, f"room for at least 2 KV blocks of {spec.block_bytes} bytes")
    return count


def free_memory_bytes(device: torch.device) -> int:
    """Memory that the KV cache may use: free on the GPU, available to this machine or container otherwise."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free)
    available: int = psutil.virtual_memory().available
    limit = Path("/sys/fs/cgroup/memory.max")
    used = Path("/sys/fs/cgroup/memory.current")
    try:
        return min(available, max(0, int(limit.read_text()) - int(used.read_text())))
    except (OSError, ValueError):  # no cgroup, or "max"
        return available


# --- inner workings


def _resolve_device(device: str, executor: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if device == "auto":
        if executor == "cuda" and not has_cuda:
            raise SettingError("EXECUTOR", executor, "a CUDA GPU, and torch sees none here; use auto or transformers")
        uses_gpu = has_cuda and executor in ("auto", "cuda", "transformers")
        return torch.device("cuda" if uses_gpu else "cpu")
    if device.startswith("cuda") and not has_cuda:
        raise SettingError("DEVICE", device, "a CUDA GPU, and torch sees none here; use auto or cpu")
    if executor == "cuda" and not device.startswith("cuda"):
        raise SettingError("DEVICE", device, "cuda, because EXECUTOR=cuda")
    if executor == "triton-interpreter" and device != "cpu":
        raise SettingError("DEVICE", device, "cpu or auto, because EXECUTOR=triton-interpreter")
    return torch.device(device)


def _resolve_dtype(name: str, value: str, default: torch.dtype) -> torch.dtype:
    if value == "auto":
        return default
    if value not in _DTYPES:
        raise SettingError(name, value, f"auto, {', '.join(_DTYPES)}; no executor here serves another")
    return _DTYPES[value]


def _cpu_obstacle(model_path: Path) -> str | None:
    """Why the CPU executor cannot serve this model here; None when it can."""
    try:
        from pdserve.engine.executors.cpu.executor import cpu_executor_supports  # noqa: PLC0415 — optional kernels
    except ImportError as error:
        return f"the CPU executor cannot be loaded ({error})"
    try:
        config: dict[str, Any] = json.loads((model_path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_path} is not a readable model folder: {error}") from error
    return cpu_executor_supports(config)


def _load_fake(request: _Request) -> Executor:
    card = ModelCard.load(request.model_path, max_model_len=request.max_model_len)
    return FakeExecutor(
        request.fake,
        vocab_size=card.vocab_size,
        eos_token_ids=card.eos_token_ids,
        block_size=request.block_size,
        max_model_len=card.max_model_len,
    )


def _load_cpu(request: _Request) -> Executor:
    from pdserve.engine.executors.cpu.executor import CpuExecutor  # noqa: PLC0415 — optional kernels

    return CpuExecutor.load(
        request.model_path,
        dtype=request.dtype,
        kv_dtype=request.kv_dtype,
        block_size=request.block_size,
        max_model_len=request.max_model_len,
        threads=request.threads,
        quantization=request.quantization,
        sharing=request.sharing,
    )


def _load_transformers(request: _Request) -> Executor:
    from pdserve.engine.executors.stock.executor import TransformersExecutor  # noqa: PLC0415 — not for the fake executor

    _refuse_quantization(request, "transformers")
    return TransformersExecutor.load(
        request.model_path,
        dtype=request.dtype,
        kv_dtype=request.kv_dtype,
        device=request.device,
        block_size=request.block_size,
        max_model_len=request.max_model_len,
    )


def _load_cuda(request: _Request) -> Executor:
    _refuse_quantization(request, "cuda")
    from pdserve.engine.executors.cuda.device import CudaDevice  # noqa: PLC0415 — needs a GPU

    return _load_triton(request, CudaDevice(request.device), "cuda")


def _load_interpreted(request: _Request) -> Executor:
    """The CUDA executor on the CPU, its kernels in Triton's interpreter: slow, for tests."""
    _refuse_quantization(request, "triton-interpreter")
    for name, dtype in (("DTYPE", request.dtype), ("KV_DTYPE", request.kv_dtype)):
        if dtype is torch.bfloat16:
            raise SettingError(name, "bfloat16", "float32 or float16, because Triton's interpreter computes it wrongly")
    triton = sys.modules.get("triton")
    if triton is not None and not triton.knobs.runtime.interpret:
        expected = "a process that has not loaded Triton yet: set TRITON_INTERPRET=1 in its environment"
        raise SettingError("EXECUTOR", "triton-interpreter", expected)
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    from pdserve.engine.executors.cuda.device import HostDevice  # noqa: PLC0415 — after the line above

    return _load_triton(request, HostDevice(), "triton-interpreter")


def _load_triton(request: _Request, device: Device, name: str) -> Executor:
    from pdserve.engine.executors.cuda.executor import CudaExecutor, StepBounds  # noqa: PLC0415 — not for the fake executor
    from pdserve.engine.executors.cuda.kernels import triton_kernels  # noqa: PLC0415

    return CudaExecutor.load(
        request.model_path,
        device,
        triton_kernels(),
        dtype=request.dtype,
        kv_dtype=request.kv_dtype,
        block_size=request.block_size,
        max_model_len=request.max_model_len,
        # A graph on a CPU is only a function.
        bounds=StepBounds(
            max_decode_seqs=request.max_decode_seqs if device.device.type == "cuda" else 0,
            max_batched_tokens=request.max_batched_tokens,
        ),
        name=name,
    )


def _refuse_quantization(request: _Request, name: str) -> None:
    if request.quantization != "none":
        raise SettingError("QUANTIZATION", request.quantization, f"none with the {name} executor")


_LOADERS: dict[str, Callable[[_Request], Executor]] = {
    "fake": _load_fake,
    "cpu": _load_cpu,
    "transformers": _load_transformers,
    "cuda": _load_cuda,
    "triton-interpreter": _load_interpreted,
}
