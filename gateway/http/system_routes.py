"""Health, readiness, version, metrics and test hooks: what orchestrators and operators ask for. No inference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from pdserve import __version__
from pdserve.errors import InvalidRequestError, SettingError, UnavailableError
from pdserve.faults import Faults
from pdserve.gateway.http.body import parse_json
from pdserve.gateway.http.error_body import error_object, error_response, http_error
from pdserve.readiness import Readiness, ReadyReason

READING = ["GET", "HEAD"]
"""Methods of a path that only tells something; the server leaves the body of an answer to HEAD out."""
_MAX_FAULTS_BYTES = 64 * 1024
_READY_CODES = {
    ReadyReason.DRAINING: "shutting_down",
    ReadyReason.BUS_UNREACHABLE: "bus_unavailable",
    ReadyReason.NO_WORKERS: "no_workers",
}
"""Codes of the errors that a request would get."""


@dataclass(frozen=True)
class SystemView:
    """What these routes can tell."""

    readiness: Callable[[], Readiness]
    render_metrics: Callable[[], tuple[bytes, str]]
    """A function that returns (text, content type)."""
    faults: Faults | None = None
    other_metrics_urls: Callable[[], list[str]] = field(default=list)
    """Not empty: this port is shared by several gateways, and each has its metrics elsewhere."""


def add_system_routes(app: FastAPI, view: SystemView) -> None:
    """Add the routes of this file to the app."""
    router = APIRouter()

    @router.api_route("/health", methods=READING)
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @router.api_route("/ready", methods=READING)
    async def ready() -> Response:
        return _ready_response(view.readiness())

    @router.api_route("/version", methods=READING)
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    @router.api_route("/metrics", methods=READING)
    async def metrics() -> Response:
        elsewhere = view.other_metrics_urls()
        if elsewhere:
            raise http_error(404, f"Several gateways share this port; their metrics are at {', '.join(elsewhere)}.")
        text, kind = view.render_metrics()
        return Response(text, headers={"content-type": kind})

    if view.faults is not None:
        _add_fault_routes(router, view.faults)
    app.include_router(router)


def _ready_response(readiness: Readiness) -> Response:
    """200 with the facts, or 503 with an error as clients know it and the same facts beside it."""
    if readiness.ready:
        return Response(msgspec.json.encode(readiness), media_type="application/json")
    error = UnavailableError(readiness.message, code=_READY_CODES.get(readiness.reason), retry_after_s=1.0)
    status, headers, _ = error_response(error)
    body = {**error_object(error), **msgspec.to_builtins(readiness)}
    named = {name.decode(): value.decode() for name, value in headers}
    return Response(msgspec.json.encode(body), status_code=status, headers=named)


def _add_fault_routes(router: APIRouter, faults: Faults) -> None:
    @router.api_route("/debug/faults", methods=[*READING, "PUT"])
    async def get_or_put_faults(request: Request) -> JSONResponse:
        if request.method == "PUT":
            await _put_faults(request, faults)
        return JSONResponse(faults.get())


async def _put_faults(request: Request, faults: Faults) -> None:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_FAULTS_BYTES:
            raise http_error(413, "The faults object is too large.")
    try:
        faults.put(parse_json(body))
    except SettingError as error:
        raise InvalidRequestError(str(error), param=error.name) from error
