"""Errors as HTTP answers and as the last words of a stream, in the envelope that the protocol's clients read.

openai     {"error": {"message", "type", "param", "code"}}
anthropic  {"type": "error", "error": {"type", "message"}, "request_id"}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from starlette.exceptions import HTTPException

from dsuf.errors import DsufError

Style = Literal["openai", "anthropic"]
RETRY_SOON_S = 2  # the official harness gives up on a Retry-After above 10
_TYPES = {401: "authentication_error", 403: "authentication_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_NO_SUCH_PATH = (
    "no such path. The chat API is POST /v1/chat/completions, the list of models GET /v1/models, "
    "a page to try it GET /demo."
)


class HttpProblem(Exception):
    """An answer other than 200 that no error of dsuf stands for."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


def busy(message: str, status: int = 503, retry_s: int = RETRY_SOON_S) -> HttpProblem:
    """An answer that asks the client to come back soon."""
    return HttpProblem(status, message, {"retry-after": str(retry_s)})


def error_type(status: int) -> str:
    """The envelope's `type` for an HTTP status."""
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def envelope(message: str, status: int, style: Style = "openai", request_id: str | None = None) -> bytes:
    """The JSON body of an error."""
    if style == "anthropic":
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return msgspec.json.encode(
            {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
        )
    kind = error_type(status)
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": kind}})


def error_frame(problem: HttpProblem, protocol: str) -> bytes:
    """The last event of a stream that broke off. `protocol` is the name in the log."""
    if protocol == "messages":
        return b"event: error\ndata: " + envelope(str(problem), problem.status, "anthropic") + b"\n\n"
    body = envelope(str(problem), problem.status)
    if protocol == "responses":  # the event of the protocol, with the envelope that the SDK raises on beside it
        event = {"type": "error", "code": error_type(problem.status), "message": str(problem), "param": None}
        body = msgspec.json.encode({**event, **msgspec.json.decode(body)})
        return b"event: error\ndata: " + body + b"\n\n"
    return b"data: " + body + b"\n\n"


def as_problem(error: Exception) -> HttpProblem:
    """Any exception as an answer. What is nobody's stated error becomes a 500 that tells nothing about the inside."""
    if isinstance(error, HttpProblem):
        return error
    if isinstance(error, DsufError):
        retry = {"retry-after": str(RETRY_SOON_S)} if error.http_status == 503 else {}
        return HttpProblem(error.http_status, str(error), retry)
    if isinstance(error, HTTPException):
        message = {404: _NO_SUCH_PATH, 405: "this path does not have that method."}.get(error.status_code, error.detail)
        return HttpProblem(error.status_code, message, error.headers)
    return HttpProblem(500, "internal error; the server's log has the details under this response's x-request-id.")
