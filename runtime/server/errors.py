"""One kind of error inside, each dialect's shape outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from clover.runtime.errors import CloverError, RequestError
from clover.runtime.scheduler.job import Outcome

Dialect = Literal["openai", "anthropic"]
MOST_TEXT = 400  # characters of an error's message
ClientFault = Literal["slow", "gone"]  # it could not keep up with its reply; it left

# status → (OpenAI's type, Anthropic's type)
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    431: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
    504: ("timeout_error", "timeout_error"),
}


def dialect_of(path: str) -> Dialect:
    """Which dialect's errors a path's clients read."""
    return "anthropic" if path.startswith("/v1/messages") else "openai"


@dataclass
class ApiError(Exception):
    """What a client is told: a status, a sentence, the field that is to blame and a code programs can match."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
    allow: str | None = None  # with 405: the methods that the path takes

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status in (408, 413):  # the rest of the body is not read
            headers["connection"] = "close"
        if self.allow is not None:
            headers["allow"] = self.allow
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def body(self, dialect: Dialect, request_id: str = "") -> dict[str, Any]:
        """The JSON of an error response, or of an error event in a stream."""
        openai, anthropic = _TYPES[self.status]
        if dialect == "anthropic":
            error: dict[str, Any] = {"type": anthropic, "message": self.message, "param": self.param}
            return {"type": "error", "error": error, "request_id": request_id}
        return {"error": {"message": self.message, "type": openai, "param": self.param, "code": self.code}}


def api_error(error: CloverError) -> ApiError:
    """A CloverError as a client sees it: a field at fault is 400; a bundle at fault is ours, 500."""
    if isinstance(error, RequestError):
        text = str(error)
        if len(text) > MOST_TEXT:  # a value it repeats is long; what to do about it stands at the end
            text = f"{text[: MOST_TEXT // 2]} … {text[-MOST_TEXT // 2 :]}"
        return ApiError(400, text, error.field[:MOST_TEXT])
    return ApiError(500, str(error))


def outcome_error(outcome: Outcome | ClientFault) -> ApiError:
    """Why a reply ended before its end."""
    if outcome == "slow":
        return ApiError(408, "the client read its reply too slowly, so it was given up.", code="slow_client")
    if outcome == "gone":
        return ApiError(408, "the client went away.")
    if outcome == "deadline":
        return ApiError(504, "the request ran into its deadline before the reply was complete.", code="deadline")
    if outcome == "shutdown":
        return ApiError(
            503,
            "the server is shutting down and could not complete the reply; send the request again.",
            code="shutdown",
            retry_after=5,
        )
    return ApiError(500, "the reply failed inside the server; its log says why.", code="engine_error")
