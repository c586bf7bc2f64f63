"""Sequences set aside in host memory: their caches as pages and a snapshot, until there is room on the device again."""

from __future__ import annotations

from dataclasses import dataclass

from dsuf.engine.backend import Backend
from dsuf.engine.sequence import Sequence
from dsuf.layout import pages_for


@dataclass
class _Parked:
    """The bytes of one sequence and the copy that fills or, later, empties them."""

    position: int
    pages: list[bytearray]
    state: bytearray
    copy: int

    @property
    def nbytes(self) -> int:
        return sum(len(page) for page in self.pages) + len(self.state)


class Parking:
    """Takes sequences out of the backend and puts them back, each as if it had stayed."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._parked: dict[str, _Parked] = {}
        self._leaving: list[_Parked] = []  # still being copied

    @property
    def nbytes(self) -> int:
        """Host memory in use."""
        return sum(parked.nbytes for parked in (*self._parked.values(), *self._leaving))

    def park(self, sequence: Sequence) -> None:
        """Save the sequence at its last resume point and free its cache."""
        limits = self._backend.limits
        position = sequence.last_position // limits.resume_step * limits.resume_step
        pages = [bytearray(limits.page_bytes) for _ in range(pages_for(position))]
        state = bytearray(limits.snapshot_bytes)
        copy = self._backend.snapshot(sequence, position, dict(enumerate(pages)), [state])
        self._parked[sequence.id] = _Parked(position, pages, state, copy)
        self._backend.release(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Put it back."""
        parked = self._parked.pop(sequence.id)
        parked.copy = self._backend.restore(sequence, parked.position, parked.pages, [parked.state])
        self._leaving.append(parked)

    def drop(self, sequence: Sequence) -> None:
        """The sequence is no more."""
        parked = self._parked.pop(sequence.id, None)
        if parked is not None:
            self._leaving.append(parked)

    def settle(self) -> None:
        """Forget the bytes of copies that have ended."""
        done = self._backend.copied() if self._leaving else 0
        self._leaving = [parked for parked in self._leaving if parked.copy > done]
