"""The router on the interpreter: choices with ties, weights, inactive rows, image rows, and the plan of groups."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import expert_plan, pack, route
from dsuf.kernels.lang import Kernel
from dsuf.ops.product import product
from dsuf.ops.route import route as op
from tests.kernels.helpers import assert_near, bf16, execute, values

K, OTHER_K = 128, 1280  # one part, two parts
LIMITS = {"most_experts": route.MOST_EXPERTS, "most_chosen": route.MOST_CHOSEN, "rows": route.MOST_ROWS}


@cache
def kernel(k: int) -> Kernel:
    return route.make(k=k, **LIMITS)


def launch(
    weight: np.ndarray, x: np.ndarray, bias: np.ndarray, topk: int, image: np.ndarray, sequence: np.ndarray,
    own: range | None = None,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """experts, weights, plan of the `own` experts and parts of the scores of x under a gate."""
    (rows, k), count = x.shape, len(weight)
    own = own or range(count)
    chosen, weights = np.full((rows, topk), -9, np.int32), np.zeros((rows, topk), np.float32)
    plan = np.full(expert_plan.plan_bytes(-(-rows // 8) * 8 * topk) // 4, -7, np.int32)
    plan[expert_plan.PLAN_ARRIVED] = 0
    counter, parts = np.array([7], np.uint32), np.full((route.parts_of(k), rows, count), np.nan, np.float32)
    execute(kernel(k), [pack.pack_bf16(weight), x, parts, bias, image, sequence, chosen, weights, plan, counter, rows,
                        count, topk, 1.5, own.start, len(own)], grid=route.grid(k, count))  # fmt: skip
    assert counter[0] == 7 + len(set(chosen.ravel().tolist()) & set(own)) and plan[expert_plan.PLAN_ARRIVED] == 0
    return chosen, weights, plan, parts


def run(z: np.ndarray, bias: np.ndarray, topk: int, image: np.ndarray, sequence: np.ndarray, own: range | None = None):
    """The router on scores z, which are bf16 values: row r of x picks column r of the gate."""
    weight, x = np.zeros((z.shape[1], K), np.float32), np.eye(len(z), K, dtype=np.float32)
    weight[:, : len(z)] = z.T
    x[sequence < 0] = np.nan
    bits = (formats.float32_to_bf16(v) for v in (weight, x))
    return launch(*bits, bias, topk, image, sequence, own)[:3]


def expected_groups(chosen: np.ndarray) -> list[list[int]]:
    flat, groups = chosen.ravel(), []
    for expert in sorted(set(flat.tolist()) - {-1}):
        pairs = np.flatnonzero(flat == expert).tolist()
        groups += [[expert, len(pairs[at : at + 8]), *pairs[at : at + 8]] for at in range(0, len(pairs), 8)]
    return groups


@pytest.mark.parametrize(("rows", "count", "topk"), [(1, 16, 4), (2, 8, 2), (7, 128, 3), (16, 384, 6), (48, 384, 6)])
def test_router_agrees_with_the_op_and_groups_its_pairs(rows: int, count: int, topk: int):
    rng = np.random.default_rng(count + rows)
    z = formats.round_bf16((rng.standard_normal((rows, count)) * 4).astype(np.float32))
    z[0, :] = np.float32(-30)  # softplus near 1e-13: no underflow, and all equal: lowest numbers win
    bias = rng.standard_normal((2, count)).astype(np.float32)
    bias[0, :] *= rows > 1
    image, sequence = np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32)
    if rows > 2:
        image[2], sequence[1] = 1, -1
    chosen, weights, plan = run(z, bias, topk, image, sequence)
    for row in range(rows):
        if sequence[row] < 0:
            assert (chosen[row] == -1).all()
            continue
        want, want_weights = op(z[row : row + 1].astype(float), bias[image[row]].astype(float), topk, 1.5)
        assert chosen[row].tolist() == want[0].tolist(), row
        assert_near(weights[row].astype(float), want_weights[0], 2e-6)
    groups = expected_groups(chosen)
    records = plan[expert_plan.PLAN_HEAD :].reshape(-1, expert_plan.PLAN_RECORD)
    assert plan[0] == len(groups)
    assert [r[: 2 + r[1]].tolist() for r in records[: len(groups)]] == groups


def test_a_rank_plans_its_own_experts_and_chooses_as_all_do():
    rng, rows, count, topk = np.random.default_rng(5), 9, 16, 4
    z, bias = rng.standard_normal((rows, count)).astype(np.float32), np.zeros((2, count), np.float32)
    image, sequence = np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32)
    every, shares, _ = run(z, bias, topk, image, sequence)
    for own in (range(8), range(8, 16)):
        chosen, weights, plan = run(z, bias, topk, image, sequence, own)
        assert np.array_equal(chosen, every) and np.array_equal(weights, shares)
        groups = expected_groups(np.where(np.isin(every, own), every - own.start, -1))
        records = plan[expert_plan.PLAN_HEAD :].reshape(-1, expert_plan.PLAN_RECORD)
        assert [r[: 2 + r[1]].tolist() for r in records[: plan[0]]] == groups


def test_a_crowded_expert_fills_several_groups():
    z = np.zeros((48, 16), np.float32)
    z[:, [3, 9]] = 8
    quiet = np.zeros((2, 16), np.float32)
    chosen, _, plan = run(z, quiet, 2, np.zeros(48, np.int32), np.arange(48, dtype=np.int32))
    assert (chosen == [3, 9]).all() and plan[0] == 12


@pytest.mark.parametrize(("rows", "count", "k"), [(1, 16, K), (7, 32, K), (3, 24, OTHER_K), (17, 40, OTHER_K)])
def test_scores_come_in_parts_that_add_up_to_the_product(rows: int, count: int, k: int):
    rng = np.random.default_rng(rows)
    weight, x = bf16(rng, count, k), bf16(rng, rows, k)
    quiet, image = np.zeros((2, count), np.float32), np.zeros(rows, np.int32)
    chosen, weights, _, parts = launch(weight, x, quiet, 2, image, np.arange(rows, dtype=np.int32))
    z = product(values(x), values(weight).T)
    assert_near(parts.astype(np.float64).sum(0), z, 1e-5, 1e-4)
    want, want_weights = op(z, quiet[0].astype(np.float64), 2, 1.5)
    assert np.array_equal(chosen, want)
    assert_near(weights.astype(np.float64), want_weights, 1e-4)


def test_a_row_is_routed_with_the_same_bits_in_any_company():
    rng = np.random.default_rng(2)
    weight, x, bias = bf16(rng, 40, OTHER_K), bf16(rng, 48, OTHER_K), rng.standard_normal((2, 40)).astype(np.float32)
    image, sequence = np.arange(48, dtype=np.int32) % 2, np.zeros(48, np.int32)
    seen = {n: launch(weight, x[:n].copy(), bias, 3, image[:n].copy(), sequence[:n].copy()) for n in (1, 6, 16, 48)}
    for n in (1, 6, 16):
        assert all(np.array_equal(few, many[:n]) for few, many in zip(seen[n][:2], seen[48][:2], strict=True))
        assert np.array_equal(seen[n][3], seen[48][3][:, :n])
