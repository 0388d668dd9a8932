"""The routes, and what every generating route does: read, check, queue, answer, and free what it took."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Match, Route
from starlette.types import Scope

from clover.runtime.errors import CloverError
from clover.runtime.server import chat, completions, fill, messages, responses, sse
from clover.runtime.server.body import parse_json, read_body
from clover.runtime.server.errors import ApiError, api_error
from clover.runtime.server.generation import Generation, collect
from clover.runtime.server.guard import Guard, error_response
from clover.runtime.server.page import load_page
from clover.runtime.server.service import Service
from clover.runtime.server.sse import EventStream

log = logging.getLogger("clover.server")
T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]
LARGE_BODY = 32_768  # bytes from which a request is checked and tokenised beside the event loop


def create_app(service: Service) -> Any:  # an ASGI application
    """The application over a loaded model. It closes the service when the server shuts down."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="Clover", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan
    )
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(CloverError, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(Exception, _on_fault)
    _add_generating(app, service)
    _add_plain(app, service)
    if service.settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.settings.cors_origin),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-api-key"],
        )
    return Guard(app, service.settings, service.metrics)


def _add_generating(app: FastAPI, service: Service) -> None:
    tokenizer, route = service.tokenizer, _adder(app)

    @route("/v1/chat/completions", "POST")
    async def chat_completions(request: Request) -> Response:
        asked = await _check(request, service, chat.parse)
        generation = service.start(asked.ask)
        if asked.stream:
            return await _streamed(request, service, generation, chat.stream(asked, generation, tokenizer))
        choices = await _answered(request, service, generation, collect(generation))
        return _json(chat.whole(asked, choices, generation.usage, tokenizer))

    @route("/v1/completions", "POST")
    async def text_completions(request: Request) -> Response:
        asked = await _check(request, service, completions.parse)
        generation = service.start(asked.ask)
        if asked.stream:
            return await _streamed(request, service, generation, completions.stream(asked, generation, tokenizer))
        choices = await _answered(request, service, generation, collect(generation))
        return _json(completions.whole(asked, choices, generation.usage, tokenizer))

    @route("/v1/responses", "POST")
    async def make_response(request: Request) -> Response:
        asked = await _check(request, service, responses.parse)
        generation = service.start(asked.ask)
        if asked.stream:
            return await _streamed(request, service, generation, responses.stream(asked, generation))
        return _json(await _answered(request, service, generation, responses.whole(asked, generation)))

    @route("/v1/fill", "POST")
    async def fill_form(request: Request) -> Response:
        asked = await _check(request, service, fill.parse_fill, slow=True)
        generation = service.start(asked.ask)
        (choice,) = await _answered(request, service, generation, collect(generation))
        return _json(fill.whole(asked, choice, generation.usage))

    @route("/v1/decide", "POST")
    async def decide(request: Request) -> Response:
        asked = await _check(request, service, fill.parse_decide, slow=True)
        generation = service.start(asked.ask)
        (choice,) = await _answered(request, service, generation, collect(generation))
        return _json(fill.whole(asked, choice, generation.usage))

    @route("/v1/messages", "POST")
    async def make_message(request: Request) -> Response:
        asked = await _check(request, service, messages.parse)
        generation = service.start(asked.ask)
        if asked.stream:
            return await _streamed(request, service, generation, messages.stream(asked, generation))
        (choice,) = await _answered(request, service, generation, collect(generation))
        return _json(messages.whole(asked, choice, generation.usage))

    @route("/v1/messages/count_tokens", "POST")
    async def count_tokens(request: Request) -> Response:
        return _json(await _check(request, service, messages.count_tokens))


def _add_plain(app: FastAPI, service: Service) -> None:
    route = _adder(app)

    def model(name: str) -> dict[str, Any]:
        manifest = service.engine.bundle.manifest
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "clover",
            "type": "model",  # this and the next two for Anthropic's clients
            "display_name": name,
            "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
            "context_length": service.engine.session.max_context,
            "block_sizes": list(manifest.block_sizes),
            "defaults": manifest.defaults,
        }

    @route("/v1/models", "GET")
    async def models(_: Request) -> Response:
        names = service.model_names
        page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return _json({"object": "list", "data": [model(name) for name in names], **page})

    @route("/v1/models/{name:path}", "GET")
    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in service.model_names:
            raise ApiError(404, f"model {name[:100]!r} isn't here.", "model", "model_not_found")
        return _json(model(name))

    page, headers = load_page()

    @route("/", "GET")
    async def chat_page(_: Request) -> Response:
        return Response(page, headers=headers)

    @route("/health", "GET")
    async def health(_: Request) -> Response:
        failed = service.scheduler.failed
        return _json({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    @route("/ready", "GET")
    async def ready(_: Request) -> Response:
        taking = service.scheduler.ready
        return _json({"status": "ready" if taking else "draining"}, 200 if taking else 503)

    @route("/metrics", "GET")
    async def metrics(_: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


# -- plumbing ------------------------------------------------------------------------------------


class _Route(Route):
    """A path without FastAPI's reading of parameters, which costs time on every request: we read bodies ourselves."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, {**found, "route": self}  # the guard's metrics name it


def _adder(app: FastAPI) -> Callable[[str, str], Callable[[Endpoint], Endpoint]]:
    def route(path: str, method: str) -> Callable[[Endpoint], Endpoint]:
        def add(endpoint: Endpoint) -> Endpoint:
            app.router.routes.append(_Route(path, endpoint, methods=[method]))  # GET brings HEAD
            return endpoint

        return add

    return route


async def _check(request: Request, service: Service, parse: Callable[[Any, Service], T], *, slow: bool = False) -> T:
    """The checked request. A long or `slow` one (a form) is read in a thread, so that the others' streams go on."""
    settings = service.settings
    raw = await read_body(request, settings.max_body_mb * 2**20, settings.client_timeout)

    def check() -> T:
        body = parse_json(raw)
        if settings.log_prompts:
            log.info("prompt", extra={"fields": {"request_id": request.state.request_id, "body": body}})
        return parse(body, service)

    slow = slow or len(raw) >= LARGE_BODY or b"json_schema" in raw
    return await asyncio.to_thread(check) if slow else check()


async def _answered(request: Request, service: Service, generation: Generation, answer: Awaitable[T]) -> T:
    """Waits for an answer, or gives the generation up when the client leaves."""
    watch = _watch(request, generation)
    try:
        return await answer
    finally:
        watch.cancel()
        _end(request, service, generation)


async def _streamed(
    request: Request, service: Service, generation: Generation, events: AsyncIterator[bytes]
) -> Response:
    """An event stream, begun when there is something to tell: what goes wrong before is a plain HTTP error."""
    watch = _watch(request, generation)

    def at_end() -> None:
        watch.cancel()
        _end(request, service, generation)

    try:
        await generation.wait_first()
    except BaseException:
        at_end()
        raise
    return EventStream(events, at_end)


def _watch(request: Request, generation: Generation) -> asyncio.Task[None]:
    """Gives a generation up when its client disconnects."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        generation.give_up()

    return asyncio.ensure_future(gone())


def _end(request: Request, service: Service, generation: Generation) -> None:
    """Frees what a request holds; metrics and the log line of its reply."""
    generation.close()
    usage = generation.usage
    first = None if generation.first_token is None else generation.first_token - generation.started
    if generation.ended:
        service.metrics.reply(usage, first)
    else:
        service.metrics.cancelled()
    request.state.log = {
        "complete": generation.ended,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "steps": usage.steps,
        "first_token_ms": None if first is None else round(1000 * first, 1),
        "reply_ms": round(1000 * (time.monotonic() - generation.started), 1),
    }


def _json(value: Any, status: int = 200) -> Response:
    return Response(sse.dumps(value), status, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, CloverError):
        if not (found := api_error(error)).status < 500:
            log.error("%s", error)
    elif isinstance(error, HTTPException):
        what = {404: "there is no such path", 405: "this path doesn't take that method"}
        status = error.status_code if error.status_code in (404, 405) else 400
        why = f"{what.get(status, str(error.detail))}: {request.method} {request.url.path[:100]}."
        found = ApiError(status, why, allow=Headers(error.headers).get("allow"))
    else:
        assert isinstance(error, ApiError)
        found = error
    return error_response(found, request.scope)


async def _on_fault(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, "the server made a mistake; its log says where."), request.scope)
