"""Acceptance: the greedy rule case by case, the sampled rule by the distribution of what it emits."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.ops.accept import accept_greedy, accept_sampled, verify_length
from dsuf.ops.philox import Purpose, uniform
from dsuf.ops.sample import pick

# chi-square quantiles at p = 0.001
CHI_15, CHI_63 = 37.7, 103.4


@pytest.mark.parametrize(
    ("drafts", "argmax", "result"),
    [
        ([], [7], (0, 7)),
        ([1, 2, 3], [1, 2, 3, 4], (3, 4)),
        ([1, 2, 3], [1, 9, 3, 4], (1, 9)),
        ([1, 2, 3], [5, 2, 3, 4], (0, 5)),
    ],
)
def test_greedy_accepts_while_the_target_agrees(drafts, argmax, result):
    assert accept_greedy(drafts, argmax) == result


def test_equal_distributions_accept_everything():
    p = np.full((3, 4), 0.25)
    assert accept_sampled([0, 3], p[:2], p, [0.999, 0.999], [0, 0], 0.6) == (2, 2)


def test_a_draft_that_the_target_excludes_is_rejected_and_never_emitted():
    q, p = np.array([[0.5, 0.5, 0]]), np.array([[0, 0.5, 0.5], [1, 0, 0]])
    assert accept_sampled([0], q, p, [0.0], [0.3], 0) == (0, 2)


def test_emitted_tokens_have_the_distribution_of_the_target():
    rng = np.random.default_rng(3)
    vocab, rounds = 8, 20_000
    q1, p1 = rng.dirichlet(np.ones(vocab)), rng.dirichlet(np.ones(vocab))
    q2, p2 = rng.dirichlet(np.ones(vocab), vocab), rng.dirichlet(np.ones(vocab), vocab)  # given the token before
    first, pairs = np.zeros(vocab), np.zeros((vocab, vocab))
    for seed in range(rounds):
        u = uniform(seed, 0, Purpose.DRAFT, 8)
        d1 = pick(q1, u[0])
        d2 = pick(q2[d1], u[1])
        targets = np.stack([p1, p2[d1], p2[d2]])
        accepted, token = accept_sampled([d1, d2], np.stack([q1, q2[d1]]), targets, u[2:4], u[4:6], u[6])
        emitted = [*[d1, d2][:accepted], token]
        first[emitted[0]] += 1
        # Where the step emitted one token only, the next one comes from the target itself.
        pairs[emitted[0], emitted[1] if len(emitted) > 1 else pick(p2[emitted[0]], u[7])] += 1
    expected = rounds * p1
    assert ((first - expected) ** 2 / expected).sum() < CHI_15
    expected = rounds * p1[:, None] * p2
    assert ((pairs - expected) ** 2 / expected).sum() < CHI_63


def test_verify_length_cuts_where_the_product_of_confidences_falls_below():
    logits = np.log(np.array([0.9, 0.8, 0.5, 0.9]) / np.array([0.1, 0.2, 0.5, 0.1]))
    assert [verify_length(logits, t) for t in (0.95, 0.9 - 1e-9, 0.7, 0.36, 0.32, 0.0)] == [0, 1, 2, 3, 4, 4]
    assert verify_length([], 0.5) == 0
