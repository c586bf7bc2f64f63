"""The kernel families as the walks call them: names, grids and shape arguments of one checkpoint in one place.

A walk names operands; what follows from the spec, the row count and the tuned tables is filled in here. `launch` is
Device.launch, outside or inside a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsuf.engine.gpu.buffers import Rows
from dsuf.errors import ConfigError
from dsuf.kernels import attend, catalogue, experts, index, mixes, route, rows_q8
from dsuf.kernels.catalogue import Width
from dsuf.kernels.engram import EMBED_SPAN
from dsuf.kernels.pack import ROWS
from dsuf.kernels.project import launch_of, projections
from dsuf.layout import PageLayout, SourceLayout
from dsuf.spec import Spec

Launch = Callable[..., None]  # (name, *arguments, grid=(x, y))
SCORE_BLOCKS = 264  # of index.scores, which walks its rows itself
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
    """Launches of `count` rows under a row table."""

    def __init__(self, launch: Launch, spec: Spec, rows: Rows, count: int) -> None:
        self.launch, self.spec, self.rows, self.count = launch, spec, rows, count
        width = width_of(spec)
        self.width = width.label
        self._projections = projections(spec)

    # ---- products and their operands

    def project(self, name: str, w: int, x: int, scales: int, y: int) -> None:
        """y = x W^T of a projection of dsuf.kernels.project; `scales` 0 where x is bf16."""
        how = launch_of(self.width, self._projections[name], self.count)
        self.launch(how.name, w, x, scales, y, self.count, *how.arguments, grid=how.grid, shared=how.shared)

    def quantise(self, x: int, codes: int, scales: int, k: int) -> None:
        """codes, scales = q8(x), k columns."""
        self.launch("q8.rows", x, codes, scales, k, grid=(-(-k // rows_q8.SPAN), self.count))

    def quantise_norm(self, x: int, g: int, codes: int, scales: int) -> None:
        """codes, scales = q8(rms(x; g)), D columns."""
        self.launch("q8.norm", x, g, codes, scales, self.spec.hidden_size, grid=(self.count, 1))

    def join_taps(self, taps: tuple[int, ...], codes: int, scales: int) -> None:
        """codes, scales = q8 of the taps side by side."""
        d = self.spec.hidden_size
        self.launch("taps.join", *taps, codes, scales, d, grid=(-(-d // rows_q8.SPAN), len(taps) * self.count))

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
        self, history: int, history_slots: int, constants: int, table: int, table_scales: int, codes: int, scales: int,
        pad_class: int,
    ) -> None:  # fmt: skip
        """Engram's table rows of each row."""
        r, spec = self.rows, self.spec
        self.launch(
            "engram.gather", history, history_slots, r.sequence, r.position, constants, table, table_scales, codes,
            scales, spec.engram_n_heads, spec.engram_head_dim, pad_class, grid=(spec.engram_columns, self.count),
        )  # fmt: skip

    def add_engram(self, streams: int, kv: int, qk: int) -> None:
        """Engram's gated value into the streams."""
        self.launch("engram.gate", streams, kv, qk, self.rows.sequence, self.spec.hidden_size, grid=(self.count, 1))

    # ---- attention

    def latents(
        self, y: int, norms: tuple[int, int], table: int, codes: int, scales: int, windows: int, pitch: int, ring: int
    ) -> None:
        """Query latent as codes, window latent into the ring."""
        r = self.rows
        self.launch(
            f"latents/{self.width}", y, *norms, table, r.sequence, r.position, codes, scales, windows, pitch, ring,
            grid=(self.count, 2),
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
        r, sets = self.rows, -(-self.spec.index_n_heads // index.QUERY_WARPS)
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
        selected: tuple[int, int], table: int, sink: int, out: int,
    ) -> None:  # fmt: skip
        """Window keys first..last and, of a source, the selected = (entries, how many)."""
        r, pages = self.rows, (0, 0, 0, 0, 0, 0)
        if source is not None:
            codes, scales = pool.base + source.codes.offset, pool.base + source.scales.offset
            pages = (pool.table, pool.most_pages, codes, scales, pool.layout.page_bytes, shift_of(source))
        self.launch(
            f"attend/{self.width}", q, windows, pitch, ring, r.sequence, r.position, first, r.last, selected[0],
            self.spec.index_topk, selected[1], *pages, table, sink, out,
            grid=(attend.blocks(self.spec.num_attention_heads) * self.count, 1),
        )  # fmt: skip

    # ---- experts

    def scores(self, gate: int, x: int, parts: int, count: int) -> None:
        """The gate's scores of `count` experts, in parts."""
        grid = (-(-count // ROWS), route.parts_of(self.spec.hidden_size))
        self.launch(f"route.scores/{self.width}", gate, x, parts, self.count, count, grid=grid)

    def route(
        self, parts: int, bias: int, experts: int, per_token: int, chosen: int, shares: int, plan: int, counter: int
    ) -> None:  # fmt: skip
        """Chosen experts, their shares, and the plan of the expert products."""
        r = self.rows
        self.launch(
            "route", parts, route.parts_of(self.spec.hidden_size), bias, r.image, r.sequence, chosen, shares, plan,
            counter, self.count, experts, per_token, self.spec.routed_scaling_factor, grid=(1, 1),
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


def shift_of(source: SourceLayout) -> int:
    """log2 of the ratio."""
    return source.ratio.bit_length() - 1


def block_shift(spec: Spec) -> int:
    """log2 of the candidate block's entries."""
    return spec.candidate_block_size.bit_length() - 1
