"""The seam between sublayers on the interpreter against ops.mixes, ops.norm and ops.qdq in float64."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import mixes as family
from dsuf.kernels.stream import scale_stride
from dsuf.ops import mixes as op
from dsuf.ops import qdq
from dsuf.ops.norm import rms_norm
from tests.kernels.helpers import assert_near, bf16, execute, made, values

D, ROUNDS, HC_EPS, EPS = 128, 20, 1e-6, 1e-20


class Case:
    """Random streams, outputs and weights of one seam, with every buffer that a launch writes."""

    def __init__(self, rng: np.random.Generator, rows: int, slots: int, *, tap: bool = False):
        self.rows, self.slots, self.tap = rows, slots, tap
        self.parts, self.last = bf16(rng, rows * max(slots, 1), D), bf16(rng, rows, D)
        self.streams = bf16(rng, rows, 4, D)
        if slots == family.FIRST:
            self.streams[:] = self.streams[:, :1]
        self.before, self.after = self.streams.copy(), np.full_like(self.streams, 0x7FC0)
        self.scale, self.base = rng.uniform(0.5, 2, 3).astype(np.float32), rng.standard_normal(24).astype(np.float32)
        self.fn = (rng.standard_normal((24, 4 * D)) * 0.05).astype(np.float32)
        self.previous = (rng.standard_normal((24, 4 * D)) * 0.05).astype(np.float32)  # fn of the seam before
        self.g = bf16(rng, D)
        flat = values(self.before).reshape(rows, -1)
        self.sums_in = np.zeros((rows, family.SUMS), np.float32)
        self.sums_in[:, :24], self.sums_in[:, 24] = flat @ self.previous.T, (flat * flat).sum(1)
        self.x, self.codes = np.zeros((rows, D), np.uint16), np.zeros((rows, D), np.uint8)
        self.scales = np.zeros((rows, scale_stride(D)), np.uint8)
        self.sums, self.tapped = np.zeros((rows, family.SUMS), np.float32), np.zeros((rows, D), np.uint16)
        self.folded, self.wide = np.zeros((rows, D), np.uint16), np.zeros((rows, D), np.float16)

    def run(self) -> None:
        kernel = made(family.make, d=D, cluster=4, splits=2, most_slots=4, rounds=ROUNDS, hc_eps=HC_EPS, eps=EPS)
        wanted = (self.tapped, self.folded, self.wide) if self.tap else (0, 0, 0)
        execute(kernel, [self.parts, self.slots, self.last, self.streams, self.after, self.sums_in, self.scale,
                         self.base, self.fn, self.g, self.x, self.codes, self.scales, self.sums, *wanted, self.rows],
                grid=(family.grid(D, self.rows), 1))  # fmt: skip

    @property
    def result(self) -> np.ndarray:
        """The streams after the seam."""
        return self.after if self.slots >= 0 else self.streams

    def expected_streams(self) -> tuple[np.ndarray, np.ndarray]:
        """New streams and the pre that folds them, unrounded."""
        streams = values(self.before)
        if self.slots == family.FIRST:
            return streams, np.tile([1.0, 0, 0, 0], (self.rows, 1))
        weights = op.MixWeights(self.previous.T.astype(float), op.repeat_scale(self.scale.astype(float), 4), self.base)
        mixed = op.mixes(streams, weights, ROUNDS, HC_EPS, EPS)
        out = values(self.last)
        if self.slots > 0:
            out = out + values(self.parts).reshape(self.rows, self.slots, D).sum(1)
        return op.unfold(formats.round_bf16(out).astype(float), streams, mixed.post, mixed.comb), mixed.pre


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize(("slots", "tap"), [(0, False), (2, True), (4, False), (family.FIRST, False)])
def test_a_seam_agrees_with_the_ops(rows: int, slots: int, tap: bool):
    case = Case(np.random.default_rng(rows + slots + 2), rows, slots, tap=tap)
    case.run()
    assert np.array_equal(case.streams, case.before)
    streams, pre = case.expected_streams()
    got = values(case.result)
    assert_near(got, streams, 2.0**-8, 1e-5)  # one rounding, and the coefficients' float32 error
    # what follows is compared from the streams as the kernel stored them
    folded = formats.round_bf16(op.fold(got, pre)).astype(np.float64)
    normed = rms_norm(folded, values(case.g), EPS)
    assert_near(values(case.x), normed, 2.0**-7, 2.0**-9)  # two roundings, the first may fall the other way
    codes, scales = qdq.q8_encode(values(case.x))
    assert np.array_equal(case.codes, codes) and np.array_equal(case.scales[:, : D // 32], scales)
    flat = got.reshape(rows, -1)
    assert_near(case.sums[:, :24].astype(float), flat @ case.fn.T.astype(float), 1e-5, 1e-4)
    assert_near(case.sums[:, 24].astype(float), (flat * flat).sum(1), 1e-5)
    if tap:
        assert_near(values(case.tapped), got.mean(1), 2.0**-8)
        assert_near(values(case.folded), folded, 2.0**-8, 1e-5)
        assert np.array_equal(case.wide.astype(float), 16.0 * qdq.q8_decode(codes, scales))


def test_after_engram_streams_are_only_folded():
    case = Case(np.random.default_rng(5), 2, family.FOLDED)
    case.run()
    assert np.array_equal(case.streams, case.before) and (case.after == 0x7FC0).all()
    _, pre = case.expected_streams()
    folded = formats.round_bf16(op.fold(values(case.before), pre)).astype(np.float64)
    assert_near(values(case.x), rms_norm(folded, values(case.g), EPS), 2.0**-7, 2.0**-9)
    flat = values(case.before).reshape(2, -1)
    assert_near(case.sums[:, :24].astype(float), flat @ case.fn.T.astype(float), 1e-5, 1e-4)


def test_coefficients_agree_with_sinkhorn_in_float64():
    case = Case(np.random.default_rng(3), 2, 0)
    case.last[:] = 0  # the streams that come out are comb applied to those that went in
    case.before[:] = case.streams[:] = formats.float32_to_bf16(np.ones((2, 4, D)) * np.array([1, 2, 4, 8])[:, None])
    flat = values(case.before).reshape(2, -1)
    case.sums_in[:, :24], case.sums_in[:, 24] = flat @ case.previous.T, (flat * flat).sum(1)
    m = case.sums_in[:, :24].astype(float) / np.sqrt((flat * flat).mean(1, keepdims=True))
    mixed = op.mixes_of(m, op.repeat_scale(case.scale.astype(float), 4), case.base.astype(float), 4, ROUNDS, HC_EPS)
    case.run()
    expected = np.einsum("rjk,j->rk", mixed.comb, [1.0, 2, 4, 8])
    assert_near(values(case.after)[:, :, 0], expected, 2.0**-8)


@pytest.mark.parametrize("rows", [6, 16, 48])
def test_a_row_is_the_same_bits_in_any_launch(rows: int):
    rng = np.random.default_rng(rows)
    whole, one = Case(rng, rows, 2), Case(rng, 1, 2)
    for name in ("scale", "base", "fn", "previous", "g"):
        setattr(one, name, getattr(whole, name))
    at = rows - 3
    one.parts, one.sums_in = whole.parts[2 * at : 2 * at + 2].copy(), whole.sums_in[at : at + 1].copy()
    one.last, one.streams = whole.last[at : at + 1].copy(), whole.streams[at : at + 1].copy()
    whole.parts[: 2 * at - 2] = whole.last[: at - 1] = whole.streams[: at - 1] = 0x7FC0  # what inactive rows may hold
    whole.run()
    one.run()
    for name in ("after", "x", "codes", "scales", "sums"):
        assert np.array_equal(getattr(one, name)[0], getattr(whole, name)[at]), name
