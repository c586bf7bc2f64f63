"""Index scores of a chunk's rows against all visible entries of their sequence, on warpgroup tensor cores (sm_90a).

    score_j = sum_h relu(qI_h . K_j) w_h,  w = y_w (di heads)^-1/2             float32 [rows, capacity]

What index.py computes for decode rows, with another order of sums. q bf16 [rows, heads, di] from index.query, weights
float32 [rows, heads]; all rows are of one sequence (`slot` of the page table), in ascending position. Keys are e2m1
with ue8m0 per 32 in pages (layout.py) of `ratio` tokens an entry. Row r gets scores of at least its (position + 1) /
ratio visible entries; what lies behind them up to the capacity, a multiple of 64, means nothing.

Reference: dsuf.ops.index.index_scores. Operations 2 heads di an entry and row decide; keys come from L2, 68 bytes an
entry for each 16 rows.

A block makes the scores of 2 * 256 / heads rows for every grid-th tile of 64 entries. Entries are the m64 of the
products and (row, head) the n256 of each of two warpgroups, so that the sum over heads is mostly inside a thread. A
third warpgroup expands keys to bf16, times 2^-8, which the weights undo.

    hand-off                 who writes      who waits       reused
    queries, weights         a consumer      itself          never
    keys of a stage          producer        consumers       when both consumers have arrived
"""

from __future__ import annotations

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.chunk_attend import SHRINK
from dsuf.kernels.lang import Kernel, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.ptx.convert import as_float, fma, fmax, fp4x8_bf16_scaled
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
from dsuf.kernels.ptx.op import HOPPER
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
STAGES = 4
KEY_SHIFT = 118  # exponent of the factor that leaves 2^-8 of a key's value


def rows_of_block(heads: int) -> int:
    """Rows that a block makes scores for; grid y counts these."""
    return CONSUMERS * COLUMNS // heads


def make(*, heads: int, di: int) -> Kernel:
    """heads a power of two up to 64; di 32, 64 or 128."""
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
    CHUNKS, BATCH = COLUMNS * (di // 8) // 128, 8
    SCALE, TILES_OF_PAGE = (di * heads) ** -0.5 * SHRINK, PAGE_TOKENS // TILE
    PAIRS = heads // 8  # accumulator columns of 8 that make one row
    multiply, wait, none = wgmma(COLUMNS, "bf16"), wgmma_wait(COLUMNS // 2), zeros(COLUMNS // 2)

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
                mbarrier_init(uint32(bar + 8 * (STAGES + s)), uint32(CONSUMERS))
            fence_mbarrier_init()
        sync_threads()
        if group == 0:
            give_some_registers()
            if warp < EXPANDING:
                key = int32(STEPS * KEYS_A_STEP * warp + (lane & 7) + 8 * (lane >> SPREAD))
                piece = int32(lane >> 3 & (PER_STEP - 1))
                turn = int32(0)
                for tile in range(tile0, tiles, step):
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
            for batch in range(CHUNKS // BATCH):
                w = regs(4 * BATCH)
                for b in unroll(BATCH):
                    i = int32((batch * BATCH + b) * 4 + warp)
                    column = int32(i // (di // 32) * 8 + (lane & 7))
                    chunk = int32(i % (di // 32) * 4 + (lane >> 3))
                    line = int64(min(own * heads + column, rows * heads - 1))
                    w[4 * b : 4 * b + 4] = ldg_u32x4(q + (line * di + chunk * 8) * 2)
                for b in unroll(BATCH):
                    i = int32((batch * BATCH + b) * 4 + warp)
                    column = int32(i // (di // 32) * 8 + (lane & 7))
                    chunk = int32(i % (di // 32) * 4 + (lane >> 3))
                    at = (chunk >> 3) * Q_PANEL + column * 128
                    sts_u32x4(uint32(mine + at + ((chunk ^ column) & 7) * 16), w[4 * b : 4 * b + 4])
            at_weights = uint32(sm + AT_WEIGHTS + share * (COLUMNS * 4))
            for i in unroll(2):
                column = int32(128 * i + (tid & 127))
                line = int64(min(own * heads + column, rows * heads - 1))
                sts_f32(uint32(at_weights + column * 4), ldg_f32(weights + line * 4) * SCALE)
            fence_async()
            sync_named(uint32(1 + share), uint32(128))
            t = int32(lane & 3)
            # after the exchange below a lane holds ROWS / 2 rows of one entry
            row0 = int32(own + (t >> 1) * (ROWS // 2))
            entry0 = int32(16 * warp + (lane >> 2) + 8 * (t & 1))
            turn = int32(0)
            for tile in range(tile0, tiles, step):
                mbarrier_wait(uint32(bar + 8 * (turn % STAGES)), uint32(turn // STAGES & 1))
                at_k = int64(SWIZZLED_TILE) + (int64(uint32(sm + AT_KEYS + turn % STAGES * STAGE)) >> 4)
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
                turn = int32(turn + 1)
                s = regs(2 * ROWS, 0.0)  # entries g, then entries g + 8
                for r in unroll(ROWS):
                    for j in unroll(PAIRS):
                        pair = lds_u32x2(uint32(at_weights + (r * PAIRS + j) * 32 + t * 8))
                        w0 = as_float(pair[0])
                        w1 = as_float(pair[1])
                        for half in unroll(2):
                            low = fmax(acc[4 * (r * PAIRS + j) + 2 * half], 0.0)
                            high = fmax(acc[4 * (r * PAIRS + j) + 2 * half + 1], 0.0)
                            s[half * ROWS + r] = fma(high, w1, fma(low, w0, s[half * ROWS + r]))
                # over the quad, halving what a lane holds: its t & 1 names the entry, t >> 1 the half of the rows
                half1 = regs(ROWS)
                for r in unroll(ROWS):
                    given = s[r] if t & 1 == 1 else s[ROWS + r]
                    kept = s[ROWS + r] if t & 1 == 1 else s[r]
                    half1[r] = kept + shuffle_xor_f32(given, uint32(1))
                entry = int32(tile * TILE + entry0)
                for r in unroll(ROWS // 2):
                    given = half1[r] if t >> 1 == 1 else half1[ROWS // 2 + r]
                    kept = half1[ROWS // 2 + r] if t >> 1 == 1 else half1[r]
                    value = kept + shuffle_xor_f32(given, uint32(2))
                    row = int64(row0 + r)
                    if row0 + r < rows:
                        stg_f32(out + (row * capacity + entry) * 4, value)

    return scores


def entries(width: Width) -> list[Entry]:
    """One kernel a width, for every ratio."""
    spec = width.spec
    heads, di, rows, ahead = spec.index_n_heads, spec.index_head_dim, 1024, 16384  # that the floor is stated for
    nbytes, operations = ahead * (di // 2 + di // 32) + 4 * rows * ahead, 2 * rows * ahead * heads * di
    shape = {"heads": heads, "di": di}
    return [Entry(f"chunk.scores/{width.label}", make, shape, HOPPER, index_scores, nbytes, operations)]
