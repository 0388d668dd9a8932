"""From settings to a listening process, and from SIGTERM to a quiet end."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from clover.runtime.errors import CloverError
from clover.runtime.server.settings import ServeSettings, load_settings

if TYPE_CHECKING:
    from clover.runtime.clover import Clover

log = logging.getLogger("clover.server")
MOST_CONNECTIONS = 2000  # more are answered 503 before they cost anything


def serve_command(bundle: Path, config: Path | None, key_file: Path | None, flags: Mapping[str, Any]) -> None:
    """`clover serve`: runs until it is told to stop. Raises CloverError."""
    given = dict(flags)
    if key_file is not None:
        try:
            keys = key_file.read_text(encoding="ascii").split()
        except UnicodeDecodeError:
            raise CloverError(f"{key_file} holds characters beyond ASCII; write one API key a line.") from None
        given["api_key"] = (*given.get("api_key", ()), *keys)
        if not given["api_key"]:
            raise CloverError(f"{key_file} holds no API key; write one a line.")
    settings = load_settings(config, given)
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise CloverError(
            f"serving needs the package {error.name}; install them with `pip install 'clover-deploy[serve]'`."
        ) from None
    _log_as_json()
    listener = listen(settings)
    from clover.runtime.server.load import load_engine

    run_server(load_engine(bundle, settings), settings, listener)


def run_server(engine: Clover, settings: ServeSettings, listener: socket.socket) -> None:
    """Serves a loaded model until a signal tells it to stop."""
    import uvicorn

    from clover.runtime.server.app import create_app
    from clover.runtime.server.service import Service

    service = Service(engine, settings)
    options = uvicorn.Config(
        create_app(service),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        ws="none",
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=75,  # above the idle time of clients' connection pools
        timeout_graceful_shutdown=int(settings.shutdown_grace) + 5,
    )

    class Server(uvicorn.Server):
        """Starts the drain the moment a signal arrives; the connections end as their replies do."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.force_exit = self.should_exit
            self.should_exit = True
            service.scheduler.drain(settings.shutdown_grace)

    host, port = listener.getsockname()[:2]
    where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(f"clover: serving {', '.join(service.model_names)} at {where}", file=sys.stderr, flush=True)
    Server(options).run(sockets=[listener])


def listen(settings: ServeSettings) -> socket.socket:
    """Binds before the model is loaded, so that a taken port is told at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise CloverError(
            f"can't listen on {settings.host} port {settings.port}: {error.strerror}; choose another with --host or --port."
        ) from None
    return listener


def _log_as_json() -> None:
    from clover.runtime.server.guard import JsonFormatter

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
