"""The way of one answer to its client, as server-sent events or as one body.

Headers of a stream leave at once; a comment breaks every long silence, because proxies and clients give up on a silent
connection. An answer in one piece gets its headers, and an empty line for every long silence, only after the first one:
until then an error keeps its status. When the engine fails after the headers, an error event goes out and the
connection is dropped without an end marker: clients take any proper end for success.
"""

from __future__ import annotations

import asyncio
import time

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsuf.engine.messages import Tokens
from dsuf.errors import DsufError
from dsuf.server.connection import Connection
from dsuf.server.exchange import Exchange, told
from dsuf.server.link import Interrupted
from dsuf.server.problems import HttpProblem, as_problem, envelope, error_frame
from dsuf.text.events import Event
from dsuf.text.protocols import MESSAGES

_COMMENT = b": keep-alive\n\n"
_EMPTY_LINE = b"\n"  # white space before a JSON body
_HEARD_S = 0.05  # before a line is dropped: browsers throw away what they have not read by then
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_LAST_WORDS_S = 0.5  # for an error event to a client that is behind
_JSON_HEADERS = [(b"content-type", b"application/json")]


class _Answer(Response):
    """The way of one call's events to its client, as an ASGI response of its own: it notices disconnects while it
    waits, merges what a slow reader has not taken, and can break off."""

    def __init__(self, exchange: Exchange) -> None:
        self.background = None
        self._exchange, self._options = exchange, exchange.service.options
        self._started = False  # the headers are out
        self._limit: asyncio.Timeout | None = None  # of a write that is under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the answer is complete; returning without the last chunk makes the server drop the line."""
        failure: BaseException | None = None
        exchange, self._send, self._connection = self._exchange, send, Connection.of(scope)
        exchange.call.on_interrupt, exchange.call.direct = self._hurry, self._direct
        watcher = asyncio.create_task(_watch(receive, exchange))
        try:
            await self._begin()
            while not exchange.finished:
                event = await exchange.call.next(self._options.keepalive_s)
                if exchange.finished:  # by a stop string, in `_direct`
                    break
                if event is not None:
                    await exchange.keep(event)
                    await self._pass_on(exchange.take(event))
                else:
                    await self._break_silence()
            if exchange.stopped:
                await exchange.keep_stopped()
            await self._end()
        except BaseException as error:
            failure = error
            if not isinstance(error, Exception):
                raise
            await self._fail(error)
        finally:
            watcher.cancel()
            await exchange.close(failure)

    async def _fail(self, error: Exception) -> None:
        """Tell the client as long as there is a way, and hand on what is a fault of ours."""
        reason = error.reason if isinstance(error, Interrupted) else None
        if reason == "disconnect":
            return
        if not self._started:
            raise told(error) from None
        if reason == "stall":
            self._connection.cut_off()
            return
        await self._last_words(as_problem(told(error)))
        if not isinstance(error, DsufError | Interrupted):
            raise error

    def _direct(self, event: Tokens) -> bool:
        """Tokens straight from the pipe, unless the client is behind."""
        if not self._connection.takes_more:
            self._exchange.service.metrics.stalled()
            return False
        try:
            self._pass_on_now(self._exchange.take(event))
        except Exception as error:
            self._exchange.call.interrupt(error)
        if self._exchange.finished:
            self._exchange.call.wake()
        return True

    async def _start(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _write(self, body: bytes, more: bool = True) -> None:
        """Write, waiting while the client is behind. Raises Interrupted when it does not read, or from outside."""
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(self._options.stall_timeout_s) as self._limit:
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            raise self._exchange.call.interrupted or Interrupted("stall") from None
        finally:
            self._limit = None
        self._exchange.sent(time.perf_counter() - begin)

    async def _last_write(self, body: bytes) -> None:
        """Write before the connection is dropped; a client that does not read is cut off."""
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
                await asyncio.sleep(_HEARD_S)
        except TimeoutError:
            self._connection.cut_off()

    def _hurry(self) -> None:
        """The call was interrupted: do not wait for the client any longer."""
        if self._limit is not None:
            self._limit.reschedule(0)


class EventStream(_Answer):
    """Server-sent events."""

    async def _begin(self) -> None:
        await self._start(_STREAM_HEADERS)

    async def _pass_on(self, events: list[Event]) -> None:
        if events:
            await self._write(_frames(events))

    def _pass_on_now(self, events: list[Event]) -> None:
        if events:
            self._connection.write_chunk(_frames(events))

    async def _break_silence(self) -> None:
        await self._write(_COMMENT)

    async def _end(self) -> None:
        done = self._exchange.protocol.done
        await self._write(Event(done).frame().encode() if done else b"", more=False)

    async def _last_words(self, problem: HttpProblem) -> None:
        await self._last_write(error_frame(problem, self._exchange.protocol.name))


class WholeAnswer(_Answer):
    """One JSON body."""

    async def _begin(self) -> None:
        pass

    async def _pass_on(self, events: list[Event]) -> None:
        pass

    def _pass_on_now(self, events: list[Event]) -> None:
        pass

    async def _break_silence(self) -> None:
        if not self._started:
            await self._start(_JSON_HEADERS)
        await self._write(_EMPTY_LINE)

    async def _end(self) -> None:
        body = self._exchange.body()
        if not self._started:
            await self._start([*_JSON_HEADERS, (b"content-length", b"%d" % len(body))])
        await self._write(body, more=False)

    async def _last_words(self, problem: HttpProblem) -> None:
        style = "anthropic" if self._exchange.protocol is MESSAGES else "openai"
        await self._last_write(envelope(str(problem), problem.status, style))


async def _watch(receive: Receive, exchange: Exchange) -> None:
    """Wait for the client to go away, then end the call."""
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.interrupt("disconnect")


def _frames(events: list[Event]) -> bytes:
    return events[0].frame().encode() if len(events) == 1 else "".join([event.frame() for event in events]).encode()
