"""Attention of decode rows over window ring and selected entries; keys are values, one set for all heads.

    s_t = rope(q) . k_t / sqrt(d);  o = sum_t e^(s_t - M) k_t / (sum_t e^(s_t - M) + e^(sink - M)), inverse rope, bf16

q bf16 [rows, H, d] before rope; o f16 [rows, H, d] of the bf16 values, what wo_a multiplies (exact from 2^-14 on, a
mean of keys stays far below 65,504). The keys of a row are positions first .. last of its window ring
(rows of latents.window_row_bytes: e4m3, ue8m0 per 32), then `chosen` of selected int32 [rows, topk]: e2m1 with one
e4m3 scale per 16 in pages (layout.py), an entry's page is entry >> (7 - shift) with shift 1 for ratio 2. chosen 0 (the
address): window only. The drafter's block sees its own five latents: they stand in the ring at the block's positions,
with first and last the same for its five rows. Reference: dsuf.ops.attend.attend. Bytes: 528 a window key, 288 a
selected one, a row; latency decides.

A cluster of 8 blocks shares a row and up to 32 heads: each takes an eighth of the keys, dequantises them to bf16 in
shared memory (exact), and makes scores, probabilities relative to its own largest score (rounded to bf16 as the
official kernel rounds them), and its part of the sum. While it does, its largest scores and weights go round the
cluster, so that a part is scaled before it is stored; then each block adds up the eight parts of its share of the
heads, in the order of ranks. Shares depend on the row's own number of keys only. In the products with q a warp owns
d / 8 columns and every other 16 keys (the block adds the columns' parts up, in order), in those with the values d / 16
columns.

Keys in shared memory, divided by 256: rows of d bf16 in chunks of 16 bytes, chunk c of key n at c ^ swizzle(n), where
the products with q (8 keys, neighbouring chunks) and the transposed loads for the values (8 keys, one chunk) touch all
banks once.

    hand-off                     who writes   who waits    reused
    addresses, keys              the block    the block    never
    scores of a warp's columns   each warp    the block    by the parts of the sum, after probabilities are made
    probabilities                each warp    the block    never
    parts, largest, sums         the block    the cluster  never; the last cluster barrier keeps them alive
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.latents import MOST_ROWS, window_row_bytes
from dsuf.kernels.ptx.convert import (
    as_bits,
    as_float,
    bf16_high,
    bf16_low,
    bf16x2,
    div,
    e4m3x4_bf16,
    e4m3x4_bf16_scaled,
    exp2_approx,
    f16x2,
    fma,
    fmax,
    fp4x8_bf16_scaled,
    mul_bf16x2,
    prmt,
)
from dsuf.kernels.ptx.memory import (
    ldg_u8,
    ldg_u32,
    ldg_u32x2,
    ldg_u32x4,
    lds_f32,
    lds_u32x4,
    ldw_f32,
    shared_base,
    stg_u32x2,
    sts_f32,
    sts_u32x2,
    sts_u32x4,
)
from dsuf.kernels.ptx.mma import ldmatrix_x4, ldmatrix_x4_trans, mma_bf16
from dsuf.kernels.ptx.sync import (
    block_index,
    cluster_address,
    cluster_arrive,
    cluster_rank,
    cluster_wait,
    ld_cluster_f32,
    ld_cluster_u32x4,
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
from dsuf.spec import Spec

CLUSTER = 8  # blocks that share the keys of a row: the portable most
LEAST_SHARE = 16  # keys of a block that has any
PAGE_SHIFT = PAGE_TOKENS.bit_length() - 1
LOG2_E = 1.4426950408889634
MASKED, LEAST = -3.0e38, -1.0e30
UNIT = 256.0  # keys stand in shared memory in this unit, so that the factors of their codes are bf16 numbers
RING_BIAS, PAGE_BIAS = 112, 0x7A807A80  # of the exponent of a ring's scale; 2^118 twice, for a page's scale
HEAD_LANES = (1, 2, 4, 8)  # sixteen lanes make one head's probabilities


def heads_of_block(h: int) -> int:
    """Heads of a cluster: whole product tiles, 32 at most."""
    return min(32, -(-h // 16) * 16)


def blocks(h: int) -> int:
    """Blocks of a row; the grid is that times the rows."""
    return CLUSTER * -(-h // heads_of_block(h))


def most_keys(spec: Spec) -> int:
    """Keys of a row that the entries are made for: those of a sparse layer, or the drafter's, in whole shares."""
    keys = max(spec.sliding_window + spec.index_topk, spec.sliding_window + spec.dspark_block_size)
    return max(128, -(-keys // (16 * CLUSTER)) * 16 * CLUSTER)


@inline
def chunk_address(base: Any, key: Any, chunk: Any, pitch: Any) -> Any:
    """Shared address of a 16-byte chunk of a key."""
    return uint32(base + key * pitch + (chunk ^ (((key & 1) << 2) | ((key >> 1) & 3))) * 16)


@inline
def turn(word: Any, c: Any, s: Any) -> Any:
    """A bf16 pair rotated by a phase."""
    a, b = rotated(bf16_low(word), bf16_high(word), c, s)
    return bf16x2(b, a)


@inline
def whole(low: Any, high: Any) -> Any:
    """An address from its two words."""
    return int64(low) | int64(high) << 32


def make(*, h: int, d: int, rope: int, most: int) -> Kernel:
    """h heads of d = 64, 128, 256 or 512 columns, rope the turned tail; most: keys of a row, a multiple of 128."""
    HEADS, SHARE, ROW = heads_of_block(h), most // CLUSTER, window_row_bytes(d)
    SETS, M_TILES = -(-h // HEADS), HEADS // 16
    PARTS = min(8, d // 32)  # of the columns in the products with q
    WARPS, PITCH = 2 * PARTS, d * 2
    THREADS, COLUMNS = WARPS * 32, d // WARPS  # columns of a warp in the products with the values
    GROUPS, PIECES = d // PARTS // 32, d // 16
    AT_ONCE = THREADS // PIECES  # keys that the block dequantises at once
    PASSES = -(-SHARE // AT_ONCE)
    LINE = SHARE + 8  # words of a line of scores, elements of a line of probabilities: all banks once
    QUADS = -(-SHARE // 64)  # quads of neighbouring keys of a lane when probabilities are made
    OUT_LINE = d + 8
    AT_ADDRESS = SHARE * PITCH
    AT_STATS = AT_ADDRESS + 16 * SHARE
    AT_FACTOR = AT_STATS + 8 * HEADS
    AT_P = AT_FACTOR + 4 * HEADS
    AT_SCORE = AT_P + 2 * HEADS * LINE
    SHARED = AT_SCORE + 4 * HEADS * max(PARTS * LINE, OUT_LINE)
    HALF, TAIL, SCALE = rope // 2, d - rope, LOG2_E * UNIT * d**-0.5
    OWN = HEADS // CLUSTER  # heads whose parts a block adds up
    ITEMS = OWN * d // 4  # of four columns
    ROUNDS = -(-ITEMS // THREADS)

    @kernel(
        threads=THREADS, grid=(CLUSTER * SETS * MOST_ROWS,), shared=SHARED, cluster=CLUSTER,
        name=f"attend_{h}x{d}_{most}",
    )  # fmt: skip
    def attention(
        q: s64, windows: s64, pitch: s64, ring: s32, sequence: s64, position: s64, first: s64, last: s64, selected: s64,
        topk: s32, chosen: s64, pages: s64, most_pages: s32, page_codes: s64, page_scales: s64, page_bytes: s64,
        shift: s32, table: s64, sink: s64, out: s64,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        g = int32(lane >> 2)
        t = int32(lane & 3)
        rank = int32(cluster_rank())
        row = int64(block_index() // (CLUSTER * SETS))
        heads = int32(block_index() // CLUSTER % SETS * HEADS)  # the first of this block
        sm = shared_base()
        wait_for_previous_kernel()
        let_next_kernel_start()
        owner = int64(int32(ldg_u32(sequence + row * 4)))
        place = int32(ldg_u32(position + row * 4))
        start = int32(ldg_u32(first + row * 4))
        entries = ldg_u32((chosen if chosen != 0 else first) + row * 4)  # one load after the other would wait twice
        window_keys = int32(int32(ldg_u32(last + row * 4)) + 1 - start)
        n = int32(window_keys + (int32(entries) if chosen != 0 else 0))
        part = int32(warp % PARTS)
        share = int32(max(((n + CLUSTER - 1) // CLUSTER + 7) // 8 * 8, LEAST_SHARE))
        base = int32(rank * share)
        mine = int32(max(min(n - base, share), 0))
        mine = int32(mine if owner >= 0 else 0)
        from_ring = int32(max(min(window_keys - base, mine), 0))
        padded = int32((mine + 15) // 16 * 16)
        for i in range(tid, mine, THREADS):
            code = windows + owner * pitch + int64((start + base + i) % ring) * ROW
            scale = code + d
            if i >= from_ring:
                entry = int32(ldg_u32(selected + (row * topk + base + i - window_keys) * 4))
                page = int32(entry >> (PAGE_SHIFT - shift))
                slot = int64(entry - (page << (PAGE_SHIFT - shift)))
                where = int64(ldg_u32(pages + (owner * most_pages + page) * 4)) * page_bytes
                code = page_codes + where + slot * (d // 2)
                scale = page_scales + where + slot * (d // 16)
            words = (uint32(code), uint32(code >> 32), uint32(scale), uint32(scale >> 32))
            sts_u32x4(uint32(sm + AT_ADDRESS + 16 * i), words)
        sync_threads()
        # all loads of keys are asked for, then dequantised: a thread has 16 columns of every AT_ONCE-th key
        piece = int32(tid % PIECES)
        code4 = regs(4 * PASSES, uint32(0))
        factor = regs(PASSES, uint32(0))
        for i in unroll(PASSES):
            key = int32(tid // PIECES + i * AT_ONCE)
            if key < mine:
                w = regs(4)
                w = lds_u32x4(uint32(sm + AT_ADDRESS + 16 * key))
                code = whole(w[0], w[1])
                scale = whole(w[2], w[3])
                if key < from_ring:
                    code4[4 * i : 4 * i + 4] = ldg_u32x4(code + piece * 16)
                    factor[i] = ldg_u8(scale + (piece >> 1))
                else:
                    code4[4 * i : 4 * i + 2] = ldg_u32x2(code + piece * 8)
                    factor[i] = ldg_u8(scale + piece)
        # q of this warp's columns: (group, rows g and g + 8 of a product tile) -> four words
        a = regs(8 * GROUPS * M_TILES)
        of_q = q + ((row * h + heads + g) * d + part * GROUPS * 32 + 8 * t) * 2
        for k in unroll(GROUPS):
            for m in unroll(2 * M_TILES):
                skipped = 0 if h % HEADS == 0 else max(heads + 8 * m + g - (h - 1), 0)  # no row beyond the last head
                word = ldg_u32x4(of_q + (8 * m * d + 32 * k) * 2 - int64(skipped) * (2 * d))
                a[8 * M_TILES * k + 4 * m : 8 * M_TILES * k + 4 * m + 4] = word
        if owner >= 0:
            for k in unroll(GROUPS):
                column = int32((part * GROUPS + k) * 32 + 8 * t)
                if column >= TAIL:
                    for j in unroll(4):
                        c, s = phase(table, place, int32((column - TAIL) // 2 + j), HALF)
                        for m in unroll(2 * M_TILES):
                            a[4 * (2 * M_TILES * k + m) + j] = turn(a[4 * (2 * M_TILES * k + m) + j], c, s)
        for i in unroll(PASSES):
            key = int32(tid // PIECES + i * AT_ONCE)
            if key < padded:
                v = regs(8, uint32(0))
                if key < from_ring:
                    both = uint32(factor[i] + RING_BIAS << 7 | factor[i] + RING_BIAS << 23)
                    for j in unroll(4):
                        v[2 * j : 2 * j + 2] = e4m3x4_bf16_scaled(code4[4 * i + j], both)
                else:
                    both = mul_bf16x2(prmt(e4m3x4_bf16(factor[i])[0], uint32(0), uint32(0x1010)), uint32(PAGE_BIAS))
                    v[0:4] = fp4x8_bf16_scaled(code4[4 * i], both)
                    v[4:8] = fp4x8_bf16_scaled(code4[4 * i + 1], both)
                sts_u32x4(chunk_address(sm, key, int32(2 * piece), PITCH), v[0:4])
                sts_u32x4(chunk_address(sm, key, int32(2 * piece + 1), PITCH), v[4:8])
        sync_threads()
        # scores: this warp's columns of all heads, 16 keys at a time
        for first_key in range(16 * (warp // PARTS), padded, 32):
            acc = regs(2 * M_TILES, (0.0, 0.0, 0.0, 0.0))
            for k in unroll(GROUPS):
                for half in unroll(2):
                    chunk = int32((part * GROUPS + k) * 4 + t)
                    b = lds_u32x4(chunk_address(sm, int32(first_key + 8 * half + g), chunk, PITCH))
                    for m in unroll(M_TILES):
                        x = regs(8)
                        x = a[8 * (M_TILES * k + m) : 8 * (M_TILES * k + m) + 8]
                        low = mma_bf16((x[0], x[4], x[1], x[5]), (b[0], b[1]), acc[2 * m + half])
                        acc[2 * m + half] = mma_bf16((x[2], x[6], x[3], x[7]), (b[2], b[3]), low)
            for half in unroll(2):
                for m in unroll(M_TILES):
                    line = (part * HEADS + 16 * m + g) * LINE + first_key + 8 * half + 2 * t
                    to = uint32(sm + AT_SCORE + line * 4)
                    sts_u32x2(to, (as_bits(acc[2 * m + half][0]), as_bits(acc[2 * m + half][1])))
                    sts_u32x2(uint32(to + 32 * LINE), (as_bits(acc[2 * m + half][2]), as_bits(acc[2 * m + half][3])))
        sync_threads()
        # probabilities: sixteen lanes a head, quads of keys
        for one in range(warp * 2 + (lane >> 4), HEADS, 2 * WARPS):
            v = regs(4 * QUADS, MASKED)
            top = LEAST
            for i in unroll(QUADS):
                key = int32(4 * ((lane & 15) + 16 * i))
                if key < padded:
                    summed = regs(4, 0.0)
                    for w in unroll(PARTS):
                        quad = lds_u32x4(uint32(sm + AT_SCORE + ((w * HEADS + one) * LINE + key) * 4))
                        for j in unroll(4):
                            summed[j] = summed[j] + as_float(quad[j])
                    for j in unroll(4):
                        v[4 * i + j] = summed[j] * SCALE if key + j < mine else MASKED
                        top = fmax(top, v[4 * i + j])
            sync_warp()
            top = max_over(top, HEAD_LANES)
            weight = 0.0
            for i in unroll(QUADS):
                key = int32(4 * ((lane & 15) + 16 * i))
                e = regs(4)
                for j in unroll(4):
                    e[j] = exp2_approx(v[4 * i + j] - top)
                weight = weight + ((e[0] + e[1]) + (e[2] + e[3]))
                if key < padded:
                    sts_u32x2(uint32(sm + AT_P + (one * LINE + key) * 2), (bf16x2(e[1], e[0]), bf16x2(e[3], e[2])))
            sync_warp()
            weight = sum_over(weight, HEAD_LANES)
            if lane & 15 == 0:
                sts_u32x2(uint32(sm + AT_STATS + 8 * one), (as_bits(top), as_bits(weight)))
        sync_threads()
        cluster_arrive()
        # this warp's columns of the sum
        o = regs(COLUMNS // 8 * M_TILES, (0.0, 0.0, 0.0, 0.0))
        for first_key in range(0, padded, 16):
            p = regs(4 * M_TILES)
            for m in unroll(M_TILES):
                line = (16 * m + (lane & 15)) * LINE + first_key + (lane >> 4) * 8
                p[4 * m : 4 * m + 4] = ldmatrix_x4(uint32(sm + AT_P + line * 2))
            for c in unroll(COLUMNS // 16):
                chunk = int32(warp * (COLUMNS // 8) + 2 * c + (lane >> 4))
                b = ldmatrix_x4_trans(chunk_address(sm, int32(first_key + (lane & 15)), chunk, PITCH))
                for m in unroll(M_TILES):
                    o[COLUMNS // 8 * m + 2 * c] = mma_bf16(
                        p[4 * m : 4 * m + 4], (b[0], b[1]), o[COLUMNS // 8 * m + 2 * c]
                    )
                    o[COLUMNS // 8 * m + 2 * c + 1] = mma_bf16(
                        p[4 * m : 4 * m + 4], (b[2], b[3]), o[COLUMNS // 8 * m + 2 * c + 1]
                    )
        cluster_wait()
        # what turns this block's part of a head's sum into a part of the result
        if tid < HEADS:
            logit = ldw_f32(sink + int64(min(heads + tid, h - 1)) * 4) * LOG2_E
            stats = uint32(sm + AT_STATS + 8 * tid)
            tops = regs(CLUSTER, LEAST)
            weights = regs(CLUSTER, 0.0)
            top = LEAST
            for r in unroll(CLUSTER):
                if r * share < n:
                    tops[r] = ld_cluster_f32(cluster_address(stats, uint32(r)))
                    weights[r] = ld_cluster_f32(cluster_address(uint32(stats + 4), uint32(r)))
            for r in unroll(CLUSTER):
                top = fmax(top, tops[r])
            total = exp2_approx(logit - top)
            for r in unroll(CLUSTER):
                total = fma(weights[r], exp2_approx(tops[r] - top), total)
            own = exp2_approx(lds_f32(stats) - top)
            sts_f32(uint32(sm + AT_FACTOR + 4 * tid), div(own * UNIT, total))
        sync_threads()
        for m in unroll(M_TILES):
            f0 = lds_f32(uint32(sm + AT_FACTOR + 4 * (16 * m + g)))
            f1 = lds_f32(uint32(sm + AT_FACTOR + 4 * (16 * m + g + 8)))
            for c in unroll(COLUMNS // 8):
                four = o[COLUMNS // 8 * m + c]
                line = (16 * m + g) * OUT_LINE + warp * COLUMNS + 8 * c + 2 * t
                to = uint32(sm + AT_SCORE + line * 4)
                sts_u32x2(to, (as_bits(four[0] * f0), as_bits(four[1] * f0)))
                sts_u32x2(uint32(to + 32 * OUT_LINE), (as_bits(four[2] * f1), as_bits(four[3] * f1)))
        cluster_arrive()
        # four columns of a head a thread: their phases are on their way while the cluster meets
        cos = regs(2 * ROUNDS, 1.0)
        sin = regs(2 * ROUNDS, 0.0)
        for i in unroll(ROUNDS):
            column = int32((tid + i * THREADS) % (d // 4) * 4)
            if owner >= 0 and column >= TAIL:
                for j in unroll(2):
                    cos[2 * i + j], sin[2 * i + j] = phase(table, place, int32((column - TAIL) // 2 + j), HALF)
        cluster_wait()
        for i in unroll(ROUNDS):
            item = int32(tid + i * THREADS)
            one = int32(rank * OWN + item // (d // 4))
            column = int32(item % (d // 4) * 4)
            if owner >= 0 and item < ITEMS and heads + one < h:
                parts = uint32(sm + AT_SCORE + (one * OUT_LINE + column) * 4)
                sums = regs(4 * CLUSTER, uint32(0))
                for r in unroll(CLUSTER):
                    if r * share < n:
                        sums[4 * r : 4 * r + 4] = ld_cluster_u32x4(cluster_address(parts, uint32(r)))
                v = regs(4, 0.0)
                for r in unroll(CLUSTER):
                    for j in unroll(4):
                        v[j] = v[j] + as_float(sums[4 * r + j])
                word = regs(2)
                for j in unroll(2):
                    word[j] = bf16x2(v[2 * j + 1], v[2 * j])
                    if column >= TAIL:
                        word[j] = turn(word[j], cos[2 * i + j], -sin[2 * i + j])
                    word[j] = f16x2(bf16_high(word[j]), bf16_low(word[j]))
                stg_u32x2(out + ((row * h + heads + one) * d + column) * 2, word)
        sync_warp()  # the cluster barrier wants whole warps
        cluster_arrive()
        cluster_wait()

    return attention


def entries(width: Width) -> list[Entry]:
    """One kernel for every layer and the drafter, and one for the heads of a rank."""
    spec, found = width.spec, []
    d, window, topk = spec.head_dim, spec.sliding_window, spec.index_topk
    for ending, h in width.heads.items():
        shape = {"h": h, "d": d, "rope": spec.qk_rope_head_dim, "most": most_keys(spec)}
        nbytes = MOST_ROWS * (window * (d + d // 32) + topk * (d // 2 + d // 16) + 4 * h * d)
        operations = 4 * MOST_ROWS * h * d * (window + topk)
        found.append(Entry(f"attend/{width.label}{ending}", make, shape, width.chips, attend, nbytes, operations))
    return found
