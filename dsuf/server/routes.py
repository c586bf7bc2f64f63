"""The paths: chat completions, models, health, metrics, version. `/v1` and `/beta` are cut off before routing."""

from __future__ import annotations

import asyncio
import uuid

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from dsuf import __version__
from dsuf.server.link import Interrupted
from dsuf.server.metrics import CONTENT_TYPE
from dsuf.server.problems import HttpProblem
from dsuf.server.record import Record
from dsuf.server.service import Service
from dsuf.server.stream import CLIENT_CLOSED, EventStream, Exchange, collect
from dsuf.text.prompt import Prompt

_SHORT_BODY = 16_384  # bytes; parsed and encoded in under a millisecond, so not worth a thread
_SESSION_HEADERS = ("x-deepseek-harness-session-id", "x-session-id")
_CLEAN_ID_LENGTH = 128


def routes() -> list[Route]:
    """Every path of the server, without prefixes."""
    return [
        Route("/chat/completions", chat_completions, methods=["POST"]),
        Route("/models", list_models, methods=["GET"]),
        Route("/models/{name:path}", show_model, methods=["GET"]),
        Route("/livez", livez, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/health", readyz, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
    ]


async def chat_completions(request: Request) -> Response:
    """POST /chat/completions, streamed or not."""
    service: Service = request.app.state.service
    record = Record(service.metrics, service.log, request.scope["request_id"], _session_id(request))
    exchange = Exchange(service, record)
    try:
        exchange.enter()
        prompt = await _prompt(service, await _read_body(request, service.options.max_body_bytes))
        await exchange.start(prompt, f"chatcmpl-{uuid.uuid4().hex}")
    except ClientDisconnect:
        await exchange.close(Interrupted("disconnect"))
        return _to_nobody()
    except BaseException as error:
        await exchange.close(error)
        raise
    if prompt.stream:
        return EventStream(exchange)
    try:
        return _json(await collect(exchange, request.receive))
    except Interrupted:
        return _to_nobody()


async def list_models(request: Request) -> Response:
    """GET /models: the served names; the aliases work as well but are not listed."""
    service: Service = request.app.state.service
    models = [_model(service, name) for name in service.text.listed_names]
    return _json(msgspec.json.encode({"object": "list", "data": models}))


async def show_model(request: Request) -> Response:
    """GET /models/{id} for any name that a request may use."""
    service: Service = request.app.state.service
    name = request.path_params["name"]
    if name not in service.text.names:
        raise HttpProblem(404, f"no model is named {name!r}. This server has {', '.join(service.text.names)}.")
    return _json(msgspec.json.encode(_model(service, name)))


async def livez(request: Request) -> Response:
    """GET /livez: 200 from this process's own loop, unless no engine will come back."""
    service: Service = request.app.state.service
    return _health(service, "the engine is gone for good" if service.link.given_up else None)


async def readyz(request: Request) -> Response:
    """GET /readyz and /health: 200 only while calls may come."""
    service: Service = request.app.state.service
    return _health(service, service.not_ready_reason)


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    service: Service = request.app.state.service
    return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def version(request: Request) -> Response:
    """GET /version."""
    return _json(msgspec.json.encode({"version": __version__}))


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """The body. Raises HttpProblem 413 above the limit, once the client has sent as much again or all of it.

    Closing a connection on a client that is still sending would often hide the answer from it.
    """
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= max_bytes:
            parts.append(part)
        elif size > 2 * max_bytes:
            break
    if size > max_bytes:
        raise HttpProblem(413, f"the body has more than {max_bytes} bytes. Send less.", {"connection": "close"})
    return b"".join(parts)


async def _prompt(service: Service, body: bytes) -> Prompt:
    """Parse and encode, in a worker thread when it takes long."""
    if len(body) <= _SHORT_BODY:
        return service.text.chat(body)
    return await asyncio.to_thread(service.text.chat, body)


def _session_id(request: Request) -> str | None:
    for name in _SESSION_HEADERS:
        value = request.headers.get(name)
        if value and len(value) <= _CLEAN_ID_LENGTH and value.isprintable():
            return value
    return None


def _to_nobody() -> Response:
    return Response(status_code=CLIENT_CLOSED)


def _model(service: Service, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "deepseek-ai",
        "max_model_len": service.text.context_limit,
    }


def _health(service: Service, reason: str | None) -> Response:
    status = 200 if reason is None else 503
    answer = {"status": service.state if reason else "ok", **({"reason": reason} if reason else {})}
    return _json(msgspec.json.encode(answer), status)


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")
