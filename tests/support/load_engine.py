"""`python -m tests.support.load_engine SOCKET RATE IDS`: an engine process that steps all its streams together.

Every request gets the same IDS (a JSON list) in each of RATE steps a second until its max_tokens, as a batch of a real
engine does: one frame a step for all of them. It costs the server's process nothing.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from dsuf import wire
from dsuf.engine.messages import Admitted, Cancel, Command, Event, Finished, Request, Stats, Status, Tokens


class LoadEngine:
    """Requests in from a reader thread, steps out at a fixed pace; late steps are not made up for."""

    def __init__(self, path: Path, rate: float, ids: list[int]) -> None:
        self.pipe = wire.connect(path, list[Command])
        self.rate, self.ids = rate, ids
        self.made: dict[str, int] = {}  # tokens of each running request
        self.most: dict[str, int] = {}
        self.lock = threading.Lock()
        self.fresh: list[Request] = []
        self.cancelled: list[str] = []
        self.closed = False

    def run(self) -> None:
        """Step until the server hangs up."""
        self.pipe.send([Status(ready=True)])
        threading.Thread(target=self._read, daemon=True).start()
        due = time.monotonic()
        while not self.closed:
            due = max(due + 1 / self.rate, time.monotonic())
            time.sleep(max(due - time.monotonic(), 0))
            events = self._step()
            try:
                if events:
                    self.pipe.send(events)
            except OSError:
                return

    def _read(self) -> None:
        while (commands := self.pipe.receive()) is not None:
            with self.lock:
                for command in commands:
                    if isinstance(command, Request):
                        self.fresh.append(command)
                    elif isinstance(command, Cancel):
                        self.cancelled.append(command.id)
        self.closed = True

    def _step(self) -> list[Event]:
        with self.lock:
            fresh, self.fresh = self.fresh, []
            cancelled, self.cancelled = self.cancelled, []
        events: list[Event] = []
        for request in fresh:
            self.made[request.id], self.most[request.id] = 0, request.max_tokens
            events.append(Admitted(request.id, len(request.prompt_ids)))
        for name in cancelled:
            if name in self.made:
                events.append(self._finish(name, "cancelled"))
        for name in list(self.made):
            ids = self.ids[: self.most[name] - self.made[name]]
            self.made[name] += len(ids)
            events.append(Tokens(name, ids))
            if self.made[name] >= self.most[name]:
                events.append(self._finish(name, "length"))
        return events

    def _finish(self, name: str, reason: str) -> Finished:
        made = self.made.pop(name)
        del self.most[name]
        steps = max(made // len(self.ids), 1)
        return Finished(name, reason, Stats(1, 0, made, steps, decode_s=steps / self.rate))


if __name__ == "__main__":
    LoadEngine(Path(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3])).run()
