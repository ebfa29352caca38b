"""Everything that only a GPU can show, in one run of at most six minutes: `python benchmarks/gpu_check.py`

Kernels against their twins and against ceilings measured in the same run; paged decode against torch's attention;
decode steps with and without CUDA graphs; greedy tokens against transformers; the disaggregated service as two
processes on one GPU over NIXL. A failed step never keeps the next from running. The report is written after every
step, with date and hardware: gpu-check.md and gpu-check.json in the folder `--report`.

`--dry-run` needs no GPU: every step in small sizes on the CPU, kernels under Triton's interpreter; it measures nothing,
and its report goes to a temporary folder unless `--report` names one.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch brings Triton, which reads TRITON_INTERPRET when it is imported
    import torch

KERNELS = (
    "paged_decode_attention",
    "paged_prefill_attention",
    "write_kv",
    "rms_norm",
    "swiglu",
    "gather_blocks",
    "block_digest",
    "sample_top_k_top_p",
)
LIMIT_S = 345.0
_SERVICE_LIMIT_S = 120.0
_MIN_STEP_S = 10.0


@dataclass
class Step:
    """Name, verdict and findings of one step."""

    name: str
    verdict: str = "ok"
    """One of ok, failed and skipped."""
    lines: list[str] = field(default_factory=list)
    data: Any = None
    duration_s: float = 0.0


@dataclass
class Check:
    """One run: where, in which type and size, and what was found so far."""

    device: torch.device
    dtype: torch.dtype
    is_tiny: bool
    report: Path
    ceilings: Any = None
    steps: list[Step] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds until the limit; below zero when it has passed."""
        return LIMIT_S - (time.monotonic() - self.began_s)

    def run(self, name: str, body: Callable[[Check, Step], None]) -> None:
        """Run one step; its failure is written down, not raised."""
        step, start_s = Step(name), time.monotonic()
        print(f"== {name}", flush=True)
        if self.left_s < _MIN_STEP_S:
            step.verdict, step.lines = "skipped", ["out of time"]
        else:
            try:
                body(self, step)
            except Exception as error:
                step.verdict = "failed"
                step.lines += [f"{type(error).__name__}: {error}", *traceback.format_exc().splitlines()[-6:]]
        step.duration_s = time.monotonic() - start_s
        self.steps.append(step)
        print("\n".join([*step.lines, f"   {step.verdict} after {step.duration_s:.1f} s"]), flush=True)
        self.write()

    def write(self) -> None:
        """Write the report as it stands, in both forms."""
        self.report.mkdir(parents=True, exist_ok=True)
        facts = environment(self)
        found = {"environment": facts, "steps": [asdict(step) for step in self.steps]}
        (self.report / "gpu-check.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        text = ["# GPU check", "", *(f"- {name}: {value}" for name, value in facts.items())]
        for step in self.steps:
            text += ["", f"## {step.name}: {step.verdict} ({step.duration_s:.1f} s)", "", "```", *step.lines, "```"]
        (self.report / "gpu-check.md").write_text("\n".join(text) + "\n", encoding="utf-8")


def environment(check: Check) -> dict[str, str]:
    """Date, hardware, and versions of the packages that matter."""
    import torch  # noqa: PLC0415  see above

    facts = {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")}
    if check.is_tiny:
        facts["hardware"] = f"dry run on a CPU ({platform.machine()}): nothing was measured"
    else:
        found = torch.cuda.get_device_properties(check.device)
        facts["hardware"] = f"{found.name}, {found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor}"
        facts["cuda"] = str(torch.version.cuda)
    facts["python"] = platform.python_version()
    for package in ("torch", "triton", "transformers", "nixl"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts


# --- the steps


def ceilings(check: Check, step: Step) -> None:
    """Measure the rates of a copy and of a matrix product, which the kernels are held against."""
    from benchmarks.gpu.bench import measure_ceilings  # noqa: PLC0415

    check.ceilings = measure_ceilings(check.device)
    step.data = asdict(check.ceilings)
    step.lines = (
        []
        if check.is_tiny
        else [f"copy {check.ceilings.copy_gb_per_s:.0f} GB/s, matmul {check.ceilings.matmul_tflops:.2f} TFLOP/s"]
    )


def kernel(name: str) -> Callable[[Check, Step], None]:
    """A step that compares one kernel with its twin and tells how near it comes to the ceilings."""

    def body(check: Check, step: Step) -> None:
        from benchmarks.gpu.bench import check_and_time  # noqa: PLC0415

        module = importlib.import_module(f"benchmarks.kernels.{name}")
        step.data = []
        for measure in module.measures(check.device, check.dtype, check.is_tiny):
            measured = check_and_time(measure, check.ceilings, check.device, check.dtype)
            step.lines.append(measured.verdict if check.is_tiny else measured.line)
            step.data.append(asdict(measured))
            if not measured.is_correct:
                step.verdict = "failed"

    return body


def other_attention(check: Check, step: Step) -> None:
    """Compare our decode attention with torch's SDPA and FlexAttention."""
    from benchmarks.gpu.bench import TOLERANCES  # noqa: PLC0415

    found = importlib.import_module("benchmarks.kernels.paged_decode_attention").compare(
        check.device, check.dtype, check.is_tiny
    )
    step.data = asdict(found)
    times = f"paged {found.paged_ms:.3f} ms, SDPA {found.sdpa_ms:.3f} ms, FlexAttention {found.flex_ms:.3f} ms"
    step.lines = [f"{found.shape}: error against SDPA {found.error:.1e}", *([] if check.is_tiny else [times])]
    if found.error > TOLERANCES[check.dtype]:
        step.verdict = "failed"


def decode_steps(check: Check, step: Step) -> None:
    """Time decode steps with and without CUDA graphs, and compare their logits."""
    from benchmarks.gpu.executor import decode_step_times  # noqa: PLC0415

    step.data = decode_step_times(check.device, check.dtype, check.is_tiny)
    for row in step.data:
        times = "" if check.is_tiny else f": {row['eager_ms']:.2f} ms, as a graph {row['graph_ms']:.2f} ms"
        step.lines.append(
            f"{row['num_seqs']} sequences of {row['context']}{times} (logits differ by {row['error']:.1e})"
        )
    if any(row["error"] > 2e-2 for row in step.data):
        step.verdict = "failed"


def greedy_tokens(check: Check, step: Step) -> None:
    """Compare the greedy tokens of a small model with those of transformers."""
    from benchmarks.gpu.executor import compare_greedy  # noqa: PLC0415

    num_equal, num_all = compare_greedy(check.device, is_tiny=check.is_tiny)
    step.lines = [f"{num_equal} of {num_all} answers equal those of transformers"]
    step.data = {"num_equal": num_equal, "num_all": num_all}
    if num_equal < num_all:
        step.verdict = "failed"


def service(check: Check, step: Step) -> None:
    """Run prefill and decode worker as two processes on one GPU, KV over NIXL; compare with transformers."""
    how = ["auto", "auto", "2"] if check.is_tiny else ["cuda", "nixl", "16"]
    command = [sys.executable, "-m", "pdserve", "verify", "--model", "tiny"]
    command += [f"{flag}={value}" for flag, value in zip(("--executor", "--transport", "--prompts"), how, strict=True)]
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "PDS_HOME": home}
        env.pop("TRITON_INTERPRET", None)
        limit_s = min(_SERVICE_LIMIT_S, check.left_s)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s, env=env)
    step.lines = (done.stdout + done.stderr).splitlines()[-12:]
    if done.returncode:
        step.verdict = "failed"


STEPS: dict[str, Callable[[Check, Step], None]] = {
    "ceilings": ceilings,
    **{name: kernel(name) for name in KERNELS},
    "greedy tokens": greedy_tokens,
    "decode steps": decode_steps,
    "service": service,
    "other attention": other_attention,
}
"""All steps in the order of their worth, should time run out."""


def main() -> int:
    """0 when nothing failed and nothing was skipped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, in small sizes")
    told = "folder of the report (default: gpu-check; a temporary one in a dry run)"
    parser.add_argument("--report", type=Path, metavar="FOLDER", help=told)
    parser.add_argument("--only", nargs="+", choices=STEPS, metavar="STEP", help="these steps; kernels need ceilings")
    options = parser.parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch  # noqa: PLC0415  after the line above

    if not options.dry_run and not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed, and torch sees none here; --dry-run tries everything that needs none")
    faulthandler.dump_traceback_later(LIMIT_S + 10, exit=True)
    check = Check(
        device=torch.device("cpu") if options.dry_run else torch.device("cuda", 0),
        dtype=torch.float32 if options.dry_run else torch.bfloat16,
        is_tiny=options.dry_run,
        report=options.report or _default_report(is_dry=options.dry_run),
    )
    for name, body in STEPS.items():
        if not options.only or name in options.only:
            check.run(name, body)
    faulthandler.cancel_dump_traceback_later()
    bad = [step.name for step in check.steps if step.verdict != "ok"]
    print(f"report in {check.report}; " + (f"not ok: {', '.join(bad)}" if bad else "all ok"))
    return int(bool(bad))


def _default_report(*, is_dry: bool) -> Path:
    return Path(tempfile.mkdtemp(prefix="gpu-check-")) if is_dry else Path("gpu-check")


if __name__ == "__main__":
    sys.exit(main())
