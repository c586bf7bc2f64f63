"""Routed and shared experts on the interpreter against ops/expert.py in float64: empty, crowded, inactive rows."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import expert_plan, pack
from dsuf.kernels import experts as family
from dsuf.kernels import gate_up as gate_up_family
from dsuf.ops import qdq
from dsuf.ops.expert import swiglu
from tests.kernels.helpers import BF16_STEP, assert_near, execute, fp4_weight, fp8_weight, values

WIDTH, INNER, EXPERTS, LIMIT = 128, 64, 5, 10.0
SCALE = 2.0**family.SHIFT


class Layer:
    """Random experts, packed and dequantised."""

    def __init__(self, rng: np.random.Generator, d: int, i: int, chip: str, experts: int = EXPERTS):
        self.d, self.i, self.chip = d, i, chip
        raw = [[fp4_weight(rng, *shape) for shape in ((i, d), (i, d), (d, i))] for _ in range(experts)]
        self.dense = [[formats.dequantise_fp4_rows(*w).astype(np.float64) for w in one] for one in raw]
        self.w13 = np.stack([gate_up_family.pack_gate_up(one[0], one[1], chip) for one in raw])
        self.w2 = np.stack([family.pack_down(one[2], chip) for one in raw])
        shared = fp8_weight(rng, 2 * i, d), fp8_weight(rng, d, i)
        both, down = (formats.dequantise_fp8_blocks(*w).astype(np.float64) for w in shared)
        self.dense.append([both[:i], both[i:], down])
        self.shared_gate_up, self.shared_down = (pack.pack_fp8(*w) for w in shared)


ROUTINGS = {
    "spread": lambda rng, rows: np.sort(rng.permuted(np.tile(np.arange(EXPERTS), (rows, 1)), axis=1)[:, :2], axis=1),
    "crowded": lambda rng, rows: np.tile([[1, 4]], (rows, 1)),
}


def run_layer(layer: Layer, x, chosen, weights, grid: int = 2):
    """x float64 [rows, d] -> its quantised values, h float64 [(k + 1) rows, i], y and shared y as bf16 bits."""
    rows, topk = chosen.shape
    exact = qdq.q8(x)
    x16 = (SCALE * exact).astype(np.float16)
    plan = expert_plan.plan_of(chosen, rows * topk)
    h = np.full(((topk + 1) * rows, layer.i), np.nan, np.float16)
    y, shared_y = np.full((rows * topk, layer.d), 0x7FC0, np.uint16), np.full((rows, layer.d), 0x7FC0, np.uint16)
    shape = {"d": layer.d, "i": layer.i, "chip": layer.chip, "pairs": 144}
    all_weights = weights.astype(np.float32).ravel()
    gate_up = gate_up_family.make_gate_up(**shape)
    arguments = [layer.w13, layer.shared_gate_up, x16, plan, all_weights, h, rows, topk, LIMIT]
    execute(gate_up, arguments, grid=(grid, 1))
    down = family.make_down(warps=2, team=1, stages=2, **shape)
    execute(down, [layer.w2, layer.shared_down, h, plan, y, shared_y, rows, topk], grid=(grid, 1))
    return exact, h.astype(np.float64) / SCALE, y, shared_y


def check_pair(layer: Layer, expert: int, x, weight: float, h, y) -> None:
    w1, w3, w2 = layer.dense[expert]
    hidden = swiglu(formats.round_bf16(np.concatenate([w1 @ x, w3 @ x])).astype(float), LIMIT) * weight
    # one step of e4m3 is 2^-3 of the value; the group's largest value sets the step of the small ones
    step = np.abs(hidden.reshape(-1, 32)).max(1).repeat(32) * 2.0**-8
    assert (np.abs(h - hidden) <= 2.0**-4 * np.abs(hidden) * 1.02 + step).all()
    assert np.array_equal(h, qdq.q8(h))  # codes times their scales
    assert_near(values(y), w2 @ h, BF16_STEP, 1e-3 * np.abs(w2 @ h).max())


def check_layer(layer: Layer, exact, h, y, shared_y, chosen, weights) -> None:
    rows, topk = chosen.shape
    for row in range(rows):
        for slot, expert in enumerate(chosen[row]):
            pair = row * topk + slot
            if expert < 0:
                assert (y[pair] == 0x7FC0).all() and np.isnan(h[pair]).all()  # nothing is written
                continue
            check_pair(layer, expert, exact[row], weights[row, slot], h[pair], y[pair])
        check_pair(layer, len(layer.dense) - 1, exact[row], 1.0, h[rows * topk + row], shared_y[row])


@pytest.mark.parametrize(
    ("chip", "rows", "routing"),
    [("sm_90a", 1, "spread"), ("sm_90a", 7, "spread"), ("sm_103a", 7, "spread"), ("sm_90a", 10, "crowded")],
)
def test_experts_agree_with_the_op(chip: str, rows: int, routing: str):
    rng = np.random.default_rng(rows)
    layer = Layer(rng, WIDTH, INNER, chip)
    chosen = ROUTINGS[routing](rng, rows).astype(np.int32)
    if rows == 7:
        chosen[3] = -1
    weights = rng.uniform(0.1, 1.5, chosen.shape)
    exact, *out = run_layer(layer, rng.standard_normal((rows, WIDTH)), chosen, weights)
    check_layer(layer, exact, *out, chosen, weights.astype(np.float32))


def test_wider_experts_with_full_chunks():
    rng = np.random.default_rng(3)
    layer = Layer(rng, 1024, 64, "sm_90a")
    chosen = np.array([[0, 4], [2, 4]], np.int32)
    weights = rng.uniform(0.1, 1.5, chosen.shape)
    exact, *out = run_layer(layer, rng.standard_normal((2, 1024)), chosen, weights)
    check_layer(layer, exact, *out, chosen, weights.astype(np.float32))


def test_a_row_is_the_same_bits_in_any_crowd_and_on_any_number_of_blocks():
    rng = np.random.default_rng(9)
    layer = Layer(rng, WIDTH, INNER, "sm_90a")
    x, weights = rng.standard_normal((16, WIDTH)), rng.uniform(0.1, 1.5, (16, 2))
    chosen = np.tile(np.array([[1, 3]], np.int32), (16, 1))
    chosen[2:] = np.where(rng.random((14, 1)) < 0.5, [[1, 3]], [[0, 1]])
    seen = {}
    for rows, grid in ((1, 1), (6, 3), (16, 2)):
        _, _, y, shared_y = run_layer(layer, x[:rows], chosen[:rows], weights[:rows], grid)
        seen[rows] = y, shared_y
    for rows in (1, 6):
        assert np.array_equal(seen[rows][0], seen[16][0][: 2 * rows])
        assert np.array_equal(seen[rows][1], seen[16][1][:rows])


def test_a_plan_of_more_words_than_a_block_has_threads():
    rng, rows, experts = np.random.default_rng(6), 40, 48
    layer = Layer(rng, 64, 64, "sm_90a", experts)
    chosen = np.sort(rng.permuted(np.tile(np.arange(experts), (rows, 1)), axis=1)[:, :2], axis=1).astype(np.int32)
    assert expert_plan.plan_of(chosen, 2 * rows)[0] * expert_plan.PLAN_RECORD > gate_up_family.THREADS
    weights = rng.uniform(0.1, 1.5, chosen.shape)
    exact, *out = run_layer(layer, rng.standard_normal((rows, 64)), chosen, weights)
    check_layer(layer, exact, *out, chosen, weights.astype(np.float32))


def test_small_and_large_rows():
    rng = np.random.default_rng(4)
    layer = Layer(rng, WIDTH, INNER, "sm_90a")
    x = rng.standard_normal((2, WIDTH)) * np.array([[0.05], [100.0]])
    chosen, weights = np.array([[0, 1], [2, 3]], np.int32), np.ones((2, 2))
    exact, *out = run_layer(layer, x, chosen, weights)
    check_layer(layer, exact, *out, chosen, weights)
