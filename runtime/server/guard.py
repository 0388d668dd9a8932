"""What stands before every route: request ids, allowed hosts, API keys, and one log line when it is over."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clover.runtime.server.errors import ApiError, dialect_of
from clover.runtime.server.metrics import Metrics
from clover.runtime.server.settings import ServeSettings

log = logging.getLogger("clover.server")
PROBES = ("/health", "/ready")  # under any host name: probes know an address, and these tell nothing
OPEN_PATHS = ("/", *PROBES)  # need no key: the page asks for it, and probes have none


def error_response(error: ApiError, scope: Scope) -> Response:
    """An error in the dialect of the path."""
    body = error.body(dialect_of(scope["path"]), scope.get("state", {}).get("request_id", ""))
    return Response(json.dumps(body), error.status, {**error.headers, "content-type": "application/json"})


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._keys = [hashlib.sha256(key.encode()).digest() for key in settings.api_key]
        # A page elsewhere can point its own host name at 127.0.0.1 and talk to a server that trusts this machine
        # (DNS rebinding); it can't do that under one of these names.
        self._hosts: set[str] | None = None
        if settings.loopback and not settings.api_key:
            self._hosts = {"localhost", "127.0.0.1", "[::1]", settings.host.lower(), *settings.allowed_host}
        elif settings.allowed_host:
            self._hosts = {*settings.allowed_host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        state = scope.setdefault("state", {})
        state["request_id"] = request_id = "req_" + secrets.token_hex(12)
        began, status = time.perf_counter(), 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        try:
            refusal = self._refusal(scope)
            if refusal:
                await error_response(refusal, scope)(scope, receive, tagged)
            else:
                await self._app(scope, receive, tagged)
        finally:
            seconds = time.perf_counter() - began
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.request(route, status, seconds)
            self._log(scope, state, status, seconds)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        known = self._hosts is None or scope["path"] in PROBES or _host_name(headers.get("host", "")) in self._hosts
        if not known:
            return ApiError(403, "this server is not known by that host name; start it with --allowed-host to add one.")
        if not self._keys or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = hashlib.sha256(given.encode()).digest()
        # every key is compared, so that the time tells nothing
        if any([hmac.compare_digest(digest, key) for key in self._keys]):
            return None
        return ApiError(
            401,
            "the API key is missing or wrong; send it as Authorization: Bearer KEY or x-api-key.",
            code="invalid_api_key",
        )

    @staticmethod
    def _log(scope: Scope, state: dict[str, Any], status: int, seconds: float) -> None:
        quiet = scope["path"] in ("/health", "/ready", "/metrics")
        client = scope.get("client")
        record = {
            "request_id": state["request_id"],
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "ms": round(1000 * seconds, 1),
            **state.get("log", {}),
        }
        log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": record})


def _host_name(header: str) -> str:
    """The host of a Host header, without its port."""
    host = header.strip().lower()
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.partition(":")[0]


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z"
        line: dict[str, Any] = {
            "time": when,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)
