"""Experts of a prefill chunk on the interpreter against ops/expert.py in float64: empty, small and crowded experts."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import grouped, pack, plan
from dsuf.kernels.gate_up import GATE_UP_CHUNK
from dsuf.ops.expert import swiglu
from tests.kernels.helpers import BF16_STEP, assert_near, execute, fp4_weight, made, values
from tests.kernels.test_dense import ORDER, decoded

EXPERTS, LIMIT = 5, 10.0
WIDTHS = (48, 64)


class Layer:
    """Random experts, packed and dequantised."""

    def __init__(self, rng: np.random.Generator, d: int, i: int, chip: str = "sm_90a"):
        self.d, self.i, self.chip = d, i, chip
        self.chunks = pack.chunk_width(d, GATE_UP_CHUNK), pack.chunk_width(i)
        raw = [[fp4_weight(rng, *shape) for shape in ((i, d), (i, d), (d, i))] for _ in range(EXPERTS)]
        self.dense = [[formats.dequantise_fp4_rows(*w).astype(np.float64) for w in one] for one in raw]
        w13 = [pack.interleave(*(pack.pack_fp4(*w, chip, GATE_UP_CHUNK) for w in one[:2]), 2) for one in raw]
        self.w13, self.w2 = np.stack(w13), np.stack([pack.pack_fp4(*one[2], chip) for one in raw])


def planned(chosen: np.ndarray, first: int = 0, own: int = EXPERTS) -> tuple[np.ndarray, np.ndarray]:
    """Run the plan kernel."""
    offsets = np.full(own + 1, -7, np.int32)
    order = np.full(chosen.size, -7, np.int32)
    execute(made(plan.make), [chosen, offsets, order, chosen.size, own, first], grid=(own, 1))
    return offsets, order


def routing(rng: np.random.Generator, rows: int, kind: str) -> np.ndarray:
    """int32 [rows, 2], experts ascending."""
    if kind == "crowded":  # expert 1 has every row, 4 all but one
        chosen = np.tile(np.array([[1, 4]], np.int32), (rows, 1))
        chosen[rows // 2] = [0, 1]
    else:  # expert 3 has none
        every = np.tile(np.array([0, 1, 2, 4], np.int32), (rows, 1))
        chosen = np.sort(rng.permuted(every, axis=1)[:, :2], axis=1)
    if rows > 5:
        chosen[3] = -1
    return np.ascontiguousarray(chosen)


@pytest.mark.parametrize("pairs", [1, 2, 127, 1500])
def test_the_plan_sorts_pairs_by_expert(pairs: int):
    rng = np.random.default_rng(pairs)
    chosen = rng.integers(-1, EXPERTS, pairs).astype(np.int32)
    chosen[chosen == 3] = 2
    offsets, order = planned(chosen)
    expected = np.flatnonzero(chosen >= 0)[np.argsort(chosen[chosen >= 0], kind="stable")]
    assert np.array_equal(order[: len(expected)], expected) and (order[len(expected) :] == -7).all()
    assert np.array_equal(offsets, [int((chosen[chosen >= 0] < e).sum()) for e in range(EXPERTS + 1)])


def test_the_plan_of_some_experts_leaves_the_others_out():
    chosen = np.random.default_rng(0).integers(-1, EXPERTS, 600).astype(np.int32)
    every, order = planned(chosen)
    offsets, mine = planned(chosen, 2, 2)
    assert np.array_equal(offsets, every[2:5] - every[2])
    assert np.array_equal(mine[: offsets[-1]], order[every[2] : every[4]]) and (mine[offsets[-1] :] == -7).all()


def run_layer(layer: Layer, x: np.ndarray, chosen: np.ndarray, weights: np.ndarray, grid: int = 2):
    """-> hidden rows by pair (values), y by pair (bits)."""
    bits, exact = decoded(x)
    offsets, order = planned(chosen)
    pairs, top = chosen.size, chosen.shape[1]
    h, y = np.full((pairs, layer.i), 0x7FC0, np.uint16), np.full((pairs, layer.d), 0x7FC0, np.uint16)
    sizes = [layer.d, layer.i]
    gate_up = made(grouped.make_gate_up, widths=WIDTHS, stages=4, chip=layer.chip)
    arguments = [layer.w13, bits, offsets, order, weights, h, EXPERTS, top, *sizes, LIMIT, layer.chunks[0]]
    execute(gate_up, arguments, grid=(grid, 1))
    down = made(grouped.make_down, widths=WIDTHS, stages=4, chip=layer.chip)
    execute(down, [layer.w2, h, offsets, order, y, EXPERTS, *sizes, layer.chunks[1]], grid=(grid, 1))
    hidden = np.full((pairs, layer.i), np.nan)
    live = order[: offsets[-1]]
    natural = np.empty_like(h)
    natural.reshape(pairs, -1, 32)[:, :, ORDER] = h.reshape(pairs, -1, 32)
    hidden[live] = values(natural)[: len(live)]
    return exact, hidden, y


def check_layer(layer: Layer, exact, hidden, y, chosen, weights) -> None:
    top = chosen.shape[1]
    for row, row_experts in enumerate(chosen):
        for slot, expert in enumerate(row_experts):
            pair = row * top + slot
            if expert < 0:
                assert (y[pair] == 0x7FC0).all()  # nothing is written
                continue
            w1, w3, w2 = layer.dense[expert]
            raw = formats.round_bf16(np.concatenate([w1 @ exact[row], w3 @ exact[row]])).astype(float)
            expected = swiglu(raw, LIMIT) * weights[row, slot]
            step = np.abs(expected.reshape(-1, 32)).max(1).repeat(32) * 2.0**-8
            assert (np.abs(hidden[pair] - expected) <= 2.0**-4 * np.abs(expected) * 1.02 + step).all()
            assert_near(values(y[pair]), w2 @ hidden[pair], BF16_STEP, 1e-3 * np.abs(w2 @ hidden[pair]).max())


@pytest.mark.parametrize("chip", ["sm_90a", "sm_103a"])
@pytest.mark.parametrize(("rows", "kind"), [(1, "spread"), (7, "spread"), (90, "spread"), (120, "crowded")])
def test_experts_agree_with_the_op(chip: str, rows: int, kind: str):
    rng = np.random.default_rng(rows)
    layer = Layer(rng, 128, 64, chip)
    chosen = routing(rng, rows, kind)
    weights = rng.uniform(0.1, 1.5, chosen.shape).astype(np.float32)
    out = run_layer(layer, rng.standard_normal((rows, layer.d)), chosen, weights)
    check_layer(layer, *out, chosen, weights)


def test_real_chunks_and_an_odd_number_of_items():
    rng = np.random.default_rng(2)
    layer = Layer(rng, 1024, 192)
    chosen = np.array([[0, 4], [2, 4]], np.int32)
    weights = rng.uniform(0.1, 1.5, chosen.shape).astype(np.float32)
    out = run_layer(layer, rng.standard_normal((2, layer.d)), chosen, weights, grid=1)
    check_layer(layer, *out, chosen, weights)


def test_a_wide_second_product():
    rng = np.random.default_rng(3)
    layer = Layer(rng, 64, 1024)
    chosen = np.array([[0, 4], [2, 4]], np.int32)
    weights = rng.uniform(0.1, 1.5, chosen.shape).astype(np.float32)
    out = run_layer(layer, rng.standard_normal((2, layer.d)), chosen, weights, grid=1)
    check_layer(layer, *out, chosen, weights)


def test_a_row_is_the_same_bits_in_any_crowd():
    rng = np.random.default_rng(9)
    layer = Layer(rng, 128, 64)
    x = rng.standard_normal((120, layer.d))
    chosen = routing(rng, 120, "crowded")
    weights = rng.uniform(0.1, 1.5, chosen.shape).astype(np.float32)
    few, some, many = (run_layer(layer, x[:n], chosen[:n], weights[:n])[2] for n in (1, 40, 120))
    assert np.array_equal(few, many[:2]) and np.array_equal(some, many[:80])
