"""Attention of the many rows of a prefill chunk over window and selected entries, on warpgroup tensor cores (sm_90a).

    o = sum_t e^(s_t - M) k_t / (sum_t e^(s_t - M) + e^(sink - M)), inverse rope, bf16;   s_t = rope(q) . k_t / sqrt(d)

What attend.py computes for decode rows, with another order of sums. The heads of a row (64, or fewer and zeros) are the
m64 of the products, because they share keys, and keys are values. q, o bf16 [rows, H, d], o with its
columns in product order (gemm.py), ready for wo_a. Window keys are positions first .. last in slots position mod ring
of `windows` + sequence * pitch (a chunk's own rows stand in a private ring, then pitch is 0). selected int32 [rows,
topk], `chosen` of them a row (topk 0: window only), in pages (layout.py) of `ratio` tokens an entry. Inactive rows
(sequence < 0) write nothing. Tiles of 64 keys, the window's first, each part from its own start: a row's bits depend on
nothing but its own keys.

Reference: dsuf.ops.attend.attend. Operations 4 H d a key; bytes 4 H d a row, and 528 or 288 a key from L2.

A block walks rows of its own, and in it four warpgroups (three where d is 64), each the next row ahead of its
successor: one fetches keys and expands them to bf16 (times 2^-8, which saves a multiplication and is undone in the
scale of the scores and of the result); one makes scores and probabilities; the others hold d / their number columns of
O each. Keys lie as [d / 64][key][128 bytes], swizzled: K-major for the scores, and the same bytes are the transposed
operand for the values. Shared memory: Q, two stages of keys, two of probabilities, addresses of the keys.

    hand-off                     who writes      who waits             reused
    addresses of a row's keys    fetching        itself                after its barrier, by the next row
    Q                            scoring         itself                after its barrier, by the next row
    keys of a stage              fetching        scoring, holding      when every holding warpgroup has arrived
    probabilities, factors       scoring         holding               when every holding warpgroup has arrived
    phases (inverse rope)        last holding    itself                the row after the next
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
    opaque,
    prmt,
)
from dsuf.kernels.ptx.copy import (
    async_commit,
    async_load16,
    async_wait,
    fence_async,
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_init,
    mbarrier_wait,
)
from dsuf.kernels.ptx.memory import (
    ldg_u8,
    ldg_u16,
    ldg_u32,
    ldg_u32x4,
    lds_f32,
    lds_u32x2,
    lds_u32x4,
    ldw_f32,
    shared_base,
    stg_u32x4,
    sts_f32,
    sts_u32,
    sts_u32x2,
    sts_u32x4,
)
from dsuf.kernels.ptx.op import HOPPER
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    give_four_registers,
    give_score_registers,
    let_next_kernel_start,
    sync_named,
    sync_threads,
    sync_warp,
    take_four_registers,
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
    wgmma_transposed,
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
SM_COUNT = 132  # blocks: any number is right
MOST_KEYS = 640  # of a row: window and selection, each rounded up to tiles
HEADS, STAGES, PANEL = 64, 2, 8192  # a panel: 64 rows of 128 bytes
SHRINK = 256.0  # keys are held divided by it
FP4_SHIFT, FP8_SHIFT = 0x3B003B00, 112  # 2^118 as an addend of bf16 exponents; the exponent of 2^112


@inline
def put_chunk(base: Any, row: Any, chunk: Any, value: Any) -> None:
    """Store 16 bytes, chunk `chunk` of row `row`, into panels of 64 rows with the 128-byte swizzle."""
    sts_u32x4(uint32(base + (chunk >> 3) * PANEL + row * 128 + ((chunk ^ row) & 7) * 16), value)


@inline
def row_of(row: Any, sequence: Any, first: Any, last: Any, chosen: Any, topk: Any) -> Any:
    """A row's slot, first window position, window keys, entries, tiles of the window, tiles (0: inactive)."""
    owner = int64(int32(ldg_u32(sequence + int64(row) * 4)))
    start = int32(ldg_u32(first + int64(row) * 4))
    window_keys = int32(int32(ldg_u32(last + int64(row) * 4)) + 1 - start)
    entries = int32(0)
    if topk > 0:
        entries = int32(ldg_u32(chosen + int64(row) * 4))
    window_tiles = int32((window_keys + TILE - 1) // TILE)
    tiles = int32(window_tiles + (entries + TILE - 1) // TILE)
    tiles = int32(tiles if owner >= 0 else 0)
    return owner, start, window_keys, entries, window_tiles, tiles


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
    """h heads up to 64; d 64 or a multiple of 128 up to 512; the rotated tail of d within its last 64 columns."""
    SHARES = 1 if d < 128 else 2  # warpgroups that hold the result
    THREADS, N, PANELS, HALF, TAIL = 128 * (2 + SHARES), d // SHARES, d // 64, rope // 2, d - rope
    ROW, PIECES, PLAIN = window_row_bytes(d), d // 32, TAIL // 64  # panels of Q that nothing rotates
    PER_STEP = min(4, PIECES)  # pieces of a key that a warp takes at once, and how far that spreads over keys
    KEYS_A_STEP, STEPS = 8 * (4 // PER_STEP), PIECES // PER_STEP
    SPREAD = 3 + PER_STEP.bit_length() - 1
    GROUPS = 16 // KEYS_A_STEP  # a producer warp expands 16 keys of a tile
    LOADS, BYTES = GROUPS * STEPS, PANELS * PANEL
    AHEAD = min(4, LOADS)
    AT_KEYS = BYTES
    AT_P = AT_KEYS + STAGES * BYTES
    AT_FACTORS = AT_P + STAGES * PANEL
    AT_PLACES = AT_FACTORS + STAGES * 8 * HEADS
    AT_PHASE = AT_PLACES + 16 * MOST_KEYS
    AT_BAR = AT_PHASE + STAGES * 8 * HALF
    FULL, FREE, GIVEN, TAKEN = AT_BAR, AT_BAR + 16, AT_BAR + 32, AT_BAR + 48  # of keys, then of probabilities
    SCALE = LOG2_E * d**-0.5 * SHRINK
    PART = min(N, 128)  # columns of one product: what ptxas takes under the registers that 512 threads leave
    PARTS, HELD = N // PART, PART // 2
    multiply, values, wait_scores, wait_out = (
        wgmma(64, "bf16"),
        wgmma_transposed(PART),
        wgmma_wait(32),
        wgmma_wait(HELD),
    )
    no_scores, no_out, rescale = zeros(32), zeros(HELD), scale_rows(HELD)
    TRANSPOSED = transposed_tile(PANEL)

    @kernel(threads=THREADS, grid=(SM_COUNT,), shared=AT_BAR + 64, name=f"chunk_attend_{h}x{d}")
    def attention(
        q: s64, windows: s64, pitch: s64, ring: s32, selected: s64, chosen: s64, topk: s32, pages: s64,
        most_pages: s32, page_codes: s64, page_scales: s64, page_bytes: s64, ratio: s32, sequence: s64, position: s64,
        first: s64, last: s64, table: s64, sink: s64, out: s64, rows: s32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5 & 3)
        group = int32(tid >> 7)
        t = int32(lane & 3)
        row0 = int32(block_index())
        every = int32(block_count())
        sm = shared_base()
        if tid == 0:
            for s in unroll(STAGES):
                mbarrier_init(uint32(sm + FULL + 8 * s), uint32(4))
                mbarrier_init(uint32(sm + FREE + 8 * s), uint32(SHARES))
                mbarrier_init(uint32(sm + GIVEN + 8 * s), uint32(4))
                mbarrier_init(uint32(sm + TAKEN + 8 * s), uint32(SHARES))
            fence_mbarrier_init()
        sync_threads()
        wait_for_previous_kernel()
        let_next_kernel_start()
        turn = int32(0)  # tiles so far: what stage and phase of its barriers a tile has
        if group == 0:
            if SHARES == 2:
                give_four_registers()
            for row in range(row0, rows, every):
                owner, start, window_keys, entries, window_tiles, tiles = row_of(
                    row, sequence, first, last, chosen, topk
                )
                sync_named(uint32(1), uint32(128))  # all have read the addresses of the row before
                for i in range(tid, tiles * TILE, 128):
                    at = uint32(sm + AT_PLACES + i * 16)
                    if i < window_tiles * TILE:
                        # a tile's keys beyond the last are copies of it: finite, and masked in the scores
                        slot = int32((start + min(i, window_keys - 1)) % ring)
                        line = windows + owner * pitch + int64(slot) * ROW
                        key_address(line, line + d, at)
                    else:
                        held = int32(min(i - window_tiles * TILE, entries - 1))
                        entry = int32(ldg_u32(selected + (int64(row) * topk + held) * 4))
                        page = int32(entry * ratio // PAGE_TOKENS)
                        where = int64(ldg_u32(pages + (owner * most_pages + page) * 4)) * page_bytes
                        slot64 = int64(entry - page * PAGE_TOKENS // ratio)
                        key_address(
                            page_codes + where + slot64 * (d // 2), page_scales + where + slot64 * (d // 16), at
                        )
                sync_named(uint32(1), uint32(128))
                for tile in range(tiles):
                    stage = uint32(sm + AT_KEYS + (turn % STAGES) * BYTES)
                    free = uint32(sm + FREE + 8 * (turn % STAGES))
                    parity = uint32((turn // STAGES & 1) ^ 1)
                    lane_here = int32(opaque(lane))
                    key = int32(16 * warp + (lane_here & 7) + 8 * (lane_here >> SPREAD))
                    piece = int32(lane_here >> 3 & (PER_STEP - 1))
                    at = uint32(sm + AT_PLACES + (tile * TILE + key) * 16)
                    if tile >= window_tiles:
                        # AHEAD pieces are on their way while one is expanded
                        word = regs(4 * (AHEAD + 1))
                        scale = regs(AHEAD + 1)
                        for i in unroll(LOADS + AHEAD):
                            if i < LOADS:
                                codes, scales = pairs_of(uint32(at + i // STEPS * (KEYS_A_STEP * 16)))
                                n = int64(piece + PER_STEP * (i % STEPS))
                                word[i % (AHEAD + 1) * 4 : i % (AHEAD + 1) * 4 + 4] = ldg_u32x4(codes + n * 16)
                                scale[i % (AHEAD + 1)] = ldg_u16(scales + n * 2)
                            if i == AHEAD - 1:
                                mbarrier_wait(free, parity)
                            if i >= AHEAD:
                                expand_selected(
                                    stage, int32(key + (i - AHEAD) // STEPS * KEYS_A_STEP),
                                    int32((piece + PER_STEP * ((i - AHEAD) % STEPS)) * 4),
                                    word[(i - AHEAD) % (AHEAD + 1) * 4 : (i - AHEAD) % (AHEAD + 1) * 4 + 4],
                                    scale[(i - AHEAD) % (AHEAD + 1)],
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
                        mbarrier_arrive(uint32(sm + FULL + 8 * (turn % STAGES)))
                    turn = int32(turn + 1)
        else:
            if group == 1:
                if SHARES == 2:
                    give_score_registers()
                chunk = int32((lane >> 3) + 4 * (warp & 1))  # of a panel, in which a thread brings four heads
                head0 = int32(8 * (warp >> 1) + (lane & 7))
                for row in range(row0, rows, every):
                    owner, start, window_keys, entries, window_tiles, tiles = row_of(
                        row, sequence, first, last, chosen, topk
                    )
                    if tiles > 0:
                        sync_named(uint32(2), uint32(128))  # nobody multiplies with the Q of the row before
                        for b in unroll(4):
                            head = int32(head0 + 16 * b)
                            line = q + ((int64(row) * h + head) * d + chunk * 8) * 2
                            to = uint32(sm + head * 128 + ((chunk ^ head) & 7) * 16)
                            if head < h:
                                for panel in unroll(PLAIN):
                                    async_load16(uint32(to + panel * PANEL), line + panel * 128)
                        async_commit()
                        place = int32(ldg_u32(position + int64(row) * 4))
                        for panel in unroll(PLAIN, PANELS):
                            w = regs(16, uint32(0))
                            for b in unroll(4):
                                head = int32(head0 + 16 * b)
                                if head < h:
                                    line = q + ((int64(row) * h + head) * d + panel * 64 + chunk * 8) * 2
                                    w[4 * b : 4 * b + 4] = ldg_u32x4(line)
                            if panel * 64 + chunk * 8 >= TAIL:
                                for j in unroll(4):
                                    pair = int32(panel * 32 + chunk * 4 + j - TAIL // 2)
                                    c, s = phase(table, place, int32(max(pair, 0)), HALF)
                                    for b in unroll(4):
                                        x, y = rotated(bf16_low(w[4 * b + j]), bf16_high(w[4 * b + j]), c, s)
                                        w[4 * b + j] = bf16x2(y, x)
                            for b in unroll(4):
                                put_chunk(sm, int32(head0 + 16 * b), int32(panel * 8 + chunk), w[4 * b : 4 * b + 4])
                        async_wait[0]()
                        fence_async()
                        sync_named(uint32(2), uint32(128))
                    top0 = LEAST
                    top1 = LEAST
                    sum0 = 0.0
                    sum1 = 0.0
                    head = int32(16 * warp + (lane >> 2))
                    for tile in range(tiles):
                        stage = uint32(sm + AT_KEYS + (turn % STAGES) * BYTES)
                        mbarrier_wait(uint32(sm + FULL + 8 * (turn % STAGES)), uint32(turn // STAGES & 1))
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
                        mbarrier_wait(uint32(sm + TAKEN + 8 * (turn % STAGES)), uint32((turn // STAGES & 1) ^ 1))
                        to = uint32(sm + AT_P + (turn % STAGES) * PANEL + head * 128 + t * 4)
                        for n in unroll(8):
                            e0 = exp2_approx(v[4 * n] - top0)
                            e1 = exp2_approx(v[4 * n + 1] - top0)
                            e2 = exp2_approx(v[4 * n + 2] - top1)
                            e3 = exp2_approx(v[4 * n + 3] - top1)
                            sum0 = sum0 + (e0 + e1)
                            sum1 = sum1 + (e2 + e3)
                            at_chunk = ((n ^ head) & 7) * 16  # the same in row head + 8
                            sts_u32(uint32(to + at_chunk), bf16x2(e1, e0))
                            sts_u32(uint32(to + at_chunk + 1024), bf16x2(e3, e2))
                        at_factor = uint32(sm + AT_FACTORS + (turn % STAGES) * (8 * HEADS) + head * 4)
                        if t == 0:
                            sts_f32(at_factor, down0)
                            sts_f32(uint32(at_factor + 32), down1)
                        if tile == tiles - 1:
                            total0 = sum_over(sum0, QUAD)
                            total1 = sum_over(sum1, QUAD)
                            if head < h:
                                total0 = total0 + exp2_approx(ldw_f32(sink + int64(head) * 4) * LOG2_E - top0)
                            if head + 8 < h:
                                total1 = total1 + exp2_approx(ldw_f32(sink + int64(head) * 4 + 32) * LOG2_E - top1)
                            if t == 0:
                                sts_f32(uint32(at_factor + 4 * HEADS), div(SHRINK, total0))
                                sts_f32(uint32(at_factor + 4 * HEADS + 32), div(SHRINK, total1))
                        fence_async()
                        sync_warp()
                        if lane == 0:
                            mbarrier_arrive(uint32(sm + GIVEN + 8 * (turn % STAGES)))
                        turn = int32(turn + 1)
            else:
                if SHARES == 2:
                    take_four_registers()
                share = int32(group - 2)  # columns share * N ... of the result
                head = int32(16 * warp + (lane >> 2))
                odd = int32(0)  # rows so far, modulo 2
                for row in range(row0, rows, every):
                    owner, start, window_keys, entries, window_tiles, tiles = row_of(
                        row, sequence, first, last, chosen, topk
                    )
                    phases = uint32(sm + AT_PHASE + odd * (8 * HALF))
                    if share == SHARES - 1 and tiles > 0:
                        for p in range(tid & 127, HALF, 128):
                            c, s = phase(table, int32(ldg_u32(position + int64(row) * 4)), p, HALF)
                            sts_u32x2(uint32(phases + p * 8), (as_bits(c), as_bits(s)))
                        sync_named(uint32(3), uint32(128))
                    odd = int32(odd ^ 1)
                    o = regs(PARTS)
                    for part in unroll(PARTS):
                        o[part] = no_out()
                    inverse0 = 0.0
                    inverse1 = 0.0
                    for tile in range(tiles):
                        mbarrier_wait(uint32(sm + FULL + 8 * (turn % STAGES)), uint32(turn // STAGES & 1))
                        mbarrier_wait(uint32(sm + GIVEN + 8 * (turn % STAGES)), uint32(turn // STAGES & 1))
                        at_factor = uint32(sm + AT_FACTORS + (turn % STAGES) * (8 * HEADS) + head * 4)
                        down0 = lds_f32(at_factor)
                        down1 = lds_f32(uint32(at_factor + 32))
                        if tile == tiles - 1:
                            inverse0 = lds_f32(uint32(at_factor + 4 * HEADS))
                            inverse1 = lds_f32(uint32(at_factor + 4 * HEADS + 32))
                        for part in unroll(PARTS):
                            o[part] = rescale(down0, down1, o[part])
                        at_v = uint32(sm + AT_KEYS + (turn % STAGES) * BYTES + share * (N // 64 * PANEL))
                        from_v = int64(TRANSPOSED) + (int64(at_v) >> 4)
                        from_p = int64(SWIZZLED_TILE) + (int64(uint32(sm + AT_P + (turn % STAGES) * PANEL)) >> 4)
                        wgmma_fence()
                        for k in unroll(4):
                            for part in unroll(PARTS):
                                at_part = from_v + (part * (PART // 64) * (PANEL // 16) + k * 128)
                                o[part] = values(from_p + 2 * k, at_part, int32(1), o[part])
                        wgmma_commit()
                        for part in unroll(PARTS):
                            o[part] = wait_out(o[part])
                        if tid & 127 == 0:
                            mbarrier_arrive(uint32(sm + TAKEN + 8 * (turn % STAGES)))
                            mbarrier_arrive(uint32(sm + FREE + 8 * (turn % STAGES)))
                        turn = int32(turn + 1)
                    if tiles > 0:
                        for part in unroll(PARTS):
                            o[part] = rescale(inverse0, inverse1, o[part])
                        # hidden from the compiler, which would keep every address from row to row
                        t_here = int32(opaque(t))
                        head_here = int32(opaque(head))
                        phases_here = uint32(sm + AT_PHASE + (odd ^ 1) * (8 * HALF))
                        start_here = int32(share * N + 2 * t_here)
                        to = out + ((int64(row) * h + head_here) * d + share * N + 8 * t_here) * 2
                        # in product order the pairs of four neighbouring tiles of 8 columns are 16 bytes of one lane
                        for part in unroll(PARTS):
                            for j in unroll(PART // 32):
                                word = regs(8)  # of row head, then of row head + 8
                                for i in unroll(4):
                                    word[i] = bf16x2(o[part][16 * j + 4 * i + 1], o[part][16 * j + 4 * i])
                                    word[4 + i] = bf16x2(o[part][16 * j + 4 * i + 3], o[part][16 * j + 4 * i + 2])
                                    if part * PART + 32 * j + 8 * i + 7 >= TAIL - (SHARES - 1) * N:
                                        column = int32(start_here + part * PART + 32 * j + 8 * i)
                                        if column >= TAIL:
                                            cs = lds_u32x2(uint32(phases_here + (column - TAIL) * 4))
                                            for m in unroll(2):
                                                low = bf16_low(word[4 * m + i])
                                                high = bf16_high(word[4 * m + i])
                                                x, y = rotated(low, high, as_float(cs[0]), -as_float(cs[1]))
                                                word[4 * m + i] = bf16x2(y, x)
                                if head_here < h:
                                    stg_u32x4(to + (part * PART + 32 * j) * 2, word[0:4])
                                if head_here + 8 < h:
                                    stg_u32x4(to + (part * PART + 32 * j) * 2 + 16 * d, word[4:8])

    return attention


def entries(width: Width) -> list[Entry]:
    """One kernel for every layer of a checkpoint's backbone, in either prefill mode."""
    spec = width.spec
    h, d = spec.num_attention_heads, spec.head_dim
    keys = spec.sliding_window + spec.index_topk
    nbytes = 1024 * (spec.sliding_window * (d + d // 32) + spec.index_topk * (d // 2 + d // 16) + 4 * h * d)
    shape = {"h": h, "d": d, "rope": spec.qk_rope_head_dim}
    return [Entry(f"chunk.attend/{width.label}", make, shape, HOPPER, attend, nbytes, 4 * 1024 * h * d * keys)]
