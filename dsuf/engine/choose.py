"""From rows of logits to tokens for one sequence: draft, accept or reject, and the probabilities that are reported.

A token at absolute position p takes its random numbers from Philox at (p, purpose), so that neither batch nor chunk
nor any other token can change them. Greedy (temperature 0) takes the first maximum and no random number.
Row i of a step gives the token `i + 1` after the last emitted one. Source: DSpark, model.md 7.2.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from dsuf.engine.messages import TokenLogprobs
from dsuf.engine.sequence import Sequence
from dsuf.ops.accept import accept_greedy, accept_sampled, verify_length
from dsuf.ops.philox import Purpose, uniform
from dsuf.ops.sample import filtered_probabilities, log_probabilities, pick, top_logprobs


class Drafting:
    """Chooses the drafts of one block; called by the model with logits [vocab] of slot 0, 1, ... in order."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self.probabilities: list[np.ndarray] = []  # f64 [vocab] a slot, from which the draft was drawn; [] when greedy

    def __call__(self, logits: np.ndarray, slot: int) -> int:
        row = masked(self._sequence, logits, slot)
        sampling = self._sequence.request.sampling
        if sampling.temperature == 0:
            return int(np.argmax(row))
        probabilities = filtered_probabilities(row, sampling.temperature, sampling.top_p, sampling.top_k)
        self.probabilities.append(probabilities)
        return pick(probabilities, _uniforms(self._sequence, Purpose.DRAFT, slot, 1)[0])


def masked(sequence: Sequence, logits: np.ndarray, ahead: int, allowed: np.ndarray | None = None) -> np.ndarray:
    """The row with what may not come made impossible: what `allowed` bool [vocab] leaves out, and EOS where min_tokens
    wants more tokens first and any other is allowed. `logits` itself stays as it is.
    """
    eos_later = sequence.eos_is_masked(ahead)
    if allowed is None and not eos_later:
        return logits
    row = logits.copy() if allowed is None else np.where(allowed, logits, -np.inf)
    if eos_later:
        without = row.copy()
        without[list(sequence.eos)] = -np.inf
        row = without if np.isfinite(without).any() else row
    return row


def drafts_to_judge(sequence: Sequence, confidence_logits: np.ndarray, threshold: float) -> int:
    """How many drafts of the block are accepted or rejected; never more than may still be emitted.

    With b tokens left of the budget and n >= b drafts, the rows 0 .. b - 1 judge b drafts, and the row of the last
    one, which would only give a token beyond the budget, is not run. So the budget changes no token before it.
    """
    count = verify_length(confidence_logits, threshold) if sequence.verify is None else sequence.verify
    return min(count, len(confidence_logits), sequence.budget_left)


def choose_tokens(
    sequence: Sequence,
    logits: np.ndarray,
    drafts: Items[int] = (),
    draft_probabilities: Items[np.ndarray] = (),
    allowed: np.ndarray | None = None,
) -> tuple[int, list[int]]:
    """Accept a prefix of `drafts` and add the token that follows it.

    logits [rows, vocab] with rows = len(drafts) + 1, or len(drafts) at the end of the budget (then nothing follows a
    block that is accepted whole) or where the last draft is one that `allowed` bool [>= rows, vocab], what a constraint
    leaves of each row, forbids. Returns (accepted, tokens).
    """
    rows = [masked(sequence, row, i, None if allowed is None else allowed[i]) for i, row in enumerate(logits)]
    if len(rows) == len(drafts):
        rows.append(rows[-1])  # stands for the row that was not run; what it gives is never taken
    if sequence.request.sampling.temperature == 0:
        accepted, following = accept_greedy(drafts, [int(np.argmax(row)) for row in rows])
    else:
        accepted, following = _accept_sampled(sequence, rows, drafts, draft_probabilities)
    return accepted, [*drafts[:accepted], following][: len(logits)]


def logprobs_of(sequence: Sequence, logits: np.ndarray, tokens: Items[int]) -> list[TokenLogprobs] | None:
    """What is reported with `tokens`, chosen from logits [>= len(tokens), vocab]; None when not asked for.

    Of the row as the model gave it: no temperature, no filter, no mask.
    """
    count = sequence.request.sampling.logprobs
    if count is None:
        return None
    return [
        TokenLogprobs(float(log_probabilities(row)[token]), top_logprobs(row, count))
        for row, token in zip(logits, tokens, strict=False)
    ]


def _accept_sampled(
    sequence: Sequence, rows: list[np.ndarray], drafts: Items[int], draft_probabilities: Items[np.ndarray]
) -> tuple[int, int]:
    sampling, count = sequence.request.sampling, len(drafts)
    targets = [filtered_probabilities(row, sampling.temperature, sampling.top_p, sampling.top_k) for row in rows]
    return accept_sampled(
        drafts,
        np.array(draft_probabilities),
        np.array(targets),
        _uniforms(sequence, Purpose.ACCEPT, 0, count),
        _uniforms(sequence, Purpose.RESIDUAL, 0, count),
        _uniforms(sequence, Purpose.BONUS, count, 1)[0],
    )


def _uniforms(sequence: Sequence, purpose: Purpose, first: int, count: int) -> list[float]:
    """One number in [0, 1) for each of `count` tokens, from the one `first + 1` after the last emitted."""
    seed, start = sequence.request.sampling.seed, sequence.last_position + 1 + first
    return [float(uniform(seed, start + i, purpose)[0]) for i in range(count)]
