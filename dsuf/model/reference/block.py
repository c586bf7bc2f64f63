"""One block and the walk through the layers, as reference model.md 2.2, 2.3, 5 and 6.2 state them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dsuf.model.reference.attention import attention, quantised
from dsuf.model.reference.batch import Batch
from dsuf.model.reference.sparse import Selection, write_entries
from dsuf.model.reference.weights import BlockWeights, LayerWeights
from dsuf.ops import engram as engram_op
from dsuf.ops.expert import experts_sum
from dsuf.ops.mixes import fold, mixes, unfold
from dsuf.ops.norm import rms_norm
from dsuf.ops.numerics import Numerics
from dsuf.ops.product import product
from dsuf.ops.route import route
from dsuf.spec import Spec


@dataclass
class Stream:
    """What goes from layer to layer: X [rows, n, D], `pre` [rows, n] that folds X into the next sublayer's input."""

    x: np.ndarray
    pre: np.ndarray

    @classmethod
    def of(cls, embedded: np.ndarray, spec: Spec) -> Stream:
        """Embedding rows [rows, D] -> equal streams, pre = (1, 0, 0, ...)."""
        rows, width = embedded.shape
        pre = np.zeros((rows, spec.hc_mult), embedded.dtype)
        pre[:, 0] = 1
        return cls(np.broadcast_to(embedded[:, None, :], (rows, spec.hc_mult, width)).copy(), pre)


def block(
    stream: Stream,
    weights: BlockWeights,
    attend_rows: Callable[[np.ndarray], np.ndarray],
    experts_per_tok: int,
    spec: Spec,
    numerics: Numerics,
) -> Stream:
    """One block; `attend_rows` maps the attention input [rows, D] to the attention output [rows, D]."""
    eps, constants = spec.rms_norm_eps, (spec.hc_sinkhorn_iters, spec.hc_eps, spec.rms_norm_eps)
    attn = mixes(stream.x, weights.hc_attn, *constants)
    u = numerics.round(fold(stream.x, stream.pre))
    o = attend_rows(numerics.round(rms_norm(u, weights.attn_norm, eps)))
    x = numerics.round(unfold(o, stream.x, attn.post, attn.comb))
    ffn = mixes(x, weights.hc_ffn, *constants)
    v = numerics.round(fold(x, attn.pre))  # folded by the coefficients of the sublayer before, not by its own
    m = moe(numerics.round(rms_norm(v, weights.ffn_norm, eps)), weights, experts_per_tok, spec, numerics)
    return Stream(numerics.round(unfold(m, x, ffn.post, ffn.comb)), ffn.pre)


def moe(x: np.ndarray, weights: BlockWeights, experts_per_tok: int, spec: Spec, numerics: Numerics) -> np.ndarray:
    """[rows, D] -> [rows, D]: the routed experts of each row, then the shared one."""
    z = product(x, weights.gate_t)
    experts, shares = route(z, weights.gate_bias, experts_per_tok, spec.routed_scaling_factor)
    every = np.full((x.shape[0], experts_per_tok + 1), weights.routed_experts)  # the last column: the shared expert
    every[:, :-1] = experts
    every_share = np.ones(every.shape, shares.dtype)
    every_share[:, :-1] = shares
    total = experts_sum(
        quantised(x, numerics), every, every_share, weights.w13_t, weights.w2_t, spec.swiglu_limit, numerics
    )
    return numerics.round(total)


def engram(x: np.ndarray, table_rows: np.ndarray, weights: LayerWeights, spec: Spec, numerics: Numerics) -> np.ndarray:
    """X [rows, n, D] and the table rows int [rows, columns] of each token -> X [rows, n, D]."""
    rows, n, width = x.shape
    e = numerics.round(weights.engram_rows(table_rows))
    kv = numerics.round(product(quantised(e, numerics), weights.engram_wkv_t))
    keys, value = kv[:, : n * width].reshape(rows, n, width), kv[:, n * width :]
    gate = engram_op.gate(x, keys, weights.engram_qk, spec.rms_norm_eps)
    return numerics.round(x + gate * value[:, None, :])


class Layers:
    """The backbone walked over one batch; holds what passes between layers beside the streams."""

    def __init__(
        self,
        weights: list[LayerWeights],
        spec: Spec,
        numerics: Numerics,
        batch: Batch,
        engram_rows: list[np.ndarray],
    ) -> None:
        self.weights, self.spec, self.numerics = weights, spec, numerics
        self.batch, self.engram_rows = batch, engram_rows  # table rows int [rows, columns] of each Engram layer
        self.chosen = Selection()
        self.taps: list[np.ndarray] = []  # stream means [rows, D] at the entry of the tap layers met so far

    def enter(self, layer: int, stream: Stream) -> Stream:
        """What stands before the block: Engram, then the drafter's tap."""
        weights = self.weights[layer]
        if weights.role.engram is not None:
            table_rows = self.engram_rows[weights.role.engram]
            stream = Stream(engram(stream.x, table_rows, weights, self.spec, self.numerics), stream.pre)
        if weights.role.is_tap:
            self.taps.append(self.numerics.round(np.add.reduce(stream.x, axis=1) / self.spec.hc_mult))
        return stream

    def run(self, layer: int, stream: Stream, *, compress: bool = True) -> Stream:
        """The block of one layer, entered before. `compress` False leaves the compressed cache as it is."""
        weights, spec, numerics = self.weights[layer], self.spec, self.numerics

        def attend_rows(x: np.ndarray) -> np.ndarray:
            return attention(x, weights, self.batch, self.chosen, spec, numerics, compress=compress)

        return block(stream, weights, attend_rows, spec.num_experts_per_tok, spec, numerics)

    def compress(self, layer: int, stream: Stream) -> None:
        """Only the entries of a kv source, from its entered stream: all that a prompt token needs of the decoder."""
        weights, numerics = self.weights[layer], self.numerics
        u = numerics.round(fold(stream.x, stream.pre))
        x = numerics.round(rms_norm(u, weights.attn_norm, self.spec.rms_norm_eps))
        write_entries(x, weights, self.batch, self.spec, numerics)
