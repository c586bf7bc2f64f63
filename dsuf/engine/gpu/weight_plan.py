"""What of a checkpoint becomes which device buffer: names, packed layout, bytes, kind, and each rank's share.

    layout   buffer                                              made from
    plain    the tensors as stored, one after the other          norms, float32 vectors, tables that are looked up in
    fp8      pack.pack_fp8 of the matrices, stacked along N      dense projections
    bf16     pack.pack_bf16 of the matrices, stacked along N     router, compressor, head
    w13      for each expert interleave(w1, w3) in fp4           routed experts
    w2       for each expert pack.pack_fp4                       routed experts
    qk       float32 q_weight * k_weight                         Engram's gate

Split over R ranks: attention by heads (rows of wq_b, sinks, groups of wo_a, columns of wo_b), routed experts by number,
the head by rows, Engram tables by rows; the rest, indexer and shared expert with it, is whole on every rank. What
cannot be split into tiles of a kernel stays whole (ranks.Rank says what that is).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dsuf.engine.gpu.ranks import Rank
from dsuf.kernels import pack
from dsuf.kernels.gate_up import GATE_UP_CHUNK
from dsuf.spec import Spec

Layout = Literal["plain", "fp8", "bf16", "w13", "w2", "qk"]
Split = Literal["rows", "columns", "groups", "experts"]
PAIR_TILES = 2  # gate tiles beside as many up tiles, as gate_up.py reads them


@dataclass(frozen=True)
class Part:
    """One device buffer. `tensors` are checkpoint names, without .weight / .scale for quantised ones."""

    owner: str  # "layers.3", "mtp.0", or "" for the model's own
    name: str  # attribute of the owner in Weights
    kind: str  # of the ledger
    layout: Layout
    tensors: tuple[str, ...]
    n: int  # rows of all matrices together, or bytes for plain
    k: int = 1
    experts: int = 0  # of this rank
    first: int = 0  # expert, row, column or (plain) byte with which this rank's share begins
    split: Split | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        n, k = self.n, self.k
        if self.layout == "plain":
            return n
        if self.layout == "qk":
            return 4 * n * k
        if self.layout == "bf16":
            return -(-n // pack.ROWS) * (k // pack.chunk_width(k, pack.BF16_CHUNK)) * pack.bf16_chunk_bytes(k)
        if self.layout == "fp8":
            return n // pack.ROWS * (k // pack.chunk_width(k)) * pack.fp8_chunk_bytes(k)
        most = GATE_UP_CHUNK if self.layout == "w13" else pack.FP8_CHUNK
        return self.experts * (n // pack.ROWS) * (k // pack.chunk_width(k, most)) * pack.fp4_chunk_bytes(k, most)


def plan(spec: Spec, *, rank: int = 0, ranks: int = 1) -> list[Part]:
    """All buffers of a rank, Engram tables included, in the order of the checkpoint."""
    one, width = Rank(rank, ranks), spec.hidden_size
    head = Part("", "head", "head", "bf16", ("head.weight",), spec.vocab_size, width)
    parts = [
        Part("", "embed", "embedding", "plain", ("embed.weight",), 2 * spec.vocab_size * width),
        _cut(head, one, one.share(spec).vocab_size),
        Part("", "norm", "dense", "plain", ("norm.weight",), 2 * width),
    ]
    for layer in range(spec.num_hidden_layers):
        parts += _block(spec, f"layers.{layer}", "", spec.n_routed_experts, one)
        parts += _sources(spec, layer)
        parts += _engram(spec, layer, one)
    for stage in range(spec.num_nextn_predict_layers):
        parts += _block(spec, f"mtp.{stage}", "drafter ", spec.dspark_n_routed_experts, one)
    return parts + list(_drafter(spec))


def bytes_by_kind(parts: list[Part]) -> dict[str, int]:
    """Sum of the buffers of each kind."""
    total: dict[str, int] = {}
    for part in parts:
        total[part.kind] = total.get(part.kind, 0) + part.nbytes
    return total


def _cut(part: Part, rank: Rank, mine: int, field: str = "n", split: Split = "rows") -> Part:
    """The rank's `mine` rows (columns, experts) of a part, where that is not all of them."""
    if mine == getattr(part, field):
        return part
    return replace(part, **{field: mine, "first": rank.index * mine, "split": split})


def _block(spec: Spec, owner: str, prefix: str, experts: int, rank: Rank) -> Iterator[Part]:
    """What every layer and every drafter stage has."""
    width, q, d, mine = spec.hidden_size, spec.q_lora_rank, spec.head_dim, rank.share(spec)
    heads, inner = spec.num_attention_heads * d, spec.moe_intermediate_size
    mid, mine_mid = spec.o_groups * spec.o_lora_rank, mine.o_groups * spec.o_lora_rank
    dense, routed = prefix + "dense", prefix + "experts"

    def plain(name: str, nbytes: int, *tensors: str) -> Part:
        return Part(owner, name, dense, "plain", tuple(f"{owner}.{t}" for t in tensors), nbytes)

    def fp8(name: str, n: int, k: int, *tensors: str) -> Part:
        return Part(owner, name, dense, "fp8", tuple(f"{owner}.{t}" for t in tensors), n, k)

    yield fp8("wq_a_wkv", q + d, width, "attn.wq_a", "attn.wkv")
    yield plain("q_norm", 2 * q, "attn.q_norm.weight")
    yield plain("kv_norm", 2 * d, "attn.kv_norm.weight")
    yield _cut(fp8("wq_b", heads, q, "attn.wq_b"), rank, mine.num_attention_heads * d)
    yield _cut(fp8("wo_a", mid, heads // spec.o_groups, "attn.wo_a"), rank, mine_mid, split="groups")
    yield _cut(fp8("wo_b", width, mid, "attn.wo_b"), rank, mine_mid, "k", "columns")
    yield _cut(plain("attn_sink", 4 * spec.num_attention_heads, "attn.attn_sink"), rank, 4 * mine.num_attention_heads)
    yield plain("attn_norm", 2 * width, "attn_norm.weight")
    yield plain("ffn_norm", 2 * width, "ffn_norm.weight")
    for part in ("attn", "ffn"):
        rows = spec.hc_mix_rows
        yield plain(f"hc_{part}_fn", 4 * rows * spec.hc_mult * width, f"hc_{part}_fn")
        yield plain(f"hc_{part}_base", 4 * rows, f"hc_{part}_base")
        yield plain(f"hc_{part}_scale", 12, f"hc_{part}_scale")
    yield Part(owner, "gate", dense, "bf16", (f"{owner}.ffn.gate.weight",), experts, width)
    yield plain("gate_bias", 8 * experts, "ffn.gate.bias", "ffn.gate.bias_vl")
    expert, own = f"{owner}.ffn.experts", rank.part(experts)[1]
    for name, layout, n, k in (("experts_w13", "w13", 2 * inner, width), ("experts_w2", "w2", width, inner)):
        yield _cut(Part(owner, name, routed, layout, (expert,), n, k, experts), rank, own, "experts", "experts")
    yield fp8("shared_gate_up", 2 * inner, width, "ffn.shared_experts.w1", "ffn.shared_experts.w3")
    yield fp8("shared_down", width, inner, "ffn.shared_experts.w2")


def _sources(spec: Spec, layer: int) -> Iterator[Part]:
    """Compressor and index key of a kv source, index queries of an index source."""
    role, owner, width, d = spec.layers[layer], f"layers.{layer}", spec.hidden_size, spec.head_dim
    attn, di = f"{owner}.attn.", spec.index_head_dim
    if role.is_kv_source:
        names = ("wkv", "wgate") if role.ratio > 1 else ("wkv",)
        tensors = tuple(f"{attn}compressor.{name}.weight" for name in names)
        yield Part(owner, "compressor", "dense", "bf16", tensors, d * len(names), width)
        yield Part(owner, "compressor_norm", "dense", "plain", (f"{attn}compressor.norm.weight",), 2 * d)
        yield Part(owner, "index_wk", "dense", "plain", (f"{attn}indexer.wk.weight",), 2 * di * d)
        yield Part(owner, "index_k_norm", "dense", "plain", (f"{attn}indexer.k_norm.weight",), 2 * di)
    if role.is_index_source:
        heads = spec.index_n_heads
        yield Part(owner, "index_wq_b", "dense", "fp8", (f"{attn}indexer.wq_b",), heads * di, spec.q_lora_rank)
        yield Part(owner, "index_weights", "dense", "bf16", (f"{attn}indexer.weights_proj.weight",), heads, width)


def _engram(spec: Spec, layer: int, rank: Rank) -> Iterator[Part]:
    ordinal, owner, width = spec.layers[layer].engram, f"layers.{layer}", spec.hidden_size
    if ordinal is None:
        return
    gathered, columns = spec.engram_columns * spec.engram_head_dim, spec.engram_head_dim
    rows = spec.engram_num_embeddings[ordinal]
    first, mine = row_share(rows, rank.index, rank.count)
    split: Split | None = "rows" if rank.count > 1 else None
    table = f"{owner}.engram.embed"
    for name, tensor, size in (("engram_table", "weight", columns), ("engram_table_scales", "scale", columns // 32)):
        tensors = (f"{table}.{tensor}",)
        yield Part(owner, name, "engram tables", "plain", tensors, mine * size, first=first * size, split=split)
    yield Part(owner, "engram_wkv", "dense", "fp8", (f"{owner}.engram.wkv",), width * (spec.hc_mult + 1), gathered)
    tensors = (f"{owner}.engram.q_weight", f"{owner}.engram.k_weight")
    yield Part(owner, "engram_qk", "dense", "qk", tensors, spec.hc_mult, width)


def row_share(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """(first, count) of a table's rows that a rank holds: equal shares, the last one what is left."""
    each = -(-rows // ranks)
    return rank * each, max(0, min(each, rows - rank * each))


def _drafter(spec: Spec) -> Iterator[Part]:
    """What only the first stage and the last stage have; attributes of the model."""
    width, rank, vocabulary = spec.hidden_size, spec.dspark_markov_rank, spec.vocab_size
    taps, last = len(spec.dspark_target_layer_ids) * width, f"mtp.{spec.num_nextn_predict_layers - 1}"

    def plain(name: str, tensor: str, nbytes: int) -> Part:
        return Part("", name, "drafter dense", "plain", (tensor,), nbytes)

    yield Part("", "main_proj", "drafter dense", "fp8", ("mtp.0.main_proj",), width, taps)
    yield plain("main_norm", "mtp.0.main_norm.weight", 2 * width)
    yield plain("draft_norm", f"{last}.norm.weight", 2 * width)
    yield plain("markov_embed", f"{last}.markov_head.embed.weight", 2 * vocabulary * rank)
    yield plain("markov_head", f"{last}.markov_head.head.weight", 2 * vocabulary * rank)
    yield plain("confidence", f"{last}.confidence_head.proj.weight", 2 * (width + rank))
