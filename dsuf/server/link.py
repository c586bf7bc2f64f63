"""The web process's end of the pipe to the engine: requests out, each one's events in, and the engine's death at once.

Web listens on a Unix socket and the engine process connects; the engine sends one array of events a step. While the
client of a call keeps up, its tokens go straight from the pipe to `Call.direct`, without a task switch. Otherwise the
tokens of several steps are merged into one event, so that nothing grows but a list of ids, up to a limit, and the
engine never waits for a client.
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
    StatusRequest,
    Tokens,
    as_error,
)
from dsuf.errors import DsufError, EngineGone

EngineState = Literal["starting", "ready", "gone"]
CallEvent = Admitted | Tokens | Finished | Rejected
InterruptReason = Literal["disconnect", "shutdown", "stall", "queue"]
_GONE = "the engine process ended while this request was running. Send it again."
_MOST_PENDING = 400_000  # ids and logprobs that may wait for a slow reader: the longest answer, or 40 MB


class Interrupted(Exception):
    """Somebody outside the engine ended a call; `reason` says who or why."""

    def __init__(self, reason: InterruptReason) -> None:
        super().__init__(reason)
        self.reason = reason


class Call:
    """One request at the engine. One task reads its events with `next`.

    `direct` may be set to take tokens while that task waits and nothing else is pending; it returns False when it
    cannot take them now, and they then come out of `next`.
    """

    def __init__(self, link: EngineLink, request_id: str, on_tokens: Callable[[Tokens], None]) -> None:
        self.id = request_id
        self.finished: Finished | None = None  # set as soon as it has arrived, read or not
        self.steps = 0  # that have emitted tokens, the one that ends prefill included
        self.direct: Callable[[Tokens], bool] | None = None
        self.on_interrupt: Callable[[], None] | None = None  # for a reader that is busy with its client
        self._link, self._on_tokens = link, on_tokens
        self._events: deque[CallEvent] = deque()
        self._pending = 0  # ids and logprobs in the last event
        self.interrupted: Exception | None = None  # set from outside
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None  # not done: the reader waits and nothing is pending
        self._timer: asyncio.TimerHandle | None = None
        self._heard = 0.0
        self._cancelled = False

    def put(self, event: CallEvent) -> None:
        """Take an event from the pipe."""
        if type(event) is Tokens:
            self.steps += 1
            self._on_tokens(event)
            waiter = self._waiter
            if waiter is not None and not waiter.done() and self.direct is not None and self.direct(event):
                self._heard = self._loop.time()
            else:
                self._add_tokens(event)
            return
        if isinstance(event, Finished):
            self.finished = event
        self._events.append(event)
        self.wake()

    def interrupt(self, why: InterruptReason | Exception) -> None:
        """End the call from outside: its reader gets Interrupted, or `why`, before any event that still waits."""
        if self.interrupted is None:
            self.interrupted = why if isinstance(why, Exception) else Interrupted(why)
        self.wake()
        if self.on_interrupt is not None:
            self.on_interrupt()

    async def next(self, timeout_s: float) -> CallEvent | None:
        """The next event, or None after `timeout_s` of silence or `wake`. Raises Interrupted."""
        if self.interrupted is None and not self._events:
            await self._wait(timeout_s)
        if self.interrupted is not None:
            raise self.interrupted
        return self._events.popleft() if self._events else None

    def wake(self) -> None:
        """Let a waiting `next` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self, keep: int | None = None) -> None:
        """Tell the engine, once, to end what has not ended; `keep`: only so many emitted tokens are of use."""
        self.direct = None
        if self.finished is None and not self._cancelled:
            self._cancelled = True
            self._link.cancel(self, keep)

    async def settle(self, timeout_s: float) -> Finished | None:
        """Make sure that the engine is done with this request: cancel it if needed, wait for its last event."""
        self.cancel()
        deadline = self._loop.time() + timeout_s
        while self.finished is None and self.id in self._link.calls and self._loop.time() < deadline:
            self._events.clear()
            await self._wait(deadline - self._loop.time())
        return self.finished

    def _add_tokens(self, event: Tokens) -> None:
        """Keep tokens for a reader that is busy; one that is too far behind is given up."""
        weight = len(event.ids) + sum(len(entry.top) for entry in event.logprobs or ())
        last = self._events[-1] if self._events else None
        if isinstance(last, Tokens):
            last.ids.extend(event.ids)
            if last.logprobs is not None:
                last.logprobs.extend(event.logprobs or ())
            self._pending += weight
            if self._pending > _MOST_PENDING:
                self.interrupt("stall")
            return
        self._events.append(event)
        self._pending = weight
        self.wake()

    async def _wait(self, timeout_s: float) -> None:
        self._waiter = self._loop.create_future()
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(timeout_s, self._quiet, timeout_s)
        try:
            await self._waiter
        finally:
            self._timer.cancel()
            self._waiter = self._timer = None

    def _quiet(self, timeout_s: float) -> None:
        """Wake the reader unless something went past it in the meantime."""
        left = self._heard + timeout_s - self._loop.time()
        if left <= 0.001:
            self.wake()
        else:
            self._timer = self._loop.call_later(left, self._quiet, timeout_s)


class EngineLink:
    """Listens for the engine and hands its events to the calls they belong to. Lives in one event loop."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self.state: EngineState = "starting"
        self.status: Status | None = None  # the latest one
        self.failure: DsufError | None = None  # why the engine is gone, where it said so
        self.given_up = False  # no engine will come back
        self.heard = 0  # times that an engine said something
        self.calls: dict[str, Call] = {}
        self.on_change: Callable[[], None] | None = None  # called when `state` has changed
        self._peer: wire.FramePeer | None = None
        self._listener: asyncio.Server | None = None

    async def open(self) -> None:
        """Start to listen. Raises WireError when the socket cannot be made."""
        self.socket_path.unlink(missing_ok=True)
        self._listener = await wire.serve_frames(self.socket_path, list[Event], self._connected)

    async def close(self) -> None:
        """Stop to listen and hang up; the engine process then ends by itself."""
        if self._listener is not None:
            self._listener.close()
        if self._peer is not None:
            self._peer.close()
        self.socket_path.unlink(missing_ok=True)

    def submit(self, request: Request, on_tokens: Callable[[Tokens], None]) -> Call:
        """Send a request; `on_tokens` sees every step as it arrives. Raises EngineGone when no engine can take it."""
        if self._peer is None:
            raise EngineGone("there is no engine process. Send the request again later.")
        call = self.calls[request.id] = Call(self, request.id, on_tokens)
        try:
            self._peer.send([request])
        except (OSError, wire.WireError) as error:
            self.calls.pop(request.id, None)
            raise EngineGone(f"the engine process cannot be reached: {error}. Send the request again.") from None
        return call

    def cancel(self, call: Call, keep: int | None) -> None:
        """Tell the engine to end a request; it answers with Finished."""
        if call.id in self.calls:
            self._tell(Cancel(call.id, keep))

    def ask_status(self) -> None:
        """Ask for a fresh `status`."""
        self._tell(StatusRequest())

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

    def hang_up(self, why: str) -> None:
        """Give up an engine that does not answer; its process must end before another is started."""
        if self._peer is not None:
            self._peer.on_end = None
            self._peer.close()
            self._peer = None
        self.lost(why)

    def _tell(self, command: Command) -> None:
        """Send what needs no answer; a broken pipe ends every call by `_ended`."""
        if self._peer is not None:
            with contextlib.suppress(OSError):
                self._peer.send([command])

    def _connected(self, peer: wire.FramePeer) -> None:
        """An engine connects. A second one is turned away."""
        if self._peer is not None:
            peer.close()
            return
        self._peer, self.failure, self.status = peer, None, None
        peer.on_message, peer.on_end = self._take_all, self._ended
        self._set_state("starting")

    def _ended(self, failure: wire.WireError | None) -> None:
        self._peer = None
        closed = "the engine process closed its pipe. Its own messages are above."
        self.lost(f"the pipe to the engine broke: {failure}" if failure else closed)

    def _take_all(self, events: list[Event]) -> None:
        """One step's events to their calls."""
        self.heard += 1
        for event in events:
            if type(event) is not Tokens:
                self._take(event)
            elif (call := self.calls.get(event.id)) is not None:
                call.put(event)

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
