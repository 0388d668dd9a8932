"""HTTP connections that can't be held open: limits on how long a client may take, in bytes of headers and in number.

uvicorn reads HTTP; what it leaves to a proxy is added here, for both of its parsers. A client has `client_timeout` seconds
to send a request's head, as long for its body, and as long to take what was written to it before more is kept waiting.
Whatever is answered here has the shape of every other error.
"""

from __future__ import annotations

import asyncio
import http
import json
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from clover.runtime.server.errors import ApiError, dialect_of
from clover.runtime.server.metrics import Metrics
from clover.runtime.server.settings import ServeSettings

if TYPE_CHECKING:

    class _Base(asyncio.Protocol):
        """What both of uvicorn's protocols have."""

        cycle: Any
        connections: set[Any]
        loop: asyncio.AbstractEventLoop
        scope: Any
        transport: Any

        def on_response_complete(self) -> None: ...

else:
    _Base = object

log = logging.getLogger("clover.server")
MOST_CONNECTIONS = 2000  # more are answered 503 before they cost anything
MOST_HEAD_BYTES = 65_536  # of a request line and headers
UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)
OTHER_FILES = 100  # that a server has open beside connections


def connection_class(settings: ServeSettings, metrics: Metrics) -> type[Connection]:
    """The protocol for uvicorn, over the fastest parser that is installed."""
    limits = {"seconds": settings.client_timeout, "most": most_connections(), "metrics": metrics}
    return type("LimitedConnection", (_over_httptools() or H11Connection,), limits)


def most_connections() -> int:
    """Connections that are served at once: MOST_CONNECTIONS, or fewer where the system allows fewer open files."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MOST_CONNECTIONS
    unlimited, wanted = resource.RLIM_INFINITY, MOST_CONNECTIONS + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != unlimited and soft < wanted:
        soft = wanted if hard == unlimited else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MOST_CONNECTIONS if soft == unlimited else max(1, min(MOST_CONNECTIONS, soft - OTHER_FILES))


class Connection(_Base):
    """One client's connection. Subclasses, one for each parser, say what of a request is `arriving`."""

    seconds = 30.0
    most = MOST_CONNECTIONS
    metrics: Metrics | None = None
    arriving: str | None = None  # "head" or "body"; None between requests and while one is answered
    lingers = False  # answered and closed but for reading what the client still sends
    _watched: tuple[str | None, Any] = (None, None)
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(_Transport(transport, self._close))  # type: ignore[arg-type]
        if len(self.connections) > self.most:
            self.refuse(ApiError(503, "the server has too many connections; try again soon.", retry_after=1))
            return
        self._timer = self.loop.call_later(self.seconds, self.transport.close)  # a client that says nothing at all

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    # -- reading ---------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.lingers:
            return
        super().data_received(data)
        # bytes that belong to no request must not keep a connection open either
        self._watch(self.arriving or (None if self._answering else "nothing"))
        self._head_bytes = self._head_bytes + len(data) if self.arriving == "head" else 0
        if self._head_bytes > MOST_HEAD_BYTES:
            self.refuse(ApiError(431, f"the headers are longer than {MOST_HEAD_BYTES} bytes; send fewer."))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch(self.arriving)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self, part: str | None) -> None:
        """Starts the clock when another part of a request begins to arrive."""
        if (part, self.cycle) == self._watched or self.lingers:
            return
        self._watched = part, self.cycle
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self.seconds, self._late) if part else None

    def _late(self) -> None:
        part = self._watched[0]
        if self._answering:  # the route waits for its body with a clock of its own; a head behind it has to wait
            self._timer = self.loop.call_later(self.seconds, self._late)
        elif part == "head":
            self.refuse(ApiError(408, f"the request's headers did not arrive within {self.seconds:g} s."))
        elif part == "body":  # of a request that was answered without it
            self.transport.abort()
        else:
            self.transport.close()

    def refuse(self, error: ApiError) -> None:
        """Answers what is no request yet, and closes."""
        if self._answering:  # an answer is being written: another one in the middle of it would garble it
            self.transport.abort()
        if self.transport.is_closing():
            return
        path = "" if self.scope is None else self.scope.get("path", "")
        body = json.dumps(error.body(dialect_of(path))).encode()
        headers = {
            **error.headers,
            "content-type": "application/json",
            "content-length": len(body),
            "connection": "close",
        }
        lines = [f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        peer = self.transport.get_extra_info("peername")
        record = {"client": peer[0] if peer else None, "status": error.status, "why": error.message}
        log.info("refused a connection", extra={"fields": record})
        if self.metrics is not None:
            self.metrics.refused(error.status)
        self._refused = True
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when its parser gives up."""
        self.refuse(ApiError(400, "the request is not valid HTTP."))

    def _unsupported_upgrade_warning(self) -> None:
        """No upgrade is offered; a client that asks for one is answered over HTTP/1.1."""

    # -- writing ---------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()
            self._write_timer = None

    def _watch_writes(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.seconds, self._stuck)

    def _stuck(self) -> None:
        log.warning("a client did not take what was sent to it for %g s; its connection is closed", self.seconds)
        self.transport.abort()

    def _close(self, transport: Any) -> None:
        """Closes. While a request still arrives, the answer is finished and the rest is read and dropped: closing at once
        would make the system reset the connection, and the client might never see why it was refused.
        """
        if self.lingers:
            return
        if transport.get_write_buffer_size():
            self._watch_writes()
        if not (self.arriving or self._refused) or transport.is_closing():
            transport.close()
            return
        self.lingers = True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self.seconds, transport.abort)
        transport.write_eof()
        transport.resume_reading()


class _Transport:
    """A transport whose closing is the connection's to decide."""

    def __init__(self, transport: Any, close: Callable[[Any], None]) -> None:
        self._transport, self._close, self._closed = transport, close, False
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._closed = True
        self._close(self._transport)

    def abort(self) -> None:
        self._closed = True
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._closed or self._transport.is_closing()


class H11Connection(Connection, H11Protocol):
    @property
    def arriving(self) -> str | None:  # type: ignore[override]
        state = self.conn.their_state
        if state is h11.SEND_BODY or state is h11.ERROR:
            return "body"
        return "head" if state is h11.IDLE and self.conn.trailing_data[0] else None


def _over_httptools() -> type[Connection] | None:
    """The connection over httptools, which is faster; None where it is not installed."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return None

    class HttptoolsConnection(Connection, HttpToolsProtocol):
        def data_received(self, data: bytes) -> None:
            # the parser takes what follows an upgrade to be another protocol's, also where none is offered: a body that
            # comes with the offer of HTTP/2, as Java's client makes it, would be lost
            if self.arriving != "body" and b"pgrade" in data:
                head, end, rest = data.partition(b"\r\n\r\n")
                data = UPGRADE.sub(b"", head + end[:2]) + end[2:] + rest
            super().data_received(data)

        def on_message_begin(self) -> None:
            self.arriving = "head"
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            if self.arriving == "head":  # nobody reads trailers, so they are not kept
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self.arriving = "body"
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self.arriving = None
            super().on_message_complete()

    return HttptoolsConnection
