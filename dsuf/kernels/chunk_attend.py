"""Attention of the many rows of a prefill chunk over window and selected entries, on warpgroup tensor cores (sm_90a).

    o = sum_t e^(s_t - M) k_t / (sum_t e^(s_t - M) + e^(sink - M)), inverse rope, bf16;   s_t = rope(q) . k_t / sqrt(d)

What attend.py computes for decode rows, with another order of sums. A block makes one row: its heads (64, or fewer and
zeros) are the m64 of the products, because they share keys, and keys are values. q, o bf16 [rows, H, d], o with its
columns in product order (gemm.py), ready for wo_a. Window keys are positions first .. last in slots position mod ring
of `windows` + sequence * pitch (a chunk's own rows stand in a private ring, then pitch is 0). selected int32 [rows,
topk], `chosen` of them a row (topk 0: window only), in pages (layout.py) of `ratio` tokens an entry. Inactive rows
(sequence < 0) write nothing. Tiles of 64 keys, the window's first, each part from its own start: a row's bits depend on
nothing but its own keys.

Reference: dsuf.ops.attend.attend. Operations 4 H d a key; bytes 4 H d a row, and 528 or 288 a key from L2.

One warpgroup fetches keys and expands them to bf16 (times 2^-8, which saves a multiplication and is undone in the
scale of the scores and of the result); the others (two where d is 512) hold d / their number columns of O each, and
make the scores of all 64 keys for themselves. Keys lie as [d / 64][key][128 bytes], swizzled: K-major for the scores,
and the same bytes are the transposed operand for the values. Shared memory: Q, two stages of keys, their addresses.

    hand-off                 who writes      who waits       reused
    phases, key addresses    the block       the block       never
    Q                        consumers       consumers       never
    keys of a stage          producer        consumers       when each consumer warpgroup has arrived
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.latents import window_row_bytes
from dsuf.kernels.ptx.convert import (
    as_bits,
    as_float,
    bf16_high,
    bf16_low,
    bf16x2,
    div,
    e4m3x4_bf16_scaled,
    exp2_approx,
    fmax,
    fp4x8_bf16_scaled,
    mul_bf16x2,
    prmt,
)
from dsuf.kernels.ptx.copy import fence_async, fence_mbarrier_init, mbarrier_arrive, mbarrier_init, mbarrier_wait
from dsuf.kernels.ptx.memory import (
    ldg_u8,
    ldg_u16,
    ldg_u32,
    ldg_u32x4,
    lds_u32x2,
    lds_u32x4,
    ldw_f32,
    shared_base,
    stg_u32x4,
    sts_u32x2,
    sts_u32x4,
)
from dsuf.kernels.ptx.op import HOPPER
from dsuf.kernels.ptx.sync import (
    block_index,
    give_some_registers,
    let_next_kernel_start,
    sync_named,
    sync_threads,
    sync_warp,
    take_most_registers,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.ptx.wgmma import (
    SWIZZLED_TILE,
    scale_rows,
    transposed_tile,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_registers,
    wgmma_wait,
    zeros,
)
from dsuf.kernels.quantise import max_over, sum_over
from dsuf.kernels.rope import phase, rotated
from dsuf.layout import PAGE_TOKENS
from dsuf.ops.attend import attend

TILE = 64  # keys
LOG2_E = 1.4426950408889634
MASKED, LEAST = -3.0e38, -1.0e30
QUAD = (1, 2)  # lanes that hold the same rows of a product
MOST_ROWS = 4096  # of the grid; a launch passes its own
MOST_KEYS = 768  # that have their addresses in shared memory: window and selection, each rounded up to tiles
HEADS, STAGES, PANEL = 64, 2, 8192  # a panel: 64 rows of 128 bytes
SHRINK = 256.0  # keys are held divided by it
FP4_SHIFT, FP8_SHIFT = 0x3B003B00, 112  # 2^118 as an addend of bf16 exponents; the exponent of 2^112


@inline
def put_chunk(base: Any, row: Any, chunk: Any, value: Any) -> None:
    """Store 16 bytes, chunk `chunk` of row `row`, into panels of 64 rows with the 128-byte swizzle."""
    sts_u32x4(uint32(base + (chunk >> 3) * PANEL + row * 128 + ((chunk ^ row) & 7) * 16), value)


@inline
def turn(word: Any, table: Any, at: Any) -> Any:
    """A bf16 pair rotated by the phase in shared memory at pair index `at`."""
    cs = lds_u32x2(uint32(table + at * 8))
    a, b = rotated(bf16_low(word), bf16_high(word), as_float(cs[0]), as_float(cs[1]))
    return bf16x2(b, a)


@inline
def key_address(codes: Any, scales: Any, place: Any) -> None:
    """Keep where a key's codes and scales lie."""
    sts_u32x4(place, (uint32(codes), uint32(codes >> 32), uint32(scales), uint32(scales >> 32)))


@inline
def pairs_of(at: Any) -> Any:
    """The two addresses that `key_address` kept, as a tuple."""
    word = lds_u32x4(at)
    return int64(word[0]) | int64(word[1]) << 32, int64(word[2]) | int64(word[3]) << 32


@inline
def expand_selected(stage: Any, key: Any, chunk: Any, word: Any, scale: Any) -> None:
    """32 e2m1 codes in four words, two e4m3 scales in one, to bf16 in shared memory from 16-byte chunk `chunk` on."""
    two = uint32(prmt(scale, uint32(0), uint32(0x4140)) << 4)
    two = uint32(mul_bf16x2(two, uint32(0x7B807B80)) + FP4_SHIFT)
    first = prmt(two, two, uint32(0x1010))
    second = prmt(two, two, uint32(0x3232))
    for j in unroll(4):
        put_chunk(stage, key, int32(chunk + j), fp4x8_bf16_scaled(word[j], first if j < 2 else second))


@inline
def expand_window(stage: Any, key: Any, chunk: Any, word: Any, exponent: Any) -> None:
    """32 e4m3 codes in eight words under one ue8m0 scale."""
    factor = uint32((exponent + FP8_SHIFT) << 7 | (exponent + FP8_SHIFT) << 23)
    for j in unroll(4):
        a = e4m3x4_bf16_scaled(word[2 * j], factor)
        b = e4m3x4_bf16_scaled(word[2 * j + 1], factor)
        put_chunk(stage, key, int32(chunk + j), (a[0], a[1], b[0], b[1]))


def make(*, h: int, d: int, rope: int) -> Kernel:
    """h heads up to 64; d 64 or a multiple of 128 up to 512."""
    CONSUMERS = 1 if d < 128 else 2
    THREADS, N, PANELS, HALF, TAIL = 128 * (CONSUMERS + 1), d // CONSUMERS, d // 64, rope // 2, d - rope
    ROW, PIECES = window_row_bytes(d), d // 32
    PER_STEP = min(4, PIECES)  # pieces of a key that a warp takes at once, and how far that spreads over keys
    KEYS_A_STEP, STEPS = 8 * (4 // PER_STEP), PIECES // PER_STEP
    SPREAD = 3 + PER_STEP.bit_length() - 1
    GROUPS = 16 // KEYS_A_STEP  # a producer warp expands 16 keys of a tile
    LOADS = GROUPS * STEPS
    AT_KEYS, BYTES = PANELS * PANEL, PANELS * PANEL
    AT_PLACES = AT_KEYS + STAGES * BYTES
    AT_PHASE = AT_PLACES + 16 * MOST_KEYS
    AT_BAR = AT_PHASE + 8 * HALF
    WARPS, CHUNKS = 4 * CONSUMERS, HEADS * (d // 8) // (128 * CONSUMERS)
    BATCH = min(8, CHUNKS)
    SCALE = LOG2_E * d**-0.5 * SHRINK
    multiply, values, wait_scores, wait_out = (
        wgmma(64, "bf16"),
        wgmma_registers(N, True),
        wgmma_wait(32),
        wgmma_wait(N // 2),
    )
    no_scores, no_out, rescale = zeros(32), zeros(N // 2), scale_rows(N // 2)
    TRANSPOSED = transposed_tile(PANEL)

    @kernel(threads=THREADS, grid=(MOST_ROWS,), shared=AT_BAR + 16 * STAGES, name=f"chunk_attend_{h}x{d}")
    def attention(
        q: s64, windows: s64, pitch: s64, ring: s32, selected: s64, chosen: s64, topk: s32, pages: s64,
        most_pages: s32, page_codes: s64, page_scales: s64, page_bytes: s64, ratio: s32, sequence: s64, position: s64,
        first: s64, last: s64, table: s64, sink: s64, out: s64,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5 & 3)
        group = int32(tid >> 7)
        row = int64(block_index())
        sm = shared_base()
        bar = uint32(sm + AT_BAR)
        wait_for_previous_kernel()
        let_next_kernel_start()
        owner = int64(int32(ldg_u32(sequence + row * 4)))
        place = int32(ldg_u32(position + row * 4))
        start = int32(ldg_u32(first + row * 4))
        window_keys = int32(int32(ldg_u32(last + row * 4)) + 1 - start)
        entries = int32(0)
        if topk > 0:
            entries = int32(ldg_u32(chosen + row * 4))
        window_tiles = int32((window_keys + TILE - 1) // TILE)
        tiles = int32(window_tiles + (entries + TILE - 1) // TILE)
        if owner >= 0:
            if tid == 0:
                for s in unroll(STAGES):
                    mbarrier_init(uint32(bar + 8 * s), uint32(4))
                    mbarrier_init(uint32(bar + 8 * (STAGES + s)), uint32(CONSUMERS))
                fence_mbarrier_init()
            for p in range(tid, HALF, THREADS):
                c, s = phase(table, place, p, HALF)
                sts_u32x2(uint32(sm + AT_PHASE + p * 8), (as_bits(c), as_bits(s)))
            for i in range(tid, tiles * TILE, THREADS):
                at = uint32(sm + AT_PLACES + i * 16)
                if i < window_tiles * TILE:
                    # a tile's keys beyond the last are copies of it: finite, and masked in the scores
                    slot = int32((start + min(i, window_keys - 1)) % ring)
                    line = windows + owner * pitch + int64(slot) * ROW
                    key_address(line, line + d, at)
                else:
                    held = int32(min(i - window_tiles * TILE, entries - 1))
                    entry = int32(ldg_u32(selected + (row * topk + held) * 4))
                    page = int32(entry * ratio // PAGE_TOKENS)
                    where = int64(ldg_u32(pages + (owner * most_pages + page) * 4)) * page_bytes
                    slot64 = int64(entry - page * PAGE_TOKENS // ratio)
                    key_address(page_codes + where + slot64 * (d // 2), page_scales + where + slot64 * (d // 16), at)
            sync_threads()
            if group == 0:
                if CONSUMERS == 2:
                    give_some_registers()
                for tile in range(tiles):
                    stage = uint32(sm + AT_KEYS + (tile % STAGES) * BYTES)
                    free = uint32(bar + 8 * (STAGES + tile % STAGES))
                    parity = uint32((tile // STAGES & 1) ^ 1)
                    key = int32(16 * warp + (lane & 7) + 8 * (lane >> SPREAD))
                    piece = int32(lane >> 3 & (PER_STEP - 1))
                    at = uint32(sm + AT_PLACES + (tile * TILE + key) * 16)
                    if tile >= window_tiles:
                        word = regs(4 * LOADS)
                        scale = regs(LOADS)
                        for g in unroll(GROUPS):
                            codes, scales = pairs_of(uint32(at + g * KEYS_A_STEP * 16))
                            for i in unroll(STEPS):
                                n = int64(piece + PER_STEP * i)
                                word[4 * (g * STEPS + i) : 4 * (g * STEPS + i) + 4] = ldg_u32x4(codes + n * 16)
                                scale[g * STEPS + i] = ldg_u16(scales + n * 2)
                        mbarrier_wait(free, parity)
                        for g in unroll(GROUPS):
                            for i in unroll(STEPS):
                                chunk = int32((piece + PER_STEP * i) * 4)
                                expand_selected(
                                    stage, int32(key + g * KEYS_A_STEP), chunk,
                                    word[4 * (g * STEPS + i) : 4 * (g * STEPS + i) + 4], scale[g * STEPS + i],
                                )  # fmt: skip
                    else:
                        mbarrier_wait(free, parity)
                        for g in unroll(GROUPS):
                            codes, scales = pairs_of(uint32(at + g * KEYS_A_STEP * 16))
                            eight = regs(8 * STEPS)
                            exponent = regs(STEPS)
                            for i in unroll(STEPS):
                                n = int64(piece + PER_STEP * i)
                                eight[8 * i : 8 * i + 4] = ldg_u32x4(codes + n * 32)
                                eight[8 * i + 4 : 8 * i + 8] = ldg_u32x4(codes + n * 32 + 16)
                                exponent[i] = ldg_u8(scales + n)
                            for i in unroll(STEPS):
                                chunk = int32((piece + PER_STEP * i) * 4)
                                expand_window(
                                    stage, int32(key + g * KEYS_A_STEP), chunk, eight[8 * i : 8 * i + 8], exponent[i]
                                )
                    fence_async()
                    sync_warp()
                    if lane == 0:
                        mbarrier_arrive(uint32(bar + 8 * (tile % STAGES)))
            else:
                if CONSUMERS == 2:
                    take_most_registers()
                share = int32(group - 1)  # columns share * N ... of the result
                own = int32(4 * share + warp)
                for batch in unroll(CHUNKS // BATCH):
                    w = regs(4 * BATCH, uint32(0))
                    for b in unroll(BATCH):
                        i = int32((batch * BATCH + b) * WARPS + own)
                        head = int32(i // (d // 32) * 8 + (lane & 7))
                        chunk = int32(i % (d // 32) * 4 + (lane >> 3))
                        if head < h:
                            w[4 * b : 4 * b + 4] = ldg_u32x4(q + ((row * h + head) * d + chunk * 8) * 2)
                    for b in unroll(BATCH):
                        i = int32((batch * BATCH + b) * WARPS + own)
                        head = int32(i // (d // 32) * 8 + (lane & 7))
                        chunk = int32(i % (d // 32) * 4 + (lane >> 3))
                        if chunk * 8 >= TAIL:
                            for j in unroll(4):
                                w[4 * b + j] = turn(
                                    w[4 * b + j], uint32(sm + AT_PHASE), int32(chunk * 4 + j - TAIL // 2)
                                )
                        put_chunk(sm, head, chunk, w[4 * b : 4 * b + 4])
                fence_async()
                sync_named(uint32(1), uint32(128 * CONSUMERS))
                o = no_out()
                top0 = LEAST
                top1 = LEAST
                sum0 = 0.0
                sum1 = 0.0
                t = int32(lane & 3)
                for tile in range(tiles):
                    stage = uint32(sm + AT_KEYS + (tile % STAGES) * BYTES)
                    mbarrier_wait(uint32(bar + 8 * (tile % STAGES)), uint32(tile // STAGES & 1))
                    at_q = int64(SWIZZLED_TILE) + (int64(sm) >> 4)
                    at_k = int64(SWIZZLED_TILE) + (int64(stage) >> 4)
                    scores = no_scores()
                    wgmma_fence()
                    for k in unroll(d // 16):
                        step = k // 4 * (PANEL // 16) + k % 4 * 2
                        scores = multiply(at_q + step, at_k + step, int32(1 if k > 0 else 0), scores)
                    wgmma_commit()
                    v = regs(32)
                    v = wait_scores(scores)
                    keys = int32(window_keys - tile * TILE)
                    if tile >= window_tiles:
                        keys = int32(entries - (tile - window_tiles) * TILE)
                    old0 = top0
                    old1 = top1
                    for n in unroll(8):
                        for j in unroll(4):
                            live = 8 * n + 2 * t + j % 2 < keys
                            v[4 * n + j] = v[4 * n + j] * SCALE if live else MASKED
                        top0 = fmax(top0, fmax(v[4 * n], v[4 * n + 1]))
                        top1 = fmax(top1, fmax(v[4 * n + 2], v[4 * n + 3]))
                    top0 = max_over(top0, QUAD)
                    top1 = max_over(top1, QUAD)
                    down0 = exp2_approx(old0 - top0)
                    down1 = exp2_approx(old1 - top1)
                    sum0 = sum0 * down0
                    sum1 = sum1 * down1
                    p = regs(16)  # A operands of four products: (row half, key half) of 16 keys
                    for n in unroll(8):
                        e0 = exp2_approx(v[4 * n] - top0)
                        e1 = exp2_approx(v[4 * n + 1] - top0)
                        e2 = exp2_approx(v[4 * n + 2] - top1)
                        e3 = exp2_approx(v[4 * n + 3] - top1)
                        sum0 = sum0 + (e0 + e1)
                        sum1 = sum1 + (e2 + e3)
                        p[2 * n] = bf16x2(e1, e0)
                        p[2 * n + 1] = bf16x2(e3, e2)
                    o = rescale(down0, down1, o)
                    at_v = int64(TRANSPOSED) + (int64(uint32(stage + share * (N // 64 * PANEL))) >> 4)
                    wgmma_fence()
                    for k in unroll(4):
                        o = values(p[4 * k : 4 * k + 4], at_v + k * 128, int32(1), o)
                    wgmma_commit()
                    o = wait_out(o)
                    if tid & 127 == 0:
                        mbarrier_arrive(uint32(bar + 8 * (STAGES + tile % STAGES)))
                sum0 = sum_over(sum0, QUAD)
                sum1 = sum_over(sum1, QUAD)
                head = int32(16 * warp + (lane >> 2))
                if head < h:
                    sum0 = sum0 + exp2_approx(ldw_f32(sink + int64(head) * 4) * LOG2_E - top0)
                if head + 8 < h:
                    sum1 = sum1 + exp2_approx(ldw_f32(sink + int64(head) * 4 + 32) * LOG2_E - top1)
                o = rescale(div(SHRINK, sum0), div(SHRINK, sum1), o)
                # in product order the pairs of four neighbouring tiles of 8 columns are 16 bytes of one lane
                for j in unroll(N // 32):
                    word = regs(8)  # of row g, then of row g + 8
                    for i in unroll(4):
                        column = int32(share * N + 32 * j + 8 * i + 2 * t)
                        word[i] = bf16x2(o[16 * j + 4 * i + 1], o[16 * j + 4 * i])
                        word[4 + i] = bf16x2(o[16 * j + 4 * i + 3], o[16 * j + 4 * i + 2])
                        if column >= TAIL:
                            cs = lds_u32x2(uint32(sm + AT_PHASE + (column - TAIL) * 4))
                            for m in unroll(2):
                                low = bf16_low(word[4 * m + i])
                                high = bf16_high(word[4 * m + i])
                                a, b = rotated(low, high, as_float(cs[0]), -as_float(cs[1]))
                                word[4 * m + i] = bf16x2(b, a)
                    to = out + ((row * h + head) * d + share * N + 32 * j + 8 * t) * 2
                    if head < h:
                        stg_u32x4(to, word[0:4])
                    if head + 8 < h:
                        stg_u32x4(to + 16 * d, word[4:8])

    return attention


def entries(width: Width) -> list[Entry]:
    """One kernel for every layer of a checkpoint's backbone, in either prefill mode."""
    spec = width.spec
    h, d = spec.num_attention_heads, spec.head_dim
    keys = spec.sliding_window + spec.index_topk
    nbytes = 1024 * (spec.sliding_window * (d + d // 32) + spec.index_topk * (d // 2 + d // 16) + 4 * h * d)
    shape = {"h": h, "d": d, "rope": spec.qk_rope_head_dim}
    return [Entry(f"chunk.attend/{width.label}", make, shape, HOPPER, attend, nbytes, 4 * 1024 * h * d * keys)]
