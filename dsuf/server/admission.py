"""Who may come in: bounds on the requests and prompt tokens that wait for their prefill, and the counts of all.

A limit counts what waits ahead of a request and not the request itself, so that one that finds nobody waiting is always
let in. Without a number the limit on tokens is what the engine prefills in 20 s, at the speed measured so far.
"""

from __future__ import annotations

import math

from dsuf.engine.messages import Stats
from dsuf.server.problems import RETRY_SOON_S, HttpProblem, busy

QUEUE_S = 20.0  # of prefill that may wait, where --max-queued-tokens is not given
LONGEST_RETRY_S = 10  # the official harness gives up on a longer Retry-After
_WORTH_MEASURING = 512  # tokens; shorter prefills show what a request costs, not a token
_REMEMBERED_S = 60.0  # of prefill time in the mean speed


class PrefillSpeed:
    """Mean speed of the latest minute of prefill; None until a prompt of some length was seen."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def observe(self, stats: Stats) -> None:
        """Count one request's prefill."""
        tokens = stats.prompt_tokens - stats.cached_tokens
        if tokens < _WORTH_MEASURING or stats.prefill_s <= 0:
            return
        kept = _REMEMBERED_S / (_REMEMBERED_S + stats.prefill_s)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + stats.prefill_s

    @property
    def tokens_per_s(self) -> float | None:
        """The mean, as far as it is known."""
        return self._tokens / self._seconds if self._seconds else None


class Admission:
    """Counts requests from their arrival to their end."""

    def __init__(self, max_queued_requests: int, max_queued_tokens: int | None = None) -> None:
        self.max_queued_requests = max_queued_requests
        self.waiting = 0  # arrived, prefill not started
        self.running = 0  # in prefill or decode
        self.waiting_tokens = 0  # of the prompts that wait, as far as they are known
        self.speed = PrefillSpeed()
        self._max_queued_tokens = max_queued_tokens

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return self.waiting + self.running

    @property
    def max_queued_tokens(self) -> int | None:
        """The limit on waiting tokens now; None while there is none."""
        speed = self.speed.tokens_per_s
        if self._max_queued_tokens is not None or speed is None:
            return self._max_queued_tokens
        return int(QUEUE_S * speed)

    def enter(self) -> Slot:
        """A place for one request. Raises HttpProblem 429 when too many wait already."""
        if self.waiting and self.waiting >= self.max_queued_requests:
            raise self._refusal(
                f"{self.waiting} requests are waiting already, at most {self.max_queued_requests} may.",
                self.waiting_tokens / max(self.waiting, 1),
            )
        self.waiting += 1
        return Slot(self)

    def check_tokens(self) -> None:
        """Raises HttpProblem 429 when too many prompt tokens wait already."""
        most = self.max_queued_tokens
        if self.waiting_tokens and most is not None and self.waiting_tokens >= most:
            raise self._refusal(
                f"{self.waiting_tokens} prompt tokens are waiting already, at most {most} may.",
                self.waiting_tokens - most,
            )

    def _refusal(self, message: str, tokens_over: float) -> HttpProblem:
        """Says when there may be room. Avoids words such as quota, which clients take as final."""
        speed = self.speed.tokens_per_s
        wait_s = math.ceil(tokens_over / speed) if speed else RETRY_SOON_S
        return busy(f"{message} Send the request again later.", 429, min(max(wait_s, 1), LONGEST_RETRY_S))


class Slot:
    """One request's place; `leave` may be called more than once."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._phase = "waiting"
        self._tokens = 0

    def queue(self, prompt_tokens: int) -> None:
        """The prompt is known. Raises HttpProblem 429 when too many tokens wait already."""
        self._admission.check_tokens()
        self._tokens = prompt_tokens
        self._admission.waiting_tokens += prompt_tokens

    def started(self) -> None:
        """Prefill has started."""
        if self._phase == "waiting":
            self._end_wait()
            self._admission.running += 1
            self._phase = "running"

    def leave(self, stats: Stats | None = None) -> None:
        """The request has ended, one way or another; `stats` is the engine's account of it."""
        if self._phase == "waiting":
            self._end_wait()
        elif self._phase == "running":
            self._admission.running -= 1
            if stats is not None:
                self._admission.speed.observe(stats)
        self._phase = "left"

    def _end_wait(self) -> None:
        self._admission.waiting -= 1
        self._admission.waiting_tokens -= self._tokens
