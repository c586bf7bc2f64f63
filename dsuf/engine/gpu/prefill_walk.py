"""The walk of one prefill chunk: the launches of its layers, in the order of reference model.md 2 to 6.

Products take bf16 rows in product order (dsuf/kernels/gemm.py) and are made for many rows; what is per row is the
decode kernels' with a longer grid, or a kernel of the chunk family. A chunk's latents and class ids stand in a private
ring, with those before it copied in front; afterwards the last ones go to the sequence's own rings.
"""

from __future__ import annotations

from typing import Any

from dsuf.engine.gpu.launches import Launch, Launches
from dsuf.engine.gpu.prefill_buffers import ChunkBuffers, ChunkRows, history_slots, scores_pitch
from dsuf.engine.gpu.step_walk import Model
from dsuf.kernels import chunk_index, chunk_rows, chunk_seam
from dsuf.kernels.gate_up import GATE_UP_CHUNK
from dsuf.kernels.latents import MOST_ROWS, window_row_bytes
from dsuf.kernels.mixes import STREAMS
from dsuf.kernels.pack import BF16_CHUNK, FP8_CHUNK, chunk_width
from dsuf.layout import SourceLayout
from dsuf.spec import BLOCK, LayerRole

SM_BLOCKS = 132  # blocks of products: as many as the chip has multiprocessors
PRODUCT_TILE = 128  # outputs and, at least, rows of a block's tile: more blocks than tiles have nothing to do
EXPAND_BLOCKS = 1056
MOST_SEGMENTS = 8  # of the entries, so that few rows of scores fill the chip too


class Chunk:
    """Rows of one sequence on their way through the layers."""

    def __init__(
        self, launch: Launch, model: Model, buffers: ChunkBuffers, rows: ChunkRows, sizes: tuple[int, int], slot: int,
        start: int, count: int, decoder_start: int,
    ) -> None:  # fmt: skip
        """sizes: rows of the buffers, bytes of scores. Positions start .. start + count - 1 of a slot."""
        self.launch, self.model, self.b, self.rows, self.sizes = launch, model, buffers, rows, sizes
        self.slot, self.start, self.count, self.decoder_start = slot, start, count, decoder_start
        self.spec, self.most_rows = model.spec, sizes[0]
        self.k = Launches(launch, self.spec, rows, count, model.rank)
        self.ring = self.most_rows + self.spec.sliding_window
        self.history_slots = history_slots(self.spec, self.most_rows)

    # ---- products

    def project(self, name: str, w: int, x: int, y: int) -> None:
        """y = x W^T; x in product order."""
        one = self.k.projections[name]
        kind, most = ("bf16", BF16_CHUNK) if one.kind == "bf16" else ("fp8", FP8_CHUNK)
        tiles = -(-self.count // PRODUCT_TILE) * -(-one.n // PRODUCT_TILE) * one.groups
        sizes = (self.count, one.n, one.k, one.groups, chunk_width(one.k, most))
        self.launch(f"dense.{kind}", w, x, y, *sizes, grid=(min(SM_BLOCKS, tiles), 1))

    def expand(self, k: int) -> None:
        """Codes of k columns to their values in product order."""
        b = self.b
        grid = (min(EXPAND_BLOCKS, self.count), 1)
        self.launch("dense.expand_q8", b.codes, b.scales, b.expanded, self.count, k, grid=grid)

    # ---- streams

    def enter(self) -> None:
        """Embeddings into the streams, class ids into the private history, and layer 0's attention input."""
        spec, weights, c = self.spec, self.model.weights, self.model.caches
        slots = self.history_slots
        before = min(self.start, spec.engram_max_ngram_size - 1)
        own = c.history + 4 * self.slot * c.history_slots
        self._move(own, c.history_slots, self.b.history, slots, self.start - before, before, 4, 2)
        self.k.embed(weights.embed, self.b.streams, weights.class_map, self._history, slots)
        after = min(self.count, c.history_slots)
        self._move(self.b.history, slots, own, c.history_slots, self.start + self.count - after, after, 4, 2)
        self._coefficients(0, 0, 0)
        if spec.layers[0].engram is not None:
            self.engram(0)
        self.again(0)

    def again(self, layer: int) -> None:
        """A layer's attention input from the streams as they are."""
        weights = self.model.weights.layers[layer]
        self._seam(-1, weights.attn_norm, self._tap(layer))
        self._mix(weights, "attn")

    def layer(self, layer: int, *, compress: bool = True, mix_next: bool = True) -> None:
        """One layer, and the attention input of the next. mix_next False: the coefficients stay this layer's."""
        self.attention(self.spec.layers[layer], compress=compress)
        self.after_attention(layer, mix_next=mix_next)

    def after_attention(self, layer: int, *, mix_next: bool = True) -> None:
        """From a layer's attention output to the attention input of the next."""
        weights = self.model.weights.layers[layer]
        self._seam(0, weights.ffn_norm, 0)
        self._mix(weights, "ffn")
        slots = self.moe(weights)
        following = layer + 1
        if following == self.spec.num_hidden_layers:
            return
        weights = self.model.weights.layers[following]
        self._seam(slots, weights.attn_norm, self._tap(following))
        if self.spec.layers[following].engram is not None:
            self.engram(following)
            self._seam(-1, weights.attn_norm, self._tap(following))
        if mix_next:
            self._mix(weights, "attn")

    def _seam(self, slots: int, norm: int, tapped: int) -> None:
        b, d = self.b, self.spec.hidden_size
        self.launch(
            "chunk.seam", b.parts, slots, b.last, b.streams, b.coefficients, norm, b.q8_rows, b.x_rows, tapped, d,
            1 / d, grid=(self.count, 1),
        )  # fmt: skip

    def _mix(self, weights: Any, part: str) -> None:
        """Coefficients of the sublayer that the streams enter."""
        fn, scale, base = (getattr(weights, f"hc_{part}_{name}") for name in ("fn", "scale", "base"))
        grid = (chunk_seam.SPLITS, -(-self.count // chunk_seam.MIX_ROWS))
        flat = STREAMS * self.spec.hidden_size
        self.launch("chunk.mix", self.b.streams, fn, self.b.sums, flat, self.count, grid=grid)
        self._coefficients(self.b.sums, scale, base)

    def _coefficients(self, sums: int, scale: int, base: int) -> None:
        width, grid = STREAMS * self.spec.hidden_size, (-(-self.count // chunk_seam.COEFFICIENT_ROWS), 1)
        out = self.b.coefficients
        self.launch("chunk.coefficients", sums, scale, base, out, 1 / width, self.count, grid=grid)

    def _tap(self, layer: int) -> int:
        """Where the stream mean at the entry of a layer goes; 0: nowhere."""
        targets = self.spec.dspark_target_layer_ids
        size = 2 * self.most_rows * self.spec.hidden_size
        return self.b.taps + targets.index(layer) * size if layer in targets else 0

    def engram(self, layer: int) -> None:
        """Table rows, their keys and value, and the gated value into the streams."""
        b, spec, weights = self.b, self.spec, self.model.weights.layers[layer]
        self.k.gather(self._history, self.history_slots, weights, b.codes, b.scales, self.model.pad_class)
        self.expand(spec.engram_columns * spec.engram_head_dim)
        self.project("engram_wkv", weights.engram_wkv, b.expanded, b.engram_kv)
        self.k.add_engram(b.streams, b.engram_kv, weights.engram_qk)

    @property
    def _history(self) -> int:
        """The private history, less what kernels add for the sequence's slot."""
        return self.b.history - 4 * self.slot * self.history_slots

    def _move(
        self,
        source: int,
        source_slots: int,
        target: int,
        target_slots: int,
        first: int,
        count: int,
        pitch: int,
        halves: int,
    ) -> None:
        """Rows of positions first, first + 1, ... from one ring to another."""
        if count > 0:
            args = (source, source_slots, target, target_slots, first, pitch, halves)
            self.launch("chunk.move", *args, grid=(count, 1))

    # ---- attention

    def attention(self, role: LayerRole, *, compress: bool) -> None:
        """Attention input -> last."""
        b, m, spec = self.b, self.model, self.spec
        weights, c = m.weights.layers[role.index], m.caches
        table = m.weights.rope_compressed if role.ratio else m.weights.rope_plain
        self.project("wq_a_wkv", weights.wq_a_wkv, b.q8_rows, b.latent)
        norms = (weights.q_norm, weights.kv_norm)
        self.k.latents(b.latent, norms, table, b.codes, b.scales, b.windows, 0, self.ring)
        self.expand(spec.q_lora_rank)
        self.project("wq_b", weights.wq_b, b.expanded, b.q)
        if role.is_kv_source and compress:
            self.compress(role)
        if role.is_index_source:
            self.select(role, table)
        own, pitch = c.window(role.index) + self.slot * c.pitch, window_row_bytes(spec.head_dim)
        halves = (spec.head_dim + spec.head_dim // BLOCK) // 2
        real = self.decoder_start if role.index >= spec.decoder_start_layer else 0
        before = max(0, self.start - max(real, self.start - spec.sliding_window + 1, 0))
        self._move(own, c.ring, b.windows, self.ring, self.start - before, before, pitch, halves)
        attended = self._attend(role, weights, table)
        after = min(self.count, c.ring)
        self._move(b.windows, self.ring, own, c.ring, self.start + self.count - after, after, pitch, halves)
        output = self.k.share.o_groups * spec.o_lora_rank
        self.project("wo_a", weights.wo_a, attended, b.y)
        self.launch("chunk.q8", b.y, b.y_rows, output, grid=(-(-output // chunk_rows.SPAN), self.count))
        self.project("wo_b", weights.wo_b, b.y_rows, b.last)
        self.k.sum_heads(b.last, f"the attention output of {weights.name}")

    def _attend(self, role: LayerRole, weights: Any, table: int) -> int:
        """Where the result stands, in product order."""
        b, spec, r = self.b, self.spec, self.rows
        source, pool = self.model.caches.source(role), self.model.caches.pool
        first = r.decoder_first if role.index >= spec.decoder_start_layer else r.first
        pages, topk = (0, 0, 0, 0, 0, 1), 0
        if source is not None:
            codes, scales, topk = pool.base + source.codes.offset, pool.base + source.scales.offset, spec.index_topk
            pages = (pool.table, pool.most_pages, codes, scales, pool.layout.page_bytes, source.ratio)
        self.launch(
            self.k.of_heads("chunk.attend"), b.q, b.windows, 0, self.ring, b.selected, b.chosen, topk, *pages,
            r.sequence, r.position, first, r.last, table, weights.attn_sink, b.o, self.count,
            grid=(min(SM_BLOCKS, self.count), 1),
        )  # fmt: skip
        return b.o

    def compress(self, role: LayerRole) -> None:
        """The entries that these rows complete, and the last row's (kv, gate) if its group stays open."""
        b = self.b
        weights = self.model.weights.layers[role.index]
        name = "compressor_gated" if role.ratio > 1 else "compressor"
        self.project(name, weights.compressor, b.x_rows, b.compressed)
        self._compress(role, 0, self.count, keep_from=self.count)
        if (self.start + self.count) % role.ratio:  # apart, because the first row may read the slot that it writes
            self._compress(role, self.count - 1, 1, keep_from=0)

    def _compress(self, role: LayerRole, row: int, count: int, *, keep_from: int) -> None:
        m, r = self.model, self.rows.after(row)
        weights, source, pool = m.weights.layers[role.index], m.caches.source(role), m.caches.pool
        planes = (source.codes, source.scales, source.key_codes, source.key_scales)
        compressed = self.b.compressed + row * role.ratio * 4 * self.spec.head_dim
        self.launch(
            f"compress.ratio{role.ratio}/{self.k.width}", compressed, m.caches.pairs.get(role.index, 0),
            weights.compressor_norm, weights.index_wk, weights.index_k_norm, m.weights.rope_compressed, r.sequence,
            r.position, pool.table, pool.most_pages, *(pool.base + plane.offset for plane in planes),
            pool.layout.page_bytes, keep_from, grid=(count, 1),
        )  # fmt: skip

    def select(self, role: LayerRole, table: int) -> None:
        """Each row's entries, for this layer and those that reuse them."""
        b, m = self.b, self.model
        weights, source = m.weights.layers[role.index], m.caches.source(role)
        self.project("index_wq_b", weights.index_wq_b, b.expanded, b.index_y)
        self.k.index_query(b.index_y, table, b.index_q)
        self.project("index_weights", weights.index_weights, b.x_rows, b.index_weights)
        if role.is_candidate_source or role.uses_candidates:
            for row in range(0, self.count, MOST_ROWS):
                self._select_by_blocks(role, source, row, min(MOST_ROWS, self.count - row))
            return
        pitch = scores_pitch(self.start + self.count, source.ratio)
        most = min(self.count, self.sizes[1] // (4 * pitch))
        for row in range(0, self.count, most):
            self._select_of_all(source, row, min(most, self.count - row), pitch)

    def _select_of_all(self, source: SourceLayout, row: int, count: int, pitch: int) -> None:
        """The best of all visible entries for some rows."""
        b, spec, r, pool = self.b, self.spec, self.rows.after(row), self.model.caches.pool
        heads, width, topk = spec.index_n_heads, spec.index_head_dim, spec.index_topk
        blocks = -(-count // chunk_index.rows_of_block(heads))
        segments = min(segments_of(blocks), pitch // chunk_index.TILE)
        self.launch(
            f"chunk.scores/{self.k.width}", b.index_q + row * heads * width * 2, b.index_weights + row * heads * 4,
            pool.table, pool.most_pages, pool.base + source.key_codes.offset, pool.base + source.key_scales.offset,
            pool.layout.page_bytes, self.slot, r.position, source.ratio, b.scores, pitch, count,
            grid=(segments, blocks),
        )  # fmt: skip
        selected, chosen = b.selected + row * topk * 4, b.chosen + row * 4
        self.launch("chunk.select", b.scores, pitch, r.position, source.ratio, selected, chosen, topk, grid=(count, 1))

    def _select_by_blocks(self, role: LayerRole, source: SourceLayout, row: int, count: int) -> None:
        """The decode kernels, 48 rows at a time, which also make candidate blocks and choose inside them."""
        b, spec, m, w = self.b, self.spec, self.model, self.model.work
        heads, width, kept = spec.index_n_heads, spec.index_head_dim, spec.candidate_topk_blocks
        k = Launches(self.launch, spec, self.rows.after(row), count, m.rank)
        candidates = (b.candidates + row * kept * 4, b.kept_of + row * 4)
        mapped = candidates if role.uses_candidates else (0, 0)
        blocks = candidates if role.is_candidate_source else (0, 0)
        k.index_scores(
            b.index_q + row * heads * width * 2, b.index_weights + row * heads * 4, m.caches.pool, source, mapped,
            w.scores, w.best, w.best32, w.capacity,
        )  # fmt: skip
        selected, chosen = b.selected + row * spec.index_topk * 4, b.chosen + row * 4
        k.select(w.scores, w.best, w.best32, w.capacity, source, mapped, selected, chosen, blocks)

    # ---- experts and drafter

    def moe(self, weights: Any) -> int:
        """A sublayer's input -> parts (routed experts; how many of a row) and last (the shared one)."""
        b, spec, n = self.b, self.spec, self.count
        d, i, e, k = spec.hidden_size, spec.moe_intermediate_size, spec.n_routed_experts, spec.num_experts_per_tok
        self.project("gate", weights.gate, b.x_rows, b.gate)
        self.launch(
            "chunk.route", b.gate, weights.gate_bias, self.rows.image, b.experts, b.shares, n, e, k,
            spec.routed_scaling_factor, grid=(-(-n // 8), 1),
        )  # fmt: skip
        first, own = self.model.rank.part(e)
        self.launch("grouped.plan", b.experts, b.offsets, b.order, n * k, own, first, grid=(own, 1))
        tiles = own + n * k // PRODUCT_TILE
        gate_up, down = (min(SM_BLOCKS, tiles * -(-width // PRODUCT_TILE)) for width in (2 * i, d))
        self.launch(
            "grouped.gate_up", weights.experts_w13, b.q8_rows, b.offsets, b.order, b.shares, b.hidden, own, k, d, i,
            spec.swiglu_limit, chunk_width(d, GATE_UP_CHUNK), grid=(gate_up, 1),
        )  # fmt: skip
        self.launch(
            "grouped.down", weights.experts_w2, b.hidden, b.offsets, b.order, b.parts, own, d, i, chunk_width(i),
            grid=(down, 1),
        )  # fmt: skip
        self.project("shared_gate_up", weights.shared_gate_up, b.q8_rows, b.shared)
        grid = (-(-i // chunk_rows.SPAN), n)
        self.launch("chunk.swiglu", b.shared, b.shared_rows, i, spec.swiglu_limit, grid=grid)
        self.project("shared_down", weights.shared_down, b.shared_rows, b.last)
        return self.k.sum_experts(b.parts, b.experts, e, k, f"the experts' output of {weights.name}")

    def drafter_windows(self) -> None:
        """The drafter's window rows of the last rows, from their taps."""
        count = min(self.count, self.model.caches.ring)
        skipped = self.count - count
        last = Chunk(
            self.launch, self.model, self.b, self.rows.after(skipped), self.sizes, self.slot, self.start + skipped,
            count, self.decoder_start,
        )  # fmt: skip
        last.write_drafter_windows(skipped)

    def write_drafter_windows(self, skipped: int) -> None:
        """Of these rows, whose taps stand `skipped` rows on."""
        b, m, spec, d = self.b, self.model, self.spec, self.spec.hidden_size
        weights, c, targets = m.weights, m.caches, spec.dspark_target_layer_ids
        taps = tuple(self._tap(layer) + 2 * d * skipped for layer in targets)
        self.k.join_taps(taps, b.codes, b.scales)
        self.expand(len(targets) * d)
        self.project("main_proj", weights.main_proj, b.expanded, b.last)
        self.k.quantise_norm(b.last, weights.main_norm, b.codes, b.scales)
        self.expand(d)
        for number, stage in enumerate(weights.stages):
            self.project("wq_a_wkv", stage.wq_a_wkv, b.expanded, b.latent)
            self.k.latents(
                b.latent, (stage.q_norm, stage.kv_norm), weights.rope_plain, 0, 0,
                c.window(spec.num_hidden_layers + number), c.pitch, c.ring,
            )  # fmt: skip


def segments_of(blocks: int) -> int:
    """Into how many parts the entries are cut, so that the last wave of blocks is as full as can be."""
    waves = [(-(-blocks * parts // SM_BLOCKS) / parts + 0.02 * parts, parts) for parts in range(1, MOST_SEGMENTS + 1)]
    return min(waves)[1]
