"""Who runs in the next turn: first come, first served, one prompt at a time, with decode steps for all in between.

A turn is one decode step of all sequences that have their first token, and one piece of the oldest unfinished prompt.
So a running stream waits for at most one piece of somebody's prompt between two steps, whatever the prompt's length,
and each turn serves every running sequence. A prompt waits for those before it and for a free place.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dsuf.engine.sequence import Phase, Sequence


@dataclass(frozen=True)
class Turn:
    """What one turn of the wheel does."""

    decode: tuple[Sequence, ...]
    prefill: Sequence | None
    started: bool  # the prefill begins with this turn


class Scheduler:
    """The queue and the running set. Moves `phase`; knows nothing of memory, arithmetic or the clock."""

    def __init__(self, max_sequences: int) -> None:
        self.max_sequences = max_sequences
        self._waiting: deque[Sequence] = deque()
        self._prefilling: Sequence | None = None
        self._decoding: dict[str, Sequence] = {}  # by id, in order of arrival

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._decoding) + (self._prefilling is not None)

    @property
    def idle(self) -> bool:
        return not self._waiting and self.running == 0

    def sequences(self) -> list[Sequence]:
        """Everybody, oldest first."""
        prefilling = [self._prefilling] if self._prefilling else []
        return [*self._decoding.values(), *prefilling, *self._waiting]

    def add(self, sequence: Sequence, now: float) -> None:
        """Put a new sequence at the end of the queue."""
        sequence.submitted_s = now
        self._waiting.append(sequence)

    def plan(self, now: float) -> Turn:
        """The next turn; takes the next sequence from the queue when no prompt is open and a place is free."""
        decode = tuple(self._decoding.values())
        started = False
        if self._prefilling is None and self._waiting and self.running < self.max_sequences:
            self._prefilling = self._waiting.popleft()
            self._prefilling.phase = Phase.PREFILL
            self._prefilling.started_s = now
            started = True
        return Turn(decode, self._prefilling, started)

    def prefilled(self, sequence: Sequence) -> None:
        """The prompt of the sequence is complete: it decodes from the next turn on."""
        self._prefilling = None
        sequence.phase = Phase.DECODE
        self._decoding[sequence.id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended or was cancelled, wherever it is."""
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
        elif sequence.phase is Phase.PREFILL:
            self._prefilling = None
        else:
            self._decoding.pop(sequence.id, None)
        sequence.phase = Phase.DONE
