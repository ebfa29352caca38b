"""Draws `usage.timing` as a waterfall in which the sums are visible. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_TTFT_STAGES = ("frontend", "queue", "schedule", "prefill", "publish")
_BAR_WIDTH = 40


def waterfall(timing: Mapping[str, float | None], num_output_tokens: int) -> list[str]:
    """Lines for a terminal: five stages that sum to TTFT, and TTFT + decode = total.

    Args:
        timing: `usage.timing` as the gateway sends it: seconds under `<stage>_s`, and `transfer_bytes`.
        num_output_tokens: of the answer, for the time per token.
    """
    seconds = {name.removesuffix("_s"): float(value or 0.0) for name, value in timing.items() if name.endswith("_s")}
    total_s = max(seconds.get("total", 0.0), 1e-9)
    lines, start_s = [], 0.0
    for stage in _TTFT_STAGES:
        lines.append(_row(stage, start_s, seconds.get(stage, 0.0), total_s))
        start_s += seconds.get(stage, 0.0)
    ttft_s, decode_s = seconds.get("ttft", 0.0), seconds.get("decode", 0.0)
    stages = " + ".join(f"{seconds.get(stage, 0.0) * 1000:.1f}" for stage in _TTFT_STAGES)
    lines.append(f"{'TTFT':<14}{ttft_s * 1000:>9.1f} ms  = {stages}")
    gap_s, transfer_s = seconds.get("handoff_gap", 0.0), seconds.get("transfer", 0.0)
    lines.append(_row("hand-off gap", ttft_s, gap_s, total_s))
    lines.append(f"{'  of it READs':<14}{transfer_s * 1000:>9.1f} ms  {_size(timing.get('transfer_bytes') or 0)}")
    lines.append(_row("decode", ttft_s, decode_s, total_s))
    per_token = f"  TPOT {decode_s / (num_output_tokens - 1) * 1000:.1f} ms" if num_output_tokens > 1 else ""
    total = f"{ttft_s * 1000:.1f} + {decode_s * 1000:.1f}"
    lines.append(f"{'total':<14}{total_s * 1000:>9.1f} ms  = {total}  ({num_output_tokens} tokens{per_token})")
    return lines


def _row(name: str, start_s: float, duration_s: float, total_s: float) -> str:
    offset = min(_BAR_WIDTH - 1, round(start_s / total_s * _BAR_WIDTH))
    width = max(1, min(_BAR_WIDTH - offset, round(duration_s / total_s * _BAR_WIDTH)))
    bar = " " * offset + "█" * width if duration_s > 0 else ""
    return f"{name:<14}{duration_s * 1000:>9.1f} ms  {bar}".rstrip()


def _size(num_bytes: float) -> str:
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**10:.1f} KiB" if num_bytes >= 2**10 else f"{num_bytes:.0f} bytes"
