"""What the engine asks of the thing that computes; `cpu`, `gpu` and the tests' scripted backend answer it.

The engine runs one turn as: `enqueue` the decode step, `prefill` one sequence, `poll` what was emitted. A backend may
run ahead: `enqueue` queues work, `poll` returns what has ended since, and waits only when nothing more fits in the
queue. It decides alone where a sequence ends (EOS, budget), because on a GPU that is known on the device first.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from dsuf.engine.messages import FinishReason, TokenLogprobs
from dsuf.engine.sequence import Sequence, StepRecord

Progress = Callable[[str, float], None]  # what is being loaded, share of it done 0..1


@dataclass(frozen=True)
class Limits:
    """What a loaded backend can take."""

    backend: str  # "cpu", ...
    vocab_size: int
    max_context: int  # prompt and emitted tokens of one sequence
    draft_len: int  # drafts of a block


@dataclass(frozen=True)
class Emitted:
    """Tokens that one sequence got: from the end of its prefill (`record` None) or from a decode step."""

    sequence: Sequence
    ids: list[int]  # already appended to sequence.emitted
    reason: FinishReason | None = None  # set when the sequence ends with these
    logprobs: list[TokenLogprobs] | None = None
    record: StepRecord | None = None
    rows: int = 0  # rows that the decode step ran for this sequence


@dataclass(frozen=True)
class StepCounts:
    """Totals over all decode steps so far, for the floor that a benchmark holds a step against."""

    steps: int = 0
    rows: int = 0  # rows run through the backbone
    slots: int = 0  # drafted tokens
    experts: int = 0  # distinct routed experts read, summed over backbone layers
    drafter_experts: int = 0  # the same over drafter stages


class Backend(Protocol):
    """Memory and arithmetic of all sequences; called from one thread."""

    @property
    def limits(self) -> Limits:
        """Valid after `load`."""
        ...

    def load(self, progress: Progress) -> None:
        """Read the weights. Raises CheckpointError, ConfigError or DeviceError before the first request."""
        ...

    def prefill(self, sequence: Sequence, rows: int, budget_s: float) -> bool:
        """Put up to `rows` more prompt rows in the cache and count them in `sequence.prefilled`.

        Works in passes of its own size, at least one, and starts no further one after `budget_s`. True when the
        prompt is complete: the first token then comes out of `poll`. The first call makes the sequence's cache.
        """
        ...

    def enqueue(self, batch: Items[Sequence]) -> int:
        """Queue one decode step for these sequences; the number of the step. Ended ones are left out by the backend."""
        ...

    def poll(self) -> list[Emitted]:
        """What has been emitted since the last call, in order; at most one per sequence and step."""
        ...

    def rewind(self, sequence: Sequence, position: int) -> None:
        """Go back until the token at `position` is the last emitted one; at most 24 positions."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Give back the sequence's memory, whatever it is doing; later `poll`s say nothing of it."""
        ...

    def counts(self) -> StepCounts:
        """What the decode steps so far have read."""
        ...

    def ledger(self) -> dict[str, int]:
        """Bytes in use by kind: weights, caches, ..."""
        ...
