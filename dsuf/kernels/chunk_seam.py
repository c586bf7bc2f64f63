"""The seam between two sublayers for the many rows of a prefill chunk, as three kernels (mixes.py has it in one).

    seam          o = bf16(sum of the routed experts' outputs in slot order + last)       or just `last` (attention)
                  X'_k = bf16(post_k o + sum_j comb[j, k] X_j);  u = bf16(sum_j pre_j X'_j)
                  x = bf16(u g / sqrt(mean(u^2) + eps));  q = q8(x)
    mix           sums = fn X' (24 numbers), sum of X'^2, of the flattened streams, in SPLITS parts of their columns
    coefficients  pre, post, comb of the next seam from the sums, Sinkhorn rounds included

X bf16 [rows, 4, D], in place; parts bf16 [rows * slots, D], last bf16 [rows, D]; coefficients float32 [rows, 24]; sums
float32 [SPLITS, rows, 26]; fn float32 [24, 4 D]. rows_q8 and rows_x (0: not wanted) bf16 [rows, D]: values of q and of
x in product order (gemm.py), as the products of this family want them. tapped (0: not wanted) bf16 [rows, D]: the mean
of the streams. slots -1: nothing is unfolded, X stays (a fresh embedding, or after Engram). Without sums (address 0)
`coefficients` gives those of a fresh embedding: pre = (1, 0, 0, 0).

Reference: dsuf.ops.mixes (unfold, fold, mixes), ops.norm.rms_norm, ops.qdq.q8. Bytes a row: 24 D for the streams (seam
reads and writes, mix reads), 2 (slots + 1) D, 4 D: memory decides. over_d is 1 / D, over_width 1 / 4 D. The product
with fn runs on tensor cores: X is bf16, and a float32 is exactly the sum of three bf16. Every sum's order follows from
D alone, so a row does not depend on the others of its chunk.

    hand-off (mix)           who writes      who waits       reused
    fn of 128 columns        the block       the block       after a barrier
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, f32, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.mixes import ROWS_OF_FN, STREAMS, SUMS, sigmoid, sinkhorn
from dsuf.kernels.ptx.convert import (
    as_float,
    bf16_high,
    bf16_low,
    bf16x2,
    e4m3x2,
    e4m3x4_bf16,
    fabs,
    fma,
    fmax,
    mul_bf16x2,
    round_bf16,
    rsqrt_approx,
)
from dsuf.kernels.ptx.memory import (
    ldg_f32,
    ldg_u32x4,
    lds_f32,
    lds_u32x4,
    ldw_f32,
    ldw_u32x4,
    shared_base,
    stg_f32,
    stg_u32,
    stg_u32x4,
    sts_f32,
    sts_u32x4,
)
from dsuf.kernels.ptx.mma import mma_bf16
from dsuf.kernels.ptx.sync import (
    block_index,
    block_index_y,
    let_next_kernel_start,
    sync_threads,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.quantise import inverse_scale, max_over, q8_exponent, sum_over
from dsuf.ops.mixes import mixes

SPLITS = 16  # parts of 4 D columns whose sums are added by `coefficients`
THREADS, WARPS = 640, 20  # of a seam: eight columns a thread
MOST_WIDTH = 8 * THREADS
MIX_WARPS, MIX_ROWS, SLICE = 8, 128, 128  # 16 rows a warp; columns of fn in shared memory
GROUP_BYTES = 9 * 512  # 32 columns of fn: three terms of three tiles of eight rows
COEFFICIENT_ROWS, COEFFICIENT_THREADS = 64, 256  # of a block
WARP, SCALE_LANES, QUAD = (1, 2, 4, 8, 16), (1, 2), (1, 2)


@inline
def put_product_order(to: Any, column: Any, word: Any) -> None:
    """Store columns column .. column + 7 (four pairs) of a row at `to` where product order has them."""
    at = to + (column & ~31) * 2 + (column & 31) // 2
    for i in unroll(4):
        stg_u32(at + i * 16, word[i])


@inline
def q8_values(v: Any, word: Any) -> None:
    """word = the pairs of q8(v), decoded; v: eight values of a thread, four threads share a scale."""
    amax = 0.0
    for i in unroll(8):
        amax = fmax(amax, fabs(v[i]))
    e = q8_exponent(max_over(amax, SCALE_LANES))
    f = inverse_scale(e)
    both = uint32(e << 7 | e << 23)
    for i in unroll(2):
        low = e4m3x2(v[4 * i + 1] * f, v[4 * i] * f)
        pair = e4m3x4_bf16(uint32(low | e4m3x2(v[4 * i + 3] * f, v[4 * i + 2] * f) << 16))
        word[2 * i] = mul_bf16x2(pair[0], both)
        word[2 * i + 1] = mul_bf16x2(pair[1], both)


@inline
def load_slice(a: Any, b: Any, low: Any, high: Any, start: Any, end: Any, parts: Any) -> None:
    """Columns start .. of two rows as operands of products, `parts` times 32 of them, zeros from `end` on."""
    for part in unroll(parts):
        if start + 32 * part < end:
            a[4 * part : 4 * part + 4] = ldg_u32x4(low + int64(start + 32 * part) * 2)
            b[4 * part : 4 * part + 4] = ldg_u32x4(high + int64(start + 32 * part) * 2)


def make_seam(*, eps: float) -> Kernel:
    """A block a row, a thread eight columns of all four streams; D up to 5,120, a multiple of 32."""
    AT_SUM = 96

    @kernel(threads=THREADS, grid=(4096,), shared=AT_SUM + 4 * WARPS, name="chunk_seam")
    def seam(
        parts: s64, slots: s32, last: s64, streams: s64, coefficients: s64, g: s64, rows_q8: s64, rows_x: s64,
        tapped: s64, d: s32, over_d: f32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        row = int64(block_index())
        sm = shared_base()
        wait_for_previous_kernel()
        let_next_kernel_start()
        if tid < ROWS_OF_FN:
            sts_f32(uint32(sm + 4 * tid), ldg_f32(coefficients + (row * ROWS_OF_FN + tid) * 4))
        column = int64(8 * tid)
        holds = 8 * tid < d
        x = regs(4 * STREAMS, uint32(0))  # pairs
        o = regs(4, uint32(0))
        if holds:
            for j in unroll(STREAMS):
                x[4 * j : 4 * j + 4] = ldg_u32x4(streams + ((row * STREAMS + j) * d + column) * 2)
            if slots >= 0:
                o = ldg_u32x4(last + (row * d + column) * 2)
        if holds and slots > 0:
            total = regs(8, 0.0)
            for slot in range(slots):
                w = ldg_u32x4(parts + ((row * slots + slot) * d + column) * 2)
                for i in unroll(4):
                    total[2 * i] = total[2 * i] + bf16_low(w[i])
                    total[2 * i + 1] = total[2 * i + 1] + bf16_high(w[i])
            for i in unroll(4):
                o[i] = bf16x2(total[2 * i + 1] + bf16_high(o[i]), total[2 * i] + bf16_low(o[i]))
        sync_threads()
        v = regs(8, 0.0)
        if holds:
            if slots >= 0:
                old = regs(4 * STREAMS)
                for i in unroll(4 * STREAMS):
                    old[i] = x[i]
                for k in unroll(STREAMS):
                    post = lds_f32(uint32(sm + 16 + 4 * k))
                    n = regs(8)
                    for i in unroll(4):
                        n[2 * i] = post * bf16_low(o[i])
                        n[2 * i + 1] = post * bf16_high(o[i])
                    for j in unroll(STREAMS):
                        mix = lds_f32(uint32(sm + 32 + 16 * j + 4 * k))
                        for i in unroll(4):
                            n[2 * i] = fma(mix, bf16_low(old[4 * j + i]), n[2 * i])
                            n[2 * i + 1] = fma(mix, bf16_high(old[4 * j + i]), n[2 * i + 1])
                    for i in unroll(4):
                        x[4 * k + i] = bf16x2(n[2 * i + 1], n[2 * i])
                    stg_u32x4(streams + ((row * STREAMS + k) * d + column) * 2, x[4 * k : 4 * k + 4])
            for j in unroll(STREAMS):
                pre = lds_f32(uint32(sm + 4 * j))
                for i in unroll(4):
                    v[2 * i] = fma(pre, bf16_low(x[4 * j + i]), v[2 * i])
                    v[2 * i + 1] = fma(pre, bf16_high(x[4 * j + i]), v[2 * i + 1])
            if tapped != 0:
                mean = regs(4)
                for i in unroll(4):
                    low = ((bf16_low(x[i]) + bf16_low(x[4 + i])) + bf16_low(x[8 + i])) + bf16_low(x[12 + i])
                    high = ((bf16_high(x[i]) + bf16_high(x[4 + i])) + bf16_high(x[8 + i])) + bf16_high(x[12 + i])
                    mean[i] = bf16x2(high * 0.25, low * 0.25)
                stg_u32x4(tapped + (row * d + column) * 2, mean)
        s = 0.0
        for i in unroll(8):
            v[i] = round_bf16(v[i])
            s = fma(v[i], v[i], s)
        s = sum_over(s, WARP)
        if tid & 31 == 0:
            sts_f32(uint32(sm + AT_SUM + (tid >> 5) * 4), s)
        sync_threads()
        s = lds_f32(uint32(sm + AT_SUM))
        for w in unroll(1, WARPS):
            s = s + lds_f32(uint32(sm + AT_SUM + 4 * w))
        inverse = rsqrt_approx(s * over_d + eps)
        if holds:
            w = ldw_u32x4(g + column * 2)
            for i in unroll(4):
                v[2 * i] = round_bf16(v[2 * i] * inverse * bf16_low(w[i]))
                v[2 * i + 1] = round_bf16(v[2 * i + 1] * inverse * bf16_high(w[i]))
        word = regs(4)
        q8_values(v, word)
        if holds:
            put_product_order(rows_q8 + row * (2 * d), column, word)
            if rows_x != 0:
                for i in unroll(4):
                    word[i] = bf16x2(v[2 * i + 1], v[2 * i])
                put_product_order(rows_x + row * (2 * d), column, word)

    return seam


def make_mix() -> Kernel:
    """grid (SPLITS, ceil(rows / 128)); 4 D / SPLITS a multiple of 32."""
    PARTS = SLICE // 32

    @kernel(threads=32 * MIX_WARPS, grid=(SPLITS, 32), shared=PARTS * GROUP_BYTES, name="chunk_mix")
    def mix(streams: s64, fn: s64, sums: s64, flat: s32, rows: s32) -> None:
        tid = int32(thread_index())
        lane = int32(tid & 31)
        g = int32(lane >> 2)
        t = int32(lane & 3)
        split = int32(block_index())
        first = int32(block_index_y() * MIX_ROWS + 16 * (tid >> 5) + g)
        sm = shared_base()
        wait_for_previous_kernel()
        let_next_kernel_start()
        end = int32(flat // SPLITS * (split + 1))
        low = streams + (int64(min(first, rows - 1)) * flat + 8 * t) * 2
        high = streams + (int64(min(first + 8, rows - 1)) * flat + 8 * t) * 2
        acc = regs(3, (0.0, 0.0, 0.0, 0.0))
        square0 = 0.0
        square1 = 0.0
        begin = int32(flat // SPLITS * split)
        a = regs(4 * PARTS, uint32(0))
        b = regs(4 * PARTS, uint32(0))
        load_slice(a, b, low, high, begin, end, PARTS)
        for start in range(begin, end, SLICE):
            sync_threads()
            for i in range(tid, ROWS_OF_FN * (SLICE // 8), 32 * MIX_WARPS):
                n = int32(i // (SLICE // 8))
                octet = int32(i % (SLICE // 8))
                f = regs(8, uint32(0))
                if start + 8 * octet < end:
                    from_fn = fn + (int64(n) * flat + start + 8 * octet) * 4
                    f[0:4] = ldw_u32x4(from_fn)
                    f[4:8] = ldw_u32x4(from_fn + 16)
                at = uint32(sm + (octet >> 2) * GROUP_BYTES + (n >> 3) * 512 + ((n & 7) * 4 + (octet & 3)) * 16)
                rest = regs(8)
                for j in unroll(8):
                    rest[j] = as_float(f[j])
                for term in unroll(3):
                    word = regs(4)
                    for j in unroll(4):
                        word[j] = bf16x2(rest[2 * j + 1], rest[2 * j])
                        rest[2 * j] = rest[2 * j] - bf16_low(word[j])
                        rest[2 * j + 1] = rest[2 * j + 1] - bf16_high(word[j])
                    sts_u32x4(uint32(at + term * 1536), word)
            sync_threads()
            next_a = regs(4 * PARTS, uint32(0))
            next_b = regs(4 * PARTS, uint32(0))
            load_slice(next_a, next_b, low, high, int32(start + SLICE), end, PARTS)
            for part in unroll(PARTS):
                for term in unroll(3):
                    for n in unroll(3):
                        w = lds_u32x4(uint32(sm + part * GROUP_BYTES + (3 * term + n) * 512 + lane * 16))
                        for i in unroll(4 * part, 4 * part + 4, 2):
                            x = (a[i], b[i], a[i + 1], b[i + 1])
                            acc[n] = mma_bf16(x, (w[i % 4], w[i % 4 + 1]), acc[n])
                for i in unroll(4 * part, 4 * part + 4):
                    square0 = fma(bf16_high(a[i]), bf16_high(a[i]), fma(bf16_low(a[i]), bf16_low(a[i]), square0))
                    square1 = fma(bf16_high(b[i]), bf16_high(b[i]), fma(bf16_low(b[i]), bf16_low(b[i]), square1))
            for i in unroll(4 * PARTS):
                a[i] = next_a[i]
                b[i] = next_b[i]
        square0 = sum_over(square0, QUAD)
        square1 = sum_over(square1, QUAD)
        for half in unroll(2):
            row = int32(first + 8 * half)
            if row < rows:
                to = sums + (int64(split) * rows + row) * (4 * SUMS)
                for n in unroll(3):
                    stg_f32(to + (8 * n + 2 * t) * 4, acc[n][2 * half])
                    stg_f32(to + (8 * n + 2 * t) * 4 + 4, acc[n][2 * half + 1])
                if t == 0:
                    stg_f32(to + 4 * ROWS_OF_FN, square0 if half == 0 else square1)

    return mix


def make_coefficients(*, rounds: int, hc_eps: float, eps: float) -> Kernel:
    """64 rows a block: their sums by all threads, parts in ascending order; then a thread a row."""
    HELD = COEFFICIENT_ROWS * SUMS

    @kernel(threads=COEFFICIENT_THREADS, grid=(64,), shared=4 * HELD, name="chunk_coefficients")
    def coefficients(sums: s64, scale: s64, base: s64, out: s64, over_width: f32, rows: s32) -> None:
        tid = int32(thread_index())
        first = int32(block_index() * COEFFICIENT_ROWS)
        row = int32(first + tid)
        sm = shared_base()
        wait_for_previous_kernel()
        let_next_kernel_start()
        to = out + int64(row) * (4 * ROWS_OF_FN)
        live = tid < COEFFICIENT_ROWS and row < rows
        if live and sums == 0:
            for i in unroll(ROWS_OF_FN):
                stg_f32(to + 4 * i, 1.0 if i == 0 else 0.0)
        if sums != 0:
            for i in range(tid, min(rows - first, COEFFICIENT_ROWS) * SUMS, COEFFICIENT_THREADS):
                total = 0.0
                if i % SUMS <= ROWS_OF_FN:
                    for split in unroll(SPLITS):
                        at = sums + ((int64(split) * rows + first) * SUMS + i) * 4
                        total = total + ldg_f32(at)
                sts_f32(uint32(sm + 4 * i), total)
            sync_threads()
        if live and sums != 0:
            m = regs(ROWS_OF_FN + 1)
            for i in unroll(ROWS_OF_FN + 1):
                m[i] = lds_f32(uint32(sm + (tid * SUMS + i) * 4))
            inverse = rsqrt_approx(m[ROWS_OF_FN] * over_width + eps)
            for i in unroll(8):
                gate = sigmoid(fma(m[i] * inverse, ldw_f32(scale + (0 if i < 4 else 4)), ldw_f32(base + 4 * i)))
                stg_f32(to + 4 * i, gate + hc_eps if i < 4 else gate * 2.0)
            c = regs(16)
            for i in unroll(16):
                c[i] = fma(m[8 + i] * inverse, ldw_f32(scale + 8), ldw_f32(base + 32 + 4 * i))
            sinkhorn(c, rounds, hc_eps)
            for i in unroll(16):
                stg_f32(to + 32 + 4 * i, c[i])

    return coefficients


def entries(width: Width) -> list[Entry]:
    """One of each for every width: D is an argument, and the configurations share epsilons and rounds."""
    spec, rows = width.spec, 1024  # that the floors are stated for
    if width.label != "v41":
        return []
    d, slots = spec.hidden_size, spec.num_experts_per_tok
    sinkhorn = {"rounds": spec.hc_sinkhorn_iters, "hc_eps": spec.hc_eps, "eps": spec.rms_norm_eps}
    return [
        Entry("chunk.seam", make_seam, {"eps": spec.rms_norm_eps}, width.chips, mixes, rows * d * (22 + 2 * slots), 0),
        Entry("chunk.mix", make_mix, {}, width.chips, mixes, 8 * rows * d, 24 * rows * ROWS_OF_FN * d),
        Entry("chunk.coefficients", make_coefficients, sinkhorn, width.chips, mixes, 800 * rows, 0),
    ]
