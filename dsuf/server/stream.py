"""One call at the engine, and its answer as server-sent events or as one body.

Headers leave at once; a comment breaks every long silence, because proxies and clients give up on a silent connection.
When the engine fails after that, an error event goes out and the connection is dropped without an end marker: clients
take any proper end for success.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsuf.engine.messages import Admitted, Finished, Rejected, Tokens, as_error
from dsuf.errors import DsufError, EngineGone
from dsuf.server.admission import Slot
from dsuf.server.link import Call, Interrupted
from dsuf.server.problems import HttpProblem, as_problem, busy, error_frame
from dsuf.server.record import Record
from dsuf.server.service import Service
from dsuf.text.completion_reply import AnyReply, CompletionReply
from dsuf.text.events import Event
from dsuf.text.output import Reply
from dsuf.text.prompt import Prompt
from dsuf.text.protocols import COMPLETIONS, Protocol

CLIENT_CLOSED = 499  # never sent; what the log says of a client that went away
_COMMENT = b": keep-alive\n\n"
_SETTLE_S = 2.0  # the engine has this long to say what a cancelled request cost
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Exchange:
    """One API call from its arrival to its `request_end` line: `enter`, `start`, `events`, and always `close`."""

    def __init__(self, service: Service, record: Record) -> None:
        self._service, self._record = service, record
        self._slot: Slot | None = None
        self._call: Call | None = None
        self._reply: AnyReply | None = None
        self.protocol: Protocol | None = None  # once the prompt is there

    def enter(self) -> None:
        """Take a place. Raises HttpProblem 429 or 503 when there is none."""
        self._slot = self._service.enter()

    async def start(self, prompt: Prompt, reply_id: str) -> None:
        """Hand the prompt to the engine. Raises EngineGone."""
        self._record.prompt(prompt)
        self.protocol = prompt.protocol
        kind = CompletionReply if prompt.protocol is COMPLETIONS else Reply
        self._reply = kind(self._service.text, prompt, reply_id)
        self._call = await self._service.link.submit(prompt.request(reply_id), self._record.tokens)

    async def events(self) -> AsyncIterator[list[Event] | None]:
        """The protocol's events as they come, None for each silence of `keepalive_s`.

        Ends when the answer is complete. Raises Interrupted, or a DsufError when the engine failed.
        """
        call, reply, keepalive_s = self._call, self._reply, self._service.options.keepalive_s
        while not reply.finished:
            event = await call.next(keepalive_s)
            if event is None:
                yield None
            elif isinstance(event, Tokens):
                yield reply.tokens(event)
            elif isinstance(event, Admitted):
                self._slot.started()
                self._record.admitted(event)
                yield reply.ready(event)
            elif isinstance(event, Finished) and event.reason in ("stop", "length"):
                yield reply.finish(event.reason)
            else:
                raise _failure(event)

    def body(self) -> bytes:
        """The whole answer, after `events` ended without streaming."""
        return self._reply.body().encode()

    def interrupt(self, reason: str) -> None:
        """End the call from outside."""
        self._call.interrupt(reason)

    def sent(self, seconds: float) -> None:
        """A write to the client took this long."""
        self._record.sent(seconds)

    async def close(self, error: BaseException | None = None) -> None:
        """Free what the call holds, here and in the engine, and write its line."""
        outcome, status = _outcome(error)
        if self._reply is not None:
            self._reply.close()
        finished = await self._call.settle(_SETTLE_S) if self._call is not None else None
        if self._slot is not None:
            self._slot.leave()
        self._record.end(outcome, status, finished, self._reply)


class EventStream(Response):
    """The streamed answer, as an ASGI response of its own: it notices disconnects while it waits and can break off."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the answer is complete; returning without the last chunk makes the server drop the line."""
        failure: BaseException | None = None
        watcher = asyncio.create_task(watch(receive, self._exchange))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            async with contextlib.aclosing(self._exchange.events()) as events:
                async for batch in events:
                    if batch is None:
                        await self._write(send, _COMMENT)
                    elif batch:
                        await self._write(send, "".join([event.frame() for event in batch]).encode())
            done = self._exchange.protocol.done
            await self._write(send, Event(done).frame().encode() if done else b"", more=False)
        except BaseException as error:
            failure = error
            if not isinstance(error, Exception):
                raise
            if not _is_disconnect(error):
                await self._write(send, error_frame(as_problem(_told(error)), self._exchange.protocol.name))
            if not isinstance(error, DsufError | Interrupted):
                raise
        finally:
            watcher.cancel()
            await self._exchange.close(failure)

    async def _write(self, send: Send, body: bytes, more: bool = True) -> None:
        begin = time.perf_counter()
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._exchange.sent(time.perf_counter() - begin)


async def collect(exchange: Exchange, receive: Receive) -> bytes:
    """The whole answer as one body; closes the exchange. Raises what the client is to hear; Interrupted if it left."""
    failure: BaseException | None = None
    watcher = asyncio.create_task(watch(receive, exchange))
    try:
        async with contextlib.aclosing(exchange.events()) as events:
            async for _ in events:
                pass
        return exchange.body()
    except BaseException as error:
        failure = error
        if isinstance(error, Interrupted) and not _is_disconnect(error):
            raise _told(error) from None
        raise
    finally:
        watcher.cancel()
        await exchange.close(failure)


async def watch(receive: Receive, exchange: Exchange) -> None:
    """Wait for the client to go away, then end the call."""
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.interrupt("disconnect")


def _failure(event: Finished | Rejected) -> DsufError:
    if isinstance(event, Rejected):
        return as_error(event.kind, event.message)
    return EngineGone(event.message or "the engine ended this request. Send it again.")


def _told(error: Exception) -> Exception:
    """What the client hears: a drain's end is a 503, a parser's fault an internal error."""
    return busy("the server is shutting down; the answer is not complete.") if isinstance(error, Interrupted) else error


def _is_disconnect(error: BaseException) -> bool:
    return isinstance(error, Interrupted) and error.reason == "disconnect"


def _outcome(error: BaseException | None) -> tuple[str, int]:
    """(status, http_status) of the `request_end` line."""
    if error is None:
        return "ok", 200
    if _is_disconnect(error) or isinstance(error, asyncio.CancelledError):
        return "cancelled", CLIENT_CLOSED
    if isinstance(error, HttpProblem):
        return "rejected", error.status
    status = as_problem(_told(error)).status if isinstance(error, Exception) else 500
    return ("error" if status >= 500 else "rejected"), status
