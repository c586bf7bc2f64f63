"""Compressor of a kv source layer: pools a finished group of tokens and writes its entry and index key into a page.

    c   = bf16(kv) (ratio 1) or bf16(sum_i softmax_i(g_i) kv_i) over the ratio-2 pair, per channel
    c   = bf16(c / rms(c) norm)
    C   = q4e(rope(c, position of the group's first token))              entry: d e2m1, one e4m3 scale per 16
    K   = q4p(rope(bf16(k / rms(k) k_norm))), k = bf16(wk c)             index key: di e2m1, one ue8m0 per 32

y float32 [rows, d] (ratio 1) or [rows, 2 d] = (kv, gate) (ratio 2), from project.bf16. A row at position p finishes
entry (p + 1) / ratio - 1 if ratio divides p + 1; its entry lies in the page of p (layout.py). The other token of a pair
is the row before, if that is of the same sequence, else what an earlier step left in `pairs` float32 [sequences,
PAIR_RING, 2 d] at slot (p - 1) mod PAIR_RING: every row of a ratio-2 source from row keep_from on leaves its own there,
so that a rejected block leaves nothing to undo. Inactive rows (sequence < 0) write nothing.

Reference: dsuf.ops.compress.pool, ops.norm.rms_norm, ops.rope.rotate, ops.qdq.q4e_encode, q4p_encode. A block a row;
wk bf16 [di, d] is asked for before the wait, into registers: 128 KB a finished entry, from L2.

    hand-off                who writes    who waits    reused
    warp sums, c, k         the block     the block    each once
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.latents import MOST_ROWS
from dsuf.kernels.ptx.convert import (
    as_float,
    bf16_high,
    bf16_low,
    div,
    e2m1_code,
    e4m3x2,
    e4m3x4_f16,
    exp2_approx,
    f16_low,
    fabs,
    fma,
    fmax,
    fmin,
    round_bf16,
    rsqrt_approx,
)
from dsuf.kernels.ptx.memory import (
    ldg_u32,
    ldg_u32x2,
    ldg_u32x4,
    lds_f32,
    ldw_u32,
    shared_base,
    stg_u8,
    stg_u32x2,
    sts_f32,
)
from dsuf.kernels.ptx.sync import (
    block_index,
    let_next_kernel_start,
    sync_threads,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.quantise import inverse_scale, max_over, q4p_exponent, sum_over
from dsuf.kernels.rope import phase, rotated
from dsuf.layout import PAGE_TOKENS
from dsuf.ops.compress import pool

LOG2_E = 1.4426950408889634
PAIR_RING = 64  # positions whose (kv, gate) are kept: a rewind, a step that is queued behind it, and a block
SMALLEST_Q4E = 6 * 2.0**-9
WARP, ENTRY_LANES, KEY_LANES = (1, 2, 4, 8, 16), (1, 2, 4), (1, 2, 4, 8)


@inline
def load_words(w: Any, weights: Any, first: Any, count: Any) -> None:
    """`count` words of a lane's weights into registers from `first` on."""
    if count >= 4:
        for i in unroll(0, count, 4):
            w[first + i : first + i + 4] = ldg_u32x4(weights + 4 * i)
    else:
        for i in unroll(count):
            w[first + i] = ldg_u32(weights + 4 * i)


@inline
def pool_pair(v: Any, gate: Any, other: Any, d: Any) -> None:
    """v = softmax-weighted mean of two channels of a pair: v with `gate`, and (kv, gate) float32 at `other`."""
    kv = ldg_u32x2(other)
    g = ldg_u32x2(other + 4 * d)
    for j in unroll(2):
        top = fmax(as_float(g[j]), as_float(gate[j]))
        e0 = exp2_approx((as_float(g[j]) - top) * LOG2_E)
        e1 = exp2_approx((as_float(gate[j]) - top) * LOG2_E)
        v[j] = div(fma(e0, as_float(kv[j]), e1 * v[j]), e0 + e1)


@inline
def block_sum(mine: Any, at: Any, warp: Any, lane: Any, warps: Any) -> Any:
    """Sum of a float32 over the block, in the order of the warps."""
    s = sum_over(mine, WARP)
    if lane == 0:
        sts_f32(uint32(at + 4 * warp), s)
    sync_threads()
    s = lds_f32(at)
    for i in unroll(1, warps):
        s = s + lds_f32(uint32(at + 4 * i))
    return s


@inline
def quantise_entry(v: Any) -> Any:
    """q4e of two neighbouring channels, eight lanes a group: the byte of codes, the scale's code."""
    amax = max_over(fmax(fabs(v[0]), fabs(v[1])), ENTRY_LANES)
    scale_code = uint32(e4m3x2(0.0, div(fmax(amax, SMALLEST_Q4E), 6.0)))
    half = e4m3x4_f16(scale_code)
    scale = f16_low(half[0])
    low = e2m1_code(fmax(fmin(div(v[0], scale), 6.0), -6.0))
    high = e2m1_code(fmax(fmin(div(v[1], scale), 6.0), -6.0))
    return uint32(low | high << 4), scale_code


@inline
def key_channels(w: Any, c: Any, k: Any, warp: Any, lane: Any, channels: Any, words: Any) -> None:
    """wk c: a warp makes `channels` neighbouring channels at `k` from c at `c`, both float32 in shared memory."""
    held = regs(2 * words)
    for i in unroll(2 * words):
        held[i] = lds_f32(uint32(c + (lane * (2 * words) + i) * 4))
    for j in unroll(channels):
        s = 0.0
        for i in unroll(words):
            s = fma(held[2 * i], bf16_low(w[j * words + i]), s)
            s = fma(held[2 * i + 1], bf16_high(w[j * words + i]), s)
        s = sum_over(s, WARP)
        if lane == 0:
            sts_f32(uint32(k + 4 * (warp * channels + j)), round_bf16(s))


@inline
def write_key(
    k: Any, k_norm: Any, table: Any, first: Any, key_codes: Any, key_scales: Any, lane: Any, di: Any, half_rope: Any,
    eps: Any,
) -> None:  # fmt: skip
    """Norm, rope and q4p of the key by one warp: channels 2 lane + 64 i, so that 16 lanes share a scale."""
    s = 0.0
    for channel in range(lane, di, 32):
        x = lds_f32(uint32(k + 4 * channel))
        s = fma(x, x, s)
    s = sum_over(s, WARP)
    inverse = rsqrt_approx(s * (1.0 / di) + eps)
    for start in range(0, di, 64):
        channel = int32(start + 2 * lane)
        x0 = 0.0
        x1 = 0.0
        if channel < di:
            pair = ldw_u32(k_norm + int64(channel) * 2)
            x0 = round_bf16(lds_f32(uint32(k + 4 * channel)) * inverse * bf16_low(pair))
            x1 = round_bf16(lds_f32(uint32(k + 4 * channel + 4)) * inverse * bf16_high(pair))
            if channel >= di - 2 * half_rope:
                c, sn = phase(table, first, int32((channel - (di - 2 * half_rope)) // 2), half_rope)
                a, b = rotated(x0, x1, c, sn)
                x0 = round_bf16(a)
                x1 = round_bf16(b)
        e = q4p_exponent(max_over(fmax(fabs(x0), fabs(x1)), KEY_LANES))
        f = inverse_scale(e)
        code = uint32(e2m1_code(x0 * f) | e2m1_code(x1 * f) << 4)
        if channel < di:
            stg_u8(key_codes + channel // 2, code)
            if lane & 15 == 0:
                stg_u8(key_scales + channel // 32, e)


def make(*, d: int, di: int, rope: int, ratio: int, eps: float) -> Kernel:
    """The first d / 2 threads hold two neighbouring channels of c each; ratio 1 or 2."""
    THREADS = max(32, d)
    WARPS, TAIL, HALF = THREADS // 32, d - rope, rope // 2
    AT_SUM, AT_C = 0, 4 * WARPS
    AT_K = AT_C + 4 * d
    WIDTH, ROWS_OF_PAGE = d * ratio, PAGE_TOKENS // ratio
    PER_LANE, CHANNELS = d // 32, di // WARPS  # channels of c a lane, and of the key a warp, in the product with wk
    WORDS = PER_LANE // 2

    @kernel(threads=THREADS, grid=(MOST_ROWS,), shared=AT_K + 4 * di, name=f"compress_{d}_{di}_ratio{ratio}")
    def compress(
        y: s64, pairs: s64, norm: s64, wk: s64, k_norm: s64, table: s64, sequence: s64, position: s64, pages: s64,
        most_pages: s32, codes: s64, scales: s64, key_codes: s64, key_scales: s64, page_bytes: s64,
        keep_from: s32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        row = int64(block_index())
        sm = shared_base()
        w = regs(CHANNELS * WORDS)
        for j in unroll(CHANNELS):
            load_words(w, wk + (int64(warp * CHANNELS + j) * d + lane * PER_LANE) * 2, j * WORDS, WORDS)
        wait_for_previous_kernel()
        let_next_kernel_start()
        owner = int64(int32(ldg_u32(sequence + row * 4)))
        place = int32(ldg_u32(position + row * 4))
        neighbour = int64(row - 1 if row > 0 else row)
        beside = row > 0 and int64(int32(ldg_u32(sequence + neighbour * 4))) == owner
        page = int64(0)
        if owner >= 0:
            page = int64(ldg_u32(pages + (owner * most_pages + place // PAGE_TOKENS) * 4)) * page_bytes
        column = int64(2 * tid)
        holds = 2 * tid < d and owner >= 0
        v = regs(2, 0.0)
        if holds:
            own = ldg_u32x2(y + (row * WIDTH + column) * 4)
            v[0] = as_float(own[0])
            v[1] = as_float(own[1])
            if ratio == 2:
                gate = ldg_u32x2(y + (row * WIDTH + d + column) * 4)
                ring = pairs + (owner * PAIR_RING + (place & (PAIR_RING - 1))) * (8 * d) + column * 4
                if row >= keep_from:
                    stg_u32x2(ring, own)
                    stg_u32x2(ring + 4 * d, gate)
                if place & 1 == 1:
                    other = pairs + (owner * PAIR_RING + ((place - 1) & (PAIR_RING - 1))) * (8 * d) + column * 4
                    pool_pair(v, gate, int64(y + (neighbour * WIDTH + column) * 4 if beside else other), d)
        if owner >= 0 and (place + 1) % ratio == 0:
            v[0] = round_bf16(v[0])
            v[1] = round_bf16(v[1])
            s = block_sum(fma(v[1], v[1], v[0] * v[0]), uint32(sm + AT_SUM), warp, lane, WARPS)
            inverse = rsqrt_approx(s * (1.0 / d) + eps)
            if holds:
                weight = ldw_u32(norm + column * 2)
                v[0] = round_bf16(v[0] * inverse * bf16_low(weight))
                v[1] = round_bf16(v[1] * inverse * bf16_high(weight))
                sts_f32(uint32(sm + AT_C + 8 * tid), v[0])
                sts_f32(uint32(sm + AT_C + 8 * tid + 4), v[1])
            sync_threads()
            entry = int32((place + 1) // ratio - 1)
            slot = int64(entry % ROWS_OF_PAGE)
            first = int32(entry * ratio)
            if holds and 2 * tid >= TAIL:
                c, sn = phase(table, first, int32(tid - TAIL // 2), HALF)
                a, b = rotated(v[0], v[1], c, sn)
                v[0] = round_bf16(a)
                v[1] = round_bf16(b)
            code, scale_code = quantise_entry(v)
            if holds:
                stg_u8(codes + page + (slot * (d // 2) + tid), code)
                if tid & 7 == 0:
                    stg_u8(scales + page + (slot * (d // 16) + (tid >> 3)), scale_code)
            key_channels(w, uint32(sm + AT_C), uint32(sm + AT_K), warp, lane, CHANNELS, WORDS)
            sync_threads()
            if warp == 0:
                write_key(uint32(sm + AT_K), k_norm, table, first, key_codes + page + slot * (di // 2),
                          key_scales + page + slot * (di // 32), lane, di, HALF, eps)  # fmt: skip

    return compress


def entries(width: Width) -> list[Entry]:
    """One kernel for each ratio."""
    spec, found = width.spec, []
    for ratio in sorted({role.ratio for role in spec.layers if role.is_kv_source}):
        d, di = spec.head_dim, spec.index_head_dim
        shape = {"d": d, "di": di, "rope": spec.qk_rope_head_dim, "ratio": ratio, "eps": spec.rms_norm_eps}
        nbytes = MOST_ROWS * (8 * d * ratio + d // 2 + di // 2) + 2 * d * di
        label = f"compress.ratio{ratio}/{width.label}"
        found.append(Entry(label, make, shape, width.chips, pool, nbytes, 2 * MOST_ROWS * d * di // ratio))
    return found
