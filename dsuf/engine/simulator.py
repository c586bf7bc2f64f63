"""A backend with a virtual clock, and runs of an engine over it: what a scheduling policy does to a load, in seconds.

Steps and passes cost what was measured (`Costs`); tokens are numbers. The engine, its scheduler, its ledger and the
pieces of prompts are the real ones, and so is the order of things on a GPU: steps are queued, prompts wait for them.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from dsuf.engine.backend import Emitted, Limits, Progress, StepCounts
from dsuf.engine.engine import Engine
from dsuf.engine.messages import Finished, Request, Tokens
from dsuf.engine.options import EngineOptions
from dsuf.engine.pieces import Piece, Pieces
from dsuf.engine.sequence import Sequence, StepRecord
from dsuf.engine.tier import Buffer
from dsuf.layout import PAGE_TOKENS, pages_for

AHEAD = 2  # steps that may be queued and not yet collected
_STATE_BYTES = 8


@dataclass(frozen=True)
class Costs:
    """What steps, passes and copies of one machine and checkpoint take.

    The defaults are one H200 with configs/h200x1.json: docs/results/h200-decode-rows*-1k.json (steps with drafting),
    prefill-chunks-h200.json (passes of 4,096 rows at several positions), pace-h200.json (passes of fewer rows, a tail)
    and copies-h200.json (the link).
    """

    steps: tuple[tuple[int, float], ...] = ((1, 4.83e-3), (6, 10.06e-3), (12, 15.93e-3), (24, 24.83e-3), (48, 35.8e-3))
    pass_fixed_s: float = 56e-3
    row_s: float = 29.3e-6
    row_context_s: float = 34e-12  # a row and position before it: attention, index scores
    tail_s: float = 31e-3  # the decoder on the last window of a prompt, and at resume points
    snapshot_bytes: float = 2.9e6
    page_bytes: float = 113_920
    link_bytes_per_s: float = 50e9

    def step_s(self, rows: int) -> float:
        """One decode step of `rows` rows of any sequences, between the measured ones in a straight line."""
        for (fewer, less), (more, longer) in itertools.pairwise(self.steps):
            if rows <= more:
                return less + (longer - less) * (rows - fewer) / (more - fewer)
        return self.steps[-1][1]

    def pass_s(self, rows: int, start: int) -> float:
        """`rows` prompt rows from position `start` on."""
        return self.pass_fixed_s + rows * (self.row_s + start * self.row_context_s)

    def piece_s(self, piece: Piece) -> float:
        """A piece of a prompt, without the step of its first token."""
        return self.pass_s(piece.rows, piece.start) if piece.rows else self.tail_s

    def copy_s(self, tokens: int) -> float:
        """A snapshot and its pages, out or in."""
        return (self.snapshot_bytes + pages_for(tokens) * self.page_bytes) / self.link_bytes_per_s


@dataclass(frozen=True)
class _Step:
    """A queued step: when it ends, and whose it is with their rows."""

    ends_s: float
    parts: tuple[tuple[Sequence, int], ...]

    def without(self, sequence: Sequence) -> _Step:
        return _Step(self.ends_s, tuple(part for part in self.parts if part[0] is not sequence))


class SimulatedBackend:
    """See `dsuf.engine.backend.Backend`; `now` is the virtual time, `accept` the mean number of accepted drafts."""

    def __init__(
        self, options: EngineOptions, costs: Costs, *, accept: float = 2.5, max_context: int = 1 << 20
    ) -> None:
        self.now = 0.0
        self.costs, self._options, self._accept = costs, options, accept
        pages = None if options.cache_tokens is None else options.cache_tokens // PAGE_TOKENS
        self.limits = Limits(
            backend="simulated",
            vocab_size=1 << 17,
            max_context=max_context,
            draft_len=5,
            cache_pages=pages,
            page_bytes=1,  # their size is in the costs
            snapshot_bytes=_STATE_BYTES,
            resume_step=2,
        )
        self.prefilled_rows = 0
        self._pieces = Pieces(
            most_rows=options.prefill_chunk,
            resume_every=options.resume_every,
            tails=options.prefill == "truncated",
        )
        self._read: dict[str, int] = {}  # of those that hold memory: prompt rows that passes have read
        self._waiting: set[str] = set()  # those that decode
        self._busy_until = 0.0  # the device has work until then
        self._queued: deque[_Step] = deque()
        self._emitted: list[Emitted] = []
        self._counts = StepCounts()
        self._copies = 0

    def clock(self) -> float:
        """Virtual seconds."""
        return self.now

    def load(self, progress: Progress) -> None:
        progress("simulator", 1.0)

    def warm_up(self) -> None:
        for piece in self._pieces.rehearsal(self.limits.max_context):
            self._pieces.took(piece, self.costs.piece_s(piece))
        self._pieces.first_took(self.costs.step_s(1))

    def fits(self, sequence: Sequence, rows: int, budget_s: float) -> bool:
        return self._pieces.worth(self._next(sequence, rows, budget_s), budget_s)

    def prefill(self, sequence: Sequence, rows: int, budget_s: float) -> bool:
        self._collect(ahead=0)
        self._read.setdefault(sequence.id, 0)
        end, deadline = sequence.prefilled + rows, self.now + budget_s
        waited_for = self._waiting - {sequence.id}
        piece = self._next(sequence, rows, budget_s if waited_for else math.inf)
        while True:
            self.now += (took := self.costs.piece_s(piece))
            self._pieces.took(piece, took)
            self.prefilled_rows += piece.prefilled - sequence.prefilled
            self._read[sequence.id], sequence.prefilled = piece.start + piece.rows, piece.prefilled
            if sequence.prefilled == sequence.prompt_len:
                self.now += (took := self.costs.step_s(1))
                self._pieces.first_took(took)
                self._waiting.add(sequence.id)
                self._emit(sequence, 1, None)
                return True
            left = deadline - self.now
            if sequence.prefilled >= end or left <= 0:
                return False
            piece = self._next(sequence, end - sequence.prefilled, left if waited_for else math.inf)
            if not self._pieces.worth(piece, left):
                return False

    def enqueue(self, batch: Items[Sequence]) -> int:
        self._collect(ahead=AHEAD - 1)
        parts = tuple((sequence, self._rows(sequence)) for sequence in batch)
        rows = sum(rows for _, rows in parts)
        self._busy_until = max(self._busy_until, self.now) + self.costs.step_s(rows)
        self._queued.append(_Step(self._busy_until, parts))
        self._counts = StepCounts(self._counts.steps + 1, self._counts.rows + rows)
        return self._counts.steps

    def poll(self, *, wait: bool = False) -> list[Emitted]:
        self._collect(ahead=0 if wait else AHEAD)
        emitted, self._emitted = self._emitted, []
        return emitted

    def _collect(self, *, ahead: int) -> None:
        """Take in the steps that have ended, and wait until at most so many are left."""
        while self._queued and (self._queued[0].ends_s <= self.now or len(self._queued) > ahead):
            step = self._queued.popleft()
            self.now = max(self.now, step.ends_s)
            for sequence, rows in step.parts:
                if sequence.id in self._waiting:
                    accepted = min(rows - 1, self._accepted(sequence))
                    self._emit(sequence, 1 + accepted, accepted)

    def _next(self, sequence: Sequence, rows: int, seconds: float) -> Piece:
        at = sequence.prompt_len - sequence.prompt_left
        return self._pieces.next(sequence.prompt_len, at, self._read.get(sequence.id, 0), rows, seconds)

    def rewind(self, sequence: Sequence, position: int) -> None:
        del sequence.emitted[position - sequence.prompt_len + 1 :]

    def snapshot(self, sequence: Sequence, position: int, pages: Mapping[int, Buffer], state: Items[Buffer]) -> int:
        return self._copy(position)

    def restore(self, sequence: Sequence, position: int, pages: Items[Buffer], state: Items[Buffer]) -> int:
        self._read[sequence.id] = position
        if sequence.emitted:
            self._waiting.add(sequence.id)
        sequence.prefilled = min(position, sequence.prompt_len)
        return self._copy(position)

    def share(self, memory: memoryview | None) -> None:
        pass

    def copied(self) -> int:
        return self._copies

    def release(self, sequence: Sequence) -> None:
        self._read.pop(sequence.id, None)
        self._waiting.discard(sequence.id)
        self._queued = deque(step.without(sequence) for step in self._queued)
        self._emitted = [item for item in self._emitted if item.sequence is not sequence]

    def counts(self) -> StepCounts:
        return self._counts

    def ledger(self) -> dict[str, int]:
        return {"caches": len(self._read)}

    def _copy(self, tokens: int) -> int:
        self.now += self.costs.copy_s(tokens)
        self._copies += 1
        return self._copies

    def _rows(self, sequence: Sequence) -> int:
        if not sequence.draft:
            return 1
        return 1 + (self.limits.draft_len if sequence.verify is None else sequence.verify)

    def _accepted(self, sequence: Sequence) -> int:
        """`accept` on average, by a hash of the position."""
        chance = zlib.crc32(f"{sequence.id} {sequence.last_position}".encode()) / (1 << 32)
        return int(self._accept + 2 * chance - 0.5)

    def _emit(self, sequence: Sequence, count: int, accepted: int | None) -> None:
        kept, reason = sequence.cut([8] * count)
        record = None
        if accepted is not None:
            accepted = min(accepted, len(kept))
            record = StepRecord(sequence.last_position, sequence.last_token, [8] * 5, [0.0] * 5, accepted, kept)
        sequence.emit(kept, last=reason is not None)
        if reason is not None:
            self._waiting.discard(sequence.id)
        self._emitted.append(Emitted(sequence, kept, reason, None, record, rows=count))


@dataclass
class Course:
    """What one request saw; times in virtual seconds."""

    request: Request
    arrived_s: float
    tokens: list[tuple[float, int]] = field(default_factory=list)  # when, how many
    ended_s: float | None = None

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.tokens[0][0] - self.arrived_s

    @property
    def gaps(self) -> list[float]:
        """Times between events with tokens."""
        times = [time for time, _ in self.tokens]
        return [after - before for before, after in itertools.pairwise(times)]


def simulated_engine(options: EngineOptions, costs: Costs | None = None, **settings: float) -> Engine:
    """An engine on virtual time, warm as a server's is; `settings` are those of SimulatedBackend."""
    backend = SimulatedBackend(options, costs or Costs(), **settings)
    backend.warm_up()
    return Engine(backend, options, backend.clock)


def run(engine: Engine, arrivals: Iterable[tuple[float, Request]], until_s: float = float("inf")) -> dict[str, Course]:
    """Let requests arrive at their times and run until all ended, or until `until_s`; their courses by id."""
    backend, courses = engine.backend, {}
    coming = deque(sorted(arrivals, key=lambda arrival: arrival[0]))
    while (coming or not engine.idle) and backend.now < until_s:
        if engine.idle:
            backend.now = max(backend.now, coming[0][0])
        while coming and coming[0][0] <= backend.now:
            arrived, request = coming.popleft()
            courses[request.id] = Course(request, arrived)
            engine.submit(request)
        for event in engine.step():
            if isinstance(event, Tokens):
                courses[event.id].tokens.append((backend.now, len(event.ids)))
            elif isinstance(event, Finished):
                courses[event.id].ended_s = backend.now
    return courses
