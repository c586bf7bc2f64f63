"""The backbone over the rows of a step, as a flat list of launches: what reference model.md 2 to 6 does, in its order.

A walk is a function of a `launch`: called outside a capture it runs the step, inside one it records it. Every operand
is an address that never changes; which rows are live, where they stand and whose they are is in the row table.

    streams -> [engram] -> seam -> attention -> seam -> experts -> ... -> seam -> head

The seam before a sublayer unfolds the output of the one before, folds, norms and quantises; `Residual` keeps which of
the two stream buffers and coefficient sums is current.

With several ranks each walks its own heads and experts, and `sum_heads` and `sum_experts` make one output of all parts;
everything else each does for itself, from the same bits (ranks.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsuf.engine.gpu.buffers import Workspace
from dsuf.engine.gpu.launches import Launches, Pool
from dsuf.engine.gpu.ranks import ALONE, Rank
from dsuf.kernels.mixes import FIRST, FOLDED
from dsuf.layout import SourceLayout
from dsuf.spec import LayerRole, Spec


@dataclass(frozen=True)
class Caches:
    """Addresses of all sequences' caches; a slot's part lies `slot` pitches on."""

    windows: int  # [slots, layers + stages, ring, row]
    pitch: int  # bytes between slots
    layer_pitch: int
    ring: int
    pool: Pool
    pairs: dict[int, int]  # (kv, gate) of open groups, by ratio-2 source layer
    history: int  # int32 [slots, history_slots]
    history_slots: int

    def window(self, layer: int) -> int:
        """Slot 0's ring of a layer; drafter stages come after the layers."""
        return self.windows + layer * self.layer_pitch

    def source(self, role: LayerRole) -> SourceLayout | None:
        """Where the entries that a layer reads lie in a page."""
        return next((s for s in self.pool.layout.sources if s.layer == role.kv_source), None)


@dataclass(frozen=True)
class Model:
    """What walks read: dimensions, weights (dsuf.engine.gpu.weights), caches, workspace, counters."""

    spec: Spec
    weights: Any
    caches: Caches
    work: Workspace
    pad_class: int  # of Engram's pad token
    expert_counter: int = 0  # address of a uint64, 0: not counted
    draft_expert_counter: int = 0
    rank: Rank = ALONE


class Residual:
    """The streams between sublayers."""

    def __init__(self, k: Launches, work: Workspace) -> None:
        self._k, self._work = k, work
        self._at = self._turn = 0  # current buffers
        self._mix = self._mix_before = (0, 0)

    @classmethod
    def at(cls, k: Launches, work: Workspace, block: Any) -> Residual:
        """Where the attention input of `block` has just been made, with streams and sums in the first buffers."""
        residual = cls(k, work)
        residual._mix = (block.hc_attn_scale, block.hc_attn_base)
        return residual

    @property
    def streams(self) -> int:
        """bf16 [R, 4, D] as they are now."""
        return self._work.streams[self._at]

    @property
    def sums(self) -> int:
        """float32 [R, 26] of the sublayer that comes next."""
        return self._work.sums[self._turn]

    def first(self, block: Any, tapped: int = 0) -> None:
        """Attention input of the first layer, from fresh streams."""
        self._mix = (block.hc_attn_scale, block.hc_attn_base)  # asked for ahead of time, not used
        self._seam(FIRST, block, "attn", block.attn_norm, tapped, 0)

    def after_attention(self, block: Any) -> None:
        """The experts' input, for routed experts as wide rows too."""
        self._seam(0, block, "ffn", block.ffn_norm, 0, 0, self._work.x_half)

    def after_experts(self, slots: int, block: Any, norm: int, tapped: int = 0, folded: int = 0) -> None:
        """Attention input of the next layer (of `block`), or with another norm the head's input."""
        self._seam(slots, block, "attn", norm, tapped, folded)

    def again(self, block: Any, tapped: int = 0) -> None:
        """The same attention input after the streams themselves have changed."""
        self._turn ^= 1
        self._mix = self._mix_before
        self._seam(FOLDED, block, "attn", block.attn_norm, tapped, 0)

    def _seam(self, slots: int, block: Any, part: str, norm: int, tapped: int, folded: int, wide: int = 0) -> None:
        w, turn = self._work, self._turn
        fn, scale, base = (getattr(block, f"hc_{part}_{name}") for name in ("fn", "scale", "base"))
        streams = (w.streams[self._at], w.streams[1 - self._at])
        self._k.seam(
            slots, w.parts, w.last, streams, (w.sums[turn], w.sums[1 - turn]), self._mix, fn, norm,
            (w.x, w.x_codes, w.x_scales), tapped, folded, wide,
        )  # fmt: skip
        self._at ^= 1 if slots >= 0 else 0
        self._turn ^= 1
        self._mix_before, self._mix = self._mix, (scale, base)


def backbone(k: Launches, m: Model) -> None:
    """All layers on the rows of the table; then work.x is the head's input and work.taps the drafter's."""
    residual = enter(k, m)
    for layer in range(m.spec.num_hidden_layers):
        layer_walk(k, m, residual, layer)


def enter(k: Launches, m: Model) -> Residual:
    """Embeddings into the streams, and layer 0's attention input."""
    residual, caches, weights = Residual(k, m.work), m.caches, m.weights
    k.embed(weights.embed, residual.streams, weights.class_map, caches.history, caches.history_slots)
    if m.spec.layers[0].engram is not None:
        engram(k, m, residual, 0)
    residual.first(weights.layers[0], tap_of(m, 0))
    return residual


def layer_walk(k: Launches, m: Model, residual: Residual, layer: int, *, compress: bool = True) -> None:
    """One layer from its attention input to the attention input of the next, or to the head's. `compress` False leaves
    the compressed cache as it is.
    """
    weights, role = m.weights.layers[layer], m.spec.layers[layer]
    attention(k, m, role, compress=compress)
    residual.after_attention(weights)
    parts = moe(k, m, weights, m.spec.n_routed_experts, m.spec.num_experts_per_tok, m.expert_counter)
    if layer + 1 < m.spec.num_hidden_layers:
        to_next(k, m, residual, layer + 1, parts)
    else:
        residual.after_experts(parts, weights, m.weights.norm)


def to_next(k: Launches, m: Model, residual: Residual, layer: int, parts: int) -> None:
    """Attention input of `layer` from the experts' output before it, `parts` a row: Engram and tap stand here."""
    weights, role = m.weights.layers[layer], m.spec.layers[layer]
    tap = tap_of(m, layer)
    if role.engram is None:
        residual.after_experts(parts, weights, weights.attn_norm, tap)
        return
    residual.after_experts(parts, weights, weights.attn_norm)
    engram(k, m, residual, layer)
    residual.again(weights, tap)


def tap_of(m: Model, layer: int) -> int:
    """Where the stream mean at the entry of a layer goes; 0: nowhere."""
    targets = m.spec.dspark_target_layer_ids
    return m.work.taps[targets.index(layer)] if layer in targets else 0


def engram(k: Launches, m: Model, residual: Residual, layer: int) -> None:
    """Table rows, their keys and value, and the gated value into the streams."""
    w, c, weights = m.work, m.caches, m.weights.layers[layer]
    k.gather(c.history, c.history_slots, weights, w.engram_codes, w.engram_scales, m.pad_class)
    k.project("engram_wkv", weights.engram_wkv, w.engram_codes, w.engram_scales, w.engram_kv)
    k.add_engram(residual.streams, w.engram_kv, weights.engram_qk)


def attention(k: Launches, m: Model, role: LayerRole, *, compress: bool = True) -> None:
    """work.x -> work.last."""
    w, c, weights = m.work, m.caches, m.weights.layers[role.index]
    table = m.weights.rope_compressed if role.ratio else m.weights.rope_plain
    queries(k, m, weights, table, role.index)
    if role.is_kv_source and compress:
        compress_rows(k, m, role)
    if role.is_index_source:
        select(k, m, role, table)
    decoder = role.index >= m.spec.decoder_start_layer
    first = k.rows.decoder_first if decoder else k.rows.first
    fresh = role.is_index_source or role.is_kv_source
    selected = (w.selected, w.chosen, fresh) if role.ratio else (0, 0, False)
    k.attend(
        w.q, c.window(role.index), c.pitch, c.ring, first, c.pool, c.source(role), selected, table, weights.attn_sink,
        w.o,
    )  # fmt: skip
    output(k, m, weights)


def queries(k: Launches, m: Model, weights: Any, table: int, window: int) -> None:
    """Queries, the indexer's too where the layer has one, and the layer's own window rows, from work.x."""
    w, c = m.work, m.caches
    k.project("wq_a_wkv", weights.wq_a_wkv, w.x_codes, w.x_scales, w.latent)
    norms, ring = (weights.q_norm, weights.kv_norm), (c.window(window), c.pitch, c.ring)
    k.queries(w.latent, norms, table, ring, (weights.wq_b, w.q), (weights.index_wq_b, w.index_y))


def output(k: Launches, m: Model, weights: Any) -> None:
    """work.o -> work.last."""
    w = m.work
    k.project("wo_a", weights.wo_a, w.o, w.y_scales, w.y_codes)
    k.project("wo_b", weights.wo_b, w.y_codes, w.y_scales, w.last)
    k.sum_heads(w.last, f"the attention output of {weights.name}")


def compress_rows(k: Launches, m: Model, role: LayerRole) -> None:
    """The entries that these rows complete."""
    w, c, weights = m.work, m.caches, m.weights.layers[role.index]
    name = "compressor_gated" if role.ratio > 1 else "compressor"
    k.project(name, weights.compressor, w.x, 0, w.compressed)
    k.compress(
        w.compressed, c.pairs.get(role.index, 0), weights.compressor_norm, weights.index_wk, weights.index_k_norm,
        m.weights.rope_compressed, c.pool, c.source(role),
    )  # fmt: skip


def select(k: Launches, m: Model, role: LayerRole, table: int) -> None:
    """Each row's entries into work.selected, for this layer and those that reuse it, from work.index_y."""
    w, c, weights, source = m.work, m.caches, m.weights.layers[role.index], m.caches.source(role)
    k.index_query(w.index_y, table, w.index_q)
    k.project("index_weights", weights.index_weights, w.x, 0, w.index_weights)
    candidates = (w.candidates, w.kept_of)
    mapped = candidates if role.uses_candidates else (0, 0)
    k.index_scores(w.index_q, w.index_weights, c.pool, source, mapped, w.scores, w.best, w.best32, w.capacity)
    blocks = candidates if role.is_candidate_source else (0, 0)
    k.select(w.scores, w.best, w.best32, w.capacity, source, mapped, w.selected, w.chosen, blocks)


def moe(k: Launches, m: Model, weights: Any, experts: int, per_token: int, counter: int) -> int:
    """work.x -> work.parts (routed experts; how many of a row) and work.last (the shared one)."""
    w = m.work
    gate, out = (weights.gate, weights.gate_bias), (w.experts, w.shares, w.plan)
    k.route(gate, w.x, w.gate, experts, per_token, out, counter)
    routed, shared = (weights.experts_w13, weights.experts_w2), (weights.shared_gate_up, weights.shared_down)
    k.expert_products(routed, shared, w.x_half, w.plan, w.shares, w.h, (w.parts, w.last), per_token)
    return k.sum_experts(w.parts, w.experts, experts, per_token, f"the experts' output of {weights.name}")


def head(k: Launches, m: Model, logits: int) -> None:
    """work.x -> logits float32 [R, V]."""
    k.head(m.weights.head, m.work.x, logits)
