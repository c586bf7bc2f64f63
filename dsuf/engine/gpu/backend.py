"""The backend of one GPU or several: sequences as slots on it, steps as captured graphs, the host one step ahead.

`enqueue` queues a step while the one before still runs; `poll` hands over what the ring of results shows. The device
knows first where a sequence ends, so a step that was queued too late for one finds its slot inactive and runs nothing
for it. Where a grammar binds somebody, the host waits for each step's drafts and for the step before, to say what may
follow while the step's layers run. A step whose logits the host wants (a trace) is waited for.

The prompt's last token is the first row of the decode path: prefill runs the ones before it. Several GPUs are
ranks that all do the same with their parts of the weights (all_ranks.py); one GPU is the only rank.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import numpy as np

from dsuf.engine.backend import ClassMap, Emitted, Limits, Progress, StepCounts
from dsuf.engine.gpu import machines
from dsuf.engine.gpu.all_ranks import AllCopies, AllPages, AllSteps
from dsuf.engine.gpu.copies import Copies
from dsuf.engine.gpu.held import Held, Pass, admission, step_record, streams
from dsuf.engine.gpu.machine import Machine, total
from dsuf.engine.gpu.prefilling import Prefilling
from dsuf.engine.gpu.ranks import Ranks
from dsuf.engine.gpu.step_graph import Bucket, Entry, bucket_of, splits
from dsuf.engine.messages import FinishReason, Request, Sampling
from dsuf.engine.options import EngineOptions
from dsuf.engine.pieces import LEAST_ROWS, Piece
from dsuf.engine.sequence import Sequence
from dsuf.engine.tier import Buffer
from dsuf.errors import DeviceError, UsageError
from dsuf.kernels import slots as words
from dsuf.kernels.slots import Record
from dsuf.layout import SnapshotLayout, resume_step

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device

AHEAD = 2  # steps that may be queued and not yet collected
REASONS: dict[int, FinishReason] = {words.STOP: "stop", words.LENGTH: "length"}
PAUSE_S = 20e-6  # between looks at the ring
LOOK_S = 2e-3  # between looks at the device, whether it still lives
ANY = np.uint32(0xFFFFFFFF)  # of a mask: all of these tokens


class GpuBackend:
    """See `dsuf.engine.backend.Backend` for what each method promises."""

    def __init__(
        self,
        options: EngineOptions,
        class_map: ClassMap | None,
        devices: Items[Device],
        clock: Callable[[], float] = time.monotonic,
        *,
        graphs: bool = True,
        synthetic: dict[str, Any] | None = None,
    ) -> None:
        """`devices`: one a rank. `synthetic`: a config whose weights are made there, instead of a checkpoint's."""
        self._options, self._class_map, self._devices, self._clock = options, class_map, devices, clock
        self._graphs, self._synthetic = graphs, synthetic
        self._held: dict[str, Held] = {}
        self._queued: deque[Pass] = deque()
        self._emitted: list[Emitted] = []
        self._generation = 0
        self._steps = 0
        self.collected = 0  # steps whose results have been taken in

    @property
    def machine(self) -> Machine:
        """What is loaded on the first rank."""
        return self._machine

    def load(self, progress: Progress) -> None:
        ranks = self._ranks = Ranks(self._devices)
        if self._synthetic is not None:
            self.machines = machines.make(self._synthetic, self._options, ranks, graphs=self._graphs)
        else:
            self.machines = machines.load(self._options, self._class_map, ranks, progress, graphs=self._graphs)
        self._machine = self.machines[0]
        self.checkpoint = self._machine.checkpoint
        self.host_tables = self._machine.model.weights.host_tables
        self.all_steps = AllSteps([machine.steps for machine in self.machines], ranks)
        self._copies = AllCopies([Copies(one.pages, lambda: streams(self._held)) for one in self.machines])
        self._pages = AllPages([machine.pages for machine in self.machines], ranks, self._copies.others)
        self._prefilling = Prefilling(self.machines, self._options)

    def warm_up(self) -> None:
        self.all_steps.warm_up(self._options.max_sequences, drafts=self._options.draft)
        pieces, most = self._prefilling.pieces, self.limits.max_context
        self._rehearse(pieces.rehearsal(min(LEAST_ROWS + 1, most)))  # the very first ones take longer
        for piece, seconds in self._rehearse(pieces.rehearsal(most)):
            pieces.took(piece, seconds)

    def _rehearse(self, rehearsal: list[Piece]) -> list[tuple[Piece, float]]:
        """Read a prompt in these pieces, up to its first token; what each took."""
        ids = np.random.default_rng(0).integers(self._machine.spec.vocab_size, size=rehearsal[-1].prefilled)
        request = Request("warm-up", ids.tolist(), 1, Sampling(temperature=0))
        held = self._open(Sequence(request, 1, draft=False, verify=None, trace=None))
        times = [self._clock()]
        for piece in rehearsal:
            self._prefilling.run(held, piece)
            self._ranks.record().wait()
            times.append(self._clock())
        self._first_token(held)
        self._prefilling.pieces.first_took(self._clock() - times[-1])
        self.release(held.sequence)
        return [(piece, after - before) for piece, before, after in zip(rehearsal, times, times[1:], strict=False)]

    @property
    def limits(self) -> Limits:
        m = self._machine
        return Limits(
            backend="gpu",
            vocab_size=m.spec.vocab_size,
            max_context=m.max_context,
            draft_len=m.spec.dspark_block_size,
            max_rows=words.MOST_ROWS,
            cache_pages=self._pages.count,
            page_bytes=self._pages.page_bytes,
            snapshot_bytes=SnapshotLayout.of(m.spec).snapshot_bytes,
            resume_step=resume_step(m.spec),
        )

    # ---- prompts

    def fits(self, sequence: Sequence, rows: int, budget_s: float) -> bool:
        held, pieces = self._held.get(sequence.id), self._prefilling.pieces
        length, at = sequence.prompt_len, sequence.prompt_len - sequence.prompt_left
        return pieces.worth(pieces.next(length, at, at if held is None else held.read, rows, budget_s), budget_s)

    def prefill(self, sequence: Sequence, rows: int, budget_s: float) -> bool:
        held = self._held.get(sequence.id) or self._open(sequence)
        if not self._copies.land(held.slot, wait=not streams(self._held)):
            return False  # its bytes are on their way; streams go on meanwhile
        self._collect(wait=0)
        end, now = sequence.prefilled + rows, self._clock()
        deadline, pieces = now + budget_s, self._prefilling.pieces
        piece = self._next(held, end, deadline - now)
        while True:
            self._prefilling.run(held, piece)
            self._ranks.record().wait()
            begun, now = now, self._clock()
            pieces.took(piece, now - begun)
            if sequence.prefilled == sequence.prompt_len:
                self._first_token(held)
                pieces.first_took(self._clock() - now)
                return True
            if sequence.prefilled >= end or now >= deadline:
                return False
            piece = self._next(held, end, deadline - now)
            if not pieces.worth(piece, deadline - now):
                return False

    def _next(self, held: Held, end: int, seconds: float) -> Piece:
        """What the prompt goes on with, in one piece if no stream waits for it."""
        return self._prefilling.next(held, end - held.sequence.prefilled, seconds if streams(self._held) else math.inf)

    def _open(self, sequence: Sequence) -> Held:
        self._generation += 1
        held = Held(sequence, self._pages.open(), self._generation)
        self._held[sequence.id] = held
        self._reserve(held)
        return held

    def _reserve(self, held: Held) -> None:
        sequence = held.sequence
        self._pages.reserve(held.slot, sequence.prompt_len + len(sequence.emitted) + self.limits.lookahead)

    def _first_token(self, held: Held) -> None:
        """The prompt's last token as a decode row of its own; waits for what comes of it."""
        self._admit(held)
        self._step([held], first=True)
        self._collect(wait=0)

    def _admit(self, held: Held) -> None:
        """The slot's record: the last token, run by nobody yet, and everything that decides about the next ones."""
        self.all_steps.admit(held.slot, admission(held, self._options.verify_threshold))
        held.decodes = True

    # ---- steps

    def enqueue(self, batch: Items[Sequence]) -> int:
        held = [self._held[sequence.id] for sequence in batch]
        for one in held:
            self._reserve(one)
        entries = [self._entry_of(one) for one in held]
        for part in splits(entries):
            self._room()
            self._step([held[i] for i in part])
        return self._steps

    def _entry_of(self, held: Held) -> Entry:
        sequence, block = held.sequence, self._machine.spec.dspark_block_size
        if not sequence.draft:
            return Entry(held.slot, 1, drafts=False)
        return Entry(held.slot, 1 + (block if sequence.verify is None else min(sequence.verify, block)), drafts=True)

    def _step(self, held: list[Held], *, first: bool = False) -> None:
        """Queue one step; say meanwhile what may follow, or wait for its end, where somebody needs that."""
        entries = [Entry(one.slot, 1, drafts=False) if first else self._entry_of(one) for one in held]
        sampling = [one.sequence.request.sampling for one in held]
        bucket = bucket_of(
            entries,
            self._machine.spec.dspark_block_size,
            sampled=any(one.temperature > 0 for one in sampling),
            masked=any(one.sequence.constraint is not None for one in held),
            logprobs=any(one.logprobs is not None for one in sampling),
        )
        self.all_steps.draft(bucket, entries)
        failed = self._constrain(held, entries, bucket) if bucket.masked else []
        number = self.all_steps.verify(bucket)
        for one in failed:
            self.all_steps.set(one.slot, active=False)
        starts = np.cumsum([0, *(entry.rows for entry in entries)])[:-1]
        self._queued.append(Pass(number, tuple(held), tuple(map(int, starts)), self._ranks.record(), first))
        self._steps += not first
        if any(one.sequence.trace is not None and one.sequence.trace.keep_logits for one in held):
            self._collect(wait=0)

    def _constrain(self, held: list[Held], entries: list[Entry], bucket: Bucket) -> list[Held]:
        """Let the step score its rows and make their masks meanwhile; who cannot go on: of those it means nothing.

        Rows after a forbidden draft, which is rejected for sure, may be followed by anything.
        """
        self.all_steps.score(bucket)
        self._collect(wait=0)  # what may follow depends on every token so far
        drafts = self.all_steps.drafts(entries) if bucket.groups else [[] for _ in entries]
        failed, rows = [], {}
        for index, (one, own) in enumerate(zip(held, drafts, strict=True)):
            if one.sequence.constraint is None:
                continue
            masks = self.all_steps.masks[index, : len(own) + 1]
            kept = one.sequence.constraint.fill(masks, own)
            masks[0 if kept is None else kept + 1 :] = ANY
            rows[index] = len(masks)
            if kept is None:
                failed.append(one)
                one.generation = -1  # steps under way say nothing of it
                self._emitted.append(Emitted(one.sequence, [], "error", message=one.sequence.constraint.fault))
        self.all_steps.send_masks(rows)
        return failed

    # ---- what came out

    def poll(self, *, wait: bool = False) -> list[Emitted]:
        self._collect(wait=0 if wait else len(self._queued))
        self._copies.progress()
        emitted, self._emitted = self._emitted, []
        return emitted

    def _room(self) -> None:
        """Wait until one more step may be queued."""
        self._collect(wait=AHEAD - 1)

    def _collect(self, *, wait: int) -> None:
        """Take in steps that have ended, and wait until at most `wait` are left."""
        while self._queued:
            done = self.all_steps.result(self._queued[0].number)
            if done is None and len(self._queued) <= wait:
                return
            if done is None:
                done = self._await(self._queued[0])
            self._take(self._queued.popleft(), done)
            self.collected += 1

    def _await(self, step: Pass) -> list[Record]:
        """Block until a step has ended. Raises DeviceError where it never will."""
        look = self._clock() + LOOK_S
        while (done := self.all_steps.result(step.number)) is None:
            time.sleep(PAUSE_S)
            if self._clock() < look:
                continue
            look = self._clock() + LOOK_S
            if step.event.done() and self.all_steps.result(step.number) is None:
                named = ", ".join(str(device.index) for device in self._devices)
                raise DeviceError(f"step {step.number} ended on GPU {named} and left no result.")
        return done

    def _take(self, step: Pass, records: list[Record]) -> None:
        for held, first_row, record in zip(step.held, step.rows, records, strict=False):
            alive = self._held.get(held.sequence.id) is held
            if alive and record.generation == held.generation and record.emitted:
                self._emit(step, held, first_row, record)

    def _emit(self, step: Pass, held: Held, first_row: int, record: Record) -> None:
        sequence, reason, told = held.sequence, REASONS.get(record.reason), None
        count = len(record.emitted)
        kept = None if step.first else step_record(record)
        if sequence.trace is not None and sequence.trace.keep_logits:
            sequence.trace.logits.extend(self.all_steps.logits(first_row, count))
        if step.first and sequence.trace is not None and sequence.trace.prompt_argmax is not None:
            sequence.trace.prompt_argmax.append(int(np.argmax(self.all_steps.logits(first_row, 1)[0])))
        wanted = sequence.request.sampling.logprobs
        if wanted is not None:
            told = self.all_steps.logprobs(step.number, first_row, record.logits, wanted)
        sequence.emit(record.emitted, last=reason is not None)
        rows_run = 0 if step.first else record.rows
        self._emitted.append(Emitted(sequence, record.emitted, reason, told, kept, rows=rows_run))

    # ---- going back, saving, coming back

    def rewind(self, sequence: Sequence, position: int) -> None:
        held = self._held[sequence.id]
        if not sequence.prompt_len <= position <= sequence.last_position:
            raise ValueError(f"position {position} is not that of an emitted token of {sequence.id!r}")
        if position < held.oldest:
            raise UsageError(
                f"rewind to {position}: not before {held.oldest}, where the sequence was restored; prefill again."
            )
        token = sequence.emitted[position - sequence.prompt_len]
        held.generation = -1  # steps under way say nothing of it
        self._collect(wait=0)
        self._generation += 1
        held.generation = self._generation
        held.decoder_start = min(held.decoder_start, position)
        del sequence.emitted[position - sequence.prompt_len + 1 :]
        assert sequence.last_token == token
        self._admit(held)

    def snapshot(self, sequence: Sequence, position: int, pages: Mapping[int, Buffer], state: Items[Buffer]) -> int:
        held = self._held[sequence.id]
        if position < held.oldest:
            raise UsageError(f"save at {position}: not before {held.oldest}, where the sequence was restored.")
        return self._copies.snapshot(held.slot, position, held.decoder_start, pages, state)

    def restore(self, sequence: Sequence, position: int, pages: Items[Buffer], state: Items[Buffer]) -> int:
        held = self._open(sequence)
        number, held.decoder_start = self._copies.restore(held.slot, position, pages, state)
        held.oldest = position
        sequence.prefilled = min(position, sequence.prompt_len)
        if sequence.emitted:
            self._copies.land(held.slot)
            self._prefilling.again(held, position)
            sequence.prefilled = sequence.prompt_len
            self._admit(held)
        return number

    def copied(self) -> int:
        return self._copies.progress()

    def share(self, memory: memoryview | None) -> None:
        self._copies.share(memory)

    def release(self, sequence: Sequence) -> None:
        held = self._held.pop(sequence.id, None)
        if held is not None:
            if held.decodes:
                self.all_steps.set(held.slot, active=False)
            self._copies.forget(held.slot)
            self._pages.release(held.slot)
        self._emitted = [item for item in self._emitted if item.sequence is not sequence]

    # ---- for benchmarks

    def adopt(self, sequence: Sequence) -> int:
        """Let a sequence decode from the last token of its prompt on, whose cache somebody else fills; its slot."""
        held = self._open(sequence)
        sequence.prefilled = sequence.prompt_len
        self._admit(held)
        return held.slot

    def slot_of(self, sequence: Sequence) -> int:
        """The slot that a sequence has."""
        return self._held[sequence.id].slot

    def entry(self, sequence: Sequence) -> Entry:
        """The sequence's part of its next step."""
        return self._entry_of(self._held[sequence.id])

    def set_drafting(self, sequence: Sequence, *, draft: bool) -> None:
        """Draft from now on or not, with what the sequence has emitted so far; no step may be under way."""
        sequence.draft = draft
        self._admit(self._held[sequence.id])

    def finish(self) -> None:
        """Wait for every step that is queued."""
        self._collect(wait=0)

    def forget_steps(self) -> None:
        """Steps were queued behind this backend's back: put every slot where its sequence is."""
        for held in self._held.values():
            self._admit(held)

    # ---- counts

    def counts(self) -> StepCounts:
        return total([machine.counts(self._steps) for machine in self.machines], self._machine.spec)

    def ledger(self) -> dict[str, int]:
        return dict(sum((Counter(device.held()) for device in self._devices), Counter()))
