"""The paths that ask for an answer, one endpoint a protocol, and those that only count or spell tokens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from dsuf.server.exchange import CLIENT_CLOSED, Exchange
from dsuf.server.link import Interrupted
from dsuf.server.options import ServerOptions
from dsuf.server.problems import HttpProblem
from dsuf.server.record import Record
from dsuf.server.service import Service
from dsuf.server.stream import EventStream, WholeAnswer
from dsuf.text.completion import completion
from dsuf.text.prompt import Prompt
from dsuf.text.protocols import COMPLETIONS, MESSAGES, Protocol
from dsuf.text.spelling import detokenize, tokenize

Result = TypeVar("Result")
_SHORT_BODY = 16_384  # bytes; parsed and encoded in under a millisecond, so not worth a thread
_SESSION_HEADERS = ("x-deepseek-harness-session-id", "x-session-id")
_CLEAN_ID_LENGTH = 128


def endpoint(protocol: Protocol) -> Callable[[Request], Awaitable[Response]]:
    """The handler of one protocol's path, streamed or not."""

    async def answer(request: Request) -> Response:
        service: Service = request.app.state.service
        session = _session_id(request)
        record = Record(service.metrics, service.log, request.scope["request_id"], session, protocol.name)
        exchange = Exchange(service, record, f"{protocol.id_prefix}{uuid.uuid4().hex}")
        try:
            exchange.enter()
            body = await read_body(request, service.options)
            exchange.start(await _prompt(service, protocol, body, exchange.reply_id, request.scope["tenant"]))
        except ClientDisconnect:
            await exchange.close(Interrupted("disconnect"))
            return _to_nobody()
        except BaseException as error:
            await exchange.close(error)
            raise
        return EventStream(exchange) if exchange.stream else WholeAnswer(exchange)

    return answer


async def count_tokens(request: Request) -> Response:
    """POST /messages/count_tokens: the length of the prompt that the same body would make."""
    service: Service = request.app.state.service
    body = await read_body(request, service.options)
    ids = await in_thread(body, lambda: service.text.count(MESSAGES, body))
    return _json(msgspec.json.encode({"input_tokens": len(ids)}))


async def tokenize_text(request: Request) -> Response:
    """POST /tokenize: `{prompt}` or a chat body to `{tokens, count, max_model_len}`."""
    service: Service = request.app.state.service
    body = await read_body(request, service.options)
    ids = await in_thread(body, lambda: tokenize(service.text, body))
    answer = {"count": len(ids), "max_model_len": service.text.context_limit, "tokens": ids}
    return _json(msgspec.json.encode(answer))


async def detokenize_ids(request: Request) -> Response:
    """POST /detokenize: `{tokens}` to `{prompt}`."""
    service: Service = request.app.state.service
    body = await read_body(request, service.options)
    text = await in_thread(body, lambda: detokenize(service.text, body))
    return _json(msgspec.json.encode({"prompt": text}))


async def read_body(request: Request, options: ServerOptions) -> bytes:
    """The body. Raises HttpProblem 408 when it does not come, 413 above the limit, then once the client has sent as
    much again or all of it: closing a connection on a client that is still sending would often hide the answer from it.
    """
    parts: list[bytes] = []
    size, most = 0, options.max_body_bytes
    stream = request.stream()
    end = asyncio.get_running_loop().time() + options.queue_timeout_s
    try:
        while size <= 2 * most:
            async with asyncio.timeout(min(options.stall_timeout_s, end - asyncio.get_running_loop().time())):
                part = await anext(stream, None)
            if part is None:
                break
            size += len(part)
            if size <= most:
                parts.append(part)
    except TimeoutError:
        raise HttpProblem(408, "the body did not arrive in time. Send it again.", {"connection": "close"}) from None
    if size > most:
        raise HttpProblem(413, f"the body has more than {most} bytes. Send less.", {"connection": "close"})
    return b"".join(parts)


async def in_thread(body: bytes, work: Callable[[], Result]) -> Result:
    """What `work` returns, from a worker thread when the body is long."""
    return work() if len(body) <= _SHORT_BODY else await asyncio.to_thread(work)


async def _prompt(service: Service, protocol: Protocol, body: bytes, reply_id: str, tenant: str) -> Prompt:
    """Parse and encode; where caches are kept, the longest saved prefix is looked up in between."""
    text, prefixes = service.text, service.prefixes
    if protocol is COMPLETIONS:
        return replace(await in_thread(body, lambda: completion(text, body)), tenant=tenant)
    if prefixes is None:
        return await in_thread(body, lambda: text.prompt(protocol, body))
    begun = await in_thread(body, lambda: text.begin(protocol, body))
    return await prefixes.prompt(begun, reply_id, tenant, lambda work: in_thread(body, work))


def _session_id(request: Request) -> str | None:
    for name in _SESSION_HEADERS:
        value = request.headers.get(name)
        if value and len(value) <= _CLEAN_ID_LENGTH and value.isprintable():
            return value
    return None


def _to_nobody() -> Response:
    return Response(status_code=CLIENT_CLOSED)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
