"""What `/ready` of a worker or a gateway answers: facts for machines, and one sentence for people.

Its readers decide by `reason` and the numbers, never by words of the sentence. An answer that is no such
object, from an older process or another program, is read as reason `unknown`.
"""

from __future__ import annotations

import enum

import msgspec


class ReadyReason(enum.StrEnum):
    """Why a process is ready for requests, or is not."""

    READY = "ready"
    STARTING = "starting"
    """It has not registered itself on the bus yet."""
    BUS_UNREACHABLE = "bus_unreachable"
    NO_TRANSPORT = "no_transport"
    """A worker whose transports to all peers fail."""
    STEP_HANGS = "step_hangs"
    """A worker whose running step does not end."""
    NO_WORKERS = "no_workers"
    """A gateway without the workers that a request needs."""
    DRAINING = "draining"
    UNKNOWN = "unknown"
    """The answer is not of this form, or its reason is of a newer process."""

    @classmethod
    def _missing_(cls, value: object) -> ReadyReason:
        return cls.UNKNOWN


class ReadyLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What would be lost with this process, in numbers: a pool that shrinks drops its least loaded workers."""

    num_running: int = 0
    """Sequences that are being computed (a gateway: requests in flight)."""
    num_waiting: int = 0
    """Sequences that wait (a gateway: requests in its queue)."""
    num_used_blocks: int = 0
    """KV blocks that are neither free nor cached; 0 for a gateway."""


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/ready`: status 200 when `ready`, else 503."""

    ready: bool
    reason: ReadyReason
    message: str
    """One sentence that says what is missing and, where a user can do something, what."""
    load: ReadyLoad = ReadyLoad()
    id: str = ""
    """The worker or gateway that answers."""
    generation: str = ""
    """The generation under which it is registered now."""
    pid: int = 0
    """The process id by which a starter on the same machine tells its own child from another program."""


def read_readiness(body: bytes) -> Readiness:
    """The readiness in an answer's body; reason `unknown` for a body of any other form."""
    try:
        return msgspec.json.decode(body, type=Readiness)
    except msgspec.MsgspecError:
        return Readiness(ready=False, reason=ReadyReason.UNKNOWN, message="The answer of /ready has no known form.")
