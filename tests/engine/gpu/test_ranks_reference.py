"""What ranks do, in the reference: heads and experts of all of them add up to the layer, before anything is rounded."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dsuf.engine.gpu.ranks import Rank
from dsuf.model.checkpoint import Checkpoint
from dsuf.model.reference.attention import output, queries
from dsuf.model.reference.block import quantised
from dsuf.model.reference.model import ReferenceModel
from dsuf.model.synthetic import write_checkpoint
from dsuf.ops.attend import attend
from dsuf.ops.expert import experts_sum
from dsuf.ops.product import product
from dsuf.ops.rope import frequencies
from dsuf.ops.route import route
from tests.engine.gpu.small import small_config

ROWS, LAYER = 5, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "ckpt"
    write_checkpoint(small_config(o_groups=4), folder)
    with Checkpoint.open(folder) as checkpoint:
        yield ReferenceModel.load(checkpoint, "qdq64")


@pytest.fixture
def x(model):
    return np.random.default_rng(1).standard_normal((ROWS, model.spec.hidden_size))


def phases(spec):
    forward = np.exp(1j * np.arange(ROWS)[:, None] * frequencies(spec, True))
    return SimpleNamespace(forward=forward, inverse=forward.conj())


def heads_of(rank, weights, spec):
    """A rank's heads as weights of an attention that has no others."""
    mine = rank.share(spec)
    width, groups = mine.num_attention_heads * spec.head_dim, mine.o_groups
    h, q, g = (slice(rank.index * n, (rank.index + 1) * n) for n in (mine.num_attention_heads, width, groups))
    y = slice(rank.index * groups * spec.o_lora_rank, (rank.index + 1) * groups * spec.o_lora_rank)
    return mine, SimpleNamespace(
        wq_a_wkv_t=weights.wq_a_wkv_t, q_norm=weights.q_norm, kv_norm=weights.kv_norm, wq_b_t=weights.wq_b_t[:, q],
        attn_sink=weights.attn_sink[h], wo_a_t=weights.wo_a_t[g], wo_b_t=weights.wo_b_t[y],
    )  # fmt: skip


def attended(x, weights, spec, numerics):
    """Every row sees all rows' window latents."""
    q, k, _ = queries(x, weights, phases(spec), spec, numerics)
    keys = np.broadcast_to(k, (ROWS, *k.shape))
    o = attend(q, keys, np.zeros((ROWS, ROWS)), weights.attn_sink, numerics)
    return output(o, weights, phases(spec), spec, numerics)


@pytest.mark.parametrize("count", [2, 4])
def test_heads_of_all_ranks_add_up(model, x, count):
    weights, spec, numerics = model.weights.layers[LAYER], model.spec, model.numerics
    whole = attended(x, weights, spec, numerics)
    total = np.zeros_like(whole)
    for index in range(count):
        mine, part = heads_of(Rank(index, count), weights, spec)
        assert mine.num_attention_heads == spec.num_attention_heads // count
        total += attended(x, part, mine, numerics)
    assert np.abs(total - whole).max() < 1e-12 * np.abs(whole).max()


@pytest.mark.parametrize("count", [2, 4])
def test_experts_of_all_ranks_and_the_shared_one_add_up(model, x, count):
    weights, spec, numerics = model.weights.layers[LAYER], model.spec, model.numerics
    chosen, shares = route(
        product(x, weights.gate_t), weights.gate_bias, spec.num_experts_per_tok, spec.routed_scaling_factor
    )
    every = np.concatenate([chosen, np.full((ROWS, 1), weights.routed_experts)], axis=1)
    factors = np.concatenate([shares, np.ones((ROWS, 1))], axis=1)

    def summed(factors):
        args = (weights.w13_t, weights.w2_t, spec.swiglu_limit, numerics)
        return experts_sum(quantised(x, numerics), every, factors, *args)

    whole, total = summed(factors), summed(np.where(every == weights.routed_experts, 1.0, 0.0))
    for index in range(count):
        first, own = Rank(index, count).part(spec.n_routed_experts)
        assert own == spec.n_routed_experts // count
        total += summed(np.where((every >= first) & (every < first + own), factors, 0.0))
    assert np.abs(total - whole).max() < 1e-12 * np.abs(whole).max()


@pytest.mark.parametrize("count", [2, 4])
def test_rows_of_the_head_stand_beside_each_other(model, x, count):
    head, parts = model.weights.head_t, []
    for index in range(count):
        first, own = Rank(index, count).part(model.spec.vocab_size, 16)
        parts.append(product(x, head[:, first : first + own]))
    assert np.abs(np.concatenate(parts, axis=1) - product(x, head)).max() < 1e-12
