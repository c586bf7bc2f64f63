"""Attention of decode rows over window ring and selected entries; keys are values, one set for all heads.

    partial  for each tile of 64 keys: m = max_t s_t, l = sum_t 2^(s_t - m), O = sum_t bf16(2^(s_t - m)) k_t
             s_t = log2(e) rope(q) . k_t / sqrt(d)
    combine  o = sum_i O_i 2^(m_i - M) / (sum_i l_i 2^(m_i - M) + 2^(log2(e) sink - M)), inverse rope, bf16

q bf16 [rows, H, d] before rope; o bf16 [rows, H, d]. Window keys are positions first .. last of the row's ring (rows of
latents.window_row_bytes: e4m3, ue8m0 per 32); selected entries are e2m1 with one e4m3 scale per 16 in pages
(layout.py), selected int32 [rows, topk], `chosen` of them. Both dequantise exactly to bf16 in shared memory. Tiles:
window first, then selected, at fixed places, so that a row's sums do not depend on other rows. partials float32 [rows,
tiles, H, d], stats float32 [rows, tiles, H, 2].

The drafter's block sees its own five latents: they stand in the ring at the block's positions, with first and last the
same for its five rows. Reference: dsuf.ops.attend.attend. Bytes: 528 a window key, 288 a selected one, a row; the
partial sums of 640 keys are 1.3 MB a row and live in L2.

Shared memory of a tile: 64 keys of d bf16 in chunks of 16 bytes, chunk c of key n at c ^ swizzle(n), where the products
with q (8 keys, neighbouring chunks) and the transposed loads for the values (8 keys, one chunk) touch all banks once.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.latents import MOST_ROWS, RING_EXTRA, window_row_bytes
from dsuf.kernels.ptx.convert import (
    as_bits,
    as_float,
    bf16_high,
    bf16_low,
    bf16x2,
    div,
    e4m3x4_bf16,
    exp2_approx,
    fma,
    fmax,
    fp4x8_bf16,
    mul_bf16x2,
    prmt,
)
from dsuf.kernels.ptx.memory import (
    ldg_f32,
    ldg_u8,
    ldg_u32,
    ldg_u32x2,
    ldg_u32x4,
    lds_u32x2,
    lds_u32x4,
    ldw_f32,
    shared_base,
    stg_f32,
    stg_u32x2,
    sts_u32x2,
    sts_u32x4,
)
from dsuf.kernels.ptx.mma import ldmatrix_x4_trans, mma_bf16
from dsuf.kernels.ptx.sync import (
    block_index,
    block_index_y,
    let_next_kernel_start,
    sync_threads,
    sync_warp,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.quantise import max_over, sum_over
from dsuf.kernels.rope import phase, rotated
from dsuf.layout import PAGE_TOKENS
from dsuf.ops.attend import attend

TILE = 64  # keys
LOG2_E = 1.4426950408889634
MASKED, LEAST = -3.0e38, -1.0e30
QUAD = (1, 2)  # lanes that hold the same rows of a product


def tiles(window: int, topk: int) -> int:
    """Tiles of a row: those of the window (at most `window` keys), then those of the selection."""
    return -(-window // TILE) + -(-topk // TILE)


@inline
def chunk_address(base: Any, key: Any, chunk: Any, pitch: Any) -> Any:
    """Shared address of a 16-byte chunk of a key."""
    return uint32(base + key * pitch + (chunk ^ (((key & 1) << 2) | ((key >> 1) & 3))) * 16)


@inline
def turn(word: Any, table: Any, at: Any) -> Any:
    """A bf16 pair rotated by the phase in shared memory at pair index `at`."""
    cs = lds_u32x2(uint32(table + at * 8))
    a, b = rotated(bf16_low(word), bf16_high(word), as_float(cs[0]), as_float(cs[1]))
    return bf16x2(b, a)


@inline
def score_group(score: Any, low: Any, high: Any, keys: Any, k: Any, g: Any, t: Any, pitch: Any) -> None:
    """score[n] += 32 columns of q (rows g and g + 8) times those of keys 8n .. 8n + 7."""
    for n in unroll(8):
        w = lds_u32x4(chunk_address(keys, int32(8 * n + g), int32(4 * k + t), pitch))
        score[n] = mma_bf16((low[0], high[0], low[1], high[1]), (w[0], w[1]), score[n])
        score[n] = mma_bf16((low[2], high[2], low[3], high[3]), (w[2], w[3]), score[n])


def make_partial(*, h: int, d: int, rope: int, ring: int, window: int, topk: int, ratio: int) -> Kernel:
    """h heads, padded to 16; window keys at most; topk 0: window only."""
    M_TILES, PITCH, ROW = -(-h // 16), d * 2, window_row_bytes(d)
    PARTS = 1 if d < 128 else max(1, 8 // M_TILES)  # warps of 16 heads, each with its share of d
    WARPS = M_TILES * PARTS
    THREADS, GROUPS, OUT_TILES = WARPS * 32, d // 32, d // 8 // PARTS
    WINDOW_TILES, TILES, PIECES = -(-window // TILE), tiles(window, topk), d // 16
    HALF, TAIL = rope // 2, d - rope
    ROWS_OF_PAGE = PAGE_TOKENS // max(ratio, 1)
    AT_PHASE = TILE * PITCH
    SCALE = LOG2_E * d**-0.5

    @kernel(
        threads=THREADS, grid=(MOST_ROWS * TILES,), shared=AT_PHASE + HALF * 8, name=f"attend_{h}x{d}_w{window}_k{topk}"
    )
    def partial(
        q: s64, windows: s64, pitch: s64, selected: s64, chosen: s64, pages: s64, most_pages: s32, page_codes: s64,
        page_scales: s64, page_bytes: s64, sequence: s64, position: s64, first: s64, last: s64, table: s64, out: s64,
        stats: s64,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        g = int32(lane >> 2)
        t = int32(lane & 3)
        row = int64(block_index() // TILES)
        tile = int32(block_index() % TILES)
        sm = shared_base()
        wait_for_previous_kernel()
        let_next_kernel_start()
        owner = int64(int32(ldg_u32(sequence + row * 4)))
        start = int32(ldg_u32(first + row * 4))
        count = int32(int32(ldg_u32(last + row * 4)) + 1 - start)
        base = int32(tile * TILE)
        if topk > 0 and tile >= WINDOW_TILES:
            base = int32((tile - WINDOW_TILES) * TILE)
            count = int32(ldg_u32(chosen + row * 4))
        keys = int32(count - base)  # that this tile holds, if positive
        if owner >= 0 and keys > 0:
            for p in range(tid, HALF, THREADS):
                c, s = phase(table, int32(ldg_u32(position + row * 4)), p, HALF)
                sts_u32x2(uint32(sm + AT_PHASE + p * 8), (as_bits(c), as_bits(s)))
            for i in range(tid, TILE * PIECES, THREADS):
                key = int32(i // PIECES)
                piece = int32(i - key * PIECES)
                v = regs(8, uint32(0))
                if key < keys:
                    if topk > 0 and tile >= WINDOW_TILES:
                        entry = int32(ldg_u32(selected + (row * topk + base + key) * 4))
                        page = int32(entry // ROWS_OF_PAGE)
                        where = int64(ldg_u32(pages + (owner * most_pages + page) * 4)) * page_bytes
                        slot = int64(entry - page * ROWS_OF_PAGE)
                        code = ldg_u32x2(page_codes + where + (slot * (d // 2) + piece * 8))
                        scale = e4m3x4_bf16(ldg_u8(page_scales + where + (slot * (d // 16) + piece)))
                        both = prmt(scale[0], uint32(0), uint32(0x1010))
                        for j in unroll(2):
                            four = fp4x8_bf16(code[j])
                            for m in unroll(4):
                                v[4 * j + m] = mul_bf16x2(four[m], both)
                    else:
                        line = windows + owner * pitch + int64((start + base + key) % ring) * ROW
                        code4 = ldg_u32x4(line + piece * 16)
                        exponent = ldg_u8(line + d + (piece >> 1))
                        both = uint32(exponent << 7 | exponent << 23)
                        for j in unroll(4):
                            two = e4m3x4_bf16(code4[j])
                            v[2 * j] = mul_bf16x2(two[0], both)
                            v[2 * j + 1] = mul_bf16x2(two[1], both)
                sts_u32x4(chunk_address(sm, key, int32(2 * piece), PITCH), v[0:4])
                sts_u32x4(chunk_address(sm, key, int32(2 * piece + 1), PITCH), v[4:8])
        sync_threads()
        if owner >= 0 and keys > 0:
            # scores of 16 heads and all 64 keys; the warps of one set of heads repeat this for each other
            head = int32(warp // PARTS * 16 + g)
            q_low = q + ((row * h + (head if head < h else 0)) * d + t * 8) * 2
            q_high = q + ((row * h + (head + 8 if head + 8 < h else 0)) * d + t * 8) * 2
            score = regs(8, (0.0, 0.0, 0.0, 0.0))
            for k in range(TAIL // 32):
                a = ldg_u32x4(q_low + k * 64)
                b = ldg_u32x4(q_high + k * 64)
                score_group(score, a, b, sm, k, g, t, PITCH)
            for k in range(TAIL // 32, GROUPS):
                x = regs(8)
                x[0:4] = ldg_u32x4(q_low + k * 64)
                x[4:8] = ldg_u32x4(q_high + k * 64)
                if k * 32 + t * 8 >= TAIL:
                    for j in unroll(4):
                        at = int32(k * 16 + t * 4 + j - TAIL // 2)
                        x[j] = turn(x[j], uint32(sm + AT_PHASE), at)
                        x[4 + j] = turn(x[4 + j], uint32(sm + AT_PHASE), at)
                sync_warp()  # the product below wants whole warps
                score_group(score, x[0:4], x[4:8], sm, k, g, t, PITCH)
            top0 = LEAST
            top1 = LEAST
            v = regs(32)
            for n in unroll(8):
                for j in unroll(4):
                    live = 8 * n + 2 * t + j % 2 < keys
                    v[4 * n + j] = score[n][j] * SCALE if live else MASKED
                top0 = fmax(top0, fmax(v[4 * n], v[4 * n + 1]))
                top1 = fmax(top1, fmax(v[4 * n + 2], v[4 * n + 3]))
            top0 = max_over(top0, QUAD)
            top1 = max_over(top1, QUAD)
            sum0 = 0.0
            sum1 = 0.0
            p = regs(16)  # probabilities as A fragments: (n, row half) -> keys 2t, 2t + 1 of key tile n
            for n in unroll(8):
                e0 = exp2_approx(v[4 * n] - top0)
                e1 = exp2_approx(v[4 * n + 1] - top0)
                e2 = exp2_approx(v[4 * n + 2] - top1)
                e3 = exp2_approx(v[4 * n + 3] - top1)
                sum0 = sum0 + (e0 + e1)
                sum1 = sum1 + (e2 + e3)
                p[2 * n] = bf16x2(e1, e0)
                p[2 * n + 1] = bf16x2(e3, e2)
            sum0 = sum_over(sum0, QUAD)
            sum1 = sum_over(sum1, QUAD)
            at_head = (row * TILES + tile) * h
            if t == 0 and warp % PARTS == 0:
                if head < h:
                    stg_f32(stats + (at_head + head) * 8, top0)
                    stg_f32(stats + (at_head + head) * 8 + 4, sum0)
                if head + 8 < h:
                    stg_f32(stats + (at_head + head + 8) * 8, top1)
                    stg_f32(stats + (at_head + head + 8) * 8 + 4, sum1)
            for n in range(OUT_TILES // 2):  # 16 columns of the result at a time
                column = int32((warp % PARTS * OUT_TILES + 2 * n) * 8)
                o0 = (0.0, 0.0, 0.0, 0.0)
                o1 = (0.0, 0.0, 0.0, 0.0)
                for k in unroll(TILE // 16):
                    # matrices: keys 0-7 and 8-15 of this 16, columns 0-7, then the same for columns 8-15
                    key = int32(16 * k + (lane & 7) + ((lane >> 3) & 1) * 8)
                    w = ldmatrix_x4_trans(chunk_address(sm, key, int32((column >> 3) + (lane >> 4)), PITCH))
                    o0 = mma_bf16(p[4 * k : 4 * k + 4], (w[0], w[1]), o0)
                    o1 = mma_bf16(p[4 * k : 4 * k + 4], (w[2], w[3]), o1)
                to = out + ((at_head + head) * d + column + 2 * t) * 4
                if head < h:
                    stg_u32x2(to, (as_bits(o0[0]), as_bits(o0[1])))
                    stg_u32x2(to + 32, (as_bits(o1[0]), as_bits(o1[1])))
                if head + 8 < h:
                    stg_u32x2(to + 32 * d, (as_bits(o0[2]), as_bits(o0[3])))
                    stg_u32x2(to + 32 * d + 32, (as_bits(o1[2]), as_bits(o1[3])))

    return partial


def make_combine(*, h: int, d: int, rope: int, window: int, topk: int) -> Kernel:
    """A block a head and row, a thread four columns."""
    THREADS = -(-d // 128) * 32
    TILES, WINDOW_TILES, HALF, TAIL = tiles(window, topk), -(-window // TILE), rope // 2, d - rope

    @kernel(threads=THREADS, grid=(h, MOST_ROWS), name=f"attend_combine_{h}x{d}_w{window}_k{topk}")
    def combine(
        partials: s64, stats: s64, sink: s64, sequence: s64, position: s64, first: s64, last: s64, chosen: s64,
        table: s64, out: s64,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        head = int64(block_index())
        row = int64(block_index_y())
        wait_for_previous_kernel()
        let_next_kernel_start()
        if int32(ldg_u32(sequence + row * 4)) >= 0 and 4 * tid < d:
            window_keys = int32(int32(ldg_u32(last + row * 4)) + 1 - int32(ldg_u32(first + row * 4)))
            entries = int32(ldg_u32(chosen + row * 4)) if topk > 0 else int32(0)
            logit = ldw_f32(sink + head * 4) * LOG2_E
            top = LEAST
            for i in unroll(TILES):
                held = window_keys - i * TILE if i < WINDOW_TILES else entries - (i - WINDOW_TILES) * TILE
                if held > 0:
                    top = fmax(top, ldg_f32(stats + ((row * TILES + i) * h + head) * 8))
            total = exp2_approx(logit - top)
            v = regs(4, 0.0)
            for i in unroll(TILES):
                held = window_keys - i * TILE if i < WINDOW_TILES else entries - (i - WINDOW_TILES) * TILE
                if held > 0:
                    at = (row * TILES + i) * h + head
                    f = exp2_approx(ldg_f32(stats + at * 8) - top)
                    total = fma(ldg_f32(stats + at * 8 + 4), f, total)
                    w = ldg_u32x4(partials + (at * d + 4 * tid) * 4)
                    for j in unroll(4):
                        v[j] = fma(as_float(w[j]), f, v[j])
            word = regs(2)
            for j in unroll(2):
                word[j] = bf16x2(div(v[2 * j + 1], total), div(v[2 * j], total))
            if 4 * tid >= TAIL:
                place = int32(ldg_u32(position + row * 4))
                for j in unroll(2):
                    c, s = phase(table, place, int32(2 * tid - TAIL // 2 + j), HALF)
                    a, b = rotated(bf16_low(word[j]), bf16_high(word[j]), c, -s)
                    word[j] = bf16x2(b, a)
            stg_u32x2(out + ((row * h + head) * d + 4 * tid) * 2, word)

    return combine


def entries(width: Width) -> list[Entry]:
    """Window-only and sparse attention of the backbone, and the drafter's, whose window holds its own block too."""
    spec, found = width.spec, []
    h, d, rope, w = spec.num_attention_heads, spec.head_dim, spec.qk_rope_head_dim, spec.sliding_window
    kinds = {"window": (w, 0, 0), "draft": (w + spec.dspark_block_size, 0, 0)}
    for ratio in sorted({role.ratio for role in spec.layers if role.ratio}):
        kinds[f"ratio{ratio}"] = (w, spec.index_topk, ratio)
    for name, (window, topk, ratio) in kinds.items():
        shape = {"h": h, "d": d, "rope": rope, "window": window, "topk": topk}
        keys = window + topk
        nbytes = MOST_ROWS * (window * (d + d // 32) + topk * (d // 2 + d // 16) + 4 * h * d)
        operations = 4 * MOST_ROWS * h * d * keys
        extra = {"ring": w + RING_EXTRA, "ratio": ratio}
        label = f"attend.{name}/{width.label}"
        found.append(Entry(label, make_partial, shape | extra, width.chips, attend, nbytes, operations))
        if ratio != 2:  # one combine for every ratio
            parts = MOST_ROWS * tiles(window, topk) * h * d
            label = f"attend_combine.{name if not ratio else 'sparse'}/{width.label}"
            found.append(Entry(label, make_combine, shape, width.chips, attend, 4 * parts, 2 * parts))
    return found
