"""Clover on Ray Serve: replicas of `clover serve`, with every conversation kept on the replica that caches its state.

    serve run clover.yaml

Front reads a request, tells its conversation (conversation.py) and hands it to Model by consistent hashing. Model is the
application of `clover serve` itself, so paths, errors, streams, keys and limits are the same (docs/server.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from conversation import conversation_key
from pydantic import BaseModel
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from clover.runtime.server.body import parse_json
from clover.runtime.server.errors import ApiError
from clover.runtime.server.guard import JsonFormatter, error_response
from clover.runtime.server.settings import ServeSettings, load_settings

REPLICA = "x-clover-replica"  # response header: who answered
RETRY_SECONDS = 5
log = logging.getLogger("clover.server")


class Arguments(BaseModel, extra="forbid"):
    """`args` of the application in clover.yaml. Both paths must exist on every node."""

    bundle: Path
    config: Path | None = None  # clover.toml; its host and port are Ray's affair


@serve.deployment(
    max_ongoing_requests=8,  # what is more goes to the next replica on the ring, then waits in Front
    max_queued_requests=64,
    request_router_config=RequestRouterConfig(
        request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
        request_router_kwargs={"num_fallback_replicas": 1},
    ),
    autoscaling_config=AutoscalingConfig(min_replicas=1, max_replicas=2, target_ongoing_requests=4),
    graceful_shutdown_timeout_s=60,
)
class Model:
    """One loaded bundle with its scheduler and conversation cache."""

    def __init__(self, bundle: str, settings: ServeSettings) -> None:
        from clover.runtime.server.app import create_app
        from clover.runtime.server.load import load_engine
        from clover.runtime.server.service import Service

        log_as_json()
        self._service = Service(load_engine(Path(bundle), settings), settings)
        self._app = create_app(self._service)
        self._name = serve.get_replica_context().replica_id.unique_id

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Any]:
        """Runs one request through the application. Gives (status, headers), then the body's pieces."""
        request: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
        sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

        async def receive() -> dict[str, Any]:
            if request:
                return request.pop()
            return await asyncio.Future()  # a client that leaves ends this call, and with it the application's task

        async def send(message: dict[str, Any]) -> None:
            sent.put_nowait(message)

        async def run() -> None:
            try:
                await self._app(scope, receive, send)
            except Exception:  # the application has answered 500
                log.exception("a request failed")
            finally:
                sent.put_nowait(None)

        task, whole = asyncio.create_task(run()), False
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    # Ray's proxy adds an x-request-id of its own; ours stays in request-id
                    headers = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
                    yield message["status"], [*headers, (REPLICA.encode(), self._name.encode())]
                elif message["type"] == "http.response.body":
                    whole = not message.get("more_body")
                    if piece := message.get("body"):
                        yield piece
            if not whole:  # so that a cut stream does not look whole to the client
                raise ConnectionError("the application broke the response off")
        finally:
            task.cancel()

    def check_health(self) -> None:
        """Called by Ray, which replaces a replica that raises."""
        if self._service.scheduler.failed:
            raise RuntimeError("the scheduler of this replica died; its log says why.")

    def __del__(self) -> None:
        if hasattr(self, "_service"):
            self._service.close()


@serve.deployment(max_ongoing_requests=1000)
class Front:
    """Takes requests in and picks the replica."""

    def __init__(self, model: DeploymentHandle[Any], max_body_mb: int) -> None:
        self._model, self._max_bytes = model, max_body_mb * 2**20

    async def __call__(self, request: Request) -> Response:
        body = await self._body(request)
        if body is None:
            return error_response(ApiError(413, f"the body is larger than {self._max_bytes} bytes."), request.scope)
        key = conversation_key(request.headers, await asyncio.to_thread(_json, body))
        names = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")
        scope = {name: request.scope[name] for name in names if name in request.scope}
        scope |= {"root_path": "", "client": request.scope.get("client"), "server": request.scope.get("server")}
        answer: Any = self._model.options(method_name="answer", stream=True, session_id=key).remote(scope, body)
        try:
            status, headers = await anext(answer)
        except BackPressureError:
            full = ApiError(429, "every replica is busy and the queue is full.", retry_after=RETRY_SECONDS)
            return error_response(full, request.scope)
        except (RayError, RayServeException, StopAsyncIteration):
            lost = ApiError(503, "the replica failed; send the request again.", retry_after=RETRY_SECONDS)
            return error_response(lost, request.scope)
        response = StreamingResponse(answer, status)
        response.raw_headers = headers
        return response

    async def _body(self, request: Request) -> bytes | None:
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > self._max_bytes:
                return None
        return b"".join(parts)


def log_as_json() -> None:
    """The log of `clover serve`, in the replica's log file."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def _json(body: bytes) -> Any:
    """The body's JSON; None for what is none, which Model will say."""
    with suppress(ApiError):
        return parse_json(body)
    return None


def build(args: dict[str, Any]) -> serve.Application:
    """The application that clover.yaml names; `args`: see Arguments."""
    given = Arguments.model_validate(args)
    settings = load_settings(given.config, {})
    # @serve.deployment made Deployments of both classes, which type checkers do not follow
    model = Model.bind(str(given.bundle), settings)  # type: ignore[attr-defined]
    return Front.bind(model, settings.max_body_mb)  # type: ignore[attr-defined]
