"""Who runs in the next turn, and what a prompt may cost others.

Steps of running streams and chunks of prefill take turns. A chunk is a time, `EngineOptions.prefill_budget_s`: as many
passes over prompts as are expected to be over by then, at least one (dsuf/engine/pieces.py). So a running stream waits
for at most one chunk between two steps, however long a prompt is and however many there are; where steps take S and
chunks C, prompts get C / (C + S) of the time. While no stream runs, a pass is as long as it can be (`prefill_chunk`
rows) and takes the place of a chunk.

**Prefill.** A prompt is short when its rows fit in one chunk, as fast as prefill has been lately (one whose beginning
is restored counts with the rest). Short prompts go first, by priority and then by arrival, until they are one chunk's
time ahead of the long ones; then both get the same time, but for those with a priority, which do not wait for that: the
server gives it to tiny requests only, titles and the like. Long prompts take turns between the one that has least left
and the oldest one; at most two are open at once. So
- a short prompt has its first token after the chunk under way and its own (two, where its last piece does not fit into
  the first), unless other short ones came before it;
- a prompt of any length costs a short one nothing else: not its length, not its place in the queue;
- short prompts take at most half of the prefill time while a long one waits, and other long ones half of the rest: a
  prompt of 1 M tokens takes at most four times the prefill time it takes alone once it is the oldest long one.

**Decode.** All running streams step together if their rows fit into one step (limits.max_rows, the drafts that each may
verify included; load never changes those). If not, those who waited longest go first, as many as fit: every stream gets
a step in each round, and a round has as many turns as the rows need.

**Room.** Places (max_sequences) and cache pages are given in the order in which prompts are chosen. A prompt that finds
no pages may be passed by others for PATIENCE_S, then nobody starts before it. Streams grow page by page; when none is
left, the youngest stream of the lowest priority is parked in host memory, and nobody starts until all parked ones are
back. `ledger` keeps that order possible. A stream that can neither grow nor be parked waits for somebody's end.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsuf.engine.ledger import Ledger
from dsuf.engine.sequence import Phase, Sequence

PATIENCE_S = 10.0
OPEN_LONG_PROMPTS = 2
_RATE_DECAY = 0.98  # of the fastest prefill seen, with every piece that was slower


@dataclass(frozen=True)
class Turn:
    """What one turn does before its prefill, in this order."""

    park: tuple[Sequence, ...]
    resume: tuple[Sequence, ...]
    decode: tuple[Sequence, ...]


class Scheduler:
    """The queue and the running sets. Moves `phase`; knows nothing of bytes, arithmetic or the clock."""

    def __init__(self, ledger: Ledger, *, max_sequences: int, budget_s: float, pass_rows: int) -> None:
        self.ledger = ledger
        self.max_sequences = max_sequences
        self._budget_s, self._pass_rows = budget_s, pass_rows
        self._arrivals = 0
        self._waiting: dict[str, Sequence] = {}  # these by id, in order of arrival
        self._prefilling: dict[str, Sequence] = {}
        self._parked: dict[str, Sequence] = {}
        self._decoding: dict[str, Sequence] = {}  # the one whose latest step is longest ago first
        self._long: set[str] = set()  # open prompts that were long when they began
        self._rate = 0.0  # prompt rows a second
        self._short_ahead_s = 0.0  # prefill time that short prompts got more than long ones that waited
        self._oldest_next = True  # of long prompts
        self._refused: dict[str, float] = {}  # since when a prompt finds no pages

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def parked(self) -> int:
        return len(self._parked)

    @property
    def running(self) -> int:
        """Places taken: prompts under way, streams, parked streams."""
        return len(self._decoding) + len(self._prefilling) + len(self._parked)

    @property
    def chunk_rows(self) -> int:
        """Rows that a short prompt has to run at most."""
        return max(self._pass_rows, int(self._rate * self._budget_s))

    def sequences(self) -> list[Sequence]:
        """Everybody, oldest first."""
        everybody = (self._decoding, self._parked, self._prefilling, self._waiting)
        return sorted((s for kind in everybody for s in kind.values()), key=lambda s: s.arrival)

    def add(self, sequence: Sequence, now: float) -> None:
        """Put a new sequence at the end of the queue."""
        self._arrivals += 1
        sequence.arrival, sequence.submitted_s = self._arrivals, now
        self._waiting[sequence.id] = sequence

    def plan(self) -> Turn:
        """Who is parked, who comes back, who decodes."""
        park, stalled = self._grow()
        resume = () if park else self._come_back()
        return Turn(tuple(park), tuple(resume), tuple(self._decode(stalled)))

    def prompts_due(self, now: float) -> bool:
        """Whether a prompt can go on, or begin as far as is known."""
        return bool(self._prefilling) or any(s.id not in self._refused for s in self._startable(now, set()))

    def next_prompt(self, now: float) -> Sequence | None:
        """Whose prompt goes on, moved to PREFILL if it begins; None: nobody's can."""
        refused: set[str] = set()
        while (chosen := self._choose(now, refused)) is not None:
            if chosen.phase is Phase.PREFILL:
                return chosen
            if self.ledger.start(chosen):
                self._refused.pop(chosen.id, None)
                if not self.is_short(chosen):
                    self._long.add(chosen.id)
                self._move(chosen, self._waiting, self._prefilling, Phase.PREFILL)
                chosen.started_s = now
                return chosen
            self._refused.setdefault(chosen.id, now)
            refused.add(chosen.id)
        return None

    def spent(self, sequence: Sequence, rows: int, seconds: float, *, short: bool) -> None:
        """A prompt got this much: `rows` are done, and it was short or not before."""
        if rows and seconds > 0:
            self._rate = max(self._rate * _RATE_DECAY, rows / seconds)
        prompts = [*self._prefilling.values(), *self._waiting.values()]
        if not short:
            self._oldest_next = not self._oldest_next
            self._short_ahead_s = max(self._short_ahead_s - seconds, 0.0)
        elif any(not self.is_short(other) for other in prompts if other is not sequence):
            self._short_ahead_s += seconds
        else:
            self._short_ahead_s = 0.0

    def is_short(self, sequence: Sequence) -> bool:
        """Whether the prompt fits in one chunk; one that has begun stays what it was."""
        if sequence.phase is Phase.PREFILL:
            return sequence.id not in self._long
        return sequence.prompt_left <= self.chunk_rows

    def prefilled(self, sequence: Sequence) -> None:
        """The prompt of the sequence is complete: it decodes from the next turn on."""
        self._move(sequence, self._prefilling, self._decoding, Phase.DECODE)
        self._long.discard(sequence.id)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended or was cancelled, wherever it is."""
        for kind in (self._waiting, self._prefilling, self._parked, self._decoding):
            kind.pop(sequence.id, None)
        self._refused.pop(sequence.id, None)
        self._long.discard(sequence.id)
        self.ledger.drop(sequence)
        sequence.phase = Phase.DONE

    # ---- prompts

    def _choose(self, now: float, refused: set[str]) -> Sequence | None:
        candidates = [*self._prefilling.values(), *self._startable(now, refused)]
        shorts = [s for s in candidates if self.is_short(s)]
        longs = [s for s in candidates if not self.is_short(s)]
        if sum(s.phase is Phase.PREFILL for s in longs) >= OPEN_LONG_PROMPTS:
            longs = [s for s in longs if s.phase is Phase.PREFILL]
        if shorts:
            first = min(shorts, key=lambda s: (-s.request.priority, s.arrival))
            if not longs or self._short_ahead_s < self._budget_s or first.request.priority:
                return first
        if not longs:
            return None
        oldest = min(longs, key=lambda s: s.arrival)
        least = min(longs, key=lambda s: (-s.request.priority, s.prompt_left, s.arrival))
        return oldest if self._oldest_next else least

    def _startable(self, now: float, refused: set[str]) -> list[Sequence]:
        """Waiting sequences that may start if there is room for them."""
        if self._parked or self.running >= self.max_sequences:
            return []
        waiting = [s for s in self._waiting.values() if not s.held]
        first = next((s for s in waiting if now - self._refused.get(s.id, now) > PATIENCE_S), None)
        return [s for s in (waiting if first is None else [first]) if s.id not in refused]

    # ---- room

    def _grow(self) -> tuple[list[Sequence], set[str]]:
        """Give every stream room for its next steps, the oldest first; who is parked for that, and who gets none."""
        parked: list[Sequence] = []
        stalled: set[str] = set()
        if self.ledger.limits.cache_pages is None:
            return parked, stalled
        for sequence in sorted(self._decoding.values(), key=_rank):
            while sequence.phase is Phase.DECODE and not self.ledger.grow(sequence):
                victim = self._park_one()
                if victim is None:
                    stalled.add(sequence.id)
                    break
                parked.append(victim)
        return parked, stalled

    def _park_one(self) -> Sequence | None:
        """Park the youngest stream of the lowest priority that can be."""
        for sequence in sorted(self._decoding.values(), key=_rank, reverse=True):
            if sequence.last_position >= self.ledger.limits.resume_step and self.ledger.park(sequence):
                self._move(sequence, self._decoding, self._parked, Phase.PARKED)
                return sequence
        return None

    def _come_back(self) -> list[Sequence]:
        back: list[Sequence] = []
        for sequence in sorted(self._parked.values(), key=_rank):
            spare = len(self._decoding)  # a page for each other stream, or it would have to go again at once
            if not self.ledger.resume(sequence, spare):
                break
            self._move(sequence, self._parked, self._decoding, Phase.DECODE)
            back.append(sequence)
        return back

    # ---- decode

    def _decode(self, stalled: set[str]) -> list[Sequence]:
        """As many as fit into one step, those first who waited longest; they go to the end of the line."""
        served, rows = [], 0
        for sequence in self._decoding.values():
            needed = self._rows(sequence)
            if sequence.id not in stalled and rows + needed <= self.ledger.limits.max_rows:
                served.append(sequence)
                rows += needed
        for sequence in served:
            self._decoding[sequence.id] = self._decoding.pop(sequence.id)
        return served

    def _rows(self, sequence: Sequence) -> int:
        """Rows that a step of this sequence may take."""
        if not sequence.draft:
            return 1
        return 1 + (self.ledger.limits.draft_len if sequence.verify is None else sequence.verify)

    @staticmethod
    def _move(sequence: Sequence, source: dict[str, Sequence], to: dict[str, Sequence], phase: Phase) -> None:
        to[sequence.id] = source.pop(sequence.id)
        sequence.phase = phase


def _rank(sequence: Sequence) -> tuple[int, int]:
    """Who gets pages first."""
    return -sequence.request.priority, sequence.arrival
