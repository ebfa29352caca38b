"""Whether one more hand-off may join the decoding sequences: only while their step stays within its target.

A refused hand-off is told at once (its gateway tries another worker, or again later). None is refused for ever: a
sequence alone is always admitted, and so is one that was first refused long enough ago.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.engine.scheduling.step_targets import StepTargets, num_admissible
from pdserve.engine.scheduling.step_time import DecodeTime, StepWork
from pdserve.engine.sequence import Sequence
from pdserve.errors import NoCapacityError
from pdserve.messages import SequenceKey

_FORGET_AFTER_WAITS = 10
"""A refused hand-off that has not come back for so many waiting bounds went elsewhere."""


def decode_batch_of(sequences: Iterable[Sequence]) -> StepWork:
    """The step in which all of these decode."""
    num_tokens = [sequence.num_tokens for sequence in sequences]
    return StepWork(len(num_tokens), sum(num_tokens))


class HandOffGate:
    """Guards the step time of one decode worker; touched by the engine's thread.

    Args:
        targets: how long its steps may take.
        max_wait_s: after this long a refused hand-off is admitted, whatever the step time.
    """

    def __init__(self, targets: StepTargets, max_wait_s: float) -> None:
        self._step_targets = targets
        self._max_wait_s = max_wait_s
        self._refused_s: dict[SequenceKey, float] = {}
        """When a sequence that was refused, and has not come back since, was refused first."""

    def check(self, sequence: Sequence, decode_batch: StepWork, time: DecodeTime | None, now_s: float) -> None:
        """Let a hand-off pass, or remember that it was refused.

        Args:
            sequence: the one to be handed off.
            decode_batch: the step without it.
            time: duration of a decode step, as measured; None while it is unknown: every hand-off passes.
            now_s: monotonic.

        Raises:
            NoCapacityError: the step would exceed its target.
        """
        if num_admissible(self._step_targets, time, decode_batch, sequence.num_tokens) >= 1:
            self._refused_s.pop(sequence.key.sequence, None)
            return
        first_s = self._refused_s.setdefault(sequence.key.sequence, now_s)
        if now_s - first_s >= self._max_wait_s:
            del self._refused_s[sequence.key.sequence]
            return
        self._forget(now_s)
        raise NoCapacityError(
            f"{decode_batch.num_sequences} sequences decode here; one more would make a step longer "
            f"than TPOT_SLO_S={self._step_targets.tpot_s} s"
        )

    def _forget(self, now_s: float) -> None:
        oldest_s = now_s - _FORGET_AFTER_WAITS * self._max_wait_s
        for key in [key for key, first_s in self._refused_s.items() if first_s < oldest_s]:
            del self._refused_s[key]
