"""The paths. `/anthropic`, `/beta` and `/v1` are cut off before routing."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dsuf import __version__
from dsuf.server.calls import count_tokens, detokenize_ids, endpoint, tokenize_text
from dsuf.server.demo.page import demo
from dsuf.server.metrics import CONTENT_TYPE
from dsuf.server.openapi import openapi
from dsuf.server.problems import HttpProblem
from dsuf.server.service import Service
from dsuf.text.protocols import CHAT, COMPLETIONS, MESSAGES, RESPONSES


def routes() -> list[Route]:
    """Every path of the server, without prefixes."""
    return [
        Route("/chat/completions", endpoint(CHAT), methods=["POST"]),
        Route("/completions", endpoint(COMPLETIONS), methods=["POST"]),
        Route("/responses", endpoint(RESPONSES), methods=["POST"]),
        Route("/messages", endpoint(MESSAGES), methods=["POST"]),
        Route("/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/tokenize", tokenize_text, methods=["POST"]),
        Route("/detokenize", detokenize_ids, methods=["POST"]),
        Route("/demo", demo, methods=["GET"]),
        Route("/models", list_models, methods=["GET"]),
        Route("/models/{name:path}", show_model, methods=["GET"]),
        Route("/livez", livez, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/health", readyz, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/load", load, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
    ]


async def list_models(request: Request) -> Response:
    """GET /models: the served names; the aliases work as well but are not listed."""
    service: Service = request.app.state.service
    models = [_model(service, name) for name in service.text.listed_names]
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}
    return _json(msgspec.json.encode({"object": "list", "data": models, **ends}))


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
    text = service.metrics.render(service.options.metrics_names)
    if service.prefixes is not None:
        text += await service.prefixes.metrics()
    return Response(text, headers={"content-type": CONTENT_TYPE})


async def load(request: Request) -> Response:
    """GET /load: queue and speed, for a router."""
    service: Service = request.app.state.service
    return _json(msgspec.json.encode(service.load()))


async def version(request: Request) -> Response:
    """GET /version."""
    return _json(msgspec.json.encode({"version": __version__}))


def _model(service: Service, name: str) -> dict[str, object]:
    """One entry in OpenAI's and Anthropic's words: clients of either read what they know."""
    return {
        "id": name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "deepseek-ai",
        "max_model_len": service.text.context_limit,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.started_at, UTC).isoformat(),
    }


def _health(service: Service, reason: str | None) -> Response:
    status = 200 if reason is None else 503
    answer = {"status": service.state if reason else "ok", **({"reason": reason} if reason else {})}
    return _json(msgspec.json.encode(answer), status)


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")
