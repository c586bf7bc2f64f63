"""What pulling and recomputing cost here, learnt as we go: whether to pull, how long to wait, what to leave alone.

    pull when      latency + bytes / rate(path)  <  half of  tokens / recompute rate
    deadline     = min(2 s, half of the recompute time) + bytes / (half of the slowest rate seen on that path)

While nothing has been recomputed yet its cost is unknown, and a pull is always worth it.
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_GUESS = {"shm": 4e9, "rdma": 8e9, "tcp": 1e9}  # bytes/s until something was measured
LATENCY_S = 0.003
LONGEST_WAIT_S = 2.0
CIRCUIT_S = 5.0
SMOOTHING = 0.2
SMALL_BYTES = 1 << 20  # a smaller transfer says more about latency than about the rate


class Rates:
    """Learnt rates; `tokens_per_s` is the engine's prefill."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        self._rates = dict(FIRST_GUESS)
        self._slowest = dict(FIRST_GUESS)

    def prefilled(self, tokens_per_s: float) -> None:
        """The engine has measured a prefill."""
        if tokens_per_s > 0:
            before = self.tokens_per_s or tokens_per_s
            self.tokens_per_s = before + SMOOTHING * (tokens_per_s - before)

    def moved(self, path: str, nbytes: int, seconds: float) -> None:
        """A transfer went through."""
        if nbytes >= SMALL_BYTES and seconds > 0:
            rate = nbytes / seconds
            self._rates[path] += SMOOTHING * (rate - self._rates[path])
            self._slowest[path] = min(self._slowest[path], rate)

    def worth_it(self, path: str, tokens: int, nbytes: int) -> bool:
        """Whether pulling `nbytes` for `tokens` is predicted to take under half of the recompute time."""
        return LATENCY_S + nbytes / self._rates[path] < 0.5 * self._recompute_s(tokens)

    def deadline_s(self, path: str, tokens: int, nbytes: int) -> float:
        """How long a pull may take before it is given up."""
        patience = min(LONGEST_WAIT_S, 0.5 * self._recompute_s(tokens))
        return patience + nbytes / (0.5 * self._slowest[path])

    def _recompute_s(self, tokens: int) -> float:
        return tokens / self.tokens_per_s if self.tokens_per_s else float("inf")


class Circuits:
    """Pairs of peer and path that failed are left alone for a while."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._until = clock, {}

    def open(self, *pair: str) -> None:
        """Leave this one alone for CIRCUIT_S."""
        now = self._clock()
        self._until = {pair: until for pair, until in self._until.items() if until > now}
        self._until[pair] = now + CIRCUIT_S

    def is_open(self, *pair: str) -> bool:
        """Whether to leave it alone."""
        return self._until.get(pair, 0.0) > self._clock()
