"""GET /openapi.json: what the server takes and gives, for client generators and for the fuzzing of our own tests.

Bodies are described as far as this server reads them; fields beyond are accepted without effect or refused by name.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dsuf import __version__

Schema = dict[str, Any]


def description() -> Schema:
    """The OpenAPI 3.1 document."""
    paths = {
        f"/v1/{name}": {"post": _call(summary, _object(required, **fields), streams=True)}
        for name, (summary, required, fields) in _ASKING.items()
    }
    paths["/v1/messages/count_tokens"] = {
        "post": _call("Tokens of a prompt", _object(("model", "messages"), model=_MODEL, messages=_MESSAGES))
    }
    spelled = _object((), prompt=_TEXT, messages=_MESSAGES, add_special_tokens=_FLAG)
    paths["/tokenize"] = {"post": _call("Ids of a text or a chat", spelled)}
    paths["/detokenize"] = {"post": _call("Text of ids", _object(("tokens",), tokens=_list(_integer(0))))}
    paths["/v1/models"] = {"get": _look("Served names")}
    paths["/v1/models/{name}"] = {"get": {**_look("One name", 404), "parameters": [_NAME]}}
    for path in ("/livez", "/readyz", "/health"):
        paths[path] = {"get": _look("State of the server", 503)}
    paths["/version"] = {"get": _look("Version")}
    paths["/load"] = {"get": _look("What is queued and running", 503)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "dsuf", "version": __version__},
        "paths": paths,
        "components": {"schemas": {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR}},
    }


async def openapi(request: Request) -> Response:
    """The document as JSON."""
    return Response(_DOCUMENT, media_type="application/json")


def _object(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def _list(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _integer(low: int, high: int = 2**31 - 1) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _choice(*values: str) -> Schema:
    return {"enum": list(values)}


def _call(summary: str, body: Schema, streams: bool = False) -> Schema:
    answer: Schema = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        answer["text/event-stream"] = {"schema": {}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "The answer", "content": answer}, **_errors(400, 401, 413, 429, 503)},
    }


def _look(summary: str, *statuses: int) -> Schema:
    found = {"description": summary, "content": {"application/json": {"schema": {"type": "object"}}}}
    return {"summary": summary, "responses": {"200": found, **_errors(401, *statuses)}}


def _errors(*statuses: int) -> Schema:
    told = {"application/json": {"schema": {"type": "object"}}}
    return {str(status): {"description": _WORDS[status], "content": told} for status in statuses}


_WORDS = {
    400: "The request cannot be done as asked",
    401: "No valid API key",
    404: "There is no such thing",
    413: "The body is too long",
    429: "Too many requests wait; Retry-After says when to come back",
    503: "Not ready, or shutting down",
}
_ERROR = _object(("error",), error=_object(("message", "type", "param", "code")))
_MESSAGES_ERROR = _object(("type", "error"), type=_choice("error"), error=_object(("type", "message")))
_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_MODEL = {"type": "string", "examples": ["deepseek-v4.1-flash"]}
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_TOOL_CALL = _object(("id", "type", "function"), id=_TEXT, type=_choice("function"), function=_object(("name",)))
_MESSAGES = _list(
    _object(
        ("role", "content"),
        role=_choice("system", "user", "assistant", "tool", "developer"),
        content={"anyOf": [_TEXT, _list(_object(("type", "text"), type=_choice("text"), text=_TEXT))]},
        reasoning_content=_TEXT,
        tool_calls=_list(_TOOL_CALL),
        tool_call_id=_TEXT,
        prefix=_FLAG,
    ),
    minItems=1,
)
_STOP = {"anyOf": [_TEXT, _list(_TEXT, maxItems=16)]}
_SAMPLING = {
    "temperature": _number(0, 2),
    "top_p": _number(0.01, 1),
    "top_k": _integer(-1),
    "seed": _integer(0),
    "ignore_eos": _FLAG,
    "min_tokens": _integer(0, 64),
    "stream": _FLAG,
}
_FUNCTION = _object(("name",), name=_TEXT, description=_TEXT, parameters={"type": "object"}, strict=_FLAG)
_TOOLS = _list(_object(("type", "function"), type=_choice("function"), function=_FUNCTION))
_FORMAT = _object(
    ("type",),
    type=_choice("text", "json_object", "json_schema", "regex"),
    json_schema=_object(("name", "schema"), name=_TEXT, schema={"type": "object"}, strict=_FLAG),
    regex=_TEXT,
)
_THINKING = _object(("type",), type=_choice("enabled", "disabled", "adaptive"))
_EFFORT = _choice("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")
_USAGE = _object((), include_usage=_FLAG, include_steps=_FLAG)
_ASKING: dict[str, tuple[str, tuple[str, ...], dict[str, Schema]]] = {
    "chat/completions": (
        "Chat Completions",
        ("model", "messages"),
        {
            "model": _MODEL, "messages": _MESSAGES, "max_tokens": _integer(1, 393_216), "stop": _STOP,
            "logprobs": _FLAG, "top_logprobs": _integer(0, 20), "tools": _TOOLS, "response_format": _FORMAT,
            "tool_choice": _choice("auto", "none", "required"), "thinking": _THINKING, "reasoning_effort": _EFFORT,
            "stream_options": _USAGE, **_SAMPLING,
        },
    ),
    "completions": (
        "Text completions",
        ("model", "prompt"),
        {
            "model": _MODEL, "prompt": {"anyOf": [_TEXT, _list(_integer(0, 129_279))]}, "echo": _FLAG,
            "max_tokens": _integer(1, 393_216), "stop": _STOP, "logprobs": _integer(0, 20), "stream_options": _USAGE,
            "suffix": _TEXT, "add_special_tokens": _FLAG, **_SAMPLING,
        },
    ),
    "responses": (
        "Responses, stateless",
        ("model", "input"),
        {
            "model": _MODEL, "input": {"anyOf": [_TEXT, _list(_object(("role", "content"), role=_choice("user"),
            content=_TEXT))]}, "instructions": _TEXT, "max_output_tokens": _integer(1, 393_216),
            "reasoning": _object((), effort=_EFFORT), "text": _object((), format=_object(("type",),
            type=_choice("text", "json_object"))), "top_logprobs": _integer(0, 20), **_SAMPLING,
        },
    ),
    "messages": (
        "Anthropic Messages",
        ("model", "messages", "max_tokens"),
        {
            "model": _MODEL, "messages": _MESSAGES, "max_tokens": _integer(1), "system": _TEXT,
            "stop_sequences": _list(_TEXT, maxItems=16), "thinking": _THINKING,
            "tools": _list(_object(("name", "input_schema"), name=_TEXT, input_schema={"type": "object"})), **_SAMPLING,
        },
    ),
}  # fmt: skip
_DOCUMENT = msgspec.json.encode(description())
