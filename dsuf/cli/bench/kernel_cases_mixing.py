"""What `dsuf bench kernels` measures of a step's small launches: stream mixing, compressor, window rows, quantising.

Latency decides all of them; what is of a weight lies cold, what the launch before leaves is near, as in a step.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from dsuf import formats
from dsuf.cli.bench.kernel_bench import BF16_ERROR, Bench, Case, relative_error
from dsuf.kernels import compress, experts, index_query, mixes, rope, taps
from dsuf.kernels.latents import RING_EXTRA, window_row_bytes
from dsuf.kernels.stream import scale_stride
from dsuf.layout import PAGE_TOKENS, PageLayout
from dsuf.ops import mixes as mixes_op
from dsuf.ops import qdq
from dsuf.ops import rope as rope_op
from dsuf.ops.compress import pool
from dsuf.ops.norm import rms_norm

LAST = 32767  # position of a step's last row, which ends a page and a pair
FOUR_BIT_ERROR = 0.1  # a value between two steps may fall either way: one such in a short row is some percent of it
CODES_ERROR = 2.0**-5  # the same with eight bits


def seam(after: str, bench: Bench, rows: int) -> Case:
    """Stream mixing after attention (wide rows for the experts too) or after the experts (the sum of their parts)."""
    spec, rng, d = bench.spec, bench.rng, bench.spec.hidden_size
    slots = spec.num_experts_per_tok if after == "experts" else 0
    parts, last, streams, g = (_bf16(rng, *s) for s in ((rows * max(slots, 1), d), (rows, d), (rows, 4, d), (d,)))
    scale, base = rng.uniform(0.5, 2, 3).astype(np.float32), rng.standard_normal(mixes.ROWS_OF_FN).astype(np.float32)
    previous, fn = (rng.standard_normal((mixes.ROWS_OF_FN, 4 * d)).astype(np.float32) * (4 * d) ** -0.5 for _ in "ab")
    flat = _values(streams).reshape(rows, -1)
    sums = np.zeros((rows, mixes.SUMS), np.float32)
    sums[:, : mixes.ROWS_OF_FN], sums[:, mixes.ROWS_OF_FN] = flat @ previous.T, (flat * flat).sum(1)
    before = [bench.put(parts), slots, bench.put(last), bench.put(streams)]
    given = [bench.put(array) for array in (sums, scale, base)]
    out, x, codes, sums_out = (bench.poisoned(rows * n) for n in (8 * d, 2 * d, d, 4 * mixes.SUMS))
    scales, at_g = bench.poisoned(rows * scale_stride(d)), bench.put(g)
    wide = 0 if slots else bench.poisoned(rows * 2 * d)

    def go(weight: int) -> None:
        bench.device.launch(f"seam/{bench.label}", *before, out, *given, weight, at_g, x, codes, scales, sums_out, 0, 0,
                            wide, rows, grid=(mixes.grid(d, rows), 1))  # fmt: skip

    def error() -> float:
        o = _values(last) + (_values(parts).reshape(rows, slots, d).sum(1) if slots else 0.0)
        weights = mixes_op.MixWeights(previous.T.astype(float), mixes_op.repeat_scale(scale.astype(float), 4), base)
        mixed = mixes_op.mixes(_values(streams), weights, spec.hc_sinkhorn_iters, spec.hc_eps, spec.rms_norm_eps)
        unfolded = mixes_op.unfold(_rounded(o), _values(streams), mixed.post, mixed.comb)
        made = _values(bench.get(out, (rows, 4, d), np.uint16))
        normed = rms_norm(_rounded(mixes_op.fold(made, mixed.pre)), _values(g), spec.rms_norm_eps)
        row = _values(bench.get(x, (rows, d), np.uint16))
        flat = made.reshape(rows, -1)
        totals = np.concatenate([flat @ fn.T.astype(float), (flat * flat).sum(1, keepdims=True)], 1)
        summed = bench.get(sums_out, (rows, mixes.SUMS), np.float32)[:, : mixes.ROWS_OF_FN + 1].astype(float)
        found = [(made, unfolded), (row, normed), (summed, totals), (_q8(bench, codes, scales, rows, d), qdq.q8(row))]
        if wide:
            found.append((bench.get(wide, (rows, d), np.float16).astype(float), 2.0**experts.SHIFT * qdq.q8(row)))
        return _worst(found)

    nbytes = fn.nbytes + rows * d * (8 + 8 + 2 * (slots + 1) + 3 + (2 if wide else 0))
    operations = 2 * rows * d * 4 * (mixes.ROWS_OF_FN + 4 + 2)
    launches = [partial(go, weight) for weight in bench.many_copies(fn)]
    return Case(f"seam_after_{after}", rows, launches, error, BF16_ERROR, nbytes, operations)


def compressor(ratio: int, bench: Bench, rows: int) -> Case:
    """Entries and index keys that the rows complete, into pages: pool, norm, rope, the key's product, quantise."""
    spec, rng, d, di = bench.spec, bench.rng, bench.spec.head_dim, bench.spec.index_head_dim
    layout, w = PageLayout.of(spec), rope_op.frequencies(spec, True)
    source = next(one for one in layout.sources if one.ratio == ratio)
    y = rng.standard_normal((rows, d * ratio)).astype(np.float32)
    ring = rng.standard_normal((compress.PAIR_RING, 2 * d)).astype(np.float32)
    norm, wk, k_norm = (_bf16(rng, *shape) for shape in ((d,), (di, d), (di,)))
    position, count = np.arange(LAST + 1 - rows, LAST + 1, dtype=np.int32), (LAST + 1) // PAGE_TOKENS
    page = bench.poisoned(layout.page_bytes)
    planes = (source.codes, source.scales, source.key_codes, source.key_scales)
    before = [bench.put(y), bench.put(ring), bench.put(norm)]
    arrays = (k_norm, rope.tables(w, LAST + 1), np.zeros(rows, np.int32), position, np.zeros(count, np.uint32))
    after = [*map(bench.put, arrays), count, *(page + plane.offset for plane in planes), layout.page_bytes, 0]

    def go(weight: int) -> None:
        bench.device.launch(f"compress.ratio{ratio}/{bench.label}", *before, weight, *after, grid=(rows, 1))

    def error() -> float:
        done = np.flatnonzero((position + 1) % ratio == 0)
        c = y[done, :d].astype(float)
        if ratio == 2:
            pairs = np.stack([y[i - 1] if i > 0 else ring[(position[0] - 1) % len(ring)] for i in done])
            both = np.stack([pairs, y[done]], 1).astype(float)
            c = pool(both[..., :d], both[..., d:])
        c = _rounded(rms_norm(_rounded(c), _values(norm), spec.rms_norm_eps))
        k = _rounded(rms_norm(_rounded(c @ _values(wk).T), _values(k_norm), spec.rms_norm_eps))
        entry = (position[done] + 1) // ratio - 1
        stored = bench.get(page, (layout.page_bytes,), np.uint8)
        codes, scales, key_codes, key_scales = (
            stored[plane.offset : plane.end].reshape(plane.rows, plane.width)[entry % plane.rows] for plane in planes
        )
        c, k = (_turned(v, entry * ratio, w) for v in (c, k))
        return _worst([(qdq.q4e_decode(codes, scales), qdq.q4e_decode(*qdq.q4e_encode(c))),
                       (qdq.q4p_decode(key_codes, key_scales), qdq.q4p_decode(*qdq.q4p_encode(k)))])  # fmt: skip

    done = (rows + ratio - 1) // ratio
    nbytes = y.nbytes + (ratio - 1) * y.nbytes + wk.nbytes + done * sum(plane.width for plane in planes)
    launches = [partial(go, weight) for weight in bench.many_copies(wk)]
    return Case(f"compress_ratio{ratio}", rows, launches, error, FOUR_BIT_ERROR, nbytes, 2 * done * d * di)


def window_rows(bench: Bench, rows: int) -> Case:
    """Norm, rope and insertion of window rows, as the drafter's have it; a layer's own go with its queries."""
    spec, rng, q, d = bench.spec, bench.rng, bench.spec.q_lora_rank, bench.spec.head_dim
    y, g, w = _bf16(rng, rows, q + d), _bf16(rng, d), rope_op.frequencies(spec, False)
    position, ring = np.arange(LAST + 1 - rows, LAST + 1, dtype=np.int32), spec.sliding_window + RING_EXTRA
    width = window_row_bytes(d)
    windows = bench.poisoned(ring * width)
    before = [bench.put(y), 0, bench.put(g), bench.put(rope.tables(w, LAST + 1)), bench.put(np.zeros(rows, np.int32))]

    def error() -> float:
        row = bench.get(windows, (ring, width), np.uint8)[position % ring]
        k = _rounded(rms_norm(_values(y[:, q:]), _values(g), spec.rms_norm_eps))
        got = qdq.q8_decode(row[:, :d], row[:, d : d + d // 32]).astype(float)
        return _worst([(got, qdq.q8(_turned(k, position, w)))])

    go = partial(bench.device.launch, f"latents/{bench.label}", *before, bench.put(position), 0, 0, windows,
                 ring * width, ring, grid=(rows, 1))  # fmt: skip
    return Case("window_rows", rows, [go], error, CODES_ERROR, rows * 3 * d, rows * 12 * d)


def queries_of_index(bench: Bench, rows: int) -> Case:
    """Rope and quantisation of the indexer's queries."""
    spec, rng, heads, di = bench.spec, bench.rng, bench.spec.index_n_heads, bench.spec.index_head_dim
    y, w = _bf16(rng, rows, heads, di), rope_op.frequencies(spec, True)
    position, out = np.arange(LAST + 1 - rows, LAST + 1, dtype=np.int32), bench.poisoned(rows * heads * di * 2)
    arguments = [*map(bench.put, (y, np.zeros(rows, np.int32), position, rope.tables(w, LAST + 1))), out]

    def error() -> float:
        got = _values(bench.get(out, (rows, heads, di), np.uint16))
        return _worst([(got, qdq.q4p(_turned(_values(y), position, w)))])

    sets = -(-heads // index_query.QUERY_WARPS)
    go = partial(bench.device.launch, f"index.query/{bench.label}", *arguments, grid=(rows * sets, 1))
    return Case("index_query", rows, [go], error, FOUR_BIT_ERROR, rows * heads * di * 4, rows * heads * di * 10)


def join_taps(bench: Bench, rows: int) -> Case:
    """The drafter's taps beside each other, quantised."""
    d = bench.spec.hidden_size
    each = [_bf16(bench.rng, rows, d) for _ in range(taps.TAPS)]
    codes, scales = bench.poisoned(rows * taps.TAPS * d), bench.poisoned(rows * scale_stride(taps.TAPS * d))

    def error() -> float:
        return _worst([(_q8(bench, codes, scales, rows, taps.TAPS * d), qdq.q8(_values(np.concatenate(each, 1))))])

    go = partial(bench.device.launch, "taps.join", *map(bench.put, each), codes, scales, d,
                 grid=(-(-d // taps.SPAN), taps.TAPS * rows))  # fmt: skip
    return Case("taps_join", rows, [go], error, 0.0, rows * taps.TAPS * d * 3)


def norm_rows(bench: Bench, rows: int) -> Case:
    """The drafter's features: norm and quantise."""
    d = bench.spec.hidden_size
    x, g = _bf16(bench.rng, rows, d), _bf16(bench.rng, d)
    codes, scales = bench.poisoned(rows * d), bench.poisoned(rows * scale_stride(d))

    def error() -> float:
        normed = _rounded(rms_norm(_values(x), _values(g), bench.spec.rms_norm_eps))
        return _worst([(_q8(bench, codes, scales, rows, d), qdq.q8(normed))])

    go = partial(bench.device.launch, "q8.norm", bench.put(x), bench.put(g), codes, scales, d, grid=(rows, 1))
    return Case("q8_norm", rows, [go], error, CODES_ERROR, rows * d * 3, rows * d * 12)


# ---- operands and what became of them


def _bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return formats.float32_to_bf16(rng.standard_normal(shape).astype(np.float32))


def _values(bits: np.ndarray) -> np.ndarray:
    return formats.bf16_to_float32(bits).astype(np.float64)


def _rounded(x: np.ndarray) -> np.ndarray:
    return formats.round_bf16(x.astype(np.float32)).astype(np.float64)


def _turned(x: np.ndarray, position: np.ndarray, w: np.ndarray) -> np.ndarray:
    out = np.array(x, np.float64)
    rope_op.rotate(out, rope_op.phases(position, w, np.dtype(np.float64)))
    return _rounded(out)


def _q8(bench: Bench, codes: int, scales: int, rows: int, k: int) -> np.ndarray:
    stored = bench.get(scales, (rows, scale_stride(k)), np.uint8)[:, : k // 32]
    return qdq.q8_decode(bench.get(codes, (rows, k), np.uint8), stored).astype(np.float64)


def _worst(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """The largest relative error of several (got, want); NaN if one is."""
    return float(np.max([relative_error(got, want) for got, want in pairs]))
