"""The web process's end of the pipe, blocking, with a real engine process behind it."""

from __future__ import annotations

import multiprocessing

from dsuf import wire
from dsuf.engine.messages import Event
from dsuf.engine.service import serve_engine

WAIT_S = 20.0


class Peer:
    """The web process's end, blocking."""

    def __init__(self, tmp_path, factory):
        self.path = tmp_path / "engine.sock"
        self.listener = wire.listen(self.path)
        self.listener.settimeout(WAIT_S)
        self.process = multiprocessing.get_context("spawn").Process(target=serve_engine, args=(self.path, factory))
        self.process.start()
        try:
            sock, _ = self.listener.accept()
        except TimeoutError:
            self.process.kill()
            raise
        sock.settimeout(WAIT_S)
        self.pipe = wire.Connection(sock, list[Event])
        self.pending = []

    def send(self, *commands):
        self.pipe.send(list(commands))

    def next(self):
        """The next event; None when the engine has closed the pipe."""
        while not self.pending:
            events = self.pipe.receive()
            if events is None:
                return None
            self.pending = list(events)
        return self.pending.pop(0)

    def until(self, kind, **fields):
        """All events up to the first of this kind with these fields."""
        seen = []
        while True:
            event = self.next()
            assert event is not None, f"the pipe closed before {kind.__name__}; seen {seen}"
            seen.append(event)
            if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items()):
                return seen

    def rest(self):
        return list(iter(self.next, None))

    def exit_code(self):
        self.process.join(WAIT_S)
        return self.process.exitcode

    def close(self):
        self.pipe.close()
        self.listener.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
