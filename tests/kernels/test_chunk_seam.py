"""The seam of a chunk's rows on the interpreter against ops.mixes, ops.norm and ops.qdq in float64."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import chunk_seam as family
from dsuf.ops import mixes as op
from dsuf.ops import qdq
from dsuf.ops.norm import rms_norm
from tests.kernels.helpers import assert_near, bf16, execute, made, values
from tests.kernels.test_chunk_attend import natural

ROUNDS, HC_EPS, EPS = 20, 1e-6, 1e-20


def mixed(rng: np.random.Generator, rows: int, d: int) -> tuple[np.ndarray, list, np.ndarray, np.ndarray]:
    """Random streams; scale and base; fn; the coefficients that two kernels make of them."""
    streams, fn = bf16(rng, rows, 4, d), (rng.standard_normal((24, 4 * d)) * 0.05).astype(np.float32)
    scale, base = rng.uniform(0.5, 2, 3).astype(np.float32), rng.standard_normal(24).astype(np.float32)
    sums = np.full((family.SPLITS, rows, family.SUMS), np.nan, np.float32)
    execute(made(family.make_mix), [streams, fn, sums, 4 * d, rows], grid=(family.SPLITS, -(-rows // family.MIX_ROWS)))
    out = np.full((rows, 24), np.nan, np.float32)
    kernel = made(family.make_coefficients, rounds=ROUNDS, hc_eps=HC_EPS, eps=EPS)
    execute(kernel, [sums, scale, base, out, 1 / (4 * d), rows], grid=(-(-rows // family.COEFFICIENT_ROWS), 1))
    return streams, [scale, base], fn, out


@pytest.mark.parametrize(("rows", "d"), [(1, 128), (130, 128), (3, 1280)])
def test_coefficients_agree_with_the_op(rows: int, d: int):
    streams, (scale, base), fn, out = mixed(np.random.default_rng(rows), rows, d)
    weights = op.MixWeights(fn.T.astype(float), op.repeat_scale(scale.astype(float), 4), base.astype(float))
    want = op.mixes(values(streams), weights, ROUNDS, HC_EPS, EPS)
    assert_near(out[:, :4].astype(float), want.pre, 1e-5, 1e-6)
    assert_near(out[:, 4:8].astype(float), want.post, 1e-5, 1e-6)
    assert_near(out[:, 8:].reshape(rows, 4, 4).astype(float), want.comb, 1e-5, 1e-5)


def test_a_fresh_embedding_is_taken_as_it_is():
    out = np.full((3, 24), np.nan, np.float32)
    execute(made(family.make_coefficients, rounds=ROUNDS, hc_eps=HC_EPS, eps=EPS), [0, 0, 0, out, 0.0, 3], grid=(1, 1))
    assert np.array_equal(out, np.eye(1, 24).repeat(3, 0))


@pytest.mark.parametrize(("slots", "d"), [(0, 128), (2, 128), (6, 1280), (-1, 128)])
def test_a_seam_agrees_with_the_ops(slots: int, d: int):
    rng, rows = np.random.default_rng(slots + 5), 3
    parts, last, before, g = bf16(rng, rows * max(slots, 1), d), bf16(rng, rows, d), bf16(rng, rows, 4, d), bf16(rng, d)
    coefficients = rng.uniform(0.1, 1, (rows, 24)).astype(np.float32)
    streams, tapped = before.copy(), np.zeros((rows, d), np.uint16)
    q, x = np.full((rows, d), 0x7FC0, np.uint16), np.full((rows, d), 0x7FC0, np.uint16)
    execute(made(family.make_seam, eps=EPS), [parts, slots, last, streams, coefficients, g, q, x, tapped, d, 1 / d],
            grid=(rows, 1))  # fmt: skip
    want = values(before)
    if slots >= 0:
        o = values(last) + (values(parts).reshape(rows, slots, d).sum(1) if slots else 0)
        c = coefficients.astype(float)
        want = op.unfold(formats.round_bf16(o).astype(float), want, c[:, 4:8], c[:, 8:].reshape(rows, 4, 4))
        assert_near(values(streams), want, 2.0**-8, 1e-6)
    else:
        assert np.array_equal(streams, before)
    got = values(streams)
    assert_near(values(tapped), got.mean(1), 2.0**-8, 1e-6)
    folded = formats.round_bf16(op.fold(got, coefficients[:, :4].astype(float))).astype(np.float64)
    assert_near(values(natural(x)), rms_norm(folded, values(g), EPS), 2.0**-7, 2.0**-9)
    codes, scales = qdq.q8_encode(values(natural(x)))
    assert np.array_equal(values(natural(q)), qdq.q8_decode(codes, scales).astype(float))


def test_a_row_does_not_depend_on_its_chunk():
    rng = np.random.default_rng(9)
    streams, fn = bf16(rng, 150, 4, 128), (rng.standard_normal((24, 512)) * 0.05).astype(np.float32)
    found = []
    for rows in (streams, streams[137:141].copy()):
        sums = np.full((family.SPLITS, len(rows), family.SUMS), np.nan, np.float32)
        grid = (family.SPLITS, -(-len(rows) // family.MIX_ROWS))
        execute(made(family.make_mix), [rows, fn, sums, 512, len(rows)], grid=grid)
        found.append(sums[:, :, :25])
    assert np.array_equal(found[0][:, 137:141], found[1])
