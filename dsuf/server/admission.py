"""Who may come in: a bound on the requests that wait for their prefill, and the counts of waiting and running ones."""

from __future__ import annotations

from dsuf.server.problems import HttpProblem, busy


class Admission:
    """Counts requests from their arrival; one that finds nobody waiting is always let in."""

    def __init__(self, max_queued_requests: int) -> None:
        self.max_queued_requests = max_queued_requests
        self.waiting = 0  # arrived, prefill not started
        self.running = 0  # in prefill or decode

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return self.waiting + self.running

    def enter(self) -> Slot:
        """A place for one request. Raises HttpProblem 429 when too many wait already."""
        if self.waiting and self.waiting >= self.max_queued_requests:
            raise self.refusal()
        self.waiting += 1
        return Slot(self)

    def refusal(self) -> HttpProblem:
        """Avoids words such as quota, which clients take as final."""
        return busy(f"{self.waiting} requests are waiting already, at most {self.max_queued_requests} may.", 429)


class Slot:
    """One request's place; `leave` may be called more than once."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._phase = "waiting"

    def started(self) -> None:
        """Prefill has started."""
        if self._phase == "waiting":
            self._admission.waiting -= 1
            self._admission.running += 1
            self._phase = "running"

    def leave(self) -> None:
        """The request has ended, one way or another."""
        if self._phase == "waiting":
            self._admission.waiting -= 1
        elif self._phase == "running":
            self._admission.running -= 1
        self._phase = "left"
