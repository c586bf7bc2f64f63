"""One call at the engine, from its arrival to its `request_end` line, whatever way its answer takes to the client."""

from __future__ import annotations

import asyncio

from dsuf.engine.messages import Admitted, Finished, Rejected, Tokens, as_error
from dsuf.errors import DsufError, EngineGone
from dsuf.server.admission import Slot
from dsuf.server.link import Call, CallEvent, Interrupted
from dsuf.server.problems import HttpProblem, as_problem, busy
from dsuf.server.record import Record
from dsuf.server.service import Service
from dsuf.text.completion_reply import AnyReply, CompletionReply
from dsuf.text.events import Event, used_before_stop
from dsuf.text.output import Reply
from dsuf.text.prompt import Prompt
from dsuf.text.protocols import COMPLETIONS, Protocol

CLIENT_CLOSED = 499  # never sent; what the log says of a client that went away
_SETTLE_S = 2.0  # the engine has this long to say what a cancelled request cost
_SAVE_S = 0.5  # and this long to save an answer that a stop string ended, before the client hears of the end
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
        self._told_end = False  # by the engine

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

    @property
    def stopped(self) -> bool:
        """It is complete before the engine said so: a stop string has come."""
        return self._reply.finished and not self._told_end

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
            self._told_end = True
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

    async def keep_stopped(self) -> None:
        """`keep` for an answer that a stop string has ended: the engine has emitted more than is used of it."""
        prompt, reply = self._prompt, self._reply
        if self.service.prefixes is None or prompt.ignore_eos:
            return
        bytes_of, read = self.service.text.vocabulary.bytes_of, self._emitted[: reply.completion_tokens]
        used, rest = used_before_stop([bytes_of[token] for token in read], reply.stops)
        self.call.cancel(keep=used)
        await self.call.settle(_SAVE_S)
        try:
            (more,) = self.service.text.encoder.plain([rest.decode()])
        except UnicodeDecodeError:  # what was emitted is no text, so nobody will send it again
            return
        await self.service.prefixes.ended(prompt, self.reply_id, [*read[:used], *more], whole=False)

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
        finished = await self._settle(isinstance(error, Interrupted)) if self.call is not None else None
        if self.service.prefixes is not None:
            await self.service.prefixes.forget(self.reply_id)
        if self._slot is not None:
            self._slot.leave(finished.stats if finished else None)
        self.service.exchanges.discard(self)
        self._record.end(outcome, status, finished, self._reply)

    async def _settle(self, interrupted: bool) -> Finished | None:
        """Wait for the engine's last word. What a client had got of a broken off answer can be gone on from."""
        prefixes, told = self.service.prefixes, list(self._emitted)
        if interrupted and prefixes is not None:
            self.call.cancel(keep=len(told))
        finished = await self.call.settle(_SETTLE_S)
        if interrupted and prefixes is not None and finished is not None and finished.reason == "cancelled":
            await prefixes.ended(self._prompt, self.reply_id, told, whole=False)
        return finished


def _failure(event: Finished | Rejected) -> DsufError:
    if isinstance(event, Rejected):
        return as_error(event.kind, event.message)
    return EngineGone(event.message or "the engine ended this request. Send it again.")


def told(error: Exception) -> Exception:
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
    status = as_problem(told(error)).status if isinstance(error, Exception) else 500
    return ("error" if status >= 500 else "rejected"), status
