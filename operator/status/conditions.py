"""Conditions of a status: made from facts, merged with the previous ones so that nothing changes needlessly. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pdserve.operator.status.reasons import Reason

Json = dict[str, Any]

_MAX_MESSAGE = 1000
"""Characters of a message. Object sizes are limited, and an error text of another program may be long."""


@dataclass(frozen=True)
class Condition:
    """One condition of a status, without its times."""

    type: str
    status: bool | None
    """None when it cannot be told (`Unknown` in the API)."""
    reason: Reason
    message: str

    @property
    def status_text(self) -> str:
        """The status as the API writes it."""
        return "Unknown" if self.status is None else str(self.status)


def merge_conditions(
    previous: Iterable[Json], conditions: Iterable[Condition], generation: int, now: str
) -> list[Json]:
    """Conditions as the API stores them; `lastTransitionTime` is kept while the status is the same."""
    before = {condition["type"]: condition for condition in previous}
    return [_with_times(before.get(condition.type), condition, generation, now) for condition in conditions]


def transitions(before: Iterable[Json], after: Iterable[Json]) -> list[Json]:
    """Conditions whose status or reason differs from before."""
    old = {condition["type"]: (condition["status"], condition["reason"]) for condition in before}
    return [
        condition for condition in after if old.get(condition["type"]) != (condition["status"], condition["reason"])
    ]


def shorten(message: str) -> str:
    """The message, cut to the length that a message may have."""
    return message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 1] + "…"


def _with_times(before: Json | None, condition: Condition, generation: int, now: str) -> Json:
    is_same = before is not None and before["status"] == condition.status_text
    return {
        "type": condition.type,
        "status": condition.status_text,
        "reason": condition.reason,
        "message": shorten(condition.message),
        "lastTransitionTime": before["lastTransitionTime"] if before is not None and is_same else now,
        "observedGeneration": generation,
    }
