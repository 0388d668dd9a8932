"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

WAITING = b": waiting\n\n"  # a comment: clients skip it, proxies see that the connection lives
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
    """Streams events and calls `at_end`, however the stream ends. Whoever makes it watches for the client to leave."""

    def __init__(self, events: AsyncIterator[bytes], at_end: Callable[[], None]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must not hold events back
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events, self._at_end = events, at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._at_end()
