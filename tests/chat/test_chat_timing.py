from __future__ import annotations

import re

import pytest

from pdserve.chat.timing import waterfall

TIMING = {
    "frontend_s": 0.001,
    "queue_s": 0.002,
    "schedule_s": 0.003,
    "prefill_s": 0.1,
    "publish_s": 0.004,
    "ttft_s": 0.11,
    "handoff_gap_s": 0.02,
    "transfer_s": 0.005,
    "transfer_bytes": 3 * 2**20,
    "decode_s": 0.39,
    "total_s": 0.5,
}


def test_the_sums_are_visible_and_right() -> None:
    lines = waterfall(TIMING, num_output_tokens=14)
    ttft = next(line for line in lines if line.startswith("TTFT"))
    parts = [float(x) for x in re.findall(r"[\d.]+", ttft)]
    assert parts[0] == pytest.approx(sum(parts[1:])) == 110.0
    total = next(line for line in lines if line.startswith("total"))
    assert "500.0 ms  = 110.0 + 390.0" in total
    assert "14 tokens  TPOT 30.0 ms" in total
    assert any("3.0 MiB" in line for line in lines)


def test_bars_follow_one_another() -> None:
    rows = {line.split()[0]: line for line in waterfall(TIMING, 14)}
    assert rows["prefill"].index("█") < rows["decode"].index("█")
    assert rows["decode"].count("█") > 2 * rows["prefill"].count("█")


def test_an_answer_of_one_token_has_no_tpot_and_no_decode() -> None:
    lines = waterfall(TIMING | {"decode_s": 0.0, "total_s": 0.11, "handoff_gap_s": None}, 1)
    assert "TPOT" not in "".join(lines)
    assert "110.0 + 0.0" in lines[-1]
