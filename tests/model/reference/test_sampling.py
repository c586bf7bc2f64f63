"""Sampling with drafts emits what sampling without drafts emits, as a distribution; and one seed gives one text."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.model.reference.model import Block, DraftRequest
from dsuf.ops.accept import accept_sampled
from dsuf.ops.philox import Purpose, uniform
from dsuf.ops.sample import filtered_probabilities, pick
from tests.model.reference.forwards import prefilled, twin

PROMPT, FIRST = [7, 3, 50, 21, 9, 33, 2, 14, 60, 5, 18], 11
TEMPERATURE = 0.7  # flat enough that several tokens are likely, steep enough that drafts are rejected
# chi-square at p = 0.001 for 5, 10, 20, 40, 63 degrees of freedom
CHI_SQUARE = {5: 20.5, 10: 29.6, 20: 45.3, 40: 73.4, 63: 103.4}


def probabilities(logits):
    return filtered_probabilities(logits, TEMPERATURE)


def drafted_step(model, caches, seed, drafts_judged):
    """One draft and verification after FIRST; the tokens it emits. The caches stay as they were."""
    position, q = caches.length + 1, []

    def choose(logits, slot):
        q.append(probabilities(logits))
        return pick(q[-1], uniform(seed, position + slot, Purpose.DRAFT)[0])

    (draft,) = model.draft([DraftRequest(caches, FIRST, choose)])
    drafts = draft.tokens[:drafts_judged]
    (logits,) = model.forward([Block(caches, [FIRST, *drafts])])
    accepted, following = accept_sampled(
        drafts,
        np.array(q[:drafts_judged]),
        np.array([probabilities(row) for row in logits]),
        [uniform(seed, position + i, Purpose.ACCEPT)[0] for i in range(drafts_judged)],
        [uniform(seed, position + i, Purpose.RESIDUAL)[0] for i in range(drafts_judged)],
        uniform(seed, position + drafts_judged, Purpose.BONUS)[0],
    )
    return [*drafts[:accepted], following]


def chi_square(counts, expected):
    """Statistic over tokens with at least 5 expected, the others in one bin, and its allowed maximum."""
    often = expected >= 5
    counts = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    keep = expected > 0
    degrees = int(keep.sum()) - 1
    allowed = next(limit for known, limit in CHI_SQUARE.items() if degrees <= known)
    return float(((counts - expected)[keep] ** 2 / expected[keep]).sum()), allowed


@pytest.mark.parametrize("judged", [1, 3])
def test_emitted_tokens_have_the_distribution_of_the_undrafted_model(model_of, judged):
    model, rounds = model_of("micro", "qdq64"), 600
    caches = prefilled(model, PROMPT)
    target = probabilities(model.forward([Block(twin(caches), [FIRST])])[0][0])
    firsts, seconds, accepted = np.zeros(target.size), np.zeros(target.size), 0
    likely = int(np.argmax(target))
    second_target = probabilities(model.forward([Block(twin(caches), [FIRST, likely])])[0][1])
    followed = 0
    for seed in range(rounds):
        emitted = drafted_step(model, caches, seed, judged)
        firsts[emitted[0]] += 1
        accepted += len(emitted) - 1
        if emitted[0] == likely and len(emitted) > 1:  # whether a second token is emitted depends on the first only
            followed += 1
            seconds[emitted[1]] += 1
    assert rounds * 0.02 < accepted < rounds * judged  # both branches of the rule were taken
    statistic, allowed = chi_square(firsts, rounds * target)
    assert statistic < allowed
    statistic, allowed = chi_square(seconds, followed * second_target)
    assert statistic < allowed


def test_a_step_of_a_seed_is_the_same_in_any_company(model_of):
    model = model_of("micro", "qdq64")
    caches, other = prefilled(model, PROMPT), prefilled(model, PROMPT[:5])
    alone = drafted_step(model, caches, 17, 3)
    model.forward([Block(other, [1, 2, 3]), Block(caches, [4, 5])])
    assert drafted_step(model, caches, 17, 3) == alone
