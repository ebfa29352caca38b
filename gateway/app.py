"""The HTTP application: which path leads where, in which spellings, and one shape for every error.

FastAPI routes; the endpoints that generate are plain ASGI apps (endpoint.py), so that nothing stands between a token
and the socket. Never imports torch or transformers.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route, Router
from starlette.types import Receive, Scope, Send

from pdserve.errors import InvalidRequestError, RequestError
from pdserve.gateway.http.error_body import error_response, http_error, internal_error
from pdserve.gateway.http.system_routes import SystemView, add_system_routes
from pdserve.gateway.openai.chat import chat_completions
from pdserve.gateway.openai.completions import completions
from pdserve.gateway.openai.endpoint import PostEndpoint
from pdserve.gateway.openai.frontend import Frontend
from pdserve.gateway.openai.text_routes import add_text_routes

_SENTENCES = {404: "There is nothing at this path.", 405: "This path does not take this method."}


def create_app(frontend: Frontend, view: SystemView) -> FastAPI:
    """The API of one gateway."""
    app = _new_app()
    generating = {
        "/v1/chat/completions": PostEndpoint(frontend, chat_completions, "chatcmpl", is_generation=True),
        "/v1/completions": PostEndpoint(frontend, completions, "cmpl", is_generation=True),
    }
    app.router.routes.extend(Route(path, endpoint, methods=["POST"]) for path, endpoint in generating.items())
    add_text_routes(app, frontend)
    add_system_routes(app, view)
    _accept_spellings(app.router)
    return app


def create_system_app(view: SystemView) -> FastAPI:
    """Only health, readiness, metrics and test hooks: what listens on METRICS_PORT."""
    app = _new_app()
    add_system_routes(app, view)
    _accept_spellings(app.router)
    return app


def _new_app() -> FastAPI:
    app = FastAPI(title="pdserve", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(RequestError, _answer_request_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(Exception, _answer_unexpected)
    return app


# --- spellings


def _accept_spellings(router: Router) -> None:
    """Serve each path with and without `/v1` before it and one `/` behind it; a path as it is written comes first."""
    not_found = router.default

    async def try_spellings(scope: Scope, receive: Receive, send: Send) -> None:
        for path in _spellings(scope["path"]):
            other = {**scope, "path": path, "raw_path": path.encode()}
            if any(route.matches(other)[0] is not Match.NONE for route in router.routes):
                await router(other, receive, send)
                return
        await not_found(scope, receive, send)

    router.default = try_spellings


def _spellings(path: str) -> list[str]:
    """Other ways to write a path, the likeliest first."""
    bare, prefix = path.removesuffix("/"), "/v1"
    other = bare.removeprefix(prefix)
    if other == bare:
        other = prefix + bare
    elif other.startswith(f"{prefix}/"):
        return []  # once is enough
    return [spelling for spelling in (bare, other) if spelling not in (path, "")]


# --- errors


def _response(error: RequestError, extra: dict[str, str] | None = None) -> Response:
    status, headers, body = error_response(error)
    named = {name.decode(): value.decode() for name, value in headers}
    return Response(body, status_code=status, headers={**named, **(extra or {})})


async def _answer_request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError), error
    return _response(error)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), error
    allowed = {name: value for name, value in (error.headers or {}).items() if name.lower() == "allow"}
    methods = sorted({"OPTIONS", *(name.strip() for value in allowed.values() for name in value.split(","))})
    allowed = {name: ", ".join(methods) for name in allowed}
    if request.method == "OPTIONS" and (error.status_code == 405 or request.scope["path"] == "*"):
        return Response(status_code=204, headers=allowed)
    return _response(http_error(error.status_code, _SENTENCES.get(error.status_code)), allowed)


async def _answer_validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), error
    return _response(InvalidRequestError("The request is not valid.", code="invalid_value"))


async def _answer_unexpected(_: Request, error: Exception) -> Response:
    del error  # logged by the server
    return _response(internal_error())
