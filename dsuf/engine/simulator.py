"""A backend with a virtual clock, and runs of an engine over it: what a scheduling policy does to a load, in seconds.

Steps and passes cost what `Costs` says; tokens are numbers. The engine, its scheduler and its ledger are the real ones.

    step      draft + (fixed bytes + bytes of distinct experts) / rate,  distinct = E (1 - (1 - k / E)^rows) a layer
    pass      max(bytes of all encoder weights / rate, rows * (linear + start * indexer) operations / speed)
    copy      bytes / link rate
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from dsuf.engine.backend import Emitted, Limits, Progress, StepCounts
from dsuf.engine.engine import Engine
from dsuf.engine.messages import Finished, Request, Tokens
from dsuf.engine.options import EngineOptions
from dsuf.engine.sequence import Sequence, StepRecord
from dsuf.engine.tier import Buffer
from dsuf.layout import PAGE_TOKENS, pages_for

_STATE_BYTES = 8


@dataclass(frozen=True)
class Costs:
    """Bytes, operations and rates of one machine and checkpoint.

    The defaults are one H200 with configs/h200x1.json. Bytes and operations: reference model.md 13 and 13.1. Rates: FP4
    rows at 83 % of the measured read ceiling of 4.63 TB/s (DESIGN.md 5.1), 600 TFLOP/s in prefill products (model.md
    13.2), page-locked host memory at 50 GB/s.
    """

    read_bytes_per_s: float = 0.83 * 4.63e12
    fixed_step_bytes: float = 8.52e9  # dense weights and head
    expert_bytes: float = 40 * 18.8e6  # one expert of each layer
    experts: int = 128
    experts_per_tok: int = 6
    draft_bytes: float = 2.93e9
    prefill_bytes: float = 51.9e9
    row_operations: float = 17.4e9
    operations_per_context: float = 6.4e3  # of the indexer, a row and token before it
    operations_per_s: float = 600e12
    snapshot_bytes: float = 2.9e6
    page_bytes: float = 113_920
    link_bytes_per_s: float = 50e9

    def step_s(self, rows: int, drafting: bool) -> float:
        """One decode step of `rows` rows of any sequences."""
        distinct = self.experts * (1 - (1 - self.experts_per_tok / self.experts) ** rows)
        read = self.fixed_step_bytes + distinct * self.expert_bytes + (self.draft_bytes if drafting else 0.0)
        return read / self.read_bytes_per_s

    def pass_s(self, rows: int, start: int) -> float:
        """`rows` prompt rows from position `start` on."""
        operations = rows * (self.row_operations + start * self.operations_per_context)
        return max(self.prefill_bytes / self.read_bytes_per_s, operations / self.operations_per_s)

    def copy_s(self, tokens: int) -> float:
        """A snapshot and its pages, out or in."""
        return (self.snapshot_bytes + pages_for(tokens) * self.page_bytes) / self.link_bytes_per_s


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
        self._live: set[str] = set()
        self._emitted: list[Emitted] = []
        self._counts = StepCounts()
        self._copies = 0

    def clock(self) -> float:
        """Virtual seconds."""
        return self.now

    def load(self, progress: Progress) -> None:
        progress("simulator", 1.0)

    def prefill(self, sequence: Sequence, rows: int, budget_s: float) -> bool:
        self._live.add(sequence.id)
        deadline = self.now + budget_s
        while rows > 0:
            count = min(self._options.prefill_chunk, rows)
            self.now += self.costs.pass_s(count, sequence.prefilled)
            sequence.prefilled += count
            self.prefilled_rows += count
            rows -= count
            if sequence.prefilled == sequence.prompt_len:
                self._emit(sequence, 1, None)
                return True
            if self.now >= deadline:
                break
        return False

    def enqueue(self, batch: Items[Sequence]) -> int:
        rows = sum(self._rows(sequence) for sequence in batch)
        self.now += self.costs.step_s(rows, any(sequence.draft for sequence in batch))
        self._counts = StepCounts(self._counts.steps + 1, self._counts.rows + rows)
        for sequence in batch:
            rows = self._rows(sequence)
            accepted = min(rows - 1, self._accepted(sequence))
            self._emit(sequence, 1 + accepted, accepted)
        return self._counts.steps

    def poll(self) -> list[Emitted]:
        emitted, self._emitted = self._emitted, []
        return emitted

    def rewind(self, sequence: Sequence, position: int) -> None:
        del sequence.emitted[position - sequence.prompt_len + 1 :]

    def snapshot(self, sequence: Sequence, position: int, pages: Mapping[int, Buffer], state: Items[Buffer]) -> int:
        return self._copy(position)

    def restore(self, sequence: Sequence, position: int, pages: Items[Buffer], state: Items[Buffer]) -> int:
        self._live.add(sequence.id)
        sequence.prefilled = min(position, sequence.prompt_len)
        return self._copy(position)

    def share(self, memory: memoryview | None) -> None:
        pass

    def copied(self) -> int:
        return self._copies

    def release(self, sequence: Sequence) -> None:
        self._live.discard(sequence.id)
        self._emitted = [item for item in self._emitted if item.sequence is not sequence]

    def counts(self) -> StepCounts:
        return self._counts

    def ledger(self) -> dict[str, int]:
        return {"caches": len(self._live)}

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
    """An engine on virtual time; `settings` are those of SimulatedBackend."""
    backend = SimulatedBackend(options, costs or Costs(), **settings)
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
