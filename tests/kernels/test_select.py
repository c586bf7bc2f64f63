"""Exact selection on the interpreter: ties, fewer than k, exactly k, one more, long rows, blocks and mapped entries."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.kernels import select as family
from dsuf.ops.index import candidate_mask, largest
from tests.kernels.helpers import execute, made


def tops(scores: np.ndarray, group: int, n: list[int]) -> np.ndarray:
    """Largest score of each group of a row, of its first n values only."""
    seen = np.where(np.arange(scores.shape[1]) < np.array(n)[:, None], scores, -3e38)
    return np.ascontiguousarray(seen.reshape(len(scores), -1, group).max(-1), np.float32)


def run(
    scores: np.ndarray, n: list[int], k: int, *, position: list[int] | None = None, sequence=None, block_shift: int = 3,
    candidates: np.ndarray | None = None, used: list[int] | None = None, keep: int = 0,
):  # fmt: skip
    """scores [rows, any width], n values a row -> (out, number) and, if keep, (blocks, number of blocks)."""
    rows, capacity = len(scores), -(-scores.shape[1] // 32) * 32
    padded = np.full((rows, capacity), np.nan, np.float32)
    padded[:, : scores.shape[1]] = scores
    out, number = np.full((rows, k), -1, np.int32), np.full(rows, -1, np.int32)
    blocks, number_blocks = np.full((rows, max(keep, 1)), -1, np.int32), np.full(rows, -1, np.int32)
    sequence = np.arange(rows, dtype=np.int32) if sequence is None else np.array(sequence, np.int32)
    position = np.array([x - 1 for x in n] if position is None else position, np.int32)
    mapped = candidates is not None
    execute(made(family.make), [
        padded, tops(padded, 1 << block_shift, n), tops(padded, 32, n), capacity, sequence, position, 0, block_shift,
        candidates if mapped else 0, candidates.shape[1] if mapped else 0, np.array(used, np.int32) if mapped else 0,
        out, number, k, blocks if keep else 0, keep, number_blocks if keep else 0,
    ], grid=(rows, 1))  # fmt: skip
    return (out, number, blocks, number_blocks) if keep else (out, number)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 33, 257, 1000, 3000, 70000])
@pytest.mark.parametrize("ties", [False, True])
def test_selection_agrees_with_the_op(n: int, ties: bool):
    rng, k = np.random.default_rng(n), 8
    scores = rng.integers(-3, 4, (2, n)) if ties else rng.standard_normal((2, n)) * 10.0 ** rng.integers(-9, 9)
    out, number = run(scores.astype(np.float32), [n, n], k, sequence=[0, -1])
    assert number.tolist() == [min(n, k), 0] and (out[1] == -1).all()
    want = largest(scores[:1].astype(np.float32), min(n, k))[0]
    assert out[0, : number[0]].tolist() == want.tolist()
    assert (out[0, number[0] :] == -1).all()


def test_all_stages_choose_from_many_runs_with_ties():
    rng = np.random.default_rng(2)
    scores = rng.integers(0, 400, (1, 40000)).astype(np.float32)  # 1,250 runs, 512 wanted
    out, number = run(scores, [39990], 512)
    assert number[0] == 512 and out[0].tolist() == largest(scores[:, :39990], 512)[0].tolist()


def test_negative_zero_equal_and_infinite_scores_keep_their_order():
    scores = np.array([[0.5, -2, 3e38, 0.5, 0.5, -3e38, 0.5, 1, 0.25, 0.5]], np.float32)
    out, _ = run(scores, [10], 4)
    assert out[0].tolist() == [0, 2, 3, 7]


@pytest.mark.parametrize(
    ("block_shift", "keep", "n"), [(3, 16, 5), (3, 16, 128), (3, 16, 700), (2, 3, 9), (2, 3, 500), (3, 1, 90)]
)
def test_candidate_blocks_hold_the_newest_and_the_best(block_shift: int, keep: int, n: int):
    rng = np.random.default_rng(n)
    scores = rng.integers(-20, 20, (2, 704)).astype(np.float32)
    out, number, blocks, kept = run(scores, [n, n], 8, sequence=[5, -1], block_shift=block_shift, keep=keep)
    assert out[0, : number[0]].tolist() == largest(scores[:1, :n], min(n, 8))[0].tolist()
    mask = candidate_mask(scores[:1, :n].astype(float), np.array([n]), 1 << block_shift, keep)[0]
    want = np.unique(np.flatnonzero(mask) >> block_shift)
    assert blocks[0, : kept[0]].tolist() == want.tolist()
    assert kept[1] == 0 and (blocks[1] == -1).all()


def test_mapped_entries_count_what_is_visible():
    rng = np.random.default_rng(1)
    candidates = np.array([[0, 5, 18], [0, 0, 0]], np.int32)
    scores = np.full((2, 24), np.nan, np.float32)
    scores[0, :23] = rng.standard_normal(23)  # block 18 has 7 visible entries: 144 .. 150
    out, number = run(scores, [23, 0], 6, position=[150, 0], candidates=candidates, used=[3, 0])
    places = largest(scores[:1, :23], 6)[0]
    assert out[0].tolist() == [int(candidates[0, p // 8] * 8 + p % 8) for p in places] and number.tolist() == [6, 0]


@pytest.mark.parametrize("rows", [6, 16, 48])
def test_a_row_is_the_same_in_any_launch(rows: int):
    rng = np.random.default_rng(rows)
    scores, n = rng.standard_normal((rows, 512)).astype(np.float32), [int(x) for x in rng.integers(1, 512, rows)]
    sequence = [-1, -1, *range(rows - 2)]
    together, at = run(scores, n, 32, sequence=sequence, keep=16), rows - 1
    alone = run(scores[at:], n[at:], 32, sequence=sequence[at:], keep=16)
    for one, many in zip(alone, together, strict=True):
        assert np.array_equal(one[0], many[at])
