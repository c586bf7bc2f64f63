"""Hyper-connections against the reference's unit vector and plain loops in float64."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dsuf.ops.mixes import MixWeights, fold, mixes, mixes_of, repeat_scale, unfold

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/tiny.json").read_text())["units"]["mixes"]


def slow_comb(logits: np.ndarray, rounds: int, eps: float) -> np.ndarray:
    """The statement of the reference for one row."""
    comb = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) + eps
    comb = comb / (comb.sum(axis=0, keepdims=True) + eps)
    for _ in range(rounds - 1):
        comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
        comb = comb / (comb.sum(axis=0, keepdims=True) + eps)
    return comb


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-7), (np.float64, 2e-7)])
def test_coefficients_of_the_reference(dtype, tolerance):
    i = np.arange(24)
    m, base = np.sin(i + 1).astype(dtype)[None], (np.cos(i) / 4).astype(dtype)
    scale = repeat_scale(np.array(GOLDEN["scale"], dtype), 4)
    found = mixes_of(m, scale, base, 4, 20, 1e-6)
    np.testing.assert_allclose(found.pre[0], GOLDEN["pre"], atol=tolerance)
    np.testing.assert_allclose(found.post[0], GOLDEN["post"], atol=2 * tolerance)
    np.testing.assert_allclose(found.comb[0], GOLDEN["comb_j_k"], atol=2 * tolerance)


@pytest.mark.parametrize("streams", [2, 3, 4, 5])
@pytest.mark.parametrize("rows", [1, 9])
def test_coefficients_for_any_number_of_streams(streams, rows):
    rng = np.random.default_rng(streams)
    x = rng.normal(size=(rows, streams, 32))
    count = (2 + streams) * streams
    fn, base = rng.normal(size=(count, streams * 32)), rng.normal(size=count)
    weights = MixWeights(np.ascontiguousarray(fn.T), repeat_scale(np.array([0.7, 1.1, 1.9]), streams), base)
    found = mixes(x, weights, 7, 1e-6, 1e-20)
    for row in range(rows):
        flat = x[row].reshape(-1)
        m = fn @ flat / np.sqrt(np.mean(flat**2) + 1e-20)
        pre = 1 / (1 + np.exp(-(m[:streams] * 0.7 + base[:streams]))) + 1e-6
        post = 2 / (1 + np.exp(-(m[streams : 2 * streams] * 1.1 + base[streams : 2 * streams])))
        logits = (m[2 * streams :] * 1.9 + base[2 * streams :]).reshape(streams, streams)
        np.testing.assert_allclose(found.pre[row], pre, rtol=1e-12)
        np.testing.assert_allclose(found.post[row], post, rtol=1e-12)
        np.testing.assert_allclose(found.comb[row], slow_comb(logits, 7, 1e-6), rtol=1e-9)


def test_fold_and_unfold_by_their_sums():
    rng = np.random.default_rng(1)
    x, pre, post = rng.normal(size=(5, 3, 8)), rng.normal(size=(5, 3)), rng.normal(size=(5, 3))
    comb, out = rng.normal(size=(5, 3, 3)), rng.normal(size=(5, 8))
    np.testing.assert_allclose(fold(x, pre), np.einsum("rj,rjd->rd", pre, x), rtol=1e-12)
    expected = np.einsum("rk,rd->rkd", post, out) + np.einsum("rjk,rjd->rkd", comb, x)
    np.testing.assert_allclose(unfold(out, x, post, comb), expected, rtol=1e-12, atol=1e-12)
