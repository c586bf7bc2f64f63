"""Glue kernels of a chunk on the interpreter: product order, quantisation, activation, rings, the router."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import chunk_route, chunk_rows
from dsuf.kernels.chunk_rows import SPAN
from dsuf.ops import expert, qdq
from dsuf.ops.route import route
from tests.kernels.helpers import assert_near, bf16, execute, made, values
from tests.kernels.test_chunk_attend import natural


@pytest.mark.parametrize("k", [64, 2112])
def test_rows_are_quantised_into_product_order(k: int):
    x, out = bf16(np.random.default_rng(k), 3, k), np.full((3, k), 0x7FC0, np.uint16)
    execute(made(chunk_rows.make_q8), [x, out, k], grid=(-(-k // SPAN), 3))
    assert np.array_equal(values(natural(out)), qdq.q8(values(x)))


def test_the_shared_expert_is_activated():
    i, limit = 96, 0.5
    y, out = bf16(np.random.default_rng(1), 2, 2 * i), np.full((2, i), 0x7FC0, np.uint16)
    execute(made(chunk_rows.make_swiglu), [y, out, i, limit], grid=(1, 2))
    want = formats.round_bf16(expert.swiglu(values(y), limit)).astype(float)
    got = values(natural(out))
    assert (got == qdq.q8(want)).mean() > 0.97  # a step of bf16 before quantisation may fall either way
    assert_near(got, want, 2.0**-3, 2.0**-6 * np.abs(want).max())


def test_rows_move_between_rings():
    rng = np.random.default_rng(2)
    source, target = rng.integers(0, 1 << 30, (7, 132), np.uint32), np.zeros((10, 132), np.uint32)
    execute(made(chunk_rows.make_move), [source, 7, target, 10, 18, 4 * 132, 2 * 131], grid=(5, 1))
    want = np.zeros_like(target)
    for position in range(18, 23):
        want[position % 10, :131] = source[position % 7, :131]
    assert np.array_equal(target, want)


@pytest.mark.parametrize(("experts", "k"), [(16, 4), (128, 6), (384, 6)])
def test_routing_agrees_with_the_op(experts: int, k: int):
    rng, rows = np.random.default_rng(experts), 11
    z = rng.standard_normal((rows, experts)).astype(np.float32)
    z[3] = np.round(z[3])  # ties
    bias, image = rng.standard_normal((2, experts)).astype(np.float32) * 0.1, np.array([0, 1] * 5 + [0], np.int32)
    bias[:, : experts // 2] = 0
    chosen, weights = np.full((rows, k), -5, np.int32), np.full((rows, k), np.nan, np.float32)
    execute(made(chunk_route.make), [z, bias, image, chosen, weights, rows, experts, k, 1.5], grid=(2, 1))
    for row in range(rows):
        want, shares = route(z[row : row + 1].astype(float), bias[image[row]].astype(float), k, 1.5)
        assert np.array_equal(chosen[row], want[0])
        assert_near(weights[row].astype(float), shares[0], 1e-5)
