"""What the parts of one server share: the pipe, the text side, limits, metrics, and whether calls may come."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dsuf.server.admission import Admission, Slot
from dsuf.server.link import EngineLink
from dsuf.server.metrics import Metrics
from dsuf.server.options import ServerOptions
from dsuf.server.prefixes import Prefixes
from dsuf.server.problems import busy
from dsuf.server.record import as_json, as_text
from dsuf.text.prompt import ChatText

_REASONS = {
    "starting": "the engine is starting",
    "gone": "the engine is gone",
    "draining": "the server is shutting down",
}


@dataclass
class Service:
    """One server's state; `draining` is set once and for all by a signal."""

    link: EngineLink
    text: ChatText
    options: ServerOptions
    write_line: Callable[[str], None]
    started_at: int  # Unix time, for the list of models
    prefixes: Prefixes | None = None  # where caches of earlier calls are kept
    draining: bool = False
    exchanges: set[Any] = field(default_factory=set)  # calls that have not ended, for whoever must end them
    admission: Admission = field(init=False)
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        """Make the counts that belong to these options."""
        self.admission = Admission(self.options.max_queued_requests, self.options.max_queued_tokens)
        self.metrics = Metrics(self.text.names[0], self.admission, self.cache_usage)

    @property
    def state(self) -> str:
        """starting, ready, draining or gone."""
        return "draining" if self.draining else self.link.state

    @property
    def not_ready_reason(self) -> str | None:
        """Why /readyz is 503; None when it is 200."""
        reason = _REASONS.get(self.state)
        status = self.link.status
        if self.state == "starting" and status is not None and status.loading:
            return f"{reason}: {status.loading}, {status.loaded:.0%}"
        return reason

    def cache_usage(self) -> float:
        """Share of the tokens that the engine can hold, 0..1; 0 until it said."""
        status = self.link.status
        room = status.max_context * status.max_sequences if status is not None else 0
        return min(status.context_tokens / room, 1.0) if room else 0.0

    def load(self) -> dict[str, Any]:
        """What a router needs that looks at load alone. `wait_s` is the time to prefill what waits, where it is known.

        The engine's own counts are at most a second old.
        """
        admission, status = self.admission, self.link.status
        speed = admission.speed.tokens_per_s
        engine_tokens = status.waiting_tokens if status is not None else 0
        return {
            "state": self.state,
            "server_load": admission.open,
            "running": admission.running,
            "waiting": admission.waiting,
            "waiting_tokens": admission.waiting_tokens,
            "prefill_tokens": max(engine_tokens, admission.waiting_tokens),
            "prefill_tokens_per_s": speed and round(speed, 1),
            "wait_s": speed and round(max(engine_tokens, admission.waiting_tokens) / speed, 3),
            "cache_usage": round(self.cache_usage(), 4),
            "max_queued_requests": admission.max_queued_requests,
            "max_queued_tokens": admission.max_queued_tokens,
        }

    def enter(self) -> Slot:
        """A place for one call. Raises HttpProblem 503 when no calls may come now, 429 when too many wait."""
        reason = self.not_ready_reason
        if reason is not None:
            raise busy(f"{reason}. Send the request again later.")
        return self.admission.enter()

    def log(self, line: dict[str, Any]) -> None:
        """Write one log line in the chosen format."""
        self.write_line((as_json if self.options.log_format == "json" else as_text)(line))


def to_stderr(line: str) -> None:
    """Where log lines go unless a test collects them."""
    print(line, file=sys.stderr, flush=True)
