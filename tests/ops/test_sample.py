"""Filters, drawing and log probabilities by their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.ops.sample import filtered_probabilities, log_probabilities, pick, top_logprobs

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3]))


def test_without_filters_it_is_a_softmax_at_the_temperature():
    np.testing.assert_allclose(filtered_probabilities(LOGITS, 1.0), [0.1, 0.4, 0.2, 0.3])
    squared = np.array([0.1, 0.4, 0.2, 0.3]) ** 2
    np.testing.assert_allclose(filtered_probabilities(LOGITS, 0.5), squared / squared.sum())


def test_temperature_zero_is_the_first_maximum():
    assert filtered_probabilities(np.array([1.0, 3.0, 3.0]), 0).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 2, [1, 3]),
        (1.0, 1, [1]),
        (1.0, 0, [0, 1, 2, 3]),
        (0.39, 0, [1]),
        (0.41, 0, [1, 3]),
        (0.71, 0, [1, 2, 3]),
        (0.0, 0, [1]),
        (0.58, 3, [1, 3]),  # of the three that top_k leaves, 4/9 and 3/9 reach it
        (0.8, 3, [1, 2, 3]),
        (1.0, 99, [0, 1, 2, 3]),
    ],
)
def test_filters_keep_the_smallest_set_that_reaches_top_p_of_the_top_k(top_p, top_k, kept):
    p = filtered_probabilities(LOGITS, 1.0, top_p, top_k)
    assert np.flatnonzero(p).tolist() == kept
    np.testing.assert_allclose(p.sum(), 1)
    np.testing.assert_allclose(p[kept] / p[kept[0]], np.exp(LOGITS)[kept] / np.exp(LOGITS)[kept[0]])


def test_equal_probabilities_keep_the_lowest_tokens():
    assert np.flatnonzero(filtered_probabilities(np.zeros(6), 1.0, 1.0, 2)).tolist() == [0, 1]


def test_large_and_masked_logits_do_not_overflow():
    p = filtered_probabilities(np.array([1e4, -np.inf, 0.0]), 0.01, 0.95, 2)
    assert p.tolist() == [1, 0, 0]


def test_pick_inverts_the_running_sum_and_never_takes_probability_zero():
    p = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [pick(p, u) for u in (0.0, 0.2499, 0.25, 0.9999, 1 - 2**-53)] == [1, 1, 3, 3, 3]


def test_log_probabilities_and_the_best_of_them():
    np.testing.assert_allclose(np.exp(log_probabilities(LOGITS + 700)), [0.1, 0.4, 0.2, 0.3])
    best = top_logprobs(LOGITS, 2)
    assert [token for token, _ in best] == [1, 3]
    np.testing.assert_allclose([value for _, value in best], np.log([0.4, 0.3]))
    assert top_logprobs(LOGITS, 0) == []
