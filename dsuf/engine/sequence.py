"""One request inside the engine: its state and its clock, no policy and no memory.

Positions count tokens from 0, the prompt first. The last emitted token is never in the cache: it is the first row of
the next step. With N prompt tokens and e emitted ones it stands at position N + e - 1.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from dsuf.engine.constraint import Guard
from dsuf.engine.messages import FinishReason, Request, Stats
from dsuf.engine.tier import Hit


class Phase(Enum):
    """Where a sequence is; it only moves downwards in this list, but for parked ones, which come back."""

    WAITING = "waiting"
    PREFILL = "prefill"
    PARKED = "parked"  # decoding, but set aside in host memory
    DECODE = "decode"
    DONE = "done"


@dataclass(frozen=True)
class StepRecord:
    """What one decode step did for one sequence."""

    position: int  # of the token that the drafts follow
    after: int  # that token
    drafted: list[int]  # the whole block, verified or not; empty without drafting
    confidence: list[float]  # logits, one a draft
    accepted: int  # drafts that were emitted
    emitted: list[int]


@dataclass
class Trace:
    """What an in-process caller wants to see of a request; filled by the backend, never sent over the pipe."""

    keep_logits: bool = False
    keep_prompt_argmax: bool = False  # exact prefill only
    steps: list[StepRecord] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)  # f32 [vocab]: row i chose token i, before any mask
    prompt_argmax: list[int] | None = None  # greedy choice at every prompt position; None in truncated prefill


class Sequence:
    """State of one request. The scheduler moves `phase`, the backend `prefilled` and `emitted`."""

    def __init__(self, request: Request, budget: int, draft: bool, verify: int | None, trace: Trace | None) -> None:
        self.request = request
        self.budget = budget  # tokens that may be emitted: max_tokens or the room in the context
        self.draft = draft
        self.verify = verify  # drafts verified in a step; None: by confidence
        self.trace = trace
        self.eos = frozenset(request.eos_ids)
        self.constraint: Guard | None = None  # what its tokens must follow
        self.hit: Hit | None = None  # a saved prefix to start from
        self.held = False  # not to be started yet: hit or constraint are in the making
        self.admitted = False  # its prefill has begun
        self.phase = Phase.WAITING
        self.arrival = 0  # number in the order of arrival
        self.prefilled = 0  # prompt rows in the cache
        self.emitted: list[int] = []
        self.iterations = 0
        self.drafted_tokens = 0
        self.accepted_histogram: list[int] = []
        self.submitted_s = 0.0
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def prompt_left(self) -> int:
        """Prompt rows that are still to be run."""
        return self.prompt_len - max(self.prefilled, self.cached_tokens)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that come from a saved prefix."""
        return self.hit.position if self.hit is not None else 0

    @property
    def ids(self) -> list[int]:
        """All tokens so far: the prompt and what was emitted."""
        return [*self.request.prompt_ids, *self.emitted]

    @property
    def last_position(self) -> int:
        """Position of the last emitted token, or of the last prompt token before the first one."""
        return self.prompt_len + len(self.emitted) - 1

    @property
    def last_token(self) -> int:
        return self.emitted[-1] if self.emitted else self.request.prompt_ids[-1]

    @property
    def budget_left(self) -> int:
        return self.budget - len(self.emitted)

    def eos_is_masked(self, ahead: int) -> bool:
        """Whether the token emitted after `ahead` more ones may not be an EOS (min_tokens)."""
        return bool(self.eos) and len(self.emitted) + ahead < self.request.min_tokens

    def cut(self, tokens: Items[int]) -> tuple[list[int], FinishReason | None]:
        """The part of newly chosen tokens that is emitted (an ending EOS included), and why the sequence ends if so."""
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            if token in self.eos and not self.request.ignore_eos:
                return kept, "stop"
            if len(kept) == self.budget_left:
                return kept, "length"
        return kept, None

    def emit(self, tokens: Items[int], *, last: bool = False) -> None:
        """Append what `cut` kept; `last` when the sequence ends with it."""
        self.emitted.extend(tokens)
        if self.constraint is not None and not last:
            self.constraint.advance(tokens)

    def count_step(self, record: StepRecord) -> None:
        """Count one decode step, and keep it for the caller who traces."""
        self.iterations += 1
        self.drafted_tokens += len(record.drafted)
        missing = record.accepted + 1 - len(self.accepted_histogram)
        self.accepted_histogram.extend([0] * missing)
        self.accepted_histogram[record.accepted] += 1
        if self.trace is not None:
            self.trace.steps.append(record)

    def stats(self, now: float) -> Stats:
        """Counts and times up to `now`, for a request that may have ended in any phase."""
        started = now if self.started_s is None else self.started_s
        first = now if self.first_token_s is None else self.first_token_s
        return Stats(
            prompt_tokens=self.prompt_len,
            cached_tokens=self.cached_tokens,
            completion_tokens=len(self.emitted),
            iterations=self.iterations,
            drafted_tokens=self.drafted_tokens,
            accepted_histogram=self.accepted_histogram,
            queue_s=started - self.submitted_s,
            prefill_s=first - started,
            ttft_s=first - self.submitted_s if self.first_token_s is not None else 0.0,
            decode_s=self.last_token_s - first if self.last_token_s is not None else 0.0,
        )
