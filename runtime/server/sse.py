"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from clover.runtime.server.generation import Generation

DONE = b"data: [DONE]\n\n"


def dumps(value: Any) -> bytes:
    """Compact JSON. Escaping everything outside ASCII keeps line separators out of the events."""
    return json.dumps(value, separators=(",", ":")).encode()


def data(value: Any) -> bytes:
    """An event without a name."""
    return b"data: " + dumps(value) + b"\n\n"


def event(value: dict[str, Any]) -> bytes:
    """An event named by its own type."""
    return b"event: " + str(value["type"]).encode() + b"\n" + data(value)


class EventStream(StreamingResponse):
    """Streams a generation's events and closes it, however the stream ends."""

    def __init__(self, events: AsyncIterator[bytes], generation: Generation) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must not hold events back
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()
