"""Router and experts against loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dsuf.ops.expert import Dispatch, experts_sum, swiglu
from dsuf.ops.numerics import NUMERICS
from dsuf.ops.qdq import q8
from dsuf.ops.route import route


def test_the_bias_chooses_and_the_unbiased_score_weighs():
    rng = np.random.default_rng(1)
    z, bias = rng.normal(size=(5, 12)) * 3, rng.normal(size=12)
    experts, weights = route(z, bias, 4, 1.5)
    for row in range(5):
        s = [math.sqrt(math.log1p(math.exp(v))) for v in z[row]]
        chosen = sorted(sorted(range(12), key=lambda e: -(s[e] + bias[e]))[:4])
        assert experts[row].tolist() == chosen
        total = sum(s[e] for e in chosen)
        np.testing.assert_allclose(weights[row], [1.5 * s[e] / total for e in chosen], rtol=1e-12)


def test_equal_scores_take_the_lowest_expert():
    assert route(np.zeros((1, 6)), np.zeros(6), 3, 1.0)[0].tolist() == [[0, 1, 2]]


def test_very_negative_logits_neither_overflow_nor_vanish():
    _, weights = route(np.full((1, 4), -60, np.float32), np.zeros(4, np.float32), 2, 1.5)
    np.testing.assert_allclose(weights, 0.75, rtol=1e-5)


def test_swiglu_clamps_both_sides_of_up_and_one_side_of_gate():
    gate, up = np.array([-30.0, 2.0, 30.0]), np.array([-30.0, 5.0, 30.0])
    g, u = np.minimum(gate, 10), np.clip(up, -10, 10)
    np.testing.assert_allclose(swiglu(np.concatenate([gate, up]), 10), g / (1 + np.exp(-g)) * u, rtol=1e-12)


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_pairs_keep_their_own_slot_in_whole_tiles_of_one_expert(rows):
    experts = np.sort(np.random.default_rng(rows).permuted(np.tile(np.arange(9), (rows, 1)), axis=1)[:, :4], axis=1)
    dispatch = Dispatch.of(experts)
    assert len(set(dispatch.slots.ravel().tolist())) == experts.size
    expert_of = {}
    for expert, first, end in dispatch.groups:
        expert_of.update(dict.fromkeys(range(8 * first, 8 * end), expert))
    assert len(expert_of) == 8 * dispatch.tiles
    assert [[expert_of[slot] for slot in row] for row in dispatch.slots.tolist()] == experts.tolist()
    assert [group[0] for group in dispatch.groups] == sorted(set(experts.ravel().tolist()))


@pytest.mark.parametrize("name", ["exact32", "qdq64"])
def test_the_sum_over_experts_by_loops(name):
    numerics, rng = NUMERICS[name], np.random.default_rng(6)
    w13 = rng.normal(size=(5, 64, 64)).astype(numerics.dtype) / 8
    w2 = rng.normal(size=(5, 32, 64)).astype(numerics.dtype) / 8
    x = q8(rng.normal(size=(11, 64))).astype(numerics.dtype)
    experts = np.sort(rng.permuted(np.tile(np.arange(5), (11, 1)), axis=1)[:, :3], axis=1)
    weights = rng.random((11, 3)).astype(numerics.dtype)
    found = experts_sum(x, experts, weights, w13.__getitem__, w2.__getitem__, 0.5, numerics)
    for row in range(11):
        total = np.zeros(64)
        for expert, weight in zip(experts[row], weights[row], strict=True):
            gate, up = np.split(x[row].astype(np.float64) @ w13[expert], 2)
            gate, up = np.minimum(gate, 0.5), np.clip(up, -0.5, 0.5)
            hidden = gate / (1 + np.exp(-gate)) * up * weight
            total += (q8(hidden) if numerics.quantise else hidden) @ w2[expert]
        np.testing.assert_allclose(found[row], total, rtol=2e-4, atol=1e-5)
        alone = experts_sum(
            x[row : row + 1],
            experts[row : row + 1],
            weights[row : row + 1],
            w13.__getitem__,
            w2.__getitem__,
            0.5,
            numerics,
        )
        np.testing.assert_array_equal(alone[0], found[row])
