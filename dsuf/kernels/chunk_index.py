"""Index scores of a chunk's rows against all visible entries of their sequence, on tensor cores.

    score_j = sum_h relu(qI_h . K_j) w_h,  w = y_w (di heads)^-1/2             float32 [rows, capacity]

What index.py computes for decode rows, with another order of sums. q bf16 [rows, heads, di] from index.query, weights
float32 [rows, heads]; all rows are of one sequence (`slot` of the page table), in ascending position. Keys are e2m1
with ue8m0 per 32 in pages (layout.py) of `ratio` tokens an entry. Row r gets scores of at least its (position + 1) /
ratio visible entries; what lies behind them up to the capacity, a multiple of 64, means nothing.

Reference: dsuf.ops.index.index_scores. Operations 2 heads di an entry and row decide; keys come from L2, 68 bytes an
entry for each 16 rows.

A block makes the scores of 2 * 256 / heads rows for every grid-th tile of 64 entries. One warpgroup expands keys to
bf16, times 2^-8, which the weights undo; two multiply, each by 256 columns (row, head), so that the sum over heads is
mostly inside a thread. On sm_90a a warp has 16 entries and all 256 columns (wgmma). Blackwell has no wgmma; there, by
mma.sync (chunk_warps.py), a warp has all 64 entries and 64 columns, whose weights stay in registers. Every chip has
those instructions, so that body is tested on Hopper too.

    hand-off                 who writes      who waits       reused
    queries, weights         a consumer      itself          never
    keys of a stage          producer        consumers       when both have arrived (with mma.sync: their eight warps)
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.chunk_attend_keys import SHRINK
from dsuf.kernels.chunk_warps import multiply_rows
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.ptx.convert import as_float, fma, fmax, fp4x8_bf16_scaled, opaque
from dsuf.kernels.ptx.copy import fence_async, fence_mbarrier_init, mbarrier_arrive, mbarrier_init, mbarrier_wait
from dsuf.kernels.ptx.memory import (
    ldg_f32,
    ldg_u8,
    ldg_u32,
    ldg_u32x4,
    lds_u32x2,
    shared_base,
    stg_f32,
    sts_f32,
    sts_u32x4,
)
from dsuf.kernels.ptx.op import BLACKWELL
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    block_index_y,
    give_some_registers,
    let_next_kernel_start,
    shuffle_xor_f32,
    sync_named,
    sync_threads,
    sync_warp,
    take_most_registers,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.ptx.wgmma import SWIZZLED_TILE, wgmma, wgmma_commit, wgmma_fence, wgmma_wait, zeros
from dsuf.layout import PAGE_TOKENS
from dsuf.ops.index import index_scores

TILE, COLUMNS, CONSUMERS = 64, 256, 2  # entries of a tile; (row, head) pairs of a consumer warpgroup
STAGES, BATCH = 4, 8  # BATCH: loads of queries that are on their way together
KEY_SHIFT = 118  # exponent of the factor that leaves 2^-8 of a key's value


def rows_of_block(heads: int) -> int:
    """Rows that a block makes scores for; grid y counts these."""
    return CONSUMERS * COLUMNS // heads


@inline
def bring_queries(mine: Any, q: Any, first: Any, most: Any, warp: Any, lane: Any, di: Any, panel: Any) -> None:
    """COLUMNS columns (row, head) of queries from column `first` on to swizzled panels: 128 threads.

    Columns beyond `most` are copies of it.
    """
    for batch in range(COLUMNS * (di // 8) // 128 // BATCH):
        w = regs(4 * BATCH)
        for b in unroll(BATCH):
            i = int32((batch * BATCH + b) * 4 + warp)
            column = int32(i // (di // 32) * 8 + (lane & 7))
            chunk = int32(i % (di // 32) * 4 + (lane >> 3))
            line = int64(min(first + column, most))
            w[4 * b : 4 * b + 4] = ldg_u32x4(q + (line * di + chunk * 8) * 2)
        for b in unroll(BATCH):
            i = int32((batch * BATCH + b) * 4 + warp)
            column = int32(i // (di // 32) * 8 + (lane & 7))
            chunk = int32(i % (di // 32) * 4 + (lane >> 3))
            at = (chunk >> 3) * panel + column * 128
            sts_u32x4(uint32(mine + at + ((chunk ^ column) & 7) * 16), w[4 * b : 4 * b + 4])


@inline
def store_of_warpgroup(
    acc: Any, at_weights: Any, count: Any, row0: Any, rows: Any, entry: Any, t: Any, out: Any, capacity: Any
) -> None:  # fmt: skip
    """Scores of `count` rows from a warp's products with 256 columns: entries g (`entry`) and g + 8 of this thread.

    They are summed over the quad, halving what a lane holds: its t & 1 names the entry, t >> 1 the half of the rows.
    """
    s = regs(2 * count, 0.0)  # entries g, then entries g + 8
    for r in unroll(count):
        for j in unroll(COLUMNS // count // 8):
            pair = lds_u32x2(uint32(at_weights + (r * (COLUMNS // count // 8) + j) * 32 + t * 8))
            w0 = as_float(pair[0])
            w1 = as_float(pair[1])
            for half in unroll(2):
                low = fmax(acc[4 * (r * (COLUMNS // count // 8) + j) + 2 * half], 0.0)
                high = fmax(acc[4 * (r * (COLUMNS // count // 8) + j) + 2 * half + 1], 0.0)
                s[half * count + r] = fma(high, w1, fma(low, w0, s[half * count + r]))
    half1 = regs(count)
    for r in unroll(count):
        given = s[r] if t & 1 == 1 else s[count + r]
        kept = s[count + r] if t & 1 == 1 else s[r]
        half1[r] = kept + shuffle_xor_f32(given, uint32(1))
    for r in unroll(count // 2):
        given = half1[r] if t >> 1 == 1 else half1[count // 2 + r]
        kept = half1[count // 2 + r] if t >> 1 == 1 else half1[r]
        value = kept + shuffle_xor_f32(given, uint32(2))
        row = int64(row0 + (t >> 1) * (count // 2) + r)
        if row < rows:
            stg_f32(out + (row * capacity + entry + 8 * (t & 1)) * 4, value)


@inline
def weights_of_warp(w: Any, at: Any, t: Any) -> None:
    """Weights of this thread's columns, 8 n + 2 t and the next, of 64."""
    for n in unroll(8):
        pair = lds_u32x2(uint32(at + (8 * n + 2 * t) * 4))
        w[2 * n] = as_float(pair[0])
        w[2 * n + 1] = as_float(pair[1])


@inline
def store_of_warp(
    o: Any, w: Any, count: Any, row0: Any, rows: Any, entry: Any, t: Any, out: Any, capacity: Any
) -> None:  # fmt: skip
    """Scores of `count` rows from a warp's products with 64 columns: entries 8 i + g (`entry`: g) of this thread.

    Over the quad, halving what a lane holds: its t & 1 names the odd or even i, t >> 1 the half of the entries.
    """
    s = regs(8 * count, 0.0)  # [i, row]
    for i in unroll(8):
        for n in unroll(8):
            low = fmax(o[i // 2][4 * n + 2 * (i % 2)], 0.0)
            high = fmax(o[i // 2][4 * n + 2 * (i % 2) + 1], 0.0)
            s[i * count + n * count // 8] = fma(high, w[2 * n + 1], fma(low, w[2 * n], s[i * count + n * count // 8]))
    half1 = regs(4 * count)
    for i in unroll(4):
        for r in unroll(count):
            given = s[2 * i * count + r] if t & 1 == 1 else s[(2 * i + 1) * count + r]
            kept = s[(2 * i + 1) * count + r] if t & 1 == 1 else s[2 * i * count + r]
            half1[i * count + r] = kept + shuffle_xor_f32(given, uint32(1))
    for i in unroll(2):
        place = int32(entry + 32 * (t >> 1) + 16 * i + 8 * (t & 1))
        for r in unroll(count):
            given = half1[i * count + r] if t >> 1 == 1 else half1[(2 + i) * count + r]
            kept = half1[(2 + i) * count + r] if t >> 1 == 1 else half1[i * count + r]
            value = kept + shuffle_xor_f32(given, uint32(2))
            row = int64(row0 + r)
            if row < rows:
                stg_f32(out + (row * capacity + place) * 4, value)


def make(*, heads: int, di: int, chip: str) -> Kernel:
    """heads a power of two up to 64; di 32, 64 or 128."""
    WARPS = chip in BLACKWELL
    PANELS, ROWS, PIECES = -(-di // 64), COLUMNS // heads, di // 32
    KEY_PANEL, Q_PANEL = TILE * 128, COLUMNS * 128
    STAGE, MINE = PANELS * KEY_PANEL, PANELS * Q_PANEL
    AT_KEYS = CONSUMERS * MINE
    AT_WEIGHTS = AT_KEYS + STAGES * STAGE
    AT_BAR = AT_WEIGHTS + CONSUMERS * COLUMNS * 4
    PER_STEP = min(4, PIECES)  # pieces of a key that a warp expands at once; the other lanes take further keys
    KEYS_A_STEP, SPREAD = 8 * (4 // PER_STEP), 3 + PER_STEP.bit_length() - 1
    STEPS = max(1, 16 // KEYS_A_STEP)
    EXPANDING = TILE // (STEPS * KEYS_A_STEP)  # warps
    SCALE, TILES_OF_PAGE = (di * heads) ** -0.5 * SHRINK, PAGE_TOKENS // TILE
    READERS = 4 * CONSUMERS if WARPS else CONSUMERS
    multiply, wait, none = wgmma(COLUMNS, "bf16"), wgmma_wait(COLUMNS // 2), zeros(32 if WARPS else COLUMNS // 2)

    @kernel(threads=128 * (CONSUMERS + 1), grid=(1, 1), shared=AT_BAR + 16 * STAGES, name=f"chunk_scores_{heads}x{di}")
    def scores(
        q: s64, weights: s64, pages: s64, most_pages: s32, key_codes: s64, key_scales: s64, page_bytes: s64, slot: s32,
        position: s64, ratio: s32, out: s64, capacity: s64, rows: s32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5 & 3)
        group = int32(tid >> 7)
        sm = shared_base()
        bar = uint32(sm + AT_BAR)
        first = int32(block_index_y() * (CONSUMERS * ROWS))
        tile0 = int32(block_index())
        step = int32(block_count())
        wait_for_previous_kernel()
        let_next_kernel_start()
        final = int32(min(first + CONSUMERS * ROWS, rows) - 1)
        visible = int32((int32(ldg_u32(position + int64(final) * 4)) + 1) // ratio)
        tiles = int32((visible + TILE - 1) // TILE)
        if tid == 0:
            for s in unroll(STAGES):
                mbarrier_init(uint32(bar + 8 * s), uint32(EXPANDING))
                mbarrier_init(uint32(bar + 8 * (STAGES + s)), uint32(READERS))
            fence_mbarrier_init()
        sync_threads()
        if group == 0:
            give_some_registers()
            if warp < EXPANDING:
                key = int32(STEPS * KEYS_A_STEP * warp + (lane & 7) + 8 * (lane >> SPREAD))
                piece = int32(lane >> 3 & (PER_STEP - 1))
                turn = int32(0)
                for tile in range(opaque(tile0), tiles, step):
                    page = int64(tile * ratio // TILES_OF_PAGE)
                    where = int64(ldg_u32(pages + (int64(slot) * most_pages + page) * 4)) * page_bytes
                    line = int32(tile * TILE - int32(page) * PAGE_TOKENS // ratio)
                    most = int32(min(visible - tile * TILE, TILE) - 1)
                    word = regs(4 * STEPS)
                    exponent = regs(STEPS)
                    for i in unroll(STEPS):
                        held = int64(line + min(key + KEYS_A_STEP * i, most))
                        word[4 * i : 4 * i + 4] = ldg_u32x4(key_codes + where + held * (di // 2) + piece * 16)
                        exponent[i] = ldg_u8(key_scales + where + held * PIECES + piece)
                    mbarrier_wait(uint32(bar + 8 * (STAGES + turn % STAGES)), uint32((turn // STAGES & 1) ^ 1))
                    for i in unroll(STEPS):
                        r = int32(key + KEYS_A_STEP * i)
                        factor = uint32((exponent[i] + KEY_SHIFT) << 7 | (exponent[i] + KEY_SHIFT) << 23)
                        for j in unroll(4):
                            chunk = int32(piece * 4 + j)
                            at = AT_KEYS + turn % STAGES * STAGE + (chunk >> 3) * KEY_PANEL + r * 128
                            value = fp4x8_bf16_scaled(word[4 * i + j], factor)
                            sts_u32x4(uint32(sm + at + ((chunk ^ r) & 7) * 16), value)
                    fence_async()
                    sync_warp()
                    if lane == 0:
                        mbarrier_arrive(uint32(bar + 8 * (turn % STAGES)))
                    turn = int32(turn + 1)
        else:
            take_most_registers()
            share = int32(group - 1)
            mine = uint32(sm + share * MINE)
            own = int32(first + share * ROWS)  # first row of this warpgroup
            bring_queries(mine, q, int32(own * heads), int32(rows * heads - 1), warp, lane, di, Q_PANEL)
            at_weights = uint32(sm + AT_WEIGHTS + share * (COLUMNS * 4))
            for i in unroll(2):
                column = int32(128 * i + (tid & 127))
                line = int64(min(own * heads + column, rows * heads - 1))
                sts_f32(uint32(at_weights + column * 4), ldg_f32(weights + line * 4) * SCALE)
            fence_async()
            sync_named(uint32(1 + share), uint32(128))
            t = int32(lane & 3)
            turn = int32(0)
            row0 = int32(own + (warp * (ROWS // 4) if WARPS else 0))
            of_columns = uint32(at_weights + (64 * warp if WARPS else 0) * 4)
            w = regs(16 if WARPS else 1)
            if WARPS:
                weights_of_warp(w, of_columns, t)
            for tile in range(opaque(tile0), tiles, step):
                mbarrier_wait(uint32(bar + 8 * (turn % STAGES)), uint32(turn // STAGES & 1))
                stage = uint32(sm + AT_KEYS + turn % STAGES * STAGE)
                if WARPS:
                    o = regs(4)
                    for i in unroll(4):
                        o[i] = none()
                    queries = uint32(mine + 64 * 128 * warp)
                    multiply_rows(o, 4, stage, KEY_PANEL, queries, Q_PANEL, lane, di // 16)
                    sync_warp()
                    if lane == 0:
                        mbarrier_arrive(uint32(bar + 8 * (STAGES + turn % STAGES)))
                    store_of_warp(o, w, ROWS // 4, row0, rows, int32(tile * TILE + (lane >> 2)), t, out, capacity)
                else:
                    at_k = int64(SWIZZLED_TILE) + (int64(stage) >> 4)
                    at_q = int64(SWIZZLED_TILE) + (int64(mine) >> 4)
                    acc = none()
                    wgmma_fence()
                    for k in unroll(di // 16):
                        a = at_k + k // 4 * (KEY_PANEL // 16) + k % 4 * 2
                        acc = multiply(a, at_q + k // 4 * (Q_PANEL // 16) + k % 4 * 2, int32(1 if k > 0 else 0), acc)
                    wgmma_commit()
                    acc = wait(acc)
                    if tid & 127 == 0:
                        mbarrier_arrive(uint32(bar + 8 * (STAGES + turn % STAGES)))
                    entry = int32(tile * TILE + 16 * warp + (lane >> 2))
                    store_of_warpgroup(acc, of_columns, ROWS, row0, rows, entry, t, out, capacity)
                turn = int32(turn + 1)

    return scores


def entries(width: Width) -> list[Entry]:
    """One kernel a width, for every ratio."""
    spec = width.spec
    heads, di, rows, ahead = spec.index_n_heads, spec.index_head_dim, 1024, 16384  # that the floor is stated for
    nbytes, operations = ahead * (di // 2 + di // 32) + 4 * rows * ahead, 2 * rows * ahead * heads * di
    shape = {"heads": heads, "di": di}
    return [Entry(f"chunk.scores/{width.label}", make, shape, width.chips, index_scores, nbytes, operations)]
