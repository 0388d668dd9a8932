"""One question to a server that speaks the chat completions API, over the standard library."""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clover.engines.bench.cases import Case

MESSAGE = 160  # characters kept of a server's message


class DeadServerError(Exception):
    """Nobody answers at the address: it says nothing about the speed of the server."""


@dataclass(frozen=True)
class Answer:
    """text None: the server refused or broke off, `error` says how."""

    text: str | None
    seconds: float
    tokens: int | None
    error: str | None


def base_url(url: str) -> str:
    """An address as users write it, `/v1` at its end or not, without it."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def ask(
    url: str,
    model: str,
    case: Case,
    *,
    timeout: float,
    max_tokens: int,
    key: str | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Answer:
    """Asks once; `fields` go into the request as they are. Raises DeadServerError when no connection can be made."""
    body = {"model": model, "messages": case.messages, "max_tokens": case.max_tokens or max_tokens, "stream": False}
    body |= fields or {}
    began = time.perf_counter()
    try:
        reply = _call(f"{url}/v1/chat/completions", body, timeout, key)
        seconds = time.perf_counter() - began
        text = reply["choices"][0]["message"].get("content") or ""
        usage = reply.get("usage") or {}
        return Answer(str(text), seconds, usage.get("completion_tokens"), None)
    except urllib.error.HTTPError as error:
        return Answer(None, time.perf_counter() - began, None, _status(error))
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            return Answer(None, time.perf_counter() - began, None, "timeout")
        raise DeadServerError(_reason(error.reason)) from None
    except TimeoutError:
        return Answer(None, time.perf_counter() - began, None, "timeout")
    except (ConnectionError, http.client.HTTPException, socket.gaierror) as error:
        raise DeadServerError(_reason(error)) from None
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        return Answer(None, time.perf_counter() - began, None, "not a chat completion")


def _reason(error: object) -> str:
    """Why there was no connection, in words."""
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(words)


def _status(error: urllib.error.HTTPError) -> str:
    """The status, and what the server says of it as far as that is short."""
    try:
        told = json.load(error)["error"]["message"]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, RecursionError):
        told = None
    said = " ".join(told.split()) if isinstance(told, str) else ""
    return f"status {error.code}" + (f": {said[:MESSAGE]}" if said else "")


def find_model(url: str, timeout: float, key: str | None = None) -> str:
    """The first model that a server lists. Raises DeadServerError; `default` where it lists none."""
    try:
        listed = _call(f"{url}/v1/models", None, timeout, key)
        return str(listed["data"][0]["id"])
    except urllib.error.HTTPError:
        return "default"
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise DeadServerError(_reason(getattr(error, "reason", error))) from None
    except (KeyError, IndexError, TypeError, ValueError):
        return "default"


def _call(url: str, body: Any, timeout: float, key: str | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    if key is not None:
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        return json.load(reply)
