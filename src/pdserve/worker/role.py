"""What a role adds to a worker: the interface between the host process and the prefill or decode policy.

The host (`worker/host.py`) owns the process: bus, registration, generation, heartbeat, HTTP, drain. A policy
owns what the role does with jobs and hand-offs. All methods are called on the event loop and return fast.
"""

from __future__ import annotations

from typing import Protocol

from pdserve.engine.engine import StepOutput
from pdserve.engine.sequence import Sequence
from pdserve.messages import AnyMessage
from pdserve.reasons import FailReason
from pdserve.registration import Role, WorkerLoad
from pdserve.worker.attempts import Attempts
from pdserve.worker.engine_thread import StepFailure


class Policy(Protocol):
    """One role's behaviour."""

    role: Role
    attempts: Attempts

    def handle(self, message: AnyMessage) -> None:
        """One message from the inbox, at most once per delivery; may be unknown, doubled or late."""
        ...

    def on_admitted(self, sequence: Sequence) -> None:
        """The scheduler took this sequence for the first time."""
        ...

    def on_step(self, output: StepOutput) -> None:
        """The engine finished a step."""
        ...

    def on_step_failed(self, failure: StepFailure) -> None:
        """The engine's step raised: its sequences are lost here."""
        ...

    def heartbeat(self, now_s: float) -> None:
        """Once per heartbeat, after the registration was written: renew leases, expire, enforce deadlines."""
        ...

    def load(self) -> WorkerLoad:
        """Numbers for the registration."""
        ...

    def window(self, num_gateways: int) -> int:
        """What each gateway may have outstanding: prompt tokens (prefill) or KV blocks (decode)."""
        ...

    @property
    def num_held(self) -> int:
        """Attempts and leases that a drain waits for."""
        ...

    async def abandon(self, reason: FailReason) -> None:
        """Give everything up: abort all attempts, tell their gateways, end all hand-offs."""
        ...

    async def reconnect(self) -> None:
        """Tear the transports down and set them up under the new generation."""
        ...
