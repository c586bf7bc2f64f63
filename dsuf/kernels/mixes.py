"""The seam between two sublayers: unfold an output into the residual streams, fold the next input, norm, quantise.

    o    = bf16(sum of the routed experts' outputs in slot order + last)           or just `last` (attention)
    X'_k = bf16(post_k o + sum_j comb[j, k] X_j)                                   k, j = 0..3
    u    = bf16(sum_j pre_j X'_j);  x = bf16(u g / sqrt(mean(u^2) + eps));  codes, scales = q8(x)
    sums = fn X' (24 numbers), sum of X'^2                                         of the flattened streams, float32

pre, post, comb come from the sums of the seam before: their Sinkhorn rounds run in this kernel's first lines, before
it waits for the kernel that makes o, so they cost nothing where that kernel runs long enough and leaves room beside it.
That is allowed because every kernel lets the next one start only after its own wait: when a kernel begins, all but its
direct predecessor are done.

X bf16 [rows, 4, D], X' into another buffer (several clusters of a row read X); parts bf16 [rows * slots, D], last
bf16 [rows, D]; sums float32 [rows, 26] (24, sum of X'^2, unused); x bf16 [rows, D], codes e4m3 [rows, D], scales ue8m0
[rows, scale_stride(D)]; fn float32 [24, 4 D]. slots FIRST: X is a fresh embedding and pre = (1, 0, 0, 0); FOLDED: the
streams are taken as they are and folded with the coefficients of sums_in, after Engram changed them; both write no X'.
tapped: the mean of the streams, bf16 [rows, D]; folded: u, bf16 [rows, D]; wide: 16 times the quantised row, f16
[rows, D], what the experts read (address 0: not wanted).

Reference: dsuf.ops.mixes (unfold, fold, mixes), ops.norm.rms_norm, ops.qdq.q8. Bytes: fn once from L2 for each row;
streams and parts (8 + 8 + 2 slots) D a row.

A cluster of blocks shares a row, each block D / blocks columns, a thread two columns of all four streams. The 24 rows
of fn are what takes time, 250 KB a block if one cluster reads them all: four clusters of a row each repeat the fold and
read their share of fn, before the wait, into registers; the first alone writes what does not depend on fn. A cluster
takes several of more than three rows, over the same registers, and asks for the next while it sums one.

    hand-off                        who writes          who waits        reused
    coefficients                    warp 0              the block        never
    squares of u, of each warp      each warp, pushed   each block       two rows later: by then every warp has pushed
    other sums, of each warp        each warp, pushed   the first block  the row between, so has read this one
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.ptx.convert import (
    as_bits,
    as_float,
    bf16_high,
    bf16_low,
    bf16x2,
    e4m3x2,
    e4m3x4_f16,
    exp2_approx,
    fabs,
    fma,
    fmax,
    mul_f16x2,
    rcp_approx,
    rsqrt_approx,
)
from dsuf.kernels.ptx.copy import fence_mbarrier_init, mbarrier_expect, mbarrier_init, mbarrier_wait, push_u32
from dsuf.kernels.ptx.memory import (
    ldg_f32,
    ldg_u32,
    ldg_u32x2,
    lds_f32,
    ldw_f32,
    ldw_u32,
    shared_base,
    stg_f32,
    stg_u8,
    stg_u16,
    stg_u32,
    sts_f32,
)
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    cluster_address,
    cluster_arrive_relaxed,
    cluster_rank,
    cluster_wait,
    let_next_kernel_start,
    shuffle_xor_f32,
    sync_threads,
    sync_warp,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.quantise import inverse_scale, max_over, q8_exponent, sum_over, wide_scale
from dsuf.kernels.stream import scale_stride
from dsuf.ops.mixes import mixes

STREAMS, ROWS_OF_FN, SUMS = 4, 24, 26
FOLDED, FIRST = -1, -2  # `slots` where nothing is unfolded
SPLITS, ROWS_AT_ONCE, ROWS_ALONE = 4, 8, 3  # clusters of a row; rows that run beside each other, with one a cluster
MOST_ROWS, MOST_SLOTS = 48, 8  # of a launch; routed experts of a row
LOG2_E = 1.4426950408889634
WARP, GROUP_PAIRS = (1, 2, 4, 8, 16), (1, 2, 4, 8)  # lanes of a warp; lanes of one quantisation group


@inline
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    return rcp_approx(1.0 + exp2_approx(x * -LOG2_E))


@inline
def normalise(c: Any, eps: Any, by_row: Any) -> None:
    """Divide the 4x4 c[4j + k] by its row or column sums + eps."""
    for i in unroll(4):
        if by_row:
            f = rcp_approx(((c[4 * i] + c[4 * i + 1]) + c[4 * i + 2]) + c[4 * i + 3] + eps)
            for k in unroll(4):
                c[4 * i + k] = c[4 * i + k] * f
        else:
            f = rcp_approx(((c[i] + c[4 + i]) + c[8 + i]) + c[12 + i] + eps)
            for k in unroll(4):
                c[4 * k + i] = c[4 * k + i] * f


@inline
def sinkhorn(c: Any, rounds: Any, hc_eps: Any) -> None:
    """comb from its logits c[4j + k]: a softmax of each row, then columns and rows in turn; one thread."""
    for j in unroll(4):
        top = fmax(fmax(c[4 * j], c[4 * j + 1]), fmax(c[4 * j + 2], c[4 * j + 3]))
        for k in unroll(4):
            c[4 * j + k] = exp2_approx((c[4 * j + k] - top) * LOG2_E)
        f = rcp_approx(((c[4 * j] + c[4 * j + 1]) + c[4 * j + 2]) + c[4 * j + 3])
        for k in unroll(4):
            c[4 * j + k] = fma(c[4 * j + k], f, hc_eps)
    normalise(c, hc_eps, False)
    for _ in range(rounds - 1):
        normalise(c, hc_eps, True)
        normalise(c, hc_eps, False)


@inline
def coefficients(to: Any, sums: Any, scale: Any, base: Any, width: Any, rounds: Any, hc_eps: Any, eps: Any) -> None:
    """One row's pre [4], post [4], comb [16] to shared memory, from its sums (one thread)."""
    inverse = rsqrt_approx(ldg_f32(sums + 96) * (1.0 / width) + eps)
    for j in unroll(8):
        part = 0 if j < 4 else 4
        m = ldg_f32(sums + 4 * j) * inverse
        gate = sigmoid(fma(m, ldw_f32(scale + part), ldw_f32(base + 4 * j)))
        sts_f32(uint32(to + 4 * j), gate + hc_eps if j < 4 else gate * 2.0)
    c = regs(16)
    for j in unroll(16):
        c[j] = fma(ldg_f32(sums + 32 + 4 * j) * inverse, ldw_f32(scale + 8), ldw_f32(base + 32 + 4 * j))
    sinkhorn(c, rounds, hc_eps)
    for j in unroll(16):
        sts_f32(uint32(to + 32 + 4 * j), c[j])


@inline
def ask_row(
    held: Any, row: Any, slots: Any, streams: Any, last: Any, parts: Any, column: Any, d: Any, most_slots: Any
) -> None:  # fmt: skip
    """Two columns of a row's four streams, of `last` and of its parts, all asked for at once."""
    for j in unroll(4):
        held[j] = ldg_u32(streams + ((row * STREAMS + j) * d + column) * 2)
    if slots >= 0:
        held[4] = ldg_u32(last + (row * d + column) * 2)
    if slots > 0:
        for j in unroll(most_slots):  # a slot too many reads the last one again
            held[5 + j] = ldg_u32(parts + ((row * slots + min(j, slots - 1)) * d + column) * 2)


@inline
def scatter_sum(v: Any, n: Any, lane: Any) -> None:
    """v[0] = the warp's sum of value lane / (32 / n), of n values a lane, a power of two: half of them a step."""
    for step in unroll(5):
        for i in unroll((n >> step + 1) + (1 if n >> step + 1 == 0 else 0)):
            if n >> step + 1 > 0:
                low = v[i]
                high = v[(n >> step + 1) + i]
                given = low if lane & (16 >> step) != 0 else high
                kept = high if lane & (16 >> step) != 0 else low
                v[i] = kept + shuffle_xor_f32(given, uint32(16 >> step))
            else:
                v[i] = v[i] + shuffle_xor_f32(v[i], uint32(16 >> step))


@inline
def sum_of_parts(at: Any, count: Any, lane: Any) -> Any:
    """The sum of `count` floats in shared memory, the same on every lane."""
    total = 0.0
    for i in unroll(-(-count // 32)):
        place = int32(lane + 32 * i)
        if 32 * i + 32 <= count:
            total = total + lds_f32(uint32(at + place * 4))
        else:
            total = total + (lds_f32(uint32(at + min(place, count - 1) * 4)) if place < count else 0.0)
    return sum_over(total, WARP)


def grid(d: int, rows: int) -> int:
    """Blocks of a launch: where each row had a cluster, fn would come from L2 for every one, 2 MB."""
    return cluster_of(d) * SPLITS * min(max(rows // 2, min(rows, ROWS_ALONE)), ROWS_AT_ONCE)


def cluster_of(d: int) -> int:
    """Blocks that share a row; 8 is the portable most."""
    return min(8, d // 32)


def make(*, d: int, cluster: int, splits: int, most_slots: int, rounds: int, hc_eps: float, eps: float) -> Kernel:
    """d a multiple of 32 * cluster, splits a divisor of 24, most_slots routed experts of a row at most."""
    COLUMNS, SCALES = d // cluster, scale_stride(d)
    PAIRS = COLUMNS // 2
    WARPS = -(-PAIRS // 32)
    THREADS = WARPS * 32
    MINE, FLAT = ROWS_OF_FN // splits, STREAMS * d
    TOTALS = MINE + 1  # rows of fn, sum of X'^2
    LANES = 32 // (1 << MINE.bit_length())  # that end up with the same one of the totals
    PARTS = cluster * WARPS  # partial sums of a row
    AT_SQUARE = 96 * -(-MOST_ROWS // ROWS_AT_ONCE)  # behind the coefficients of a cluster's rows
    AT_TOTAL = AT_SQUARE + 2 * 4 * PARTS
    AT_BAR = -(-(AT_TOTAL + 2 * 4 * TOTALS * PARTS) // 8) * 8

    @kernel(
        threads=THREADS, grid=(cluster * splits * ROWS_AT_ONCE,), shared=AT_BAR + 32, min_blocks=2,
        cluster=cluster, name=f"seam_{d}",
    )  # fmt: skip
    def seam(
        parts: s64, slots: s32, last: s64, streams: s64, streams_out: s64, sums_in: s64, scale: s64, base: s64, fn: s64,
        g: s64, x: s64, codes: s64, scales: s64, sums_out: s64, tapped: s64, folded: s64,
        wide: s64, rows: s32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        rank = int32(cluster_rank())
        split = int32(block_index() // cluster % splits)
        first = int32(block_index() // (cluster * splits))  # row of this cluster, and then every step-th
        step = int32(block_count() // (cluster * splits))
        shared = shared_base()
        column = int64(rank * COLUMNS + 2 * tid)
        held_column = column if tid < PAIRS else int64(0)  # others hold zeros, and read what is there
        mine = fn + (int64(split * MINE) * FLAT + held_column) * 4
        f = regs(8 * MINE)
        for i in unroll(4 * MINE):
            f[2 * i : 2 * i + 2] = ldg_u32x2(mine + (i // 4 * FLAT + i % 4 * d) * 4)  # a pure load would sink
        if first + tid * step < rows:
            to = uint32(shared + 96 * tid)
            if slots == FIRST:
                for j in unroll(4):
                    sts_f32(uint32(to + 4 * j), 1.0 if j == 0 else 0.0)
            else:
                sums = sums_in + int64(first + tid * step) * (4 * SUMS)
                coefficients(to, sums, scale, base, FLAT, rounds, hc_eps, eps)
        if tid == 0:
            for i in unroll(4):
                mbarrier_init(uint32(shared + AT_BAR + 8 * i), uint32(1))
            fence_mbarrier_init()
        sync_threads()
        cluster_arrive_relaxed()
        cluster_wait()
        turn = int32(0)
        phase = int32(0)
        of_row = uint32(shared)
        wait_for_previous_kernel()
        let_next_kernel_start()
        held = regs(5 + most_slots, uint32(0))
        if tid < PAIRS and first < rows:
            ask_row(held, int64(first), slots, streams, last, parts, column, d, most_slots)
        for index in range(first, rows, step):
            row = int64(index)
            squares = uint32(shared + AT_SQUARE + turn * (4 * PARTS))
            landed = uint32(shared + AT_TOTAL + turn * (4 * TOTALS * PARTS))
            bar = uint32(shared + AT_BAR + 16 * turn)
            if tid == 0:
                mbarrier_expect(bar, uint32(4 * PARTS))
                if rank == 0:
                    mbarrier_expect(uint32(bar + 8), uint32(4 * TOTALS * PARTS))
            low = regs(4, 0.0)
            high = regs(4, 0.0)
            u0 = 0.0
            u1 = 0.0
            if tid < PAIRS:
                for j in unroll(4):
                    low[j] = bf16_low(held[j])
                    high[j] = bf16_high(held[j])
                if slots >= 0:
                    pair = held[4]
                    if slots > 0:
                        o0 = 0.0
                        o1 = 0.0
                        for j in unroll(most_slots):
                            o0 = o0 + (bf16_low(held[5 + j]) if j < slots else 0.0)
                            o1 = o1 + (bf16_high(held[5 + j]) if j < slots else 0.0)
                        pair = bf16x2(o1 + bf16_high(pair), o0 + bf16_low(pair))
                    o0 = bf16_low(pair)
                    o1 = bf16_high(pair)
                    old = regs(8)
                    for j in unroll(4):
                        old[j] = low[j]
                        old[4 + j] = high[j]
                    for k in unroll(4):
                        post = lds_f32(uint32(of_row + 16 + 4 * k))
                        n0 = post * o0
                        n1 = post * o1
                        for j in unroll(4):
                            mix = lds_f32(uint32(of_row + 32 + 16 * j + 4 * k))
                            n0 = fma(mix, old[j], n0)
                            n1 = fma(mix, old[4 + j], n1)
                        pair = bf16x2(n1, n0)
                        if split == 0:
                            stg_u32(streams_out + (row * FLAT + column + k * d) * 2, pair)
                        low[k] = bf16_low(pair)
                        high[k] = bf16_high(pair)
                for k in unroll(4):
                    pre = lds_f32(uint32(of_row + 4 * k))
                    u0 = fma(pre, low[k], u0)
                    u1 = fma(pre, high[k], u1)
                pair = bf16x2(u1, u0)
                u0 = bf16_low(pair)
                u1 = bf16_high(pair)
                if split == 0:
                    if folded != 0:
                        stg_u32(folded + (row * d + column) * 2, pair)
                    if tapped != 0:
                        mean0 = ((low[0] + low[1]) + low[2] + low[3]) * 0.25
                        mean1 = ((high[0] + high[1]) + high[2] + high[3]) * 0.25
                        stg_u32(tapped + (row * d + column) * 2, bf16x2(mean1, mean0))
            # partial sums go to whoever adds them up: squares of u to every block, the others to the first
            square = sum_over(fma(u1, u1, u0 * u0), WARP)
            if lane < cluster:
                own = uint32(squares + (rank * WARPS + warp) * 4)
                push_u32(cluster_address(own, uint32(lane)), as_bits(square), cluster_address(bar, uint32(lane)))
            totals = regs(32 // LANES, 0.0)
            for i in unroll(TOTALS):
                s = 0.0
                for j in unroll(4):
                    if i < MINE:
                        s = fma(as_float(f[8 * i + 2 * j]), low[j], s)
                        s = fma(as_float(f[8 * i + 2 * j + 1]), high[j], s)
                    else:
                        s = fma(low[j], low[j], s)
                        s = fma(high[j], high[j], s)
                totals[i] = s
            scatter_sum(totals, 32 // LANES, lane)
            which = int32(lane // LANES)
            if lane % LANES == 0 and which < TOTALS:
                own = uint32(landed + (which * PARTS + rank * WARPS + warp) * 4)
                first_bar = cluster_address(uint32(bar + 8), uint32(0))
                push_u32(cluster_address(own, uint32(0)), as_bits(totals[0]), first_bar)
            for j in unroll(5 + most_slots):
                held[j] = uint32(0)  # so that they hold no registers before
            if tid < PAIRS and index + step < rows:  # the next row comes while this one is summed and quantised
                ask_row(held, row + step, slots, streams, last, parts, column, d, most_slots)
            mbarrier_wait(bar, uint32(phase))
            inverse = rsqrt_approx(sum_of_parts(squares, PARTS, lane) * (1.0 / d) + eps)
            if tid < PAIRS:
                w = ldw_u32(g + held_column * 2)
                u0 = u0 * inverse * bf16_low(w)
                u1 = u1 * inverse * bf16_high(w)
            pair = bf16x2(u1, u0)
            u0 = bf16_low(pair)
            u1 = bf16_high(pair)
            amax = max_over(fmax(fabs(u0), fabs(u1)), GROUP_PAIRS)
            e = q8_exponent(amax)
            up = inverse_scale(e)
            if tid < PAIRS and split == 0:
                stg_u32(x + (row * d + column) * 2, pair)
                code = e4m3x2(u1 * up, u0 * up)
                stg_u16(codes + (row * d + column), code)
                if wide != 0:
                    stg_u32(wide + (row * d + column) * 2, mul_f16x2(e4m3x4_f16(code)[0], wide_scale(e)))
                if lane & 15 == 0:
                    stg_u8(scales + (row * SCALES + (column >> 5)), e)
            sync_warp()
            if rank == 0:
                mbarrier_wait(uint32(bar + 8), uint32(phase))
                for j in unroll(-(-TOTALS // WARPS)):
                    i = int32(warp + j * WARPS)
                    if i < TOTALS:
                        total = sum_of_parts(uint32(landed + i * (4 * PARTS)), PARTS, lane)
                        if lane == 0 and (i < MINE or split == 0):
                            stg_f32(sums_out + (row * SUMS + (split * MINE + i if i < MINE else ROWS_OF_FN)) * 4, total)
            phase = int32(phase ^ turn)
            turn = int32(turn ^ 1)
            of_row = uint32(of_row + 96)

    return seam


def entries(width: Width) -> list[Entry]:
    """One seam, for backbone and drafter and every place of it."""
    spec = width.spec
    d, slots = spec.hidden_size, min(MOST_SLOTS, max(spec.num_experts_per_tok, 4))
    shape = {
        "d": d, "cluster": cluster_of(d), "splits": SPLITS, "most_slots": slots,
        "rounds": spec.hc_sinkhorn_iters, "hc_eps": spec.hc_eps, "eps": spec.rms_norm_eps,
    }  # fmt: skip
    nbytes = 4 * ROWS_OF_FN * STREAMS * d + MOST_ROWS * d * (16 + 2 * (slots + 1) + 3)
    operations = 2 * MOST_ROWS * d * STREAMS * (ROWS_OF_FN + STREAMS + 2)
    return [Entry(f"seam/{width.label}", make, shape, width.chips, mixes, nbytes, operations)]
