"""The backend of a machine without a GPU: the NumPy reference model, several sequences a step.

A step is: draft a block for each sequence that drafts, cut it, run all rows of all sequences in one forward, choose,
keep the rows that lead to what was emitted. Everything is done when `enqueue` returns; `poll` only hands it over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

import numpy as np

from dsuf.engine.backend import ClassMap, Emitted, Limits, Progress, StepCounts
from dsuf.engine.choose import Drafting, choose_tokens, drafts_to_judge, logprobs_of
from dsuf.engine.options import EngineOptions
from dsuf.engine.sequence import Sequence, StepRecord
from dsuf.engine.tier import Buffer
from dsuf.errors import ConfigError
from dsuf.layout import PAGE_TOKENS
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.reference import snapshot
from dsuf.model.reference.model import Block, Caches, DraftRequest, ReferenceModel
from dsuf.spec import Spec


@dataclass
class _Step:
    """One sequence's part of a decode step."""

    sequence: Sequence
    drafted: list[int] = field(default_factory=list)  # the whole block
    confidence: list[float] = field(default_factory=list)
    probabilities: list[np.ndarray] = field(default_factory=list)
    judged: int = 0  # drafts that are accepted or rejected
    allowed: np.ndarray | None = None  # bool [rows, vocab]: what a constraint leaves of each row

    @property
    def ids(self) -> list[int]:
        """Ids of the rows that run: the last emitted token, then drafts, but no row for a token beyond the budget and
        none after a draft that the constraint forbids.
        """
        rows = min(self.judged + 1, self.sequence.budget_left)
        rows = rows if self.allowed is None else min(rows, len(self.allowed))
        return [self.sequence.last_token, *self.drafted[: rows - 1]]

    def constrain(self, vocab_size: int) -> bool:
        """Look up what may follow the drafts, and judge none beyond the first forbidden one, which is rejected for
        sure. False where the sequence cannot go on.
        """
        constraint = self.sequence.constraint
        if constraint is not None:
            self.allowed = constraint.allowed(self.drafted[: self.judged], vocab_size)
            if self.allowed is not None:
                self.judged = min(self.judged, len(self.allowed))
        return constraint is None or constraint.fault is None


class CpuBackend:
    """Backend over `model.reference`; see `dsuf.engine.backend.Backend` for what each method promises."""

    def __init__(
        self,
        options: EngineOptions,
        class_map: ClassMap | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._clock = options, clock
        self._class_map = class_map
        self._caches: dict[str, Caches] = {}
        self._emitted: list[Emitted] = []
        self._counts = StepCounts()
        self._copies = 0

    @property
    def limits(self) -> Limits:
        spec, sizes, room = self._model.spec, self._sizes(), self._options.cache_tokens
        limits = Limits(
            backend="cpu",
            vocab_size=spec.vocab_size,
            max_context=self._options.max_context or spec.max_position_embeddings,
            draft_len=spec.dspark_block_size,
            cache_pages=None if room is None else room // PAGE_TOKENS,
            page_bytes=sizes.page_bytes,
            snapshot_bytes=sizes.snapshot_bytes,
            resume_step=sizes.step,
        )
        if limits.cache_pages is None:
            return limits
        return replace(limits, max_context=min(limits.max_context, limits.cache_pages * PAGE_TOKENS - limits.lookahead))

    def warm_up(self) -> None:
        pass

    def load(self, progress: Progress) -> None:
        progress("checkpoint", 0.0)
        checkpoint = Checkpoint.open(self._options.ckpt)
        _check_context(self._options, checkpoint.spec)
        progress("weights", 0.1)
        classes = checkpoint.class_map()
        if classes is None and self._class_map is not None:
            classes = self._class_map(checkpoint)
        self.checkpoint = checkpoint
        self._model = ReferenceModel.load(checkpoint, self._options.numerics, classes)
        self._weight_bytes = checkpoint.total_bytes
        progress("weights", 1.0)

    def fits(self, sequence: Sequence, rows: int, budget_s: float) -> bool:
        return budget_s > 0

    def prefill(self, sequence: Sequence, rows: int, budget_s: float) -> bool:
        if sequence.id not in self._caches:
            self._caches[sequence.id] = self._model.new_caches()
        deadline = self._clock() + budget_s
        every = self._options.resume_every
        while rows > 0:
            count = min(self._options.prefill_chunk, rows, every - sequence.prefilled % every)
            logits = self._prefill_chunk(sequence, count)
            if logits is not None:
                self._first_token(sequence, logits)
                return True
            rows -= count
            if self._clock() >= deadline:
                break
        return False

    def enqueue(self, batch: Items[Sequence]) -> int:
        before = self._expert_reads()
        drafted = self._draft([_Step(sequence) for sequence in batch])
        steps = [step for step in drafted if step.constrain(self._model.spec.vocab_size) or self._fail(step.sequence)]
        if not steps:
            return self._counts.steps
        blocks = [Block(self._caches[step.sequence.id], step.ids) for step in steps]
        for step, block, logits in zip(steps, blocks, self._model.forward(blocks), strict=True):
            kept = self._judge(step, logits)
            self._model.commit(block.caches, kept)
        self._count(steps, sum(len(block.ids) for block in blocks), before)
        return self._counts.steps

    def poll(self, *, wait: bool = False) -> list[Emitted]:
        emitted, self._emitted = self._emitted, []
        return emitted

    def rewind(self, sequence: Sequence, position: int) -> None:
        if not sequence.prompt_len <= position <= sequence.last_position:
            raise ValueError(f"position {position} is not that of an emitted token of {sequence.id!r}")
        self._model.rewind(self._caches[sequence.id], position)
        del sequence.emitted[position - sequence.prompt_len + 1 :]

    def snapshot(self, sequence: Sequence, position: int, pages: Mapping[int, Buffer], state: Items[Buffer]) -> int:
        self._save(self._caches[sequence.id], position, pages, state)
        self._copies += 1
        return self._copies

    def restore(self, sequence: Sequence, position: int, pages: Items[Buffer], state: Items[Buffer]) -> int:
        caches = self._model.new_caches()
        self._load(caches, position, pages, state)
        self._caches[sequence.id] = caches
        sequence.prefilled = min(position, sequence.prompt_len)
        if sequence.emitted:
            again = sequence.ids[position : sequence.last_position]
            if again:
                self._model.forward([Block(caches, again)])
                self._model.commit(caches, len(again))
            sequence.prefilled = sequence.prompt_len
        self._copies += 1
        return self._copies

    def share(self, memory: memoryview | None) -> None:
        pass

    def copied(self) -> int:
        return self._copies

    def release(self, sequence: Sequence) -> None:
        self._caches.pop(sequence.id, None)
        self._emitted = [item for item in self._emitted if item.sequence is not sequence]

    def counts(self) -> StepCounts:
        return self._counts

    def ledger(self) -> dict[str, int]:
        return {
            "weights": self._weight_bytes,
            "caches": sum(caches.nbytes for caches in self._caches.values()),
        }

    def _sizes(self) -> snapshot.Sizes:
        return snapshot.Sizes.of(self._model.spec, self._model.numerics)

    def _save(self, caches: Caches, position: int, pages: Mapping[int, Buffer], state: Items[Buffer]) -> None:
        snapshot.save(caches, position, pages, state)

    def _load(self, caches: Caches, position: int, pages: Items[Buffer], state: Items[Buffer]) -> None:
        snapshot.load(caches, position, pages, state)

    def _expert_reads(self) -> tuple[int, ...]:
        weights = self._model.weights
        return tuple(sum(block.expert_reads for block in blocks) for blocks in (weights.layers, weights.stages))

    def _count(self, steps: list[_Step], rows: int, before: tuple[int, ...]) -> None:
        now, counts = self._expert_reads(), self._counts
        self._counts = StepCounts(
            steps=counts.steps + 1,
            rows=counts.rows + rows,
            slots=counts.slots + sum(len(step.drafted) for step in steps),
            experts=counts.experts + now[0] - before[0],
            drafter_experts=counts.drafter_experts + now[1] - before[1],
        )

    def _prefill_chunk(self, sequence: Sequence, count: int) -> np.ndarray | None:
        """Run `count` prompt rows; logits [vocab] of the last one when they complete the prompt."""
        mode, trace = self._options.prefill, sequence.trace
        every = trace is not None and trace.keep_prompt_argmax and mode == "exact"
        first, final = sequence.prefilled, count == sequence.prompt_left
        ids = sequence.request.prompt_ids[first : first + count]
        tail = final or (mode == "truncated" and (first + count) % self._options.resume_every == 0)
        done = self._model.prefill(self._caches[sequence.id], ids, final=tail, mode=mode, every_logit=every)
        sequence.prefilled += count
        if every:
            trace.prompt_argmax = (trace.prompt_argmax or []) + [int(token) for token in done.argmax]
        return done.logits if final else None

    def _first_token(self, sequence: Sequence, logits: np.ndarray) -> None:
        """Choose from logits [vocab] of the prompt's last position."""
        step = _Step(sequence)
        if step.constrain(len(logits)) or self._fail(sequence):
            _, tokens = choose_tokens(sequence, logits[None], allowed=step.allowed)
            self._emit(sequence, logits[None], tokens)

    def _fail(self, sequence: Sequence) -> bool:
        """End a sequence whose constraint has a fault; False, for it does not go on."""
        self._emitted.append(Emitted(sequence, [], "error", message=sequence.constraint.fault))
        return False

    def _draft(self, steps: list[_Step]) -> list[_Step]:
        """Draft for those that do, and cut each block."""
        drafting = [step for step in steps if step.sequence.draft]
        choosers = [Drafting(step.sequence) for step in drafting]
        requests = [
            DraftRequest(self._caches[step.sequence.id], step.sequence.last_token, chooser)
            for step, chooser in zip(drafting, choosers, strict=True)
        ]
        drafts = self._model.draft(requests) if requests else []
        for step, chooser, draft in zip(drafting, choosers, drafts, strict=True):
            step.drafted = [int(token) for token in draft.tokens]
            step.confidence = [float(logit) for logit in draft.confidence_logits]
            step.probabilities = chooser.probabilities
            step.judged = drafts_to_judge(step.sequence, draft.confidence_logits, self._options.verify_threshold)
        return steps

    def _judge(self, step: _Step, logits: np.ndarray) -> int:
        """Choose from logits [rows, vocab] and emit; the number of rows that stay in the cache."""
        sequence, judged = step.sequence, step.judged
        accepted, tokens = choose_tokens(
            sequence, logits, step.drafted[:judged], step.probabilities[:judged], step.allowed
        )
        return self._emit(sequence, logits, tokens, step, accepted)

    def _emit(
        self,
        sequence: Sequence,
        logits: np.ndarray,
        tokens: list[int],
        step: _Step | None = None,
        accepted: int = 0,
    ) -> int:
        """Emit what the sequence takes of `tokens`, row i of `logits` having given token i; how many it took."""
        kept, reason = sequence.cut(tokens)
        record = None
        if step is not None:
            position, after, accepted = sequence.last_position, sequence.last_token, min(accepted, len(kept))
            record = StepRecord(position, after, step.drafted, step.confidence, accepted, kept)
        if sequence.trace is not None and sequence.trace.keep_logits:
            sequence.trace.logits.extend(np.array(row, np.float32) for row in logits[: len(kept)])
        logprobs = logprobs_of(sequence, logits, kept)
        sequence.emit(kept, last=reason is not None)
        self._emitted.append(Emitted(sequence, kept, reason, logprobs, record, rows=len(logits)))
        return len(kept)


def _check_context(options: EngineOptions, spec: Spec) -> None:
    asked, most = options.max_context, spec.max_position_embeddings
    if asked is not None and asked > most:
        raise ConfigError(
            f"max_context is {asked}, this checkpoint was made for {most} tokens (max_position_embeddings). "
            "Use at most that, or leave the flag out."
        )
