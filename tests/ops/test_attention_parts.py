"""Attention, compressor and RMS norm against loops in float64."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.ops.attend import attend
from dsuf.ops.compress import completed, pool, visible
from dsuf.ops.norm import rms_norm
from dsuf.ops.numerics import NUMERICS
from dsuf.ops.product import grouped_product, product


def test_attention_by_its_formula_with_masked_slots():
    rng = np.random.default_rng(2)
    q, keys, sink = rng.normal(size=(3, 4, 8)), rng.normal(size=(3, 6, 8)), rng.normal(size=4) * 3
    real = rng.random((3, 6)) < 0.5
    real[:, 2] = True
    out = attend(q, keys, np.where(real, 0, -np.inf), sink, NUMERICS["qdq64"])
    for row in range(3):
        for head in range(4):
            weights = [np.exp(q[row, head] @ keys[row, t] / np.sqrt(8)) for t in range(6)]
            numerator = sum(w * keys[row, t] for t, w in enumerate(weights) if real[row, t])
            denominator = sum(w for t, w in enumerate(weights) if real[row, t]) + np.exp(sink[head])
            np.testing.assert_allclose(out[row, head], numerator / denominator, rtol=1e-12)


def test_a_huge_sink_leaves_nothing_and_a_tiny_one_everything():
    q, keys, bias = np.ones((1, 2, 4)), np.ones((1, 3, 4)), np.zeros((1, 3))
    out = attend(q, keys, bias, np.array([500.0, -500.0]), NUMERICS["qdq64"])
    np.testing.assert_allclose(out[0], [[0] * 4, [1] * 4], atol=1e-12)


@pytest.mark.parametrize("ratio", [1, 2, 5])
def test_pooling_is_a_softmax_over_the_tokens_of_a_group_for_each_channel(ratio):
    rng = np.random.default_rng(3)
    kv, gate = rng.normal(size=(4, ratio, 6)), rng.normal(size=(4, ratio, 6)) * 20
    shares = np.exp(gate) / np.exp(gate).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(pool(kv, gate), (shares * kv).sum(axis=1), rtol=1e-10)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_an_entry_is_completed_once_and_seen_from_then_on(ratio):
    entries = [entry for first in range(0, 60, 5) for entry in completed(first, 5, ratio)]
    assert entries == list(range(60 // ratio))
    for position in range(30):
        assert visible(np.array(position), ratio) == sum(1 for j in range(99) if (j + 1) * ratio - 1 <= position)


def test_norm_uses_an_epsilon_of_1e_20():
    x = np.full((1, 4), 1e-9)
    np.testing.assert_allclose(rms_norm(x, np.ones(4), 1e-20), x / np.sqrt(1e-18 + 1e-20), rtol=1e-12)
    assert not rms_norm(np.zeros((2, 4), np.float32), np.ones(4, np.float32), 1e-20).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("width", "columns"), [(24, 17), (128, 640), (640, 24), (515, 1)])
def test_a_row_of_a_product_has_the_same_bits_alone_and_among_others(dtype, width, columns):
    rng = np.random.default_rng(4)
    x, weight_t = rng.normal(size=(48, width)).astype(dtype), rng.normal(size=(width, columns)).astype(dtype)
    together = product(x, weight_t)
    np.testing.assert_allclose(together, x.astype(np.float64) @ weight_t, rtol=1e-3, atol=1e-3)
    for row in range(48):
        np.testing.assert_array_equal(product(x[row : row + 1], weight_t)[0], together[row])
        np.testing.assert_array_equal(product(x[row:], weight_t)[0], together[row])


def test_the_grouped_product_is_block_diagonal():
    rng = np.random.default_rng(5)
    x, weights = rng.normal(size=(9, 3, 16)), rng.normal(size=(3, 16, 5))
    expected = np.einsum("rgk,gkn->rgn", x, weights).reshape(9, 15)
    np.testing.assert_allclose(grouped_product(x, weights), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(grouped_product(x[3:4], weights)[0], grouped_product(x, weights)[3])
