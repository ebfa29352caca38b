"""What `/ready` of a worker says, from the facts of its parts. Pure."""

from __future__ import annotations

from pdserve.readiness import Readiness, ReadyLoad, ReadyReason

_MESSAGES = {
    ReadyReason.READY: "This worker takes requests.",
    ReadyReason.STARTING: "This worker has not registered itself on the bus yet.",
    ReadyReason.BUS_UNREACHABLE: "The bus does not answer: see whether Redis runs and REDIS_URL holds its password.",
    ReadyReason.DRAINING: "This worker finishes what it has and takes nothing new, for it was told to stop.",
}


def worker_readiness(
    reason: ReadyReason, *, step_problem: str | None, transport_problem: str | None, load: ReadyLoad
) -> Readiness:
    """The answer of /ready: the first reason that keeps a worker from requests is told, for it may explain the others.

    Args:
        reason: what its host says; READY when it is registered.
        step_problem: why the running step is taken for one that hangs, or None.
        transport_problem: why KV transfers cannot be trusted, or None.
        load: what would be lost with this worker.
    """
    if reason is not ReadyReason.READY:
        return Readiness(ready=False, reason=reason, message=_MESSAGES[reason], load=load)
    if step_problem is not None:
        message = f"The engine hangs: {step_problem}. Restart this worker."
        return Readiness(ready=False, reason=ReadyReason.STEP_HANGS, message=message, load=load)
    if transport_problem is not None:
        message = f"KV cannot be transferred: {transport_problem}. Look at this worker's log and at NetworkPolicies."
        return Readiness(ready=False, reason=ReadyReason.NO_TRANSPORT, message=message, load=load)
    return Readiness(ready=True, reason=reason, message=_MESSAGES[reason], load=load)
