"""What a prefill pass takes, learnt from those that ran: how many rows fit into a time.

    seconds = fixed + rows * (row + start * context)        a pass of `rows` rows from position `start` on

All weights are read whatever the rows, so that `fixed` is most of a short pass; attention and index scores grow with
the position. The three are followed by a Kalman filter: they may drift (a machine that is shared), and passes of one
length alone say nothing of how they split, which then stays as it was. A pass that is far off was held up, or all of
this has changed: it counts for three times the usual error, and those after it for more.
"""

from __future__ import annotations

import numpy as np

_ERROR = 0.03  # of a pass's time: one standard deviation
_FIRST_ERROR = 0.3
_DRIFT = 0.02  # of each of the three, from pass to pass
_FAR = 1e6  # positions over which a row may cost so much more as it costs at the beginning


class Pace:
    """The three costs in seconds. Knows nothing before the first pass."""

    def __init__(self) -> None:
        self._costs: np.ndarray | None = None  # fixed, row, context
        self._spread = np.zeros((3, 3))  # their covariance
        self.longest = 0  # rows of a pass that has been seen

    def took(self, rows: int, start: int, seconds: float) -> None:
        """A pass of so many rows from there on was over after so long."""
        if rows < 1 or seconds <= 0:
            return
        self.longest = max(self.longest, rows)
        usual = min(seconds, self.seconds(rows, start) or seconds)
        half = usual / 2 / np.array([1, rows, rows * _FAR])
        error = _ERROR * usual
        if self._costs is None:  # half of it for each: neither is known, and a first pass often does more
            self._costs, self._spread, error = half * (1, 1, 0), np.diag(half**2), _FIRST_ERROR * usual
        x = np.array([1, rows, rows * start], np.float64)
        self._spread += np.diag((_DRIFT * half) ** 2)
        miss, along = seconds - x @ self._costs, self._spread @ x
        variance = x @ along + error**2
        most = 3 * variance**0.5
        self._costs = np.maximum(self._costs + along * (min(max(miss, -most), most) / variance), 0.0)
        if abs(miss) > most:
            self._spread *= 4
        else:
            self._spread -= np.outer(along, along) / variance

    def seconds(self, rows: int, start: int) -> float:
        """What a pass is expected to take; 0.0 as long as nothing is known."""
        if self._costs is None:
            return 0.0
        fixed, row, context = self._costs
        return float(fixed + rows * (row + start * context))

    def share(self, rows: int, start: int) -> float:
        """Of such a pass's time, what its rows take."""
        took = self.seconds(rows, start)
        return 1 - self._costs[0] / took if took else 1.0

    def rows(self, seconds: float, start: int) -> int:
        """Rows of the longest pass that is expected to be over in time; at most twice as many as have been seen."""
        if self._costs is None:
            return 0
        fixed, row, context = self._costs
        left, each, most = seconds - fixed, row + start * context, 2 * self.longest
        if left <= 0:
            return 0
        return most if each * most <= left else int(left / each)
