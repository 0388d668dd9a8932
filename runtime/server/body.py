"""A request's body: bounded in bytes, time and depth before anything looks at it."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from clover.runtime.server.errors import ApiError

MAX_DEPTH = 100  # of nested lists and objects; no client's request comes near
# the closing quote is optional, so that an unclosed string is passed over once
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)


async def read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """The body of a request that says it is JSON, given up after `seconds`. Raises ApiError 400, 408, 413 or 415."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # browsers may send other kinds across sites without asking
        raise ApiError(415, "the body must be JSON, sent with the header content-type: application/json.")
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise ApiError(415, f"the content-encoding {coding[:40]!r} isn't supported; send the body as it is.")
    try:
        return await asyncio.wait_for(_read(request, max_bytes), seconds)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:g} s.") from None
    except ClientDisconnect:
        raise ApiError(400, "the client went away.") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    parts: list[bytes] = []
    size = int(declared) if declared.isdigit() and len(declared) < 20 else 0
    if size <= max_bytes:
        size = 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                break
    if size > max_bytes:
        raise ApiError(
            413, f"the body is larger than {max_bytes} bytes, the server's limit; send less.", code="too_large"
        )
    return b"".join(parts)


def parse_json(raw: bytes) -> Any:
    """Strict JSON. Raises ApiError."""
    try:
        text = raw.decode()
        if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
            raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels.")
        return json.loads(
            text, parse_constant=_no_constants, parse_float=_finite, object_pairs_hook=_object_without_repeats
        )
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8.") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg} at character {error.pos}.") from None
    except (ValueError, RecursionError) as error:  # NaN, numbers of thousands of digits
        # Python's own words would tell a client to change the interpreter
        reason = "a number has thousands of digits" if "digits" in str(error) else str(error)[:100]
        raise ApiError(400, f"the body is not JSON that can be read: {reason}.") from None


def _depth(text: str) -> int:
    """How deep JSON text is nested, as far as it matters."""
    depth = deepest = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        if match[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
            if deepest > MAX_DEPTH:
                break
        elif match[0] in "]}":
            depth -= 1
    return deepest


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. One of two values under a name would have to be ignored."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        repeated = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ApiError(400, f"the field {repeated[:60]!r} is given twice in one object; give it once.", repeated[:60])
    return made


def _no_constants(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
