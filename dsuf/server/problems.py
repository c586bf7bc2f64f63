"""Errors as HTTP answers: one envelope for all of them, `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException

from dsuf.errors import DsufError

RETRY_SOON_S = 2  # the official harness gives up on a Retry-After above 10
_TYPES = {401: "authentication_error", 403: "authentication_error", 429: "rate_limit_error"}
_NO_SUCH_PATH = "no such path. The chat API is POST /v1/chat/completions, the list of models GET /v1/models."


class HttpProblem(Exception):
    """An answer other than 200 that no error of dsuf stands for."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


def busy(message: str, status: int = 503) -> HttpProblem:
    """An answer that asks the client to come back soon."""
    return HttpProblem(status, message, {"retry-after": str(RETRY_SOON_S)})


def error_type(status: int) -> str:
    """The envelope's `type` for an HTTP status."""
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def envelope(message: str, status: int) -> bytes:
    """The JSON body, or the data of an error event in a stream."""
    kind = error_type(status)
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": kind}})


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
