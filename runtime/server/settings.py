"""The server's settings: flags, or a clover.toml with the same names."""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from clover.runtime.errors import CloverError

TABLE = "serve"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")  # as a browser sends it: no path behind the host


@dataclass(frozen=True)
class ServeSettings:
    """How a bundle is served. Raises CloverError naming the setting that can't be.

    slots: replies developed at once. shared_rows: rows of each in a step while there are several; None leaves it to the
    backend.
    cache_mb: memory for kept conversation states, 0 for none. request_timeout, client_timeout, shutdown_grace: seconds;
    client_timeout is how long a client may take to send a request's headers, to send its body, and to take what it is sent.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    insecure: bool = False
    slots: int = 4
    max_context: int | None = None
    provider: str | None = None
    threads: int | None = None
    max_queue: int = 64
    shared_rows: int | None = None
    cache_mb: int = 2048
    request_timeout: float = 600.0
    client_timeout: float = 30.0
    max_body_mb: int = 8
    shutdown_grace: float = 30.0
    model_name: tuple[str, ...] = ()
    cors_origin: tuple[str, ...] = ()
    allowed_host: tuple[str, ...] = ()
    log_prompts: bool = False
    cache: bool = True

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("slots", 1, 256),
            ("max_queue", 0, 100_000),
            ("shared_rows", 1, 65536),
            ("cache_mb", 0, 2**24),
            ("request_timeout", 0.001, 86400.0),
            ("client_timeout", 0.01, 3600.0),
            ("max_body_mb", 1, 1024),
            ("shutdown_grace", 0.0, 86400.0),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise CloverError(f"{_flag(name)} is {value}; it must be from {low:g} to {high:g}.")
        if any(len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key for key in self.api_key):
            raise CloverError("--api-key must be at least 8 printable ASCII characters without spaces.")
        if not all(name.strip() for name in self.model_name):
            raise CloverError("--model-name is empty; give the name that clients ask for, or leave it out.")
        for origin in self.cors_origin:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise CloverError(
                    f"--cors-origin {origin!r} is no origin; give a scheme and a host, such as https://example.org."
                )
        if not self.api_key and not self.insecure and not self.loopback:
            raise CloverError(
                f"--host {self.host} can be reached from other machines, and no --api-key is set; set one, or say --insecure."
            )

    @property
    def loopback(self) -> bool:
        """Only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def load_settings(config: Path | None, given: Mapping[str, Any]) -> ServeSettings:
    """Settings from the [serve] table of a TOML file, overridden by the flags in `given` (None: not given)."""
    values = _read(config) if config else {}
    values.update({name: value for name, value in given.items() if value not in (None, ())})
    return ServeSettings(**values)


def _read(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CloverError(f"{path} is not valid TOML: {error}.") from None
    unknown = [name for name in table if name != TABLE]
    section = table.get(TABLE, {})
    if unknown or not isinstance(section, dict):
        raise CloverError(
            f"{path} must hold one table, [{TABLE}]; found {', '.join(unknown) or 'a value of that name'}."
        )
    kinds = {f.name: str(f.type) for f in fields(ServeSettings)}
    values: dict[str, Any] = {}
    for key, value in section.items():
        name = key.replace("-", "_")
        if name not in kinds:
            raise CloverError(f"{path}: {key!r} is unknown; known are {', '.join(_flag(k)[2:] for k in kinds)}.")
        values[name] = _checked(path, key, kinds[name], value)
    return values


def _checked(path: Path, key: str, kind: str, value: Any) -> Any:
    """A TOML value as its setting's type. A list setting may be given as one string."""
    if kind.startswith("tuple"):
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return tuple(items)
    elif kind.startswith("float") and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif type(value).__name__ == kind.partition(" ")[0]:
        return value
    wanted = "a string or a list of strings" if kind.startswith("tuple") else kind.partition(" ")[0]
    raise CloverError(f"{path}: {key} is {value!r}; it must be of type {wanted}.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
