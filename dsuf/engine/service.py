"""The engine's end of the pipe: the main loop of the engine process.

The web process listens on a Unix socket (`wire.serve_frames`), starts this process, and the engine connects; so a peer
that is gone is seen at once, and a restarted engine comes back by itself.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from dsuf import wire
from dsuf.engine.engine import Engine, Progress
from dsuf.engine.messages import Cancel, Command, Event, Failed, Rejected, Status, StatusRequest
from dsuf.errors import DsufError, EngineGone

EngineFactory = Callable[[Progress], Engine]  # picklable; reports what it loads and the share done

_PROGRESS_EVERY_S = 0.1
_CONNECT_S = 30.0


class _Stopped(Exception):
    """SIGTERM came, or the peer closed the pipe: there is nobody to work for."""


class _Inbox:
    """Frames from the reader thread, then the one reason why there are no more."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[list[Command] | None] = queue.SimpleQueue()
        self.ended: Exception | None = None
        self.stopping = False

    def put(self, commands: list[Command]) -> None:
        self._queue.put(commands)

    def end(self, reason: Exception) -> None:
        """No more frames; the first reason counts."""
        self.ended = self.ended or reason
        self._queue.put(None)

    def stop(self, number: int, frame: object) -> None:
        """SIGTERM handler: once lets what runs finish, twice does not wait for it. SimpleQueue.put is reentrant."""
        if self.stopping:
            self.end(_Stopped("the engine was told to stop"))
        self.stopping = True
        self._queue.put(None)

    @property
    def empty(self) -> bool:
        return self._queue.empty()

    def next(self) -> list[Command]:
        """Wait for a frame. Raises the reason when there is one, without looking at what was sent before."""
        commands = self._queue.get()
        if self.ended is not None:
            raise self.ended
        return commands or []


def serve_engine(socket_path: Path, factory: EngineFactory) -> NoReturn:
    """Main function of the engine process: `run_service`, then end with its exit code."""
    raise SystemExit(run_service(socket_path, factory))


def run_service(socket_path: Path, factory: EngineFactory) -> int:
    """Connect to the listening peer, load, serve until it closes or SIGTERM comes; the exit code.

    SIGTERM lets running requests finish first, a second one ends them; SIGINT is ignored.
    0: told to stop, or the peer is gone. A DsufError gives its own code and any other fault 1, after the running
    requests were ended with reason "error" and the peer was told by `Failed`.
    """
    try:
        pipe = wire.connect(socket_path, list[Command], timeout_s=_CONNECT_S)
    except wire.WireError as error:
        return _report(error)
    inbox = _Inbox()
    with contextlib.ExitStack() as stack:
        stack.callback(pipe.close)
        _catch_signals(stack, inbox)
        threading.Thread(target=_read, args=(pipe, inbox), name="engine-pipe", daemon=True).start()
        try:
            engine = factory(_Loading(pipe, inbox))
            _send(pipe, [engine.status()])
            _turn_the_wheel(engine, pipe, inbox)
        except _Stopped:
            return 0
        except Exception as error:  # whatever it is, the peer and the log must hear of it
            code = _report(error)
            with contextlib.suppress(_Stopped):
                _send(pipe, [Failed(type(error).__name__, _last_words(error), code)])
            return code


def _turn_the_wheel(engine: Engine, pipe: wire.Connection, inbox: _Inbox) -> NoReturn:
    """Obey, step, publish, for ever. Leaves by exception; what runs then is ended with reason "error" first."""
    try:
        while True:
            while engine.idle or not inbox.empty:
                if inbox.stopping and engine.idle:
                    raise _Stopped
                answers = [_obey(engine, command, inbox.stopping) for command in inbox.next()]
                _send(pipe, [answer for answer in answers if answer is not None])
            _send(pipe, engine.step())
    except Exception as error:
        with contextlib.suppress(_Stopped):
            _send(pipe, engine.abort(_last_words(error)))
        raise


def _send(pipe: wire.Connection, events: list[Event]) -> None:
    """Send what there is. A failure means that the peer is gone: told apart from a broken pipe of the backend's own."""
    try:
        if events:
            pipe.send(events)
    except OSError:
        raise _Stopped("the web process closed the pipe") from None


def _obey(engine: Engine, command: Command, stopping: bool) -> Event | None:
    """Do what is asked; what is to be answered at once."""
    if isinstance(command, StatusRequest):
        return engine.status()
    if isinstance(command, Cancel):
        engine.cancel(command.id, command.keep)
        return None
    try:
        if stopping:
            raise EngineGone("the engine is shutting down. Send the request to another server, or again later.")
        engine.submit(command)
    except DsufError as error:
        return Rejected(command.id, type(error).__name__, str(error))
    return None


def _read(pipe: wire.Connection, inbox: _Inbox) -> None:
    """The reader thread: frames into the inbox, then the reason why there are no more."""
    try:
        while (commands := pipe.receive()) is not None:
            inbox.put(commands)
        inbox.end(_Stopped("the web process closed the pipe"))
    except (wire.WireError, OSError) as error:
        inbox.end(error)


class _Loading:
    """Progress of loading as Status events; breaks the loading off when nobody waits for it any more."""

    def __init__(self, pipe: wire.Connection, inbox: _Inbox) -> None:
        self._pipe, self._inbox = pipe, inbox
        self._said_s = -1.0

    def __call__(self, what: str, share: float) -> None:
        if self._inbox.ended is not None:
            raise self._inbox.ended
        if self._inbox.stopping:
            raise _Stopped
        now = time.monotonic()
        if now - self._said_s >= _PROGRESS_EVERY_S:
            self._said_s = now
            _send(self._pipe, [Status(ready=False, loading=what, loaded=share)])


def _catch_signals(stack: contextlib.ExitStack, inbox: _Inbox) -> None:
    """A ctrl-C or a service manager reaches the whole group: web drains first, so neither signal cuts a request."""
    if threading.current_thread() is not threading.main_thread():
        return  # tests run the service in a thread
    for number, handler in ((signal.SIGINT, signal.SIG_IGN), (signal.SIGTERM, inbox.stop)):
        stack.callback(signal.signal, number, signal.signal(number, handler))


def _last_words(error: Exception) -> str:
    if isinstance(error, (DsufError, _Stopped)):
        return str(error)
    return f"the engine failed with {type(error).__name__}: {error}. It is restarted; please send the request again."


def _report(error: Exception) -> int:
    """Tell the log; the exit code."""
    if isinstance(error, DsufError):
        print(f"dsuf engine: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    traceback.print_exception(error, file=sys.stderr)
    return 1
