"""The indexer against brute force: scores, selection with ties, candidate blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.ops.index import KEY_TILE, candidate_mask, index_scores, key_tiles, largest, mask_invisible


def test_scores_by_their_formula_in_every_tile():
    rng = np.random.default_rng(1)
    q, w, keys = rng.normal(size=(3, 4, 32)), rng.normal(size=(3, 4)), rng.normal(size=(2 * KEY_TILE, 32))
    scores = index_scores(q, w, keys)
    expected = np.einsum("rhe,rh->re", np.maximum(np.einsum("rhd,ed->rhe", q, keys), 0), w)
    np.testing.assert_allclose(scores, expected, rtol=1e-12, atol=1e-12)


def test_scores_of_a_row_do_not_depend_on_other_rows_or_on_later_entries():
    rng = np.random.default_rng(2)
    q, w = rng.normal(size=(7, 4, 32)).astype(np.float32), rng.normal(size=(7, 4)).astype(np.float32)
    keys = rng.normal(size=(3 * KEY_TILE, 32)).astype(np.float32)
    together = index_scores(q, w, keys)
    for row in range(7):
        alone = index_scores(q[row : row + 1], w[row : row + 1], keys[:KEY_TILE])
        np.testing.assert_array_equal(alone[0], together[row, :KEY_TILE])


def test_tiles_hold_the_entries_and_the_selection():
    assert [key_tiles(n) for n in (1, 64, 65)] == [1, 1, 2] and key_tiles(3, 512) == 8


def by_sorting(row: np.ndarray, count: int) -> list[int]:
    return sorted(sorted(range(len(row)), key=lambda i: (-row[i], i))[:count])


@given(st.lists(st.lists(st.integers(-3, 3), min_size=9, max_size=9), min_size=1, max_size=5), st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_the_lowest_index_wins_among_equal_scores(rows, count):
    scores = np.array(rows, np.float64)
    scores[scores == -3] = -np.inf
    assert largest(scores, count).tolist() == [by_sorting(row, count) for row in scores]


def test_invisible_entries_are_minus_infinity():
    scores = np.zeros((3, 4))
    mask_invisible(scores, np.array([0, 2, 9]))
    assert (scores == -np.inf).tolist() == [[True] * 4, [False, False, True, True], [False] * 4]


@pytest.mark.parametrize("kept", [1, 2, 3, 10])
def test_candidates_are_the_best_blocks_and_the_newest(kept):
    rng = np.random.default_rng(kept)
    block, visible = 4, np.array([1, 7, 21, 24, 25, 30])
    scores = rng.integers(0, 50, size=(6, 30)).astype(np.float64)
    mask_invisible(scores, visible)
    found = candidate_mask(scores, visible, block, kept)
    for row, seen in enumerate(visible):
        best = {b: max(scores[row, b * block : (b + 1) * block]) for b in range(-(-seen // block))}
        best[(seen - 1) // block] = np.inf
        chosen = sorted(best, key=lambda b: (-best[b], b))[:kept]
        expected = [e // block in chosen for e in range(30)]
        assert found[row, :seen].tolist() == expected[:seen]


def test_a_row_that_sees_nothing_has_no_candidates():
    scores = np.full((1, 8), -np.inf)
    assert not candidate_mask(scores, np.array([0]), 4, 1).any()
