"""Exact selection on the interpreter: ties, fewer than k, exactly k, one more, blocks and mapped entries."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.kernels import select as family
from dsuf.ops.index import largest
from tests.kernels.helpers import execute


def run(scores: np.ndarray, position, k: int, kind: str = "entries", ratio: int = 1, candidates=None, used=None):
    rows = len(scores)
    out, number = np.full((rows, k), -1, np.int32), np.full(rows, -1, np.int32)
    sequence = np.arange(rows, dtype=np.int32)
    sequence[-1] = -1  # the last row is inactive
    kept = np.zeros((rows, 1), np.int32) if candidates is None else candidates
    kernel = family.make(kind=kind)
    execute(kernel, [scores, scores.shape[1], sequence, np.array(position, np.int32), kept, kept.shape[1],
                     np.zeros(rows, np.int32) if used is None else used, out, number, k, ratio],
            grid=(rows, 1))  # fmt: skip
    assert number[-1] == 0 and (out[-1] == -1).all()
    return out, number


@pytest.mark.parametrize("n", [1, 7, 8, 9, 1000, 3000])
@pytest.mark.parametrize("ties", [False, True])
def test_selection_agrees_with_the_op(n: int, ties: bool):
    rng, k = np.random.default_rng(n), 8
    scores = np.full((3, max(n, 16)), np.nan, np.float32)
    scores[:2, :n] = rng.integers(-3, 4, (2, n)) if ties else rng.standard_normal((2, n)) * 10.0 ** rng.integers(-9, 9)
    out, number = run(scores, [n - 1, n - 1, n - 1], k)
    for row in range(2):
        assert number[row] == min(n, k)
        want = largest(scores[row : row + 1, :n], min(n, k))[0]
        assert out[row, : number[row]].tolist() == want.tolist()
        assert (out[row, number[row] :] == -1).all()


def test_negative_zero_equal_and_infinite_scores_keep_their_order():
    scores = np.array([[0.5, -2, 3e38, 0.5, 0.5, -3e38, 0.5, 1, 0.25, 0.5], [0] * 10], np.float32)
    out, _ = run(scores, [9, 9], 4)
    assert out[0].tolist() == [0, 2, 3, 7]


def test_blocks_and_mapped_entries_count_what_is_visible():
    rng = np.random.default_rng(1)
    best = rng.standard_normal((2, 20)).astype(np.float32)
    out, number = run(best, [150, 0], 3, kind="blocks", ratio=1)  # 151 entries: 19 blocks
    assert out[0].tolist() == largest(best[:1, :19], 3)[0].tolist() and number[0] == 3
    candidates = np.array([[0, 5, 18], [0, 0, 0]], np.int32)
    scores = np.full((2, 24), np.nan, np.float32)
    scores[0, :23] = rng.standard_normal(23)  # block 18 has 7 visible entries: 144 .. 150
    out, number = run(scores, [150, 0], 6, kind="mapped", candidates=candidates, used=np.array([3, 0], np.int32))
    places = largest(scores[:1, :23], 6)[0]
    assert out[0].tolist() == [int(candidates[0, p // 8] * 8 + p % 8) for p in places]
