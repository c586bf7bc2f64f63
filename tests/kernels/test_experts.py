"""FP4 experts on the interpreter against ops/expert.py in float64: empty, shared and crowded experts, inactive rows."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import experts as family
from dsuf.kernels import pack
from dsuf.kernels.stream import scale_stride
from dsuf.ops import qdq
from dsuf.ops.expert import swiglu
from tests.kernels.helpers import BF16_STEP, assert_near, execute, fp4_weight, q8_rows, values

WIDTH, INNER, EXPERTS, LIMIT = 128, 64, 5, 10.0


class Layer:
    """Random experts, packed and dequantised."""

    def __init__(self, rng: np.random.Generator, d: int, i: int, chip: str, most: int = 256):
        self.raw = [[fp4_weight(rng, *shape) for shape in ((i, d), (i, d), (d, i))] for _ in range(EXPERTS)]
        self.dense = [[formats.dequantise_fp4_rows(*w).astype(np.float64) for w in one] for one in self.raw]
        w13 = [pack.interleave(*(pack.pack_fp4(*w, chip, most) for w in one[:2]), 2) for one in self.raw]
        self.w13, self.w2 = np.stack(w13), np.stack([pack.pack_fp4(*one[2], chip) for one in self.raw])


ROUTINGS = {
    "spread": lambda rng, rows: np.sort(rng.permuted(np.tile(np.arange(EXPERTS), (rows, 1)), axis=1)[:, :2], axis=1),
    "crowded": lambda rng, rows: np.tile([[1, 4]], (rows, 1)),
}


def run_layer(layer: Layer, x, chosen, weights, tile: int, chip: str, most: int = 256):
    rows, topk = chosen.shape
    d, i = x.shape[1], layer.w2.shape[2] * pack.chunk_width(layer.dense[0][2].shape[1])
    codes, scales, exact = q8_rows(x, tile)
    pairs = tile * topk
    plan = family.plan_of(chosen, pairs)
    h, sh = np.full((pairs, i), 0x7F, np.uint8), np.full((pairs, scale_stride(i)), 255, np.uint8)
    y = np.full((pairs, d), 0x7FC0, np.uint16)
    shape = {"d": d, "i": i, "topk": 3, "rows": tile, "chip": chip, "warps": 2, "stages": 2}
    all_weights = np.zeros(pairs, np.float32)
    all_weights[: rows * topk] = weights.ravel()
    gate_up = family.make_gate_up(most=most, **shape)
    execute(gate_up, [layer.w13, codes, scales, plan, all_weights, h, sh, rows, topk, LIMIT], grid=(2, 1))
    execute(family.make_down(**shape), [layer.w2, h, sh, plan, y, rows, topk], grid=(2, 1))
    return exact, h, sh, y


def check_layer(layer: Layer, exact, h, sh, y, chosen, weights) -> None:
    topk = chosen.shape[1]
    for row, row_experts in enumerate(chosen):
        for slot, expert in enumerate(row_experts):
            pair = row * topk + slot
            if expert < 0:
                assert (y[pair] == 0x7FC0).all() and (h[pair] == 0x7F).all()  # nothing is written
                continue
            w1, w3, w2 = layer.dense[expert]
            hidden = swiglu(formats.round_bf16(np.concatenate([w1 @ exact[row], w3 @ exact[row]])).astype(float), LIMIT)
            hidden = hidden * weights[row, slot]
            got = qdq.q8_decode(h[pair], sh[pair, : h.shape[1] // 32]).astype(np.float64)
            # one step of e4m3 is 2^-3 of the value; the group's largest value sets the step of the small ones
            step = np.abs(hidden.reshape(-1, 32)).max(1).repeat(32) * 2.0**-8
            assert (np.abs(got - hidden) <= 2.0**-4 * np.abs(hidden) * 1.02 + step).all()
            assert_near(values(y[pair]), w2 @ got, BF16_STEP, 1e-3 * np.abs(w2 @ got).max())


@pytest.mark.parametrize("chip", ["sm_90a", "sm_103a"])
@pytest.mark.parametrize(("rows", "tile"), [(1, 8), (7, 8), (16, 16)])
def test_experts_agree_with_the_op(chip: str, rows: int, tile: int):
    rng = np.random.default_rng(rows)
    layer = Layer(rng, WIDTH, INNER, chip)
    chosen = ROUTINGS["spread"](rng, rows).astype(np.int32)
    if rows == 7:
        chosen[3] = -1
    weights = rng.uniform(0.1, 1.5, chosen.shape).astype(np.float32)
    exact, *out = run_layer(layer, rng.standard_normal((rows, WIDTH)), chosen, weights, tile, chip)
    check_layer(layer, exact, *out, chosen, weights)


def test_wider_experts_with_full_chunks():
    rng = np.random.default_rng(3)
    layer = Layer(rng, 1024, 64, "sm_90a", most=128)
    chosen = np.array([[0, 4], [2, 4]], np.int32)
    weights = rng.uniform(0.1, 1.5, chosen.shape).astype(np.float32)
    exact, *out = run_layer(layer, rng.standard_normal((2, 1024)), chosen, weights, 8, "sm_90a", most=128)
    check_layer(layer, exact, *out, chosen, weights)


def test_a_row_is_the_same_bits_in_any_crowd():
    rng = np.random.default_rng(9)
    layer = Layer(rng, WIDTH, INNER, "sm_90a")
    x, weights = rng.standard_normal((16, WIDTH)), rng.uniform(0.1, 1.5, (16, 2)).astype(np.float32)
    chosen = np.tile(np.array([[1, 3]], np.int32), (16, 1))
    chosen[2:] = np.where(rng.random((14, 1)) < 0.5, [[1, 3]], [[0, 1]])
    seen = {}
    for rows, tile in ((1, 8), (6, 8), (16, 16)):
        _, _, _, y = run_layer(layer, x[:rows], chosen[:rows], weights[:rows], tile, "sm_90a")
        seen[rows] = y
    assert np.array_equal(seen[1][:2], seen[16][:2]) and np.array_equal(seen[6][:12], seen[16][:12])
