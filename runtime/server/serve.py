"""From settings to a listening process, and from SIGTERM to a quiet end."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clover.runtime.errors import CloverError
from clover.runtime.server.settings import ServeSettings, load_settings

if TYPE_CHECKING:
    from clover.runtime.clover import Clover

# what a process is told to end by; the last one is Windows' own
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name)]


def serve_command(bundle: Path, config: Path | None, key_file: Path | None, flags: Mapping[str, Any]) -> None:
    """`clover serve`: runs until it is told to stop. Raises CloverError, or SystemExit with another status than 0."""
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
            f"serving needs the package {error.name}; in Clover's checkout, `pip install '.[serve]'` brings it."
        ) from None
    _log_as_json()
    listener = listen(settings)
    from clover.runtime.server.load import load_engine

    status = run_server(load_engine(bundle, settings), settings, listener)
    for sig in STOP_SIGNALS:  # one that comes this late must not break into the process's own end
        signal.signal(sig, signal.SIG_IGN)
    if status:
        raise SystemExit(status)


def run_server(engine: Clover, settings: ServeSettings, listener: socket.socket) -> int:
    """Serves a loaded model until it is told to stop. Returns the process's exit status (see lifecycle.Server)."""
    from clover.runtime.server.lifecycle import Server
    from clover.runtime.server.service import Service

    service = Service(engine, settings)
    host, port = listener.getsockname()[:2]
    where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    server = Server(service)
    server.take_signals()
    print(f"clover: serving {', '.join(service.model_names)} at {where}", file=sys.stderr, flush=True)
    server.run(sockets=[listener])
    return server.status


def listen(settings: ServeSettings) -> socket.socket:
    """Binds before the model is loaded, so that a taken port is told at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform == "win32":  # there the other option would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
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
