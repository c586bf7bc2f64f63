"""What the engine asks of the thing that computes; `cpu`, `gpu` and the tests' scripted backend answer it.

The engine's turns are: `enqueue` a decode step, or `prefill` prompts for one chunk of time; then `poll` what was
emitted. A backend may run ahead: `enqueue` queues work, `poll` returns what has ended since, and waits only when it is
told to. It decides alone where a sequence ends (EOS, budget), because on a GPU that is known on the device first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dsuf.engine.messages import FinishReason, TokenLogprobs
from dsuf.engine.sequence import Sequence, StepRecord
from dsuf.engine.tier import Buffer

if TYPE_CHECKING:
    import numpy as np

    from dsuf.model.checkpoint import Checkpoint

MOST_REWOUND = 24  # tokens that a sequence can go back, and a snapshot can lie behind
Progress = Callable[[str, float], None]  # what is being loaded, share of it done 0..1
ClassMap = Callable[["Checkpoint"], "np.ndarray | None"]  # Engram's class of each token id, of its tokenizer


@dataclass(frozen=True)
class Limits:
    """What a loaded backend can take."""

    backend: str  # "cpu", ...
    vocab_size: int
    max_context: int  # prompt and emitted tokens of one sequence
    draft_len: int  # drafts of a block
    max_rows: int = 48  # of one decode step, drafts included
    cache_pages: int | None = None  # that all sequences share, enough for one of max_context; None: no bound
    page_bytes: int = 0  # of a cache page in a snapshot; 0: this backend cannot take snapshots
    snapshot_bytes: int = 0  # of what a snapshot holds beside the pages
    resume_step: int = 1  # snapshots are taken at multiples of this position

    @property
    def lookahead(self) -> int:
        """Tokens beyond the emitted ones that a sequence may write: two queued steps."""
        return 2 * (self.draft_len + 1)


@dataclass(frozen=True)
class Emitted:
    """Tokens that one sequence got: from the end of its prefill (`record` None) or from a decode step."""

    sequence: Sequence
    ids: list[int]  # already appended to sequence.emitted; [] only with reason "error"
    reason: FinishReason | None = None  # set when the sequence ends with these
    logprobs: list[TokenLogprobs] | None = None
    record: StepRecord | None = None
    rows: int = 0  # rows that the decode step ran for this sequence
    message: str = ""  # for reason "error": what happened to this sequence alone


@dataclass(frozen=True)
class StepCounts:
    """Totals over all decode steps so far, for the floor that a benchmark holds a step against."""

    steps: int = 0
    rows: int = 0  # rows run through the backbone
    slots: int = 0  # drafted tokens
    experts: int = 0  # distinct routed experts read, summed over backbone layers
    drafter_experts: int = 0  # the same over drafter stages


class Backend(Protocol):
    """Memory and arithmetic of all sequences; called from one thread.

    Memory for pages never runs short inside a backend. A sequence takes them when its prefill begins or it is restored,
    for the whole prompt, and when it is in a batch: pages for the tokens that it has and `limits.lookahead` more. The
    engine sees to it that all together never take more than `limits.cache_pages`.
    """

    @property
    def limits(self) -> Limits:
        """Valid after `load`."""
        ...

    def load(self, progress: Progress) -> None:
        """Read the weights. Raises CheckpointError, ConfigError or DeviceError before the first request."""
        ...

    def warm_up(self) -> None:
        """Do what would hold up the first requests of a server, after `load`; nothing is left of it but what it taught.

        Whoever has one request alone does without.
        """
        ...

    def fits(self, sequence: Sequence, rows: int, budget_s: float) -> bool:
        """Whether a prompt's next pass, of up to `rows`, is to use the `budget_s` that others have left of a chunk.

        By what passes have taken so far; one that has only begun when the time is over would make streams wait.
        """
        ...

    def prefill(self, sequence: Sequence, rows: int, budget_s: float) -> bool:
        """Put up to `rows` more prompt rows in the cache and count them in `sequence.prefilled`.

        Works in passes of its own size, at least one, and starts no further one that does not fit into `budget_s`. True
        when the prompt is complete: the next `poll` has the first token. The first call makes the sequence's cache,
        unless `restore` did. Returns when the passes have run: the time until then is what the scheduler shares out.
        No pass while what `restore` queued is on its way and streams have steps to run meanwhile.
        Truncated prefill runs the decoder's tail at every multiple of `EngineOptions.resume_every` too.
        """
        ...

    def enqueue(self, batch: Items[Sequence]) -> int:
        """Queue one decode step for these sequences; the number of the step. Ended ones are left out by the backend.

        At most `limits.max_rows` rows, each sequence counted with all drafts that it may verify. A sequence with a
        constraint gets only tokens that it allows; where it has a fault, the sequence ends with reason "error".
        """
        ...

    def poll(self, *, wait: bool = False) -> list[Emitted]:
        """What has been emitted since the last call, in order; at most one per sequence and step.

        `wait`: until all steps queued so far have ended.
        """
        ...

    def rewind(self, sequence: Sequence, position: int) -> None:
        """Go back until the token at `position` is the last emitted one; at most 24 positions.

        Raises UsageError, and changes nothing, for one before the position where the sequence was restored.
        """
        ...

    def snapshot(self, sequence: Sequence, position: int, pages: Mapping[int, Buffer], state: Items[Buffer]) -> int:
        """Queue copying out what the first `position` tokens left in the cache; the number of the copy.

        `position` is a multiple of `limits.resume_step`, at most 24 behind the last emitted token and not before where
        the sequence was restored. `pages` are the wanted ones by number, [page_bytes] each; the bytes of the snapshot
        fill the parts of `state` in order. What is emitted but not polled yet does not matter. Layout: dsuf/layout.py.
        """
        ...

    def restore(self, sequence: Sequence, position: int, pages: Items[Buffer], state: Items[Buffer]) -> int:
        """Queue making the cache of a sequence that has none from all pages of `position` tokens and their snapshot.

        The number of the copy. Prefill goes on at `position`; for a sequence that has emitted already, the tokens from
        there to the last but one are run again through the decode path, and it goes on as if it had stayed.
        """
        ...

    def share(self, memory: memoryview | None) -> None:
        """Buffers of later copies lie in this memory, which others map too; None: in none that is known.

        A hint: a backend may prepare the memory for fast copies, in its own time.
        """
        ...

    def copied(self) -> int:
        """Number of the latest copy that has ended, as have all before it: their buffers are free or full."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Give back the sequence's memory, whatever it is doing; later `poll`s say nothing of it.

        Copies that were queued before still get their bytes.
        """
        ...

    def counts(self) -> StepCounts:
        """What the decode steps so far have read."""
        ...

    def ledger(self) -> dict[str, int]:
        """Bytes in use by kind: weights, caches, ..."""
        ...
