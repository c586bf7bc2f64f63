"""What a prefill pass takes, learnt from those that ran: how many rows fit into a time.

    seconds = fixed + rows * (row + start * context)        a pass of `rows` rows from position `start` on

All weights are read whatever the rows, so that `fixed` is most of a short pass; attention and index scores grow with
the position. The three are followed by a Kalman filter: they may drift (a machine that is shared), and passes of one
length alone say nothing of how they split, which then stays as it was. A pass that is far off was held up, or all of
this has changed: it counts for three times the usual error, and those after it for more. The line is not quite straight
either (tiles of rows fill up): what passes took beyond their expectation lately is kept free.
"""

from __future__ import annotations

import numpy as np

# costs are kept of a pass, of 1,000 rows, of 1,000 rows at a million: alike in size
_UNITS = np.array([1.0, 1e-3, 1e-9])
_ERROR = 0.03  # of a pass's time: one standard deviation
_FIRST_ERROR = 0.3
_DRIFT = 0.02  # of each of the three, from pass to pass
_MOST_LATE, _LATE_DECAY = 1.2, 0.98  # of the time beyond what was expected, and what is left of it a pass later


class Pace:
    """The three costs in seconds. Knows nothing before the first pass."""

    def __init__(self) -> None:
        self._costs: np.ndarray | None = None
        self._spread = np.zeros((3, 3))  # their covariance
        self._late = 1.0  # what passes took of what was expected, the worst of late
        self.longest = 0  # rows of a pass that has been seen

    def took(self, rows: int, start: int, seconds: float) -> None:
        """A pass of so many rows from there on was over after so long."""
        if rows < 1 or seconds <= 0:
            return
        self.longest = max(self.longest, rows)
        expected = self.seconds(rows, start) or seconds
        self._late = max(1 + (self._late - 1) * _LATE_DECAY, min(seconds / expected, _MOST_LATE))
        usual = min(seconds, expected)
        # all that each could be, nearly; a pass of three rows must not make those of thousands doubtful
        most = max(usual, self.seconds(self.longest, start))
        half = np.array([usual, most / (self.longest * 1e-3), most / (self.longest * 1e-3)]) / 2
        error = _ERROR * usual
        if self._costs is None:  # half of it for each: neither is known, and a first pass often does more
            self._costs, self._spread, error = half * (1, 1, 0), np.diag(half**2), _FIRST_ERROR * usual
        self._spread += np.diag((_DRIFT * half) ** 2)
        self._learn(_UNITS * (1, rows, rows * start), seconds, error)
        within = np.minimum(2 * half / np.sqrt(np.diag(self._spread)), 1.0)  # what is not seen is not doubted for ever
        self._spread *= np.outer(within, within)

    def _learn(self, x: np.ndarray, seconds: float, error: float) -> None:
        """One step of the filter. A cost that would fall below zero stays there, and the others explain the rest."""
        free = np.ones(3)
        while True:
            along = free * (self._spread @ (free * x))
            miss, variance = seconds - x @ self._costs, along @ x + error**2
            most, gain = 3 * variance**0.5, along / variance
            costs = self._costs + gain * min(max(miss, -most), most)
            if not np.any(costs < 0):
                break
            self._costs, free = np.where(costs < 0, 0.0, self._costs), free * (costs >= 0)
        self._costs = costs
        if abs(miss) > most:
            self._spread *= 4
        else:  # this form stays a covariance whatever is rounded
            kept = np.eye(3) - np.outer(gain, x)
            self._spread = kept @ self._spread @ kept.T + error**2 * np.outer(gain, gain)

    def seconds(self, rows: int, start: int) -> float:
        """What a pass is expected to take; 0.0 as long as nothing is known."""
        if self._costs is None:
            return 0.0
        return float(self._costs @ (_UNITS * (1, rows, rows * start)))

    def share(self, rows: int, start: int) -> float:
        """Of such a pass's time, what its rows take."""
        took = self.seconds(rows, start)
        return 1 - float(self._costs[0]) / took if took else 1.0

    def rows(self, seconds: float, start: int) -> int:
        """Rows of the longest pass that is expected to be over in time; at most twice as many as have been seen."""
        if self._costs is None:
            return 0
        fixed = self.seconds(0, 0)
        left, each, most = seconds / self._late - fixed, self.seconds(1, start) - fixed, 2 * self.longest
        if left <= 0:
            return 0
        return most if each * most <= left else int(left / each)
