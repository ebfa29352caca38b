"""Health, readiness, version, metrics and test hooks: what orchestrators and people at work ask for. No inference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from pdserve import __version__
from pdserve.errors import InvalidRequestError, SettingError, UnavailableError
from pdserve.faults import Faults
from pdserve.gateway.http.body import parse_json
from pdserve.gateway.http.error_body import http_error

_MAX_FAULTS_BYTES = 64 * 1024


@dataclass(frozen=True)
class SystemView:
    """What these routes can tell."""

    is_ready: Callable[[], bool]
    is_draining: Callable[[], bool]
    render_metrics: Callable[[], tuple[bytes, str]]
    """(text, content type)."""
    faults: Faults | None = None
    other_metrics_urls: Callable[[], list[str]] = field(default=list)
    """Not empty: this port is shared by several gateways, and each has its metrics elsewhere."""


def add_system_routes(app: FastAPI, view: SystemView) -> None:
    """Add the routes of this file."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @router.get("/ready")
    async def ready() -> JSONResponse:
        if view.is_draining():
            raise UnavailableError("This gateway is shutting down.", code="shutting_down", retry_after_s=1.0)
        if not view.is_ready():
            raise UnavailableError(
                "The workers that a request needs are not ready, or the bus does not answer.",
                code="no_workers",
                retry_after_s=1.0,
            )
        return JSONResponse({"status": "ready"})

    @router.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        elsewhere = view.other_metrics_urls()
        if elsewhere:
            raise http_error(404, f"Several gateways share this port; their metrics are at {', '.join(elsewhere)}.")
        text, kind = view.render_metrics()
        return Response(text, headers={"content-type": kind})

    if view.faults is not None:
        _add_fault_routes(router, view.faults)
    app.include_router(router)


def _add_fault_routes(router: APIRouter, faults: Faults) -> None:
    @router.get("/debug/faults")
    async def get_faults() -> JSONResponse:
        return JSONResponse(faults.get())

    @router.put("/debug/faults")
    async def put_faults(request: Request) -> JSONResponse:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > _MAX_FAULTS_BYTES:
                raise http_error(413, "The faults object is too large.")
        try:
            faults.put(parse_json(body))
        except SettingError as error:
            raise InvalidRequestError(str(error), param=error.name) from error
        return JSONResponse(faults.get())
