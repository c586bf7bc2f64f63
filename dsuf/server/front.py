"""What every HTTP call passes first, as pure ASGI: one spelling of the path, a request id, the API key, errors as JSON.

Middleware classes of the framework that wrap a response in a task would break the cancellation of streams.
"""

from __future__ import annotations

import hmac
import re
import traceback
import uuid
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsuf.server.options import ServerOptions
from dsuf.server.problems import HttpProblem, Style, as_problem, envelope

_PREFIXES = ("anthropic", "beta", "v1")  # in this order; any of them or none
_OPEN_PATHS = frozenset(("/livez", "/readyz", "/health", "/metrics", "/demo"))  # who asks for these has no key
_CLEAN_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


class Front:
    """Wraps the routed application."""

    def __init__(self, app: ASGIApp, options: ServerOptions, log: Callable[[dict[str, Any]], None]) -> None:
        self._app, self._log = app, log
        self._tenants = [(key.encode(), options.tenant(key)) for key in options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call; `scope["request_id"]` names it for everything inside, `scope["tenant"]` who calls."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))
        path = plain_path(scope["path"])
        scope = {**scope, "path": path, "request_id": request_id, "style": _style(scope["path"], path)}
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            scope["tenant"] = self._tenant(path, headers)
            await self._app(scope, receive, send_named)
        except Exception as error:
            if not isinstance(error, HttpProblem):
                self._log(
                    {"event": "fault", "request_id": request_id, "error": "".join(traceback.format_exception(error))}
                )
            if not started:
                await problem_response(Request(scope), error)(scope, receive, send_named)
            # else: returning without the last chunk makes the server drop the connection

    def _tenant(self, path: str, headers: dict[bytes, bytes]) -> str:
        """Whose key it is that the call bears. Raises HttpProblem 401 for none of ours, where one is needed."""
        if not self._tenants or path in _OPEN_PATHS:
            return ""
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()
        # a list: every key is compared, whichever it is
        found = [tenant for key, tenant in self._tenants if hmac.compare_digest(given, key)]
        if not found:
            raise HttpProblem(
                401,
                "no valid API key. Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
                {"www-authenticate": "Bearer"},
            )
        return found[0]


def plain_path(path: str) -> str:
    """`//v1//chat/completions/` -> `/chat/completions`: base URLs are joined in many ways by clients."""
    parts = [part for part in path.split("/") if part]
    for prefix in _PREFIXES:
        if parts and parts[0] == prefix:
            parts = parts[1:]
    return "/" + "/".join(parts)


def _style(path: str, plain: str) -> Style:
    """Whose words an error is told in."""
    return "anthropic" if plain.startswith("/messages") or path.lstrip("/").startswith("anthropic/") else "openai"


def problem_response(request: Request, error: Exception) -> Response:
    """Any error as the JSON envelope; Starlette's exception handler for all of them."""
    problem = as_problem(error)
    style = request.scope.get("style", "openai")
    body = envelope(str(problem), problem.status, style, request.scope.get("request_id"))
    return Response(body, problem.status, problem.headers, "application/json")


def _request_id(given: bytes) -> str:
    """The client's, if it is short and clean, else a new one."""
    text = given.decode("latin-1")
    return text if _CLEAN_ID.fullmatch(text) else f"req-{uuid.uuid4().hex}"
