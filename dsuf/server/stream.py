"""One call at the engine, and its answer as server-sent events or as one body.

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

from dsuf.engine.messages import Admitted, Finished, Rejected, Tokens, as_error
from dsuf.errors import DsufError, EngineGone
from dsuf.server.admission import Slot
from dsuf.server.connection import Connection
from dsuf.server.link import Call, CallEvent, Interrupted
from dsuf.server.problems import HttpProblem, as_problem, busy, envelope, error_frame
from dsuf.server.record import Record
from dsuf.server.service import Service
from dsuf.text.completion_reply import AnyReply, CompletionReply
from dsuf.text.events import Event
from dsuf.text.output import Reply
from dsuf.text.prompt import Prompt
from dsuf.text.protocols import COMPLETIONS, MESSAGES, Protocol

CLIENT_CLOSED = 499  # never sent; what the log says of a client that went away
_COMMENT = b": keep-alive\n\n"
_EMPTY_LINE = b"\n"  # white space before a JSON body
_HEARD_S = 0.05  # before a line is dropped: browsers throw away what they have not read by then
_SETTLE_S = 2.0  # the engine has this long to say what a cancelled request cost
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_LAST_WORDS_S = 0.5  # for an error event to a client that is behind
_JSON_HEADERS = [(b"content-type", b"application/json")]
_TOLD = {  # why a call was ended from outside, to its client; nobody is left to hear of a disconnect
    "shutdown": "the server is shutting down; the answer is not complete.",
    "queue": "the request waited too long for its turn. Send it again later.",
    "stall": "the client did not read; the answer is not complete.",
}


class Exchange:
    """One API call from its arrival to its `request_end` line: `enter`, `start`, then `answer`, and always `close`."""

    def __init__(self, service: Service, record: Record, reply_id: str) -> None:
        self.service, self._record, self.reply_id = service, record, reply_id
        self.call: Call | None = None
        self._slot: Slot | None = None
        self._reply: AnyReply | None = None
        self._deadline: asyncio.TimerHandle | None = None  # of the wait for prefill
        self.protocol: Protocol | None = None  # once the prompt is there
        self.stream = self._include_steps = False
        self._prompt: Prompt | None = None
        self._emitted: list[int] = []

    def enter(self) -> None:
        """Take a place. Raises HttpProblem 429 or 503 when there is none."""
        self._slot = self.service.enter()
        self.service.exchanges.add(self)

    def start(self, prompt: Prompt) -> None:
        """Hand the prompt to the engine. Raises EngineGone, or HttpProblem 429 when too many tokens wait ahead."""
        self._record.prompt(prompt)
        self._slot.queue(len(prompt.ids))
        self._prompt, self.protocol = prompt, prompt.protocol
        self.stream, self._include_steps = prompt.stream, prompt.include_steps
        kind = CompletionReply if prompt.protocol is COMPLETIONS else Reply
        self._reply = kind(self.service.text, prompt, self.reply_id)
        self.call = self.service.link.submit(prompt.request(self.reply_id), self._record.tokens)
        wait_s = self.service.options.queue_timeout_s
        self._deadline = asyncio.get_running_loop().call_later(wait_s, self.interrupt, "queue")

    @property
    def finished(self) -> bool:
        """The answer is complete."""
        return self._reply.finished

    def take(self, event: CallEvent) -> list[Event]:
        """The protocol's events for one of the engine's. Raises a DsufError when the engine failed."""
        if type(event) is Tokens:
            self._emitted += event.ids
            events = self._reply.tokens(event)
            return self._with_steps(events) if self._include_steps else events
        if isinstance(event, Admitted):
            self._deadline.cancel()
            self._slot.started()
            self._record.admitted(event)
            return self._reply.ready(event)
        if isinstance(event, Finished) and event.reason in ("stop", "length"):
            return self._with_steps(self._reply.finish(event.reason))
        raise _failure(event)

    def _with_steps(self, events: list[Event]) -> list[Event]:
        """Where the client asks for it, events with the counts so far: what has arrived has been read by now."""
        if not self._include_steps:
            return events
        return [one.with_steps(self.call.steps - 1, self._reply.completion_tokens) for one in events]

    async def keep(self, event: CallEvent) -> None:
        """If the answer ends with this event, let the next turn find it before the client can send that."""
        prefixes = self.service.prefixes
        if prefixes is not None and isinstance(event, Finished) and event.reason in ("stop", "length"):
            await prefixes.ended(self._prompt, self.reply_id, self._emitted, event.reason == "stop")

    def body(self) -> bytes:
        """The whole answer, after the last event, where it is not streamed."""
        return self._reply.body().encode()

    def interrupt(self, reason: str) -> None:
        """End the call from outside."""
        if self.call is not None:
            self.call.interrupt(reason)

    def sent(self, seconds: float) -> None:
        """A write to the client took this long."""
        self._record.sent(seconds)

    async def close(self, error: BaseException | None = None) -> None:
        """Free what the call holds, here and in the engine, and write its line."""
        outcome, status = _outcome(error, self.service.draining)
        if self._deadline is not None:
            self._deadline.cancel()
        if self._reply is not None:
            self._reply.close()
        finished = await self.call.settle(_SETTLE_S) if self.call is not None else None
        if self.service.prefixes is not None:
            await self.service.prefixes.forget(self.reply_id)
        if self._slot is not None:
            self._slot.leave(finished.stats if finished else None)
        self.service.exchanges.discard(self)
        self._record.end(outcome, status, finished, self._reply)


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
            raise _told(error) from None
        if reason == "stall":
            self._connection.cut_off()
            return
        await self._last_words(as_problem(_told(error)))
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


def _failure(event: Finished | Rejected) -> DsufError:
    if isinstance(event, Rejected):
        return as_error(event.kind, event.message)
    return EngineGone(event.message or "the engine ended this request. Send it again.")


def _told(error: Exception) -> Exception:
    """What the client hears: what ended the call from outside is a 503, a parser's fault an internal error."""
    return busy(_TOLD[error.reason]) if isinstance(error, Interrupted) else error


def _outcome(error: BaseException | None, draining: bool) -> tuple[str, int]:
    """(status, http_status) of the `request_end` line."""
    if error is None:
        return "ok", 200
    gone = isinstance(error, Interrupted) and error.reason in ("disconnect", "stall")
    if gone or (isinstance(error, asyncio.CancelledError) and not draining):
        return "cancelled", CLIENT_CLOSED
    if isinstance(error, HttpProblem):
        return "rejected", error.status
    if isinstance(error, asyncio.CancelledError):
        return "error", 503
    status = as_problem(_told(error)).status if isinstance(error, Exception) else 500
    return ("error" if status >= 500 else "rejected"), status
