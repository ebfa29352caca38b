"""Durations as the API writes them (500ms, 1m30s) and as code uses them (seconds)."""

from __future__ import annotations

import re

_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """`1m30s` → 90.0. The schema's pattern has been checked before."""
    parts = _PART.findall(text)
    assert "".join(number + unit for number, unit in parts) == text != "", text
    return round(sum(float(number) * _SECONDS[unit] for number, unit in parts), 6)
