"""Injected drafts on the interpreter: the recording, kept as often as asked, and nothing beyond it."""

from __future__ import annotations

import numpy as np

from dsuf.kernels import inject
from dsuf.kernels.slots import FIELDS, MOST_ROWS, T_POSITION, T_SEQUENCE
from tests.kernels.helpers import execute, made


def run(position: np.ndarray, slot: np.ndarray, keep: float, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Drafts of 48 rows whose own ones are 7, and the recording [2, 100] that starts at position 10."""
    table = np.zeros((FIELDS, MOST_ROWS), np.int32)
    table[T_SEQUENCE], table[T_POSITION] = slot, position
    recorded = np.arange(200, dtype=np.int32).reshape(2, 100) + 100
    drafts = np.full(MOST_ROWS, 7, np.int32)
    execute(made(inject.make), [table, drafts, recorded, 100, 10, 100, seed, int(keep * (2**32 - 1)), 300], grid=(1, 1))
    return drafts, recorded


def test_kept_drafts_are_the_recording():
    drafts, recorded = run(np.arange(20, 20 + MOST_ROWS), np.arange(MOST_ROWS) % 2, 1.0)
    at = np.arange(20, 20 + MOST_ROWS) + 1 - 10
    assert np.array_equal(drafts, recorded[np.arange(MOST_ROWS) % 2, at])


def test_rows_without_a_sequence_and_positions_outside_keep_what_they_have():
    slot, position = np.zeros(MOST_ROWS, np.int32), np.full(MOST_ROWS, 8)
    slot[0], position[0], position[1], position[2] = -1, 30, 108, 109
    drafts, recorded = run(position, slot, 1.0)
    assert drafts[0] == 7 and drafts[1] == recorded[0, 99] and drafts[2] == 7 and (drafts[3:] == 7).all()


def test_so_many_are_kept():
    kept = 0
    for seed in range(20):
        drafts, recorded = run(np.arange(20, 20 + MOST_ROWS), np.zeros(MOST_ROWS, np.int32), 0.8, seed)
        want = recorded[0, np.arange(20, 20 + MOST_ROWS) - 9]
        same = drafts == want
        assert (same | (drafts == want + 1)).all()
        kept += same.sum()
    assert abs(kept / (20 * MOST_ROWS) - 0.8) < 0.05
