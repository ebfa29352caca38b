"""What the GPU benchmarks share: the machine's ceilings, times of calls, and how near a kernel comes to them.

Ceilings are measured in the same run as the kernels, so that a share compares like with like. Every benchmark module
has `measures(device, dtype, is_tiny)`; `is_tiny` sizes run on a CPU, under Triton's interpreter, to try the script.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

Outcome = Tensor | tuple[Tensor, ...]

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""Largest error that a result may have, relative to its largest value, by type."""
_WARM_UP_S, _MEASURED_S, _MIN_REPEATS = 0.05, 0.2, 5


@dataclass(frozen=True)
class Measure:
    """One call of one kernel."""

    name: str
    run: Callable[[], Outcome]
    twin: Callable[[], Outcome]
    """The eager twin on the same inputs."""
    num_bytes: int
    """Bytes that every implementation has to read and write."""
    num_flops: int = 0
    tolerance: float | None = None
    """Largest relative error allowed; None stands for that of the type."""


@dataclass(frozen=True)
class Ceilings:
    """What the machine reached in this run."""

    copy_gb_per_s: float
    """Bytes read and written by a copy, per second."""
    matmul_tflops: float
    """Rate of a matrix product in bfloat16 on a GPU, in float32 on a CPU."""


@dataclass(frozen=True)
class Measured:
    """One line of a report."""

    name: str
    is_correct: bool
    error: float
    ms: float
    gb_per_s: float
    copy_share: float
    tflops: float
    matmul_share: float

    @property
    def verdict(self) -> str:
        """The line that a dry run shows: correct or not, the name and the error, without times."""
        return f"{'ok ' if self.is_correct else 'BAD'} {self.name:<52} error {self.error:.1e}"

    @property
    def line(self) -> str:
        """The line that a run on a GPU shows: verdict, time, and shares of the ceilings."""
        return (
            f"{self.verdict}  {self.ms:8.3f} ms  {self.gb_per_s:7.0f} GB/s"
            f" ({self.copy_share:.0%} of copy)  {self.tflops:6.1f} TFLOP/s ({self.matmul_share:.0%} of matmul)"
        )


def measure_ceilings(device: torch.device) -> Ceilings:
    """Time a large copy and a large matrix product: what the machine can reach."""
    is_gpu = device.type == "cuda"
    source = torch.ones(2**30 if is_gpu else 2**22, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = time_ms(lambda: target.copy_(source), device)
    side = 8192 if is_gpu else 256
    left = torch.randn(side, side, device=device, dtype=torch.bfloat16 if is_gpu else torch.float32)
    matmul_ms = time_ms(lambda: left @ left, device)
    return Ceilings(2 * len(source) / copy_ms / 1e6, 2 * side**3 / matmul_ms / 1e9)


def time_ms(run: Callable[[], object], device: torch.device) -> float:
    """Median milliseconds of a call. On a GPU the L2 cache is overwritten before each."""
    if device.type != "cuda":
        return _host_ms(run)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    deadline_s = time.monotonic() + _WARM_UP_S
    while time.monotonic() < deadline_s:
        run()
        torch.cuda.synchronize(device)
    times: list[float] = []
    deadline_s = time.monotonic() + _MEASURED_S
    while len(times) < _MIN_REPEATS or time.monotonic() < deadline_s:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def _host_ms(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start_s)


def check_and_time(measure: Measure, ceilings: Ceilings, device: torch.device, dtype: torch.dtype) -> Measured:
    """Compare with the twin, then time."""
    error = largest_error(measure.run(), measure.twin())
    ms = time_ms(measure.run, device)
    gb_per_s, tflops = measure.num_bytes / ms / 1e6, measure.num_flops / ms / 1e9
    return Measured(
        name=measure.name,
        is_correct=error <= (TOLERANCES[dtype] if measure.tolerance is None else measure.tolerance),
        error=error,
        ms=ms,
        gb_per_s=gb_per_s,
        copy_share=gb_per_s / ceilings.copy_gb_per_s,
        tflops=tflops,
        matmul_share=tflops / ceilings.matmul_tflops,
    )


def largest_error(actual: Outcome, expected: Outcome) -> float:
    """Largest error: floats relative to the largest value, integers as the share that differs; infinite for NaN."""
    pairs = zip(*((r,) if isinstance(r, Tensor) else r for r in (actual, expected)), strict=True)
    worst = 0.0
    for one, other in pairs:
        if one.shape != other.shape or one.dtype != other.dtype:
            return float("inf")
        if one.numel() == 0 or torch.equal(one, other):
            continue
        if not one.is_floating_point():
            worst = max(worst, float((one != other).double().mean()))
            continue
        difference = (one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-6)
        worst = max(worst, float(difference.nan_to_num(float("inf"))))
    return worst


def main(measures: Callable[[torch.device, torch.dtype, bool], list[Measure]]) -> None:
    """The command line of one kernel's benchmark."""
    parser = argparse.ArgumentParser(description=(sys.modules["__main__"].__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed, and torch sees none here; gpu_check.py --dry-run tries everything else")
    device, dtype = torch.device("cuda", 0), getattr(torch, options.dtype)
    ceilings = measure_ceilings(device)
    print(f"{torch.cuda.get_device_name(device)}: {asdict(ceilings)}")
    for measure in measures(device, dtype, False):
        print(check_and_time(measure, ceilings, device, dtype).line, flush=True)


def random_tensor(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of normally distributed values, equal in every run."""
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def num_bytes(*tensors: Any) -> int:
    """Bytes that the values of all tensors take together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
