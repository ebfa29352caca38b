"""What a process knows about its connection to the bus, as pure state: no clock, no socket."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ServerWatch:
    """Is the server there, is it the one we knew, and since when without a break.

    `run_id` changes when a server restarts or another one takes over: what it held may be gone.
    """

    run_id: str | None = None
    up_since_s: float | None = None
    """Start of the continuous connection to this `run_id`; None while it is down."""
    num_reconnects: int = 0

    @property
    def is_up(self) -> bool:
        """Whether the last question was answered."""
        return self.up_since_s is not None

    def answered(self, run_id: str, now_s: float) -> bool:
        """The server answered. Returns whether it is another one than before."""
        is_known = self.run_id is not None
        is_new_server = is_known and run_id != self.run_id
        if is_new_server or not self.is_up:
            self.num_reconnects += is_known
            self.up_since_s = now_s
        self.run_id = run_id
        return is_new_server

    def lost(self) -> None:
        """The server did not answer."""
        self.up_since_s = None


@dataclass(slots=True)
class Deafness:
    """How long a reader could not hear, in total: the time that a lease clock must not count.

    A reader hears from the server at least every `silence_s` (its blocking time and some slack); longer
    silence is deafness, known or not yet. The total never decreases and never jumps.
    """

    silence_s: float
    last_heard_s: float
    """Starts as the time of creation: not yet connected is deaf."""
    lost_since_s: float | None = None
    past_s: float = 0.0

    def heard(self, now_s: float) -> None:
        """The server answered this reader."""
        self.past_s = self.total_s(now_s)
        self.last_heard_s, self.lost_since_s = now_s, None

    def lost(self, now_s: float) -> None:
        """The connection failed, or stayed silent for too long."""
        if self.lost_since_s is None:
            self.lost_since_s = min(now_s, self.last_heard_s + self.silence_s)

    def is_deaf(self, now_s: float) -> bool:
        """Whether the reader cannot hear now."""
        return self.lost_since_s is not None or now_s > self.last_heard_s + self.silence_s

    def total_s(self, now_s: float) -> float:
        """Deaf time up to now."""
        since_s = self.lost_since_s if self.lost_since_s is not None else self.last_heard_s + self.silence_s
        return self.past_s + max(0.0, now_s - since_s)
