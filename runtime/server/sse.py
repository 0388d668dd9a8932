"""Server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

log = logging.getLogger("clover.server")
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
    """Streams events and calls `at_end`, however the stream ends. A client that takes nothing for `seconds` is given up."""

    def __init__(self, events: AsyncIterator[bytes], at_end: Callable[[], None], seconds: float) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must not hold events back
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._at_end, self._seconds = at_end, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._seconds):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:  # the connection is closed without the last chunk, so the client can tell
            log.warning("a client did not read its stream for %g s; closed", self._seconds)
        finally:
            self._at_end()
