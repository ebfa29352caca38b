"""A worker's own HTTP port: health, readiness, metrics and the ledger. Never serves requests.

/health          200 while the engine makes progress; 503 when a step hangs
/ready           200 when warm, registered and able to transfer, else 503; either with `readiness.Readiness`
/metrics         Prometheus text
/debug/kv        the KV ledger, checked now
/debug/requests  every attempt held here
/debug/faults    test hooks; exists only with PDS_FAULTS
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdserve.engine.kv.block_pool import LedgerError, LedgerReport
from pdserve.errors import SettingError
from pdserve.faults import Faults
from pdserve.readiness import Readiness
from pdserve.worker.attempts import Attempt

_LEDGER_TIMEOUT_S = 10.0
"""A step may be running; the ledger is read between two steps."""


@dataclass(frozen=True, slots=True)
class WorkerProbes:
    """What the HTTP port asks the worker."""

    health: Callable[[], str | None]
    """None, or why the worker should be restarted."""
    readiness: Callable[[], Readiness]
    """Whether the worker may get requests, and its load."""
    metrics: Callable[[], Awaitable[bytes]]
    ledger: Callable[[], Awaitable[LedgerReport]]
    attempts: Callable[[], list[Attempt]]
    clock: Callable[[], float]
    faults: Faults | None


def worker_app(probes: WorkerProbes) -> Starlette:
    """The ASGI application of one worker."""

    async def health(_: Request) -> Response:
        problem = probes.health()
        if problem is None:
            return JSONResponse({"status": "live"})
        return JSONResponse({"status": "unavailable", "reason": problem}, status_code=503)

    async def ready(_: Request) -> Response:
        readiness = probes.readiness()
        body = msgspec.json.encode(readiness)
        return Response(body, 200 if readiness.ready else 503, media_type="application/json")

    async def metrics(_: Request) -> Response:
        return Response(await probes.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def ledger(_: Request) -> Response:
        try:
            report = await asyncio.wait_for(probes.ledger(), _LEDGER_TIMEOUT_S)
        except LedgerError as error:
            return JSONResponse({"ok": False, "error": str(error)})
        except TimeoutError:
            return JSONResponse({"ok": False, "error": "the engine is busy with one step"}, status_code=503)
        return JSONResponse(_ledger_body(report))

    async def requests(_: Request) -> Response:
        now_s = probes.clock()
        return JSONResponse([_attempt_body(attempt, now_s) for attempt in probes.attempts()])

    routes = [
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/debug/kv", ledger),
        Route("/debug/requests", requests),
    ]
    if probes.faults is not None:
        routes.append(Route("/debug/faults", _faults_endpoint(probes.faults), methods=["GET", "PUT"]))
    return Starlette(routes=routes)


def _faults_endpoint(faults: Faults) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        if request.method == "PUT":
            try:
                faults.put(json.loads(await request.body()))
            except (ValueError, SettingError) as error:
                return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, 400)
        return JSONResponse(faults.get())

    return endpoint


def _ledger_body(report: LedgerReport) -> dict[str, Any]:
    by_request: dict[str, dict[str, int]] = {}
    for name, counts in report.by_request.items():
        request_id = name.partition("/")[0]
        total = by_request.setdefault(request_id, {})
        for state, count in counts.items():
            total[state] = total.get(state, 0) + count
    return {"total": report.total, "by_state": report.by_state, "by_request": by_request, "ok": True}


def _attempt_body(attempt: Attempt, now_s: float) -> dict[str, Any]:
    sequence = attempt.sequence
    return {
        "request_id": sequence.key.request_id,
        "choice": sequence.key.choice,
        "attempt": sequence.key.attempt,
        "phase": sequence.state.value,
        "num_prompt_tokens": sequence.num_original_prompt_tokens,
        "num_computed_tokens": sequence.num_computed_tokens,
        "num_output_tokens": attempt.next_index,
        "age_s": round(now_s - attempt.received_s, 3),
        "remaining_s": round(sequence.deadline_s - now_s, 3),
    }
