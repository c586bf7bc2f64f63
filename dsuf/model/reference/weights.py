"""Weights of one numerics: read from the checkpoint on first use, dequantised, transposed for `product`, and kept.

Names are the checkpoint's. `_t` marks a matrix stored transposed, [K, N]; projections of the same input are kept side
by side in one matrix. FP8 and FP4 matrices are kept in float32, which holds them exactly: in float64 numerics a product
widens them, which costs less than reading twice the bytes. Embedding, Markov embedding and Engram tables stay as
stored: only the rows in use are read.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from dsuf import formats
from dsuf.model.checkpoint import Checkpoint
from dsuf.ops.mixes import MixWeights, repeat_scale
from dsuf.ops.numerics import Numerics
from dsuf.spec import LayerRole, Spec


class TensorReader:
    """Tensors of one checkpoint as arrays of the dtype that the numerics computes in."""

    def __init__(self, checkpoint: Checkpoint, numerics: Numerics) -> None:
        self.checkpoint, self.dtype = checkpoint, numerics.dtype

    def plain(self, name: str) -> np.ndarray:
        """A BF16 or F32 tensor, shape as stored."""
        stored = self.checkpoint.raw(name)
        return (formats.bf16_to_float32(stored) if stored.dtype == np.uint16 else stored).astype(self.dtype)

    def plain_t(self, *names: str) -> np.ndarray:
        """BF16 or F32 matrices [N_i, K] -> [K, sum N_i]."""
        return _side_by_side([self.plain(name) for name in names])

    def dense_t(self, *names: str) -> np.ndarray:
        """FP8 matrices [N_i, K] -> [K, sum N_i]; names without .weight."""
        return _side_by_side([self.dense(name) for name in names])

    def dense(self, name: str) -> np.ndarray:
        """An FP8 matrix [N, K]."""
        weight, scale = self.checkpoint.raw(f"{name}.weight"), self.checkpoint.raw(f"{name}.scale")
        return formats.dequantise_fp8_blocks(weight, scale)

    def packed_t(self, *names: str) -> np.ndarray:
        """Packed FP4 matrices [N_i, K] -> [K, sum N_i]."""
        raw = self.checkpoint.raw
        return _side_by_side([formats.dequantise_fp4_rows(raw(f"{n}.weight"), raw(f"{n}.scale")) for n in names])

    def rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Some rows of a BF16 matrix [N, K]: ids int [...] -> [..., K]."""
        return formats.bf16_to_float32(self.checkpoint.raw(name)[ids]).astype(self.dtype)

    def table_rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Some rows of an FP8 table with one scale per row and 32 columns: ids int [...] -> [..., K]."""
        weight, scale = self.checkpoint.raw(f"{name}.weight")[ids], self.checkpoint.raw(f"{name}.scale")[ids]
        return formats.dequantise_fp8_rows(weight, scale).astype(self.dtype)


def _side_by_side(matrices: list[np.ndarray]) -> np.ndarray:
    """[N_i, K] each -> [K, sum N_i], in the dtype they have."""
    out = np.empty((matrices[0].shape[1], sum(m.shape[0] for m in matrices)), matrices[0].dtype)
    at = 0
    for matrix in matrices:
        out[:, at : at + matrix.shape[0]] = matrix.T
        at += matrix.shape[0]
    return out


class BlockWeights:
    """One block: a backbone layer (`layers.L.`) or a drafter stage (`mtp.M.`)."""

    def __init__(self, reader: TensorReader, spec: Spec, prefix: str, *, experts: int, indexer: bool = False) -> None:
        self._reader, self._spec, self._prefix = reader, spec, prefix
        self.routed_experts = experts  # the shared expert is number `routed_experts`
        self._has_indexer = indexer
        self.expert_reads = 0  # routed experts multiplied so far: a pass counts each that it hits once
        self._w13_t: dict[int, np.ndarray] = {}
        self._w2_t: dict[int, np.ndarray] = {}

    def _plain(self, name: str) -> np.ndarray:
        return self._reader.plain(self._prefix + name)

    @cached_property
    def attn_norm(self) -> np.ndarray:
        """[D]."""
        return self._plain("attn_norm.weight")

    @cached_property
    def ffn_norm(self) -> np.ndarray:
        """[D]."""
        return self._plain("ffn_norm.weight")

    @cached_property
    def q_norm(self) -> np.ndarray:
        """[Q]."""
        return self._plain("attn.q_norm.weight")

    @cached_property
    def kv_norm(self) -> np.ndarray:
        """[d]."""
        return self._plain("attn.kv_norm.weight")

    @cached_property
    def attn_sink(self) -> np.ndarray:
        """[H]."""
        return self._plain("attn.attn_sink")

    @cached_property
    def wq_a_wkv_t(self) -> np.ndarray:
        """[D, Q + d]: both read the attention input."""
        return self._reader.dense_t(f"{self._prefix}attn.wq_a", f"{self._prefix}attn.wkv")

    @cached_property
    def wq_b_t(self) -> np.ndarray:
        """[Q, H d], at an index source [Q, H d + index heads * index width]: both read the query latent."""
        names = ["attn.wq_b", "attn.indexer.wq_b"] if self._has_indexer else ["attn.wq_b"]
        return self._reader.dense_t(*(self._prefix + name for name in names))

    @cached_property
    def wo_a_t(self) -> np.ndarray:
        """[G, H d / G, R], block-diagonal."""
        matrix = self._reader.dense(f"{self._prefix}attn.wo_a")
        groups = matrix.reshape(self._spec.o_groups, self._spec.o_lora_rank, -1)
        return np.ascontiguousarray(groups.swapaxes(1, 2))

    @cached_property
    def wo_b_t(self) -> np.ndarray:
        """[G R, D]."""
        return self._reader.dense_t(f"{self._prefix}attn.wo_b")

    @cached_property
    def hc_attn(self) -> MixWeights:
        """Coefficients from the block's input streams."""
        return self._mix("attn")

    @cached_property
    def hc_ffn(self) -> MixWeights:
        """Coefficients from the streams after attention."""
        return self._mix("ffn")

    def _mix(self, sublayer: str) -> MixWeights:
        name = f"{self._prefix}hc_{sublayer}_"
        scale = repeat_scale(self._reader.plain(f"{name}scale"), self._spec.hc_mult)
        return MixWeights(self._reader.plain_t(f"{name}fn"), scale, self._reader.plain(f"{name}base"))

    @cached_property
    def gate_t(self) -> np.ndarray:
        """[D, E]."""
        return self._reader.plain_t(f"{self._prefix}ffn.gate.weight")

    @cached_property
    def gate_bias(self) -> np.ndarray:
        """[E], the bias of text tokens."""
        return self._plain("ffn.gate.bias")

    def w13_t(self, expert: int) -> np.ndarray:
        """[D, 2I], w1 then w3."""
        self.expert_reads += expert < self.routed_experts
        if expert not in self._w13_t:
            self._w13_t[expert] = self._expert(expert, "w1", "w3")
        return self._w13_t[expert]

    def w2_t(self, expert: int) -> np.ndarray:
        """[I, D]."""
        if expert not in self._w2_t:
            self._w2_t[expert] = self._expert(expert, "w2")
        return self._w2_t[expert]

    def _expert(self, expert: int, *matrices: str) -> np.ndarray:
        if expert == self.routed_experts:
            return self._reader.dense_t(*(f"{self._prefix}ffn.shared_experts.{m}" for m in matrices))
        return self._reader.packed_t(*(f"{self._prefix}ffn.experts.{expert}.{m}" for m in matrices))


class LayerWeights(BlockWeights):
    """A backbone layer: a block plus what its role adds."""

    def __init__(self, reader: TensorReader, spec: Spec, role: LayerRole) -> None:
        prefix = f"layers.{role.index}."
        super().__init__(reader, spec, prefix, experts=spec.n_routed_experts, indexer=role.is_index_source)
        self.role = role

    @cached_property
    def compressor_t(self) -> np.ndarray:
        """[D, d] at ratio 1, [D, 2d] (values, then gates) at higher ratios."""
        names = ["wkv", "wgate"] if self.role.ratio > 1 else ["wkv"]
        return self._reader.plain_t(*(f"{self._prefix}attn.compressor.{name}.weight" for name in names))

    @cached_property
    def compressor_norm(self) -> np.ndarray:
        """[d]."""
        return self._plain("attn.compressor.norm.weight")

    @cached_property
    def index_wk_t(self) -> np.ndarray:
        """[d, index width]."""
        return self._reader.plain_t(f"{self._prefix}attn.indexer.wk.weight")

    @cached_property
    def index_k_norm(self) -> np.ndarray:
        """[index width]."""
        return self._plain("attn.indexer.k_norm.weight")

    @cached_property
    def index_weights_t(self) -> np.ndarray:
        """[D, index heads]."""
        return self._reader.plain_t(f"{self._prefix}attn.indexer.weights_proj.weight")

    def engram_rows(self, ids: np.ndarray) -> np.ndarray:
        """Table rows: ids int [rows, columns] -> [rows, columns * width]."""
        return self._reader.table_rows(f"{self._prefix}engram.embed", ids).reshape(ids.shape[0], -1)

    @cached_property
    def engram_wkv_t(self) -> np.ndarray:
        """[columns * width, (n + 1) D]: n keys, then the value."""
        return self._reader.dense_t(f"{self._prefix}engram.wkv")

    @cached_property
    def engram_qk(self) -> np.ndarray:
        """[n, D], q_weight * k_weight."""
        return self._plain("engram.q_weight") * self._plain("engram.k_weight")


class ModelWeights:
    """Everything: `layers` and `stages` in order, and the tensors that belong to no block."""

    def __init__(self, checkpoint: Checkpoint, numerics: Numerics) -> None:
        spec = checkpoint.spec
        self._reader, self._last = TensorReader(checkpoint, numerics), f"mtp.{spec.num_nextn_predict_layers - 1}."
        self.layers = [LayerWeights(self._reader, spec, role) for role in spec.layers]
        self.stages = [
            BlockWeights(self._reader, spec, f"mtp.{m}.", experts=spec.dspark_n_routed_experts)
            for m in range(spec.num_nextn_predict_layers)
        ]

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """ids int [rows] -> [rows, D]."""
        return self._reader.rows("embed.weight", ids)

    def markov_embed(self, ids: np.ndarray) -> np.ndarray:
        """ids int [rows] -> [rows, Markov rank]."""
        return self._reader.rows(f"{self._last}markov_head.embed.weight", ids)

    @cached_property
    def norm(self) -> np.ndarray:
        """[D], before the head."""
        return self._reader.plain("norm.weight")

    @cached_property
    def head_t(self) -> np.ndarray:
        """[D, V]."""
        return self._reader.plain_t("head.weight")

    @cached_property
    def main_proj_t(self) -> np.ndarray:
        """[taps * D, D]."""
        return self._reader.dense_t("mtp.0.main_proj")

    @cached_property
    def main_norm(self) -> np.ndarray:
        """[D]."""
        return self._reader.plain("mtp.0.main_norm.weight")

    @cached_property
    def stages_wkv_t(self) -> np.ndarray:
        """[D, stages * d], wkv of all drafter stages: each makes a window row from the same input."""
        return self._reader.dense_t(*(f"mtp.{m}.attn.wkv" for m in range(len(self.stages))))

    @cached_property
    def stages_kv_norm(self) -> np.ndarray:
        """[stages, d]."""
        return np.stack([stage.kv_norm for stage in self.stages])

    @cached_property
    def draft_norm(self) -> np.ndarray:
        """[D], before the head in the drafter."""
        return self._reader.plain(f"{self._last}norm.weight")

    @cached_property
    def markov_head_t(self) -> np.ndarray:
        """[Markov rank, V]."""
        return self._reader.plain_t(f"{self._last}markov_head.head.weight")

    @cached_property
    def confidence_t(self) -> np.ndarray:
        """[D + Markov rank, 1]."""
        return self._reader.plain_t(f"{self._last}confidence_head.proj.weight")
