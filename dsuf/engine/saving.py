"""Joins the cache tier to a backend: hits before a prompt starts, entries at the resume points of prompt and reply.

Resume points are multiples of `limits.resume_step`: the last one inside the prompt, the last one of what has been
processed when the reply ends, and every `resume_every` tokens in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from dsuf.engine.backend import MOST_REWOUND, Backend
from dsuf.engine.sequence import Sequence
from dsuf.engine.tier import PENDING, Tier
from dsuf.errors import UsageError


class Saver:
    """Calls of the tier around one backend. What follows a copy waits for it without stopping anybody."""

    def __init__(self, tier: Tier, backend: Backend, resume_every: int) -> None:
        self.tier = tier
        self._backend = backend
        self._every = resume_every
        self._saved: dict[str, int] = {}  # latest position that a sequence was or could not be saved at, or its hit's
        self._after: deque[tuple[int, Callable[[], None]]] = deque()  # to be called when a copy has ended
        self._memory: memoryview | None = None
        self._share()

    @property
    def copying(self) -> bool:
        """Whether something is due once a copy has ended."""
        return bool(self._after)

    def want(self, sequence: Sequence) -> None:
        """A request came."""
        self.tier.want(sequence.id, sequence.request)

    def found(self, sequence: Sequence) -> bool:
        """Whether the tier has made up its mind; sets `sequence.hit`."""
        hit = self.tier.found(sequence.id)
        if hit is PENDING:
            return False
        step = self._backend.limits.resume_step
        if hit is not None and 0 < hit.position < sequence.prompt_len and hit.position % step == 0:
            sequence.hit = hit
        return True

    def restore(self, sequence: Sequence) -> None:
        """Copy the hit into the cache; one whose bytes make no sense is no hit."""
        hit, key = sequence.hit, sequence.id
        try:
            copy = self._backend.restore(sequence, hit.position, hit.pages, hit.state)
        except UsageError:
            sequence.hit = None
            return
        sequence.hit = replace(hit, pages=(), state=())  # whoever lent the bytes takes them back
        self._saved[key] = hit.position
        self._after.append((copy, lambda: self.tier.restored(key)))

    def prefilled(self, sequence: Sequence, rows: int, seconds: float, *, done: bool) -> None:
        """`rows` more rows of the prompt are there: save its last resume point if it is done, else a periodic one."""
        if rows:
            self.tier.measured(rows, seconds)
        if done:
            self._save(sequence, sequence.prompt_len - 1, periodic=False)
        else:
            self.save_periodic(sequence, sequence.prefilled)

    def save_periodic(self, sequence: Sequence, position: int) -> None:
        """Save the last multiple of `resume_every` up to `position`, if it is new and not out of reach."""
        point = position // self._every * self._every
        if position - point <= MOST_REWOUND:
            self._save(sequence, point, periodic=True)

    def save_reply(self, sequence: Sequence, keep: int | None = None) -> None:
        """The reply has ended: save the last resume point of what was processed (`keep`: of so many of its tokens)."""
        most = sequence.last_position
        if keep is not None:
            most = min(most, sequence.prompt_len + keep)
        self._save(sequence, most, periodic=False, known=keep)

    def end(self, sequence: Sequence) -> None:
        """The sequence is no more: the tier may forget it once nothing is copied for it."""
        key = sequence.id
        self._saved.pop(key, None)
        last = self._after[-1][0] if self._after else 0
        self._after.append((last, lambda: self.tier.forget(key)))
        self.settle()

    def settle(self) -> None:
        """Say what is due for copies that have ended."""
        self._share()
        done = self._backend.copied() if self._after else 0
        while self._after and self._after[0][0] <= done:
            self._after.popleft()[1]()

    def _share(self) -> None:
        """Let the backend know where the tier's bytes lie, at the start and after another agent came."""
        if self.tier.memory is not self._memory:
            self._memory = self.tier.memory
            self._backend.share(self._memory)

    def _save(self, sequence: Sequence, most: int, *, periodic: bool, known: int | None = None) -> None:
        """Save the last resume point up to `most`, with the ids up to the reply's first `known` tokens (None: all)."""
        step = self._backend.limits.resume_step
        position, key = most // step * step, sequence.id
        if position <= self._saved.get(key, 0):  # nothing new, or no room was found for it a moment ago
            return
        self._saved[key] = position
        ids = sequence.ids if known is None else sequence.ids[: sequence.prompt_len + known]
        reserved = self.tier.reserve(key, ids, position, periodic=periodic)
        if reserved is None:
            return
        copy = self._backend.snapshot(sequence, position, reserved.pages, reserved.state)
        self._after.append((copy, lambda: self.tier.ready(reserved)))
