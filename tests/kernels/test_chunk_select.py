"""Streaming selection against ops.index.largest: ties, fewer than k, rising scores that fill the room."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.kernels import chunk_select as family
from dsuf.ops.index import largest
from tests.kernels.helpers import execute, made


def run(scores: np.ndarray, position: np.ndarray, ratio: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    rows = len(scores)
    out, number = np.full((rows, k), -1, np.int32), np.full(rows, -1, np.int32)
    execute(made(family.make), [scores, scores.shape[1], position, ratio, out, number, k], grid=(rows, 1))
    return out, number


@pytest.mark.parametrize(("kind", "n", "k"), [
    ("few", 300, 512), ("exact", 512, 512), ("one more", 513, 512), ("random", 9000, 512), ("rising", 9000, 512),
    ("ties", 5000, 512), ("equal", 4500, 512), ("random", 60, 8), ("ties", 60, 8), ("negative", 3000, 100),
])  # fmt: skip
def test_the_largest_win_and_the_lowest_index_among_equals(kind: str, n: int, k: int):
    rng = np.random.default_rng(n)
    scores = rng.standard_normal((2, -(-n // 64) * 64)).astype(np.float32)
    if kind == "rising":
        scores = np.sort(scores, axis=1)
    if kind == "ties":
        scores = np.round(scores * 2) / 2
    if kind == "equal":
        scores[:] = -0.75
    if kind == "negative":
        scores = -np.abs(scores)
    position = np.array([2 * n - 1, 2 * n], np.int32)  # n entries of two tokens
    scores[:, n:] = np.inf  # behind the visible ones
    out, number = run(np.ascontiguousarray(scores), position, 2, k)
    assert (number == min(n, k)).all()
    want = np.arange(n)[None].repeat(2, 0) if n <= k else largest(scores[:, :n], k)
    assert np.array_equal(out[:, : min(n, k)], want)
    assert (out[:, n:] == -1).all()
