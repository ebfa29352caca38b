"""Finds stop strings in a text that arrives in pieces.

Holds back only the longest suffix that is a proper prefix of a stop string. The result does not depend on how
the text is cut: the stop string that is complete first ends the text, of two that end together the longer one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StopMatcher:
    """One choice's stop strings; `is_matched` never turns back."""

    stops: tuple[str, ...]
    is_included: bool = False
    """Whether the text keeps the stop string that ended it."""
    is_matched: bool = False
    _held: str = ""

    def push(self, text: str) -> str:
        """What can be shown now. After a match: the rest up to it, then nothing any more."""
        if self.is_matched or not self.stops:
            return "" if self.is_matched else text
        text = self._held + text
        match = self._find(text)
        if match is not None:
            start, end = match
            self.is_matched, self._held = True, ""
            return text[: end if self.is_included else start]
        cut = self._held_from(text)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, int] | None:
        """[start, end) of the stop string that is complete first."""
        found = [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        end, start = min(found)
        return start, end

    def _held_from(self, text: str) -> int:
        """Where the longest suffix begins that could grow into a stop string."""
        cut = len(text)
        for stop in self.stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), cut)
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1, cut)
            cut = cut if start < 0 else start
        return cut
