"""What `dsuf bench kernels` measures of attention: queries, over 640 keys, index scores, and the selection of entries.

Contexts are random valid pages, at as many places as make them cold.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from dsuf import formats
from dsuf.cli.bench.kernel_bench import BF16_ERROR, Bench, Case, relative_error
from dsuf.engine.gpu.launches import SCORE_BLOCKS, block_shift, shift_of
from dsuf.kernels import attend, pack, queries, rope
from dsuf.kernels.catalogue import tile_of
from dsuf.kernels.latents import window_row_bytes
from dsuf.layout import PAGE_TOKENS, PageLayout
from dsuf.ops import qdq
from dsuf.ops.attend import attend as attend_op
from dsuf.ops.index import KEY_TILE, largest
from dsuf.ops.index import index_scores as scores_op
from dsuf.ops.norm import rms_norm
from dsuf.ops.numerics import NUMERICS

CONTEXT = 32768  # tokens: 16 K entries of a source with two tokens an entry
LONG_CONTEXT = 1 << 20  # as many entries, of a source with one token an entry
RING_SPARE = 64
CHECKED = 16384  # entries whose scores are compared
PATTERN_PAGES = 64
WEIGHT_ROWS = 512  # of wq_b, before it repeats


class _Context:
    """Pages of one sequence in random order, repeating a few; a step's rows at its end."""

    def __init__(self, bench: Bench, rows: int, tokens: int, ratio: int) -> None:
        spec, rng = bench.spec, bench.rng
        self.layout = PageLayout.of(spec)
        self.source = next(one for one in self.layout.sources if one.ratio == ratio)
        self.count = tokens // PAGE_TOKENS
        pages = rng.integers(0, 256, (PATTERN_PAGES, self.layout.page_bytes), dtype=np.uint8)
        for plane, low, high in ((self.source.scales, 40, 64), (self.source.key_scales, 118, 122)):
            size = (PATTERN_PAGES, plane.rows * plane.width)
            pages[:, plane.offset : plane.end] = rng.integers(low, high, size, dtype=np.uint8)
        self.pages = pages
        copies = max(2, bench.cold // (self.count * self.layout.page_bytes) + 1)
        self.pools = [bench.repeated(pages, self.count * self.layout.page_bytes) for _ in range(copies)]
        self.order = rng.permutation(self.count).astype(np.uint32)
        self.table, self.sequence = bench.put(self.order), bench.put(np.zeros(rows, np.int32))
        self.position = np.arange(tokens - rows, tokens, dtype=np.int32)
        self.at_position = bench.put(self.position)

    def plane(self, name: str, entries: np.ndarray) -> np.ndarray:
        """Rows of a plane of the source, uint8 [entries, width]."""
        plane = getattr(self.source, name)
        page = self.order[entries // self.source.rows] % PATTERN_PAGES
        at = plane.offset + (entries % self.source.rows)[:, None] * plane.width + np.arange(plane.width)
        return self.pages[page[:, None], at]


def queries_of(with_index: bool, bench: Bench, rows: int) -> Case:
    """Queries from latents, the indexer's too, and window rows, one launch; checked: queries."""
    spec, rng, (n, index_n) = bench.spec, bench.rng, queries.widths(bench.spec)
    q, d, index_n = spec.q_lora_rank, spec.head_dim, index_n if with_index else 0
    raw = formats.quantise_fp8_blocks(rng.standard_normal((min(WEIGHT_ROWS, n), q)).astype(np.float32))
    packed, dense = pack.pack_fp8(*raw), formats.dequantise_fp8_blocks(*raw).astype(np.float64)
    tile, size = tile_of(bench.label, rows), (n + index_n) // pack.ROWS * packed[0].nbytes
    places = bench.copies(packed, size)
    y = formats.float32_to_bf16(rng.standard_normal((rows, q + d)).astype(np.float32))
    norms = [formats.float32_to_bf16(rng.standard_normal(k).astype(np.float32)) for k in (q, d)]
    w = spec.rope_theta ** (-np.arange(0, spec.qk_rope_head_dim, 2) / spec.qk_rope_head_dim)
    ring, out = spec.sliding_window + RING_SPARE, bench.poisoned(2 * tile * n)
    arrays = (y, *norms, rope.tables(w, CONTEXT), np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32))
    before = [*map(bench.put, arrays), bench.poisoned(ring * window_row_bytes(d)), 0, ring]
    index_out = bench.poisoned(2 * tile * max(index_n, 1))

    def go(w: int) -> None:
        index = w + n // pack.ROWS * packed[0].nbytes
        bench.device.launch(queries.name_of(bench.label, rows), *before, w, n, out, index, index_n, index_out, rows,
                            grid=(queries.blocks(bench.label, n + index_n), 1))  # fmt: skip

    def error() -> float:
        values, norm = (formats.bf16_to_float32(v).astype(np.float64) for v in (y[:, :q], norms[0]))
        c = qdq.q8(formats.round_bf16(rms_norm(values, norm, spec.rms_norm_eps).astype(np.float32)).astype(np.float64))
        got = formats.bf16_to_float32(bench.get(out, (tile, n), np.uint16))[:rows, : len(dense)]
        return relative_error(got, c @ dense.T) if np.isfinite(got).all() else float("nan")

    name, outputs = "wq_b_index" if with_index else "wq_b", n + index_n
    nbytes, operations = size + rows * (3 * (q + d) + 2 * outputs), 2 * rows * outputs * q
    return Case(name, rows, [partial(go, w) for w in places], error, 4 * BF16_ERROR, nbytes, operations,
                peer="q8", peer_shape=(rows, outputs, q, 1))  # fmt: skip


def attention(bench: Bench, rows: int, tokens: int = CONTEXT) -> Case:
    """A window and entries selected before the launch before, as in most layers: 640 keys, 64 heads, one launch."""
    spec, rng, context = bench.spec, bench.rng, _Context(bench, rows, tokens, 2)
    h, d, window, topk = spec.num_attention_heads, spec.head_dim, spec.sliding_window, spec.index_topk
    ring = window + RING_SPARE
    codes, scales = qdq.q8_encode(rng.standard_normal((ring, d)))
    kept = np.zeros((ring, window_row_bytes(d)), np.uint8)
    kept[:, :d], kept[:, d : d + d // 32] = codes, scales
    q = formats.float32_to_bf16(rng.standard_normal((rows, h, d)).astype(np.float32))
    visible = int(context.position[0] + 1) // 2
    picked = np.stack([np.sort(rng.permutation(visible)[:topk]) for _ in range(rows)]).astype(np.int32)
    sink = rng.standard_normal(h).astype(np.float32)
    w = spec.compress_rope_theta ** (-np.arange(0, spec.qk_rope_head_dim, 2) / spec.qk_rope_head_dim)
    out = bench.poisoned(rows * h * d * 2)
    first = context.position - window + 1
    before = [bench.put(q), bench.put(kept), kept.nbytes, ring, context.sequence, context.at_position,
              bench.put(first), context.at_position, bench.put(picked), topk, bench.put(np.full(rows, topk, np.int32)),
              context.table, context.count]  # fmt: skip
    after = [context.layout.page_bytes, 1, 0, bench.put(rope.tables(w, tokens)), bench.put(sink), out]
    shared = attend.shared_of(bench.width, h, rows)

    def go(pool: int) -> None:
        planes = [pool + context.source.codes.offset, pool + context.source.scales.offset]
        grid = attend.blocks(h) * rows, 1
        bench.device.launch(f"attend/{bench.label}", *before, *planes, *after, grid=grid, shared=shared)

    def error() -> float:
        got = bench.get(out, (rows, h, d), np.float16).astype(np.float64)
        places = np.arange(first[0], context.position[0] + 1) % ring
        keys = [qdq.q8_decode(codes[places], scales[places]),
                qdq.q4e_decode(context.plane("codes", picked[0]), context.plane("scales", picked[0]))]  # fmt: skip
        at = context.position[:1]
        turned = _turned(formats.bf16_to_float32(q[:1]).astype(np.float64), at, w, 1)
        keys = np.concatenate(keys).astype(np.float64)[None]
        o = attend_op(turned, keys, np.zeros(keys.shape[:2]), sink.astype(np.float64), NUMERICS["qdq64"])
        want = _turned(formats.round_bf16(o).astype(np.float64), at, w, -1)
        return relative_error(got[:1], want) if np.isfinite(got).all() else float("nan")

    nbytes = rows * (window * window_row_bytes(d) + topk * (d // 2 + d // 16) + 4 * h * d)
    operations = 4 * rows * h * d * (window + topk)
    return Case(
        "attention_640", rows, [partial(go, pool) for pool in context.pools], error, 2.0**-6, nbytes, operations
    )


def _turned(x: np.ndarray, position: np.ndarray, w: np.ndarray, sign: int) -> np.ndarray:
    """x [rows, H, d] with its tail rotated, rounded to bf16."""
    out, n = x.copy(), x.shape[-1] - 2 * len(w)
    angle = np.exp(sign * 1j * np.multiply.outer(position.astype(float), w))[:, None]
    pairs = (out[..., n::2] + 1j * out[..., n + 1 :: 2]) * angle
    out[..., n::2], out[..., n + 1 :: 2] = pairs.real, pairs.imag
    return formats.round_bf16(out).astype(np.float64)


def selection(part: str, bench: Bench, rows: int, tokens: int = CONTEXT, ratio: int = 2) -> Case:
    """Index scores of all entries, the choice of 512 of them, or both; scores are checked at some of the entries."""
    spec, rng, context = bench.spec, bench.rng, _Context(bench, rows, tokens, ratio)
    heads, di, k, entries = spec.index_n_heads, spec.index_head_dim, spec.index_topk, tokens // ratio
    shift, of_block = shift_of(context.source), block_shift(spec)
    q = qdq.q4p(rng.standard_normal((rows, heads, di)))
    weights = rng.standard_normal((rows, heads)).astype(np.float32)
    at_q, at_weights = bench.put(formats.float32_to_bf16(q.astype(np.float32))), bench.put(weights)
    outs = [bench.poisoned(rows * size * 4) for size in (entries, entries >> of_block, entries // 32)]
    chosen, number = bench.poisoned(rows * k * 4), bench.poisoned(rows * 4)

    def score(pool: int) -> None:
        keys = [pool + context.source.key_codes.offset, pool + context.source.key_scales.offset]
        bench.device.launch(
            f"index.scores/{bench.label}", at_q, at_weights, context.table, context.count, *keys,
            context.layout.page_bytes, context.sequence, context.at_position, shift, 0, 0, 0, of_block, *outs, entries,
            rows, grid=(SCORE_BLOCKS, 1),
        )  # fmt: skip

    def choose(_pool: int) -> None:
        bench.device.launch("select", *outs, entries, context.sequence, context.at_position, shift, of_block, 0, 0, 0,
                            chosen, number, k, 0, 0, 0, grid=(rows, 1))  # fmt: skip

    def both(pool: int) -> None:
        score(pool)
        choose(pool)

    def error() -> float:
        both(context.pools[0])
        seen = int(context.position[0] + 1) // ratio
        got = bench.get(outs[0], (rows, entries), np.float32)[0, :seen]
        if not np.isfinite(got).all():
            return float("nan")
        picked = bench.get(chosen, (rows, k), np.int32)[0]
        right = np.array_equal(picked, largest(got[None], k)[0])
        some = np.random.default_rng(seen).permutation(seen)[:CHECKED]
        at = np.resize(some, -(-len(some) // KEY_TILE) * KEY_TILE)  # whole tiles; what repeats is cut off again
        keys = qdq.q4p_decode(context.plane("key_codes", at), context.plane("key_scales", at)).astype(np.float64)
        want = scores_op(q[:1], weights[:1].astype(np.float64) * (di * heads) ** -0.5, keys)[0, : len(some)]
        return relative_error(got[some].astype(np.float64), want) if right else float("nan")

    score(context.pools[0])  # so that a choice alone has something to choose from
    run = {"scores": score, "select": choose, "both": both}[part]
    nbytes = rows * entries * 4 if part == "select" else entries * (di // 2 + di // 32)
    operations = 0 if part == "select" else 2 * rows * heads * di * entries
    size = "1m" if ratio == 1 else "16k"
    name = {"scores": f"index_scores_{size}", "select": f"select_512_of_{size}", "both": f"index_and_select_{size}"}
    return Case(name[part], rows, [partial(run, pool) for pool in context.pools], error, 1e-3, nbytes, operations)
