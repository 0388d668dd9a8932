"""One server from its first connection to its last: how it stops, and what ends it without being told to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn

from clover.runtime.server.app import create_app
from clover.runtime.server.connections import connection_class
from clover.runtime.server.serve import STOP_SIGNALS
from clover.runtime.server.service import Service

log = logging.getLogger("clover.server")
LAST_SECONDS = 5.0  # after the grace, for replies that were ended to be written out
AT_ONCE_SECONDS = 2.0  # after a second signal, for the step that runs
POLL_SECONDS = 0.05


class Server(uvicorn.Server):
    """uvicorn's server over a Service, which it closes.

    A first signal lets replies finish within the grace; a second one cuts them off. `status` is the process's exit status:
    0 after a stop that was asked for, 1 when the engine failed for good, 128 + the signal when replies were cut off by it.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._signals: list[int] = []
        self.status = 0
        options: dict[str, Any] = {
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
        }
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=connection_class(service.settings, service.metrics),
                lifespan="on",
                ws="none",
                timeout_keep_alive=75,  # above the idle time of clients' connection pools
                **options,
            )
        )

    def take_signals(self) -> None:
        """From now on a signal ends the server, not the process. They stay taken afterwards. Only in the main thread."""
        for sig in STOP_SIGNALS:
            signal.signal(sig, self.handle_exit)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See `take_signals`, which comes before there is a loop."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Only takes note: a handler runs in the middle of anything."""
        self._signals.append(sig)
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop; asked ten times a second."""
        if self._service.scheduler.failed:
            self.status = 1
            log.critical("the engine failed for good; the process ends with status 1, so that it can be started anew")
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """No new requests; those inside may finish; then the service is closed."""
        grace = self._service.settings.shutdown_grace
        self._service.scheduler.drain(grace)
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        limit = time.monotonic() + grace + LAST_SECONDS
        while self._busy() and time.monotonic() < limit and len(self._signals) < 2:
            await asyncio.sleep(POLL_SECONDS)
        at_once = len(self._signals) >= 2
        if at_once:
            self._service.scheduler.drain(0.0)
        if await self._cut_off(AT_ONCE_SECONDS if at_once else LAST_SECONDS) and at_once:
            self.status = self.status or 128 + self._signals[1]
        await self.lifespan.shutdown()

    def _busy(self) -> bool:
        connections: set[Any] = self.server_state.connections
        return bool(self.server_state.tasks) or not all(connection.lingers for connection in connections)

    async def _cut_off(self, seconds: float) -> int:
        """Drops the connections that are left; returns how many requests they had. Replies that can't end within `seconds`,
        because a step of the engine goes on, end with the process."""
        left = len(self.server_state.tasks)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        limit = time.monotonic() + seconds
        while self.server_state.tasks or self._service.scheduler.live:
            if time.monotonic() > limit:
                log.warning("stopped in the middle of a step; %d requests were cut off", left)
                sys.stderr.flush()
                if self._signals:
                    os._exit(self.status or 128 + self._signals[-1])
                break
            await asyncio.sleep(POLL_SECONDS)
        else:
            if left:
                log.warning("%d requests were cut off", left)
        return left
