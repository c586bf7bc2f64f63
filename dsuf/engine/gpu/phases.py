"""Seconds of each phase of a start, for the line that says where they went."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


class Phases:
    """phases("weights") ends what went before and begins the next; `tell` ends the last and prints all."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._begun, self._name = clock, clock(), ""
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str) -> None:
        """Begin a phase."""
        now = self._clock()
        if self._name:
            self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._begun
        self._name, self._begun = name, now

    def tell(self, what: str) -> None:
        """One line on stderr: `what`, then each phase with its seconds."""
        self("")
        parts = ", ".join(f"{name} {spent:.2f} s" for name, spent in self.seconds.items())
        print(f"{what} in {sum(self.seconds.values()):.2f} s: {parts}", file=sys.stderr)
