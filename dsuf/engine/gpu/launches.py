"""The kernel families as the walks call them: names, grids and shape arguments of one checkpoint in one place.

A walk names operands; what follows from the spec, the row count and the tuned tables is filled in here. `launch` is
Device.launch, outside or inside a capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsuf.engine.gpu.buffers import Rows
from dsuf.engine.gpu.ranks import ALONE, Exchange, Launch, Rank
from dsuf.errors import ConfigError
from dsuf.kernels import attend, catalogue, experts, index_query, mixes, queries, route
from dsuf.kernels.catalogue import Width
from dsuf.kernels.engram import EMBED_SPAN
from dsuf.kernels.project import launch_of, projections
from dsuf.kernels.taps import SPAN as TAPS_SPAN
from dsuf.layout import PageLayout, SourceLayout
from dsuf.spec import Spec

if TYPE_CHECKING:
    from dsuf.engine.gpu.weights import BlockWeights

SCORE_BLOCKS = 132  # of index.scores, which walks its rows itself; two an SM took 20 us a step longer, from 1 K to 1 M
FIXED = (
    "hidden_size", "moe_intermediate_size", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank",
    "o_groups", "o_lora_rank", "index_n_heads", "index_head_dim", "hc_mult", "hc_sinkhorn_iters", "engram_head_dim",
    "engram_n_heads", "engram_max_ngram_size", "dspark_markov_rank",
)  # fmt: skip  # what kernels of a width have as constants


def width_of(spec: Spec) -> Width:
    """The kernels' width that a checkpoint runs on. Raises ConfigError if there is none."""
    for width in catalogue.widths():
        if all(getattr(width.spec, name) == getattr(spec, name) for name in FIXED):
            return width
    known = ", ".join(f"{width.label} (hidden_size {width.spec.hidden_size})" for width in catalogue.widths())
    raise ConfigError(
        f"no GPU kernels are made for this checkpoint's dimensions (hidden_size {spec.hidden_size}, head_dim "
        f"{spec.head_dim}, ...); they exist for {known}. Use --gpus 0."
    )


@dataclass(frozen=True)
class Pool:
    """Cache pages as kernels address them."""

    base: int
    table: int  # uint32 [slots, most_pages]
    most_pages: int
    layout: PageLayout


class Launches:
    """Launches of `count` rows under a row table, by one of several ranks; `share` is the spec with its part alone."""

    def __init__(self, launch: Launch, spec: Spec, rows: Rows, count: int, rank: Rank = ALONE) -> None:
        self.launch, self.spec, self.rows, self.count, self.rank = launch, spec, rows, count, rank
        self.share = rank.share(spec)
        self._width = width_of(spec)
        self.width = self._width.label
        self.projections = projections(self.share)

    # ---- products and their operands

    def project(self, name: str, w: int, x: int, scales: int, y: int) -> None:
        """y = x W^T of a projection of dsuf.kernels.project; `scales` of x, of y for wo_a, else 0."""
        how = launch_of(self.width, self.projections[name], self.count)
        self.launch(how.name, w, x, scales, y, self.count, *how.arguments, grid=how.grid, shared=how.shared)

    def quantise_norm(self, x: int, g: int, codes: int, scales: int) -> None:
        """codes, scales = q8(rms(x; g)), D columns."""
        self.launch("q8.norm", x, g, codes, scales, self.spec.hidden_size, grid=(self.count, 1))

    def join_taps(self, taps: tuple[int, ...], codes: int, scales: int) -> None:
        """codes, scales = q8 of the taps side by side."""
        d = self.spec.hidden_size
        self.launch("taps.join", *taps, codes, scales, d, grid=(-(-d // TAPS_SPAN), len(taps) * self.count))

    # ---- streams

    def embed(self, embedding: int, streams: int, class_map: int, history: int, history_slots: int) -> None:
        """Fresh streams, and class ids into the history."""
        r, d = self.rows, self.spec.hidden_size
        self.launch(
            "embed", r.token, r.sequence, r.position, embedding, streams, class_map, history, history_slots, d,
            grid=(-(-d // EMBED_SPAN), self.count),
        )  # fmt: skip

    def seam(
        self, slots: int, parts: int, last: int, streams: tuple[int, int], sums: tuple[int, int], mix: tuple[int, int],
        fn: int, g: int, x: tuple[int, int, int], tapped: int, folded: int, wide: int,
    ) -> None:  # fmt: skip
        """streams, sums: (in, out); mix: scale and base of the sublayer before; fn and g of the next; x: bf16, codes,
        scales.
        """
        self.launch(
            f"seam/{self.width}", parts, slots, last, *streams, sums[0], *mix, fn, g, *x, sums[1], tapped, folded,
            wide, self.count, grid=(mixes.grid(self.spec.hidden_size, self.count), 1),
        )  # fmt: skip

    def gather(
        self, history: int, history_slots: int, weights: BlockWeights, codes: int, scales: int, pad_class: int
    ) -> None:
        """Engram's table rows of each row; those that another rank has are read there."""
        r, spec, name = self.rows, self.spec, "engram.gather"
        table = (weights.engram_table, weights.engram_table_scales)
        if weights.engram_tables:
            name, table = "engram.gather_ranks", (weights.engram_tables, weights.engram_rows)
        self.launch(
            name, history, history_slots, r.sequence, r.position, weights.engram_constants, *table, codes, scales,
            spec.engram_n_heads, spec.engram_head_dim, pad_class, grid=(spec.engram_columns, self.count),
        )  # fmt: skip

    def add_engram(self, streams: int, kv: int, qk: int) -> None:
        """Engram's gated value into the streams."""
        self.launch("engram.gate", streams, kv, qk, self.rows.sequence, self.spec.hidden_size, grid=(self.count, 1))

    # ---- attention

    def latents(
        self, y: int, norms: tuple[int, int], table: int, codes: int, scales: int, windows: int, pitch: int, ring: int
    ) -> None:
        """Window latents into the ring, query latents as codes (codes 0: not wanted)."""
        r = self.rows
        self.launch(
            f"latents/{self.width}", y, *norms, table, r.sequence, r.position, codes, scales, windows, pitch, ring,
            grid=(self.count, 2 if codes else 1),
        )  # fmt: skip

    def queries(
        self, y: int, norms: tuple[int, int], table: int, ring: tuple[int, int, int], own: tuple[int, int],
        index: tuple[int, int],
    ) -> None:  # fmt: skip
        """From latents: window rows into a ring (base, pitch, slots), and queries; own, index: weight (the indexer's 0:
        it has none) and output.
        """
        r, (n, index_n) = self.rows, queries.widths(self.share)
        index_n = index_n if index[0] else 0
        self.launch(
            queries.name_of(self.width, self.count), y, *norms, table, r.sequence, r.position, *ring, own[0], n, own[1],
            index[0], index_n, index[1], self.count, grid=(queries.blocks(self.width, n + index_n), 1),
        )  # fmt: skip

    def compress(
        self, y: int, pairs: int, norm: int, wk: int, k_norm: int, table: int, pool: Pool, source: SourceLayout
    ) -> None:
        """Entries and index keys of finished groups into pages."""
        r, planes = self.rows, (source.codes, source.scales, source.key_codes, source.key_scales)
        self.launch(
            f"compress.ratio{source.ratio}/{self.width}", y, pairs, norm, wk, k_norm, table, r.sequence, r.position,
            pool.table, pool.most_pages, *(pool.base + plane.offset for plane in planes), pool.layout.page_bytes, 0,
            grid=(self.count, 1),
        )  # fmt: skip

    def index_query(self, y: int, table: int, out: int) -> None:
        """Quantised index queries."""
        r, sets = self.rows, -(-self.spec.index_n_heads // index_query.QUERY_WARPS)
        self.launch(f"index.query/{self.width}", y, r.sequence, r.position, table, out, grid=(self.count * sets, 1))

    def index_scores(
        self, q: int, weights: int, pool: Pool, source: SourceLayout, mapped: tuple[int, int], out: int, best: int,
        best32: int, capacity: int,
    ) -> None:  # fmt: skip
        """Scores of all visible entries or, with mapped = (candidates, kept_of), of those in candidate blocks."""
        r, spec = self.rows, self.spec
        self.launch(
            f"index.scores/{self.width}", q, weights, pool.table, pool.most_pages, pool.base + source.key_codes.offset,
            pool.base + source.key_scales.offset, pool.layout.page_bytes, r.sequence, r.position, shift_of(source),
            mapped[0], spec.candidate_topk_blocks, mapped[1], block_shift(spec), out, best, best32, capacity,
            self.count, grid=(SCORE_BLOCKS, 1),
        )  # fmt: skip

    def select(
        self, scores: int, best: int, best32: int, capacity: int, source: SourceLayout, mapped: tuple[int, int],
        out: int, number: int, blocks: tuple[int, int],
    ) -> None:  # fmt: skip
        """The index_topk best entries; with blocks = (candidates, kept_of) the candidate blocks too."""
        r, spec = self.rows, self.spec
        kept = spec.candidate_topk_blocks
        self.launch(
            "select", scores, best, best32, capacity, r.sequence, r.position, shift_of(source), block_shift(spec),
            mapped[0], kept, mapped[1], out, number, spec.index_topk, blocks[0], kept, blocks[1], grid=(self.count, 1),
        )  # fmt: skip

    def attend(
        self, q: int, windows: int, pitch: int, ring: int, first: int, pool: Pool, source: SourceLayout | None,
        selected: tuple[int, int, bool], table: int, sink: int, out: int,
    ) -> None:  # fmt: skip
        """Window keys first..last and, of a source, the selected = (entries, how many, whether a launch since queries
        wrote them or their pages).
        """
        r, pages, heads = self.rows, (0, 0, 0, 0, 0, 0), self.share.num_attention_heads
        if source is not None:
            codes, scales = pool.base + source.codes.offset, pool.base + source.scales.offset
            pages = (pool.table, pool.most_pages, codes, scales, pool.layout.page_bytes, shift_of(source))
        self.launch(
            self.of_heads("attend"), q, windows, pitch, ring, r.sequence, r.position, first, r.last, selected[0],
            self.spec.index_topk, selected[1], *pages, int(selected[2]), table, sink, out,
            grid=(attend.blocks(heads) * self.count, 1), shared=attend.shared_of(self._width, heads, self.count),
        )  # fmt: skip

    def of_heads(self, family: str) -> str:
        """The kernel of a family for this rank's number of heads."""
        heads = self.share.num_attention_heads
        return f"{family}/{self.width}" + (f"/h{heads}" if heads < self.spec.num_attention_heads else "")

    # ---- experts

    def route(
        self, gate: tuple[int, int], x: int, parts: int, experts: int, per_token: int, out: tuple[int, int, int],
        counter: int,
    ) -> None:  # fmt: skip
        """gate: weights and bias; out: chosen experts, their shares, and the plan of this rank's expert products."""
        r, spec = self.rows, self.spec
        self.launch(
            f"route/{self.width}", gate[0], x, parts, gate[1], r.image, r.sequence, *out, counter, self.count, experts,
            per_token, spec.routed_scaling_factor, *self.rank.part(experts), grid=route.grid(spec.hidden_size, experts),
        )  # fmt: skip

    def expert_products(
        self, w: tuple[int, int], shared: tuple[int, int], x: int, plan: int, shares: int, h: int, y: tuple[int, int],
        k: int,
    ) -> None:  # fmt: skip
        """Routed and shared experts. w: w13, w2; shared: gate_up, down; y: of the pairs, of the shared rows."""
        limit, grid = self.spec.swiglu_limit, (experts.blocks(self.width), 1)
        gate_up, down = f"experts.gate_up/{self.width}", f"experts.down/{self.width}"
        self.launch(gate_up, w[0], shared[0], x, plan, shares, h, self.count, k, limit, grid=grid)
        self.launch(down, w[1], shared[1], h, plan, *y, self.count, k, grid=grid)

    # ---- several ranks

    def sum_heads(self, last: int, what: str) -> None:
        """last = the sum over ranks of what their heads gave; nothing where this rank has all heads."""
        if self.share.o_groups == self.spec.o_groups:
            return
        total, elements = self._exchange(), self.count * self.spec.hidden_size
        total.push(self.rank.index, last, elements, self.launch)
        total.join(self.rank.index, last, self.rank.ranks.code(what), elements, self.launch)

    def sum_experts(self, parts: int, chosen: int, experts: int, per_token: int, what: str) -> int:
        """parts = [rows, D], the sum over all ranks' experts; nothing where this rank has all of `experts`. How many
        parts of a row there are now.
        """
        own, d = self.rank.part(experts), self.spec.hidden_size
        if own[1] == experts:
            return per_token
        total, elements = self._exchange(), self.count * d
        total.push_experts(self.rank.index, parts, chosen, own, per_token, d, elements, self.launch)
        total.join(self.rank.index, parts, self.rank.ranks.code(what), elements, self.launch)
        return 1

    def head(self, w: int, x: int, logits: int) -> None:
        """logits float32 [rows, V] of the head, from all ranks' rows of it."""
        mine = self.share.vocab_size
        if mine == self.spec.vocab_size:
            self.project("head", w, x, 0, logits)
            return
        total, elements = self.rank.ranks.exchange(self.count, 2 * mine), 2 * self.count * mine
        self.project("head", w, x, 0, logits)  # where nobody needs what stands there, until the join
        total.push(self.rank.index, logits, elements, self.launch)
        total.join_rows(self.rank.index, logits, mine, self.rank.ranks.code("the logits"), elements, self.launch)

    def _exchange(self) -> Exchange:
        return self.rank.ranks.exchange(self.count, self.spec.hidden_size)


def shift_of(source: SourceLayout) -> int:
    """log2 of the ratio."""
    return source.ratio.bit_length() - 1


def block_shift(spec: Spec) -> int:
    """log2 of the candidate block's entries."""
    return spec.candidate_block_size.bit_length() - 1
