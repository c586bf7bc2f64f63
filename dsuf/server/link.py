"""The web process's end of the pipe to the engine: requests out, each one's events in, and the engine's death at once.

Web listens on a Unix socket and the engine process connects; the engine sends one array of events a step. A reader
that is slower than the engine finds the tokens of several steps merged into one event, so that nothing grows but a list
of ids and the engine never waits for a client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from dsuf import wire
from dsuf.engine.messages import (
    Admitted,
    Cancel,
    Command,
    Event,
    Failed,
    Finished,
    Rejected,
    Request,
    Status,
    Tokens,
    as_error,
)
from dsuf.errors import DsufError, EngineGone

EngineState = Literal["starting", "ready", "gone"]
CallEvent = Admitted | Tokens | Finished | Rejected
_GONE = "the engine process ended while this request was running. Send it again."


class Interrupted(Exception):
    """Somebody outside the engine ended a call; `reason` says who."""

    def __init__(self, reason: Literal["disconnect", "shutdown"]) -> None:
        super().__init__(reason)
        self.reason = reason


class Call:
    """One request at the engine. One task reads its events with `next`."""

    def __init__(self, link: EngineLink, request_id: str, on_tokens: Callable[[Tokens], None]) -> None:
        self.id = request_id
        self.finished: Finished | None = None  # set as soon as it has arrived, read or not
        self._link, self._on_tokens = link, on_tokens
        self._events: deque[CallEvent] = deque()
        self._interrupt: Interrupted | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: CallEvent) -> None:
        """Take an event from the pipe."""
        if isinstance(event, Finished):
            self.finished = event
        last = self._events[-1] if self._events else None
        if isinstance(event, Tokens):
            self._on_tokens(event)
            if isinstance(last, Tokens):
                logprobs = None if last.logprobs is None else last.logprobs + (event.logprobs or [])
                self._events[-1] = Tokens(self.id, last.ids + event.ids, logprobs)
                return  # nobody can be waiting while an event is there
        self._events.append(event)
        self._wake()

    def interrupt(self, reason: Literal["disconnect", "shutdown"]) -> None:
        """End the call from outside: its reader gets Interrupted before any event that still waits."""
        self._interrupt = self._interrupt or Interrupted(reason)
        self._wake()

    async def next(self, timeout_s: float) -> CallEvent | None:
        """The next event, or None after `timeout_s` of silence. Raises Interrupted."""
        if self._interrupt is None and not self._events:
            await self._wait(timeout_s)
        if self._interrupt is not None:
            raise self._interrupt
        return self._events.popleft() if self._events else None

    async def settle(self, timeout_s: float) -> Finished | None:
        """Make sure that the engine is done with this request: cancel it if needed, wait for its last event."""
        if self.finished is None:
            self._link.cancel(self)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self.finished is None and self.id in self._link.calls and loop.time() < deadline:
            self._events.clear()
            await self._wait(deadline - loop.time())
        return self.finished

    async def _wait(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineLink:
    """Listens for the engine and hands its events to the calls they belong to. Lives in one event loop."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self.state: EngineState = "starting"
        self.status: Status | None = None  # the latest one
        self.failure: DsufError | None = None  # why the engine is gone, where it said so
        self.given_up = False  # no engine will come back
        self.calls: dict[str, Call] = {}
        self.on_change: Callable[[], None] | None = None  # called when `state` has changed
        self._connection: wire.AsyncConnection | None = None
        self._listener: asyncio.Server | None = None
        self._sends: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Start to listen. Raises WireError when the socket cannot be made."""
        self.socket_path.unlink(missing_ok=True)
        self._listener = await wire.serve_async(self.socket_path, list[Event], self._serve)

    async def close(self) -> None:
        """Stop to listen and hang up; the engine process then ends by itself."""
        if self._listener is not None:
            self._listener.close()
        if self._connection is not None:
            await self._connection.close()
        self.socket_path.unlink(missing_ok=True)

    async def submit(self, request: Request, on_tokens: Callable[[Tokens], None]) -> Call:
        """Send a request; `on_tokens` sees every step as it arrives. Raises EngineGone when no engine can take it."""
        if self._connection is None:
            raise EngineGone("there is no engine process. Send the request again later.")
        call = self.calls[request.id] = Call(self, request.id, on_tokens)
        try:
            await self._send([request])
        except (OSError, wire.WireError) as error:
            self.calls.pop(request.id, None)
            raise EngineGone(f"the engine process cannot be reached: {error}. Send the request again.") from None
        return call

    def cancel(self, call: Call) -> None:
        """Tell the engine to end a request; it answers with Finished."""
        if call.id in self.calls and self._connection is not None:
            task = asyncio.ensure_future(self._send([Cancel(call.id)]))
            self._sends.add(task)
            task.add_done_callback(self._sent)

    def lost(self, why: str, for_good: bool = False) -> None:
        """The engine process has ended, as its parent or the pipe says: every call ends with an error.

        Another may connect afterwards, unless `for_good`: then this process is of no use any more.
        """
        self.given_up = self.given_up or for_good
        if self.state == "gone":
            return
        self.failure = self.failure or EngineGone(why)
        for call in list(self.calls.values()):
            call.put(Finished(call.id, "error", message=_GONE))
        self.calls.clear()
        self._set_state("gone")

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sends.discard(task)
        if not task.cancelled():
            task.exception()  # a broken pipe is seen by the reader, which ends every call

    async def _send(self, commands: list[Command]) -> None:
        if self._connection is not None:
            await self._connection.send(commands)

    async def _serve(self, connection: wire.AsyncConnection) -> None:
        """Read one engine's events until it hangs up. A second engine is turned away."""
        if self._connection is not None:
            await connection.close()
            return
        self._connection, self.failure, self.status = connection, None, None
        self._set_state("starting")
        why = "the engine process closed its pipe. Its own messages are above."
        try:
            while (events := await connection.receive()) is not None:
                for event in events:
                    self._take(event)
        except (OSError, wire.WireError) as error:
            why = f"the pipe to the engine broke: {error}"
        finally:
            self._connection = None
            self.lost(why)
            with contextlib.suppress(OSError):
                await connection.close()

    def _take(self, event: Event) -> None:
        if isinstance(event, Status):
            self.status = event
            self._set_state("ready" if event.ready else "starting")
        elif isinstance(event, Failed):
            self.failure = as_error(event.kind, event.message)
            self.failure.exit_code = event.exit_code
        else:
            ends = isinstance(event, Finished | Rejected)
            call = self.calls.pop(event.id, None) if ends else self.calls.get(event.id)
            if call is not None:
                call.put(event)

    def _set_state(self, state: EngineState) -> None:
        changed, self.state = state != self.state, state
        if changed and self.on_change is not None:
            self.on_change()
