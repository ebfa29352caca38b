"""The few verbs of the Kubernetes API that the operator uses, over one pool of connections.

Throttling (429) and server errors are retried for a bounded time, as the server asks; everything else is the
caller's. What is gone, or is going with its namespace, is a `GoneError`: never an error worth a retry.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import aiohttp

from pdserve.operator.cluster.credentials import ClusterError, Credentials, Login
from pdserve.operator.names import FIELD_MANAGER

Json = dict[str, Any]

_TIMEOUT_S = 15.0
_TRIES = 4
_MAX_PAUSE_S = 10.0
_MAX_CONNECTIONS = 16

_PLURALS = {"NetworkPolicy": "networkpolicies", "ScalingPolicy": "scalingpolicies"}


class GoneError(ClusterError):
    """The object does not exist (any more), or its namespace is going."""


class ConflictError(ClusterError):
    """Another client was faster."""


class RefusedError(ClusterError):
    """The API server refuses the object or the verb; the message is the server's."""


def path_of(api_version: str, kind: str, namespace: str | None, name: str = "") -> str:
    """URL path of a collection, or of one object; `namespace=None`: of all namespaces."""
    base = f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"
    plural = _PLURALS.get(kind, f"{kind.lower()}s")
    return "/".join(part for part in (base, f"namespaces/{namespace}" if namespace else "", plural, name) if part)


def path_of_object(item: Json) -> str:
    """URL path of an object that says where it belongs."""
    return path_of(item["apiVersion"], item["kind"], item["metadata"]["namespace"], item["metadata"]["name"])


class Kube:
    """One connection pool to one API server; used on one event loop."""

    def __init__(self, login: Login) -> None:
        self.login = login
        self._session: aiohttp.ClientSession | None = None
        self._retired: aiohttp.ClientSession | None = None
        """The session before; requests that it still carries may end, and the next change closes it."""
        self._connection: Credentials | None = None
        """What the session was made of, without the token, which goes with each request."""
        self._connecting = asyncio.Lock()

    async def close(self) -> None:
        """Close all connections to the server."""
        for session in (self._session, self._retired):
            if session is not None:
                await session.close()

    async def get(self, path: str) -> Json:
        """One object, or what the server says at a path.

        Raises:
            GoneError, RefusedError, ClusterError
        """
        return await self._request("GET", path)

    async def list(self, path: str, selector: str, *, is_cached: bool = False) -> list[Json]:
        """All objects of a collection that a label selector selects.

        `is_cached`: out of the API server's memory, which may be a moment old and costs it a hundredth: without, it
        reads and decodes every object of the namespace.
        """
        cached = {"resourceVersion": "0"} if is_cached else {}
        found = await self._request("GET", path, params={"labelSelector": selector} | cached)
        return list(found["items"])

    async def apply(self, item: Json, manager: str, *, subresource: str = "") -> Json:
        """Server-side apply; conflicts are won: children belong to the operator."""
        path = path_of_object(item) + (f"/{subresource}" if subresource else "")
        return await self._request(
            "PATCH", path, item, "application/apply-patch+yaml", {"fieldManager": manager, "force": "true"}
        )

    async def merge(self, path: str, patch: Json, manager: str) -> Json:
        """Change some fields by a JSON merge patch."""
        return await self._request("PATCH", path, patch, "application/merge-patch+json", {"fieldManager": manager})

    async def replace(self, path: str, item: Json) -> Json:
        """Optimistic update: the item's resourceVersion must be the current one.

        Raises:
            ConflictError: it is not.
        """
        return await self._request("PUT", path, item)

    async def create(self, path: str, item: Json) -> Json:
        """Make a new object.

        Raises:
            ConflictError: it exists already.
        """
        return await self._request("POST", path, item)

    async def delete(self, path: str) -> None:
        """Delete in the background; gone already is fine."""
        try:
            await self._request("DELETE", path, {"propagationPolicy": "Background"})
        except GoneError:
            return

    async def _request(
        self, verb: str, path: str, body: Json | None = None, kind: str = "application/json",
        params: dict[str, str] | None = None,
    ) -> Json:  # fmt: skip
        content = json.dumps(body).encode() if body is not None else None
        headers = {"Content-Type": kind} if body is not None else {}
        for attempt in range(_TRIES):
            credentials = await self.login.current()
            session = await self._session_of(credentials)
            url = credentials.server + path
            sending = session.request(
                verb, url, data=content, headers=headers | _identity(credentials), params=params,
                proxy=credentials.proxy,
            )  # fmt: skip
            status, retry_after, text = await _sent(sending, f"{verb} {path}")
            if status == 401 and attempt == 0:
                await self._renew(credentials, session)
            elif status == 429 or status >= 500:
                await asyncio.sleep(_pause_s(retry_after, attempt))
            else:
                return answer_of(status, text, f"{verb} {path}")
        raise ClusterError(f"{verb} {path}: the API server said {status} {_TRIES} times")

    async def _session_of(self, credentials: Credentials) -> aiohttp.ClientSession:
        connection = replace(credentials, authorization=None)
        async with self._connecting:
            if self._session is None or self._connection != connection:
                tls = await asyncio.to_thread(_tls, credentials)
                await self._retire()
                self._session, self._connection = _session(tls), connection
            return self._session

    async def _renew(self, refused: Credentials, session: aiohttp.ClientSession) -> None:
        """A certificate may have been replaced in its file, so the connections are new, too."""
        await self.login.renew(refused)
        async with self._connecting:
            if self._session is session:
                await self._retire()

    async def _retire(self) -> None:
        if self._session is not None:
            before, self._retired, self._session = self._retired, self._session, None
            if before is not None:
                await before.close()


def _identity(credentials: Credentials) -> dict[str, str]:
    return {"Authorization": credentials.authorization} if credentials.authorization else {}


def _tls(credentials: Credentials) -> ssl.SSLContext:
    try:
        return credentials.tls()
    except OSError as error:
        raise ClusterError(
            f"no cluster: the certificate or key for {credentials.server} is unusable ({error})"
        ) from error


def _session(tls: ssl.SSLContext) -> aiohttp.ClientSession:
    headers = {"User-Agent": FIELD_MANAGER, "Accept": "application/json"}
    connector = aiohttp.TCPConnector(limit=_MAX_CONNECTIONS, ssl=tls)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT_S, sock_read=_TIMEOUT_S)
    return aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout)


async def _sent(sending: AbstractAsyncContextManager[aiohttp.ClientResponse], what: str) -> tuple[int, str, str]:
    """(status, Retry-After, text) of an answer."""
    try:
        async with sending as response:
            return response.status, response.headers.get("Retry-After", ""), await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ClusterError(f"{what}: the API server does not answer ({error!r})") from error


def _pause_s(retry_after: str, attempt: int) -> float:
    return min(_MAX_PAUSE_S, float(retry_after) if retry_after.isdecimal() else 0.5 * 2.0**attempt)


def answer_of(status: int, text: str, what: str) -> Json:
    """The object in an answer.

    Raises:
        GoneError, ConflictError, RefusedError: the server says so, in `reason` and status.
    """
    body: Json = json.loads(text) if text.startswith("{") else {}
    if status < 400:
        return body
    message = f"{what}: {body.get('message', status)}"
    causes = (body.get("details") or {}).get("causes") or []
    if status == 404 or any(cause.get("reason") == "NamespaceTerminating" for cause in causes):
        raise GoneError(message)
    if status == 409:
        raise ConflictError(message)
    raise RefusedError(message)
