"""Log probabilities on the interpreter: the best tokens with ties, the sum, rows that ask for nothing."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.kernels import logprobs, slots
from dsuf.kernels.lang import Kernel
from dsuf.ops.sample import log_probabilities, top_logprobs
from tests.kernels.helpers import execute, made

RING = 3


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return made(logprobs.make, cluster=2, threads=128, most=8192)


def run(kernel: Kernel, logits: np.ndarray, wanted: list[int | None], step: int) -> np.ndarray:
    """uint8 [ring, rows, LOGPROB_BYTES]; slot i belongs to row i, -2 makes the row inactive."""
    state = np.concatenate([
        slots.slot_record(token=1, position=3, emitted=0, budget=9, temperature=2.0, logprobs=n) for n in wanted
    ])  # fmt: skip
    table = np.zeros((slots.FIELDS, slots.MOST_ROWS), np.int32)
    table[slots.T_SEQUENCE] = -1
    table[slots.T_SEQUENCE, : len(wanted)] = [-1 if n == -2 else i for i, n in enumerate(wanted)]
    counters = np.zeros(16, np.uint32)
    counters[slots.C_STEP] = step
    out = np.full((RING, slots.MOST_ROWS, slots.LOGPROB_BYTES), 0xEE, np.uint8)
    grid = (kernel.cluster * len(wanted), 1)
    execute(kernel, [logits, table, state, counters, out, RING, logits.shape[1]], grid=grid)
    return out


@pytest.mark.parametrize("vocabulary", [29, 1003])
def test_the_most_likely_tokens_and_any_tokens_log_probability(kernel: Kernel, vocabulary: int):
    rng = np.random.default_rng(vocabulary)
    logits = (rng.standard_normal((5, vocabulary)) * 4).astype(np.float32)
    logits[1] = rng.integers(-2, 3, vocabulary)  # ties
    logits[3:] = np.nan
    out = run(kernel, logits, [20, 7, 0, None, -2], step=7)
    for i, count in enumerate((20, 7, 0)):
        own, best = slots.top_logprobs(out[7 % RING, i], float(logits[i, 5]), count)
        want = top_logprobs(logits[i], count)
        assert [token for token, _ in best] == [token for token, _ in want]
        assert np.allclose([p for _, p in best], [p for _, p in want], atol=3e-6)
        assert abs(own - log_probabilities(logits[i])[5]) < 3e-6
    assert (out[7 % RING, 3:] == 0xEE).all() and (out[[0, 2]] == 0xEE).all()


def test_fewer_tokens_than_asked_for_and_the_real_geometry(kernel: Kernel):
    logits = np.arange(5, dtype=np.float32)[None]
    out = run(made(logprobs.make, cluster=8, threads=512, most=131072), logits, [5], step=0)
    _, best = slots.top_logprobs(out[0, 0], 0.0, 5)
    assert [token for token, _ in best] == [4, 3, 2, 1, 0]
