"""Greedy choice on the interpreter: ties, masks, a vocabulary that is no multiple of anything, inactive rows."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.kernels import choose
from tests.kernels.helpers import execute


@pytest.mark.parametrize("vocabulary", [37, 1024, 20011])
@pytest.mark.parametrize("masked", [False, True])
def test_the_largest_allowed_logit_wins_and_the_lowest_token_among_equals(vocabulary: int, masked: bool):
    rng, rows = np.random.default_rng(vocabulary), 3
    logits = rng.integers(-9, 3, (rows, vocabulary)).astype(np.float32)  # many ties
    logits[0] = -np.abs(logits[0]) - 1
    allowed = rng.random((rows, vocabulary)) < 0.3 if masked else np.ones((rows, vocabulary), bool)
    bits = np.zeros((rows, -(-vocabulary // 32) * 32), np.uint8)
    bits[:, :vocabulary] = allowed
    mask = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    sequence, token = np.array([4, -1, 0], np.int32), np.full(rows, -7, np.int32)
    parts = np.zeros((rows, choose.SPLITS, 2), np.uint32)
    argument = mask if masked else 0
    arguments = [logits, argument, sequence, parts, vocabulary]
    execute(choose.make_parts(), arguments, grid=(choose.SPLITS, rows))
    execute(choose.make_finish(), [parts, sequence, token], grid=(rows, 1))
    want = np.argmax(np.where(allowed, logits, -np.inf), axis=1)
    assert token.tolist() == [want[0], -7, want[2]]
