"""Normed and quantised rows on the interpreter against ops.qdq and ops.norm."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.kernels import rows_q8 as family
from dsuf.kernels.stream import scale_stride
from dsuf.ops import qdq
from dsuf.ops.norm import rms_norm
from tests.kernels.helpers import bf16, execute, made, values

EPS = 1e-20


def outputs(rows: int, k: int) -> list[np.ndarray]:
    return [np.zeros((rows, k), np.uint8), np.zeros((rows, scale_stride(k)), np.uint8)]


@pytest.mark.parametrize("k", [128, 1056])
def test_normed_rows_are_quantised(k: int):
    rng = np.random.default_rng(k)
    x, g, (codes, scales) = bf16(rng, 3, k), bf16(rng, k), outputs(3, k)
    execute(made(family.make_norm, eps=EPS), [x, g, codes, scales, k], grid=(3, 1))
    normed = rms_norm(values(x), values(g), EPS)
    got = qdq.q8_decode(codes, scales[:, : k // 32])
    assert (np.abs(got - normed) <= np.abs(normed) * 2.0**-3 + 2.0**-9 * np.abs(normed).max()).all()
    exact = qdq.q8_encode(normed)
    assert (codes == exact[0]).mean() > 0.95 and (scales[:, : k // 32] == exact[1]).mean() > 0.95


def test_a_row_is_the_same_bits_alone():
    rng = np.random.default_rng(9)
    x, g, (codes, scales), alone = bf16(rng, 4, 384), bf16(rng, 384), outputs(4, 384), outputs(1, 384)
    execute(made(family.make_norm, eps=EPS), [x, g, codes, scales, 384], grid=(4, 1))
    execute(made(family.make_norm, eps=EPS), [x[2:3].copy(), g, *alone, 384], grid=(1, 1))
    assert np.array_equal(alone[0][0], codes[2]) and np.array_equal(alone[1][0], scales[2])
