"""The `request_end` line: one object for each API call, on stderr, without any text of the prompt or the answer.

Averages leave out the first token, which comes from prefill, so that
1000 / average_iteration_ms * average_accept_length = decode_tokens_per_s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from dsuf.engine.messages import Admitted, Finished, Tokens
from dsuf.server.metrics import Metrics
from dsuf.text.completion_reply import AnyReply
from dsuf.text.prompt import Prompt

Outcome = Literal["ok", "cancelled", "rejected", "error"]
Log = Callable[[dict[str, Any]], None]
_COUNT_EVERY_S = 0.25  # steps of a stream reach the metrics this late at most
_STALL_S = 0.001  # a send that takes longer waited for the client


class Record:
    """What is known of one call, while it runs; `end` writes the line and counts it. Times are of this process."""

    def __init__(
        self, metrics: Metrics, log: Log, request_id: str, session_id: str | None, protocol: str = "chat"
    ) -> None:
        self._metrics, self._log = metrics, log
        self._ids = {"request_id": request_id, "session_id": session_id, "protocol": protocol}
        self._begin = time.perf_counter()
        self._prompt: Prompt | None = None
        self._admitted: Admitted | None = None
        self._first_token: float | None = None
        self._last_step = self._counted_at = 0.0
        self._steps: list[tuple[float, int]] = []  # (gap, tokens), not yet counted
        self._stall_s = 0.0
        self._ended = False

    def prompt(self, prompt: Prompt) -> None:
        """The body was understood."""
        self._prompt = prompt

    def admitted(self, event: Admitted) -> None:
        """Prefill has started."""
        self._admitted = event

    def tokens(self, event: Tokens) -> None:
        """A step has emitted tokens, whether or not the client has them yet."""
        now = time.perf_counter()
        if self._first_token is None:
            self._first_token = self._counted_at = now
            self._metrics.first_token(now - self._begin)
        elif event.ids:
            self._steps.append((now - self._last_step, len(event.ids)))
            if now - self._counted_at > _COUNT_EVERY_S:
                self._count_steps(now)
        self._last_step = now

    def _count_steps(self, now: float) -> None:
        """Many at once: for a lone fast stream the caches have forgotten this code between two steps."""
        for gap_s, tokens in self._steps:
            self._metrics.step(gap_s, tokens)
        self._steps.clear()
        self._counted_at = now

    def sent(self, seconds: float) -> None:
        """A write to the client took this long."""
        if seconds > _STALL_S:
            self._stall_s += seconds

    def end(self, outcome: Outcome, http_status: int, finished: Finished | None, reply: AnyReply | None) -> None:
        """Count the call and write its line, once."""
        if self._ended:
            return
        self._ended = True
        now = time.perf_counter()
        self._count_steps(now)
        finish_reason = reply.finish_reason if reply else None
        if outcome == "ok":
            self._metrics.ended(finish_reason or "stop", now - self._begin, reply.invalid_tool_calls if reply else 0)
        elif outcome == "cancelled":
            self._metrics.disconnected(self._phase())
        elif outcome == "rejected":
            self._metrics.rejected(http_status)
        if finished is not None and self._admitted is not None:
            self._metrics.engine_finished(finished.stats, self._admitted.source)
        self._log(
            {
                "event": "request_end",
                "ts": datetime.now(UTC).isoformat(timespec="milliseconds"),
                **self._ids,
                "model": self._prompt.model if self._prompt else None,
                "stream": self._prompt.stream if self._prompt else None,
                "status": outcome,
                "http_status": http_status,
                "finish_reason": finish_reason,
                **self._counts(reply),
                **self._engine_times(finished),
                "tokenize_ms": _ms(self._prompt.tokenize_s) if self._prompt else None,
                "ttft_ms": _ms(self._first_token - self._begin) if self._first_token is not None else None,
                "e2e_ms": _ms(now - self._begin),
                "client_stall_ms": _ms(self._stall_s),
            }
        )

    def _phase(self) -> str:
        if self._admitted is None:
            return "queue"
        return "prefill" if self._first_token is None else "decode"

    def _counts(self, reply: AnyReply | None) -> dict[str, Any]:
        admitted = self._admitted
        prompt_tokens = admitted.prompt_tokens if admitted else (len(self._prompt.ids) if self._prompt else None)
        return {
            "prompt_tokens": prompt_tokens,
            "cached_tokens": admitted.cached_tokens if admitted else None,
            "cache_source": admitted.source if admitted else None,
            "cache_look_up": self._prompt.look_up if self._prompt else None,
            "completion_tokens": reply.completion_tokens if reply else None,
            "reasoning_tokens": reply.reasoning_tokens if reply else None,
        }

    def _engine_times(self, finished: Finished | None) -> dict[str, Any]:
        """The engine's clock and counts; none where it never got to the request or is gone."""
        names = ("iterations", "average_iteration_ms", "average_accept_length", "queue_ms", "prefill_ms", "decode_ms")
        if finished is None or self._admitted is None:
            return dict.fromkeys((*names, "decode_tokens_per_s"))
        stats = finished.stats
        decoded = max(stats.completion_tokens - 1, 0)
        values = (
            stats.iterations,
            _ms(stats.average_iteration_s),
            round(stats.average_accept_length, 3),
            _ms(stats.queue_s),
            _ms(stats.prefill_s),
            _ms(stats.decode_s),
        )
        speed = round(decoded / stats.decode_s, 2) if stats.decode_s > 0 else None
        return {**dict(zip(names, values, strict=True)), "decode_tokens_per_s": speed}


def as_json(line: dict[str, Any]) -> str:
    """One log line as a JSON object."""
    return msgspec.json.encode(line).decode()


def as_text(line: dict[str, Any]) -> str:
    """One log line for people: the event, then what is known as key=value."""
    known = (f"{key}={value}" for key, value in line.items() if key != "event" and value is not None)
    return " ".join((line["event"], *known))


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
