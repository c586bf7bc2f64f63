"""Attention of the many rows of a prefill chunk over window and selected entries, on tensor cores.

    o = sum_t e^(s_t - M) k_t / (sum_t e^(s_t - M) + e^(sink - M)), inverse rope, bf16;   s_t = rope(q) . k_t / sqrt(d)

What attend.py computes for decode rows, with another order of sums. The heads of a row (64, or fewer and zeros) stand
beside each other in the products, because they share keys, and keys are values. q, o bf16 [rows, H, d], o with its
columns in product order (gemm.py), ready for wo_a. Window keys are positions first .. last in slots position mod ring
of `windows` + sequence * pitch (a chunk's own rows stand in a private ring, then pitch is 0). selected int32 [rows,
topk], `chosen` of them a row (topk 0: window only), in pages (layout.py) of `ratio` tokens an entry. Inactive rows
(sequence < 0) write nothing. Tiles of 64 keys, the window's first, each part from its own start: a row's bits depend on
nothing but its own keys.

Reference: dsuf.ops.attend.attend. Operations 4 H d a key; bytes 4 H d a row, and 528 or 288 a key from L2.

A block walks rows of its own, and in it four warpgroups (three where d is 64), each the next row ahead of its
successor: one fetches keys and expands them (chunk_attend_keys.py); one makes scores and probabilities, 16 heads a
warp (chunk_attend_heads.py); the others hold the sums. sm_90a multiplies by wgmma: a holding warpgroup has d / their
number columns, each of its warps 16 heads. Blackwell has no wgmma and multiplies the same tiles by mma.sync
(chunk_warps.py): there a warp holds up to 64 columns of as many heads as it can, so that few warps read the same keys.
Every chip has those instructions, so that body is tested on Hopper too. Shared memory: Q, two stages of keys, two of
probabilities, addresses of the keys.

    hand-off                     who writes      who waits             reused
    addresses of a row's keys    fetching        itself                after its barrier, by the next row
    Q                            scoring         itself                after its barrier, by the next row
    keys of a stage              fetching        scoring, holding      when all that hold have arrived, by warpgroups
    probabilities, factors       scoring         holding               with wgmma, by warps with mma.sync
    phases (inverse rope)        last holding    itself                the row with keys after the next
"""

from __future__ import annotations

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.chunk_attend_heads import LEAST, LOG2_E, fetch_queries, keep_phases, probabilities, put_sums
from dsuf.kernels.chunk_attend_keys import HEADS, PANEL, SHRINK, STAGES, TILE, Room, expand_tile, list_keys, row_of
from dsuf.kernels.chunk_warps import add_values, scores_of_warp
from dsuf.kernels.lang import Kernel, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.ptx.convert import opaque
from dsuf.kernels.ptx.copy import fence_async, fence_mbarrier_init, mbarrier_arrive, mbarrier_init, mbarrier_wait
from dsuf.kernels.ptx.memory import lds_f32, shared_base
from dsuf.kernels.ptx.op import BLACKWELL
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    give_four_registers,
    give_more_registers,
    give_score_registers,
    let_next_kernel_start,
    sync_named,
    sync_threads,
    sync_warp,
    take_four_registers,
    take_more_registers,
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
from dsuf.ops.attend import attend

SM_COUNT = 132  # blocks: any number is right


def make(*, h: int, d: int, rope: int, chip: str) -> Kernel:
    """h heads up to 64; d 64 or a multiple of 128 up to 512; the rotated tail of d within its last 64 columns."""
    SHARES = 1 if d < 128 else 2  # warpgroups that hold the sums
    ROOM, THREADS, WARPS = Room.of(d, rope), 128 * (2 + SHARES), chip in BLACKWELL
    SCALE = LOG2_E * d**-0.5 * SHRINK
    # a thread's sums: PARTS register tiles of PART columns, a tile beside the other (wgmma) or below it (mma.sync).
    # PART is what ptxas takes of a product under the registers that 512 threads leave.
    N = d // SHARES
    PART = max(32, d // (4 * SHARES)) if WARPS else min(N, 128)
    ABREAST = d // PART if WARPS else SHARES  # readers that share a row's columns; the others have other heads
    READERS = 4 * SHARES if WARPS else SHARES
    PARTS = HEADS // 16 * ABREAST // READERS if WARPS else N // PART
    BELOW, BESIDE, FIRST = (16, 0, d - PART) if WARPS else (0, PART, d - N)
    multiply, values = wgmma(64, "bf16"), wgmma_transposed(PART)
    wait_scores, wait_out = wgmma_wait(32), wgmma_wait(PART // 2)
    no_scores, no_out, rescale = zeros(32), zeros(PART // 2), scale_rows(PART // 2)
    TRANSPOSED = transposed_tile(PANEL)

    @kernel(threads=THREADS, grid=(SM_COUNT,), shared=ROOM.size, name=f"chunk_attend_{h}x{d}")
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
                mbarrier_init(uint32(sm + ROOM.full + 8 * s), uint32(4))
                mbarrier_init(uint32(sm + ROOM.free + 8 * s), uint32(READERS))
                mbarrier_init(uint32(sm + ROOM.given + 8 * s), uint32(4))
                mbarrier_init(uint32(sm + ROOM.taken + 8 * s), uint32(READERS))
            fence_mbarrier_init()
        sync_threads()
        wait_for_previous_kernel()
        let_next_kernel_start()
        turn = int32(0)  # tiles so far: what stage and phase of its barriers a tile has
        if group == 0:
            if SHARES == 2:
                give_four_registers()
            for row in range(opaque(row0), rows, every):
                owner, start, window_keys, entries, window_tiles, tiles = row_of(
                    row, sequence, first, last, chosen, topk
                )
                sync_named(uint32(1), uint32(128))  # all have read the addresses of the row before
                list_keys(
                    ROOM, sm, tid, tiles, window_tiles, windows + owner * pitch, start, window_keys, ring,
                    selected + int64(row) * topk * 4, entries, pages + owner * most_pages * 4, page_codes, page_scales,
                    page_bytes, ratio,
                )  # fmt: skip
                sync_named(uint32(1), uint32(128))
                for tile in range(tiles):
                    expand_tile(ROOM, sm, lane, warp, tile, window_tiles, turn)
                    fence_async()
                    sync_warp()
                    if lane == 0:
                        mbarrier_arrive(uint32(sm + ROOM.full + 8 * (turn % STAGES)))
                    turn = int32(turn + 1)
        else:
            if group == 1:
                if SHARES == 2 and WARPS:
                    give_more_registers()
                if SHARES == 2 and not WARPS:
                    give_score_registers()
                head = int32(16 * warp + (lane >> 2))
                for row in range(opaque(row0), rows, every):
                    owner, start, window_keys, entries, window_tiles, tiles = row_of(
                        row, sequence, first, last, chosen, topk
                    )
                    if tiles > 0:
                        sync_named(uint32(2), uint32(128))  # nobody multiplies with the Q of the row before
                        fetch_queries(ROOM, h, sm, lane, warp, q, row, position, table)
                        fence_async()
                        sync_named(uint32(2), uint32(128))
                    top = regs(2, LEAST)
                    total = regs(2, 0.0)
                    for tile in range(tiles):
                        stage = uint32(sm + ROOM.keys + (turn % STAGES) * ROOM.stage)
                        mbarrier_wait(uint32(sm + ROOM.full + 8 * (turn % STAGES)), uint32(turn // STAGES & 1))
                        v = regs(32)
                        if WARPS:
                            scores_of_warp(v, no_scores, uint32(sm + 16 * 128 * warp), stage, lane, PANEL, d // 64)
                        else:
                            at_q = int64(SWIZZLED_TILE) + (int64(sm) >> 4)
                            at_k = int64(SWIZZLED_TILE) + (int64(stage) >> 4)
                            scores = no_scores()
                            wgmma_fence()
                            for k in unroll(d // 16):
                                step = k // 4 * (PANEL // 16) + k % 4 * 2
                                scores = multiply(at_q + step, at_k + step, int32(1 if k > 0 else 0), scores)
                            wgmma_commit()
                            v = wait_scores(scores)
                        keys = int32(window_keys - tile * TILE)
                        if tile >= window_tiles:
                            keys = int32(entries - (tile - window_tiles) * TILE)
                        finish = int32(1 if tile == tiles - 1 else 0)
                        probabilities(ROOM, h, sm, v, SCALE, keys, finish, top, total, head, t, sink, turn)
                        fence_async()
                        sync_warp()
                        if lane == 0:
                            mbarrier_arrive(uint32(sm + ROOM.given + 8 * (turn % STAGES)))
                        turn = int32(turn + 1)
            else:
                if SHARES == 2 and WARPS:
                    take_more_registers()
                if SHARES == 2 and not WARPS:
                    take_four_registers()
                share = int32(group - 2)
                if WARPS:
                    reader = int32(4 * share + warp)
                    column = int32(reader // (READERS // ABREAST) * PART)  # the first of this thread's sums
                    head = int32(reader % (READERS // ABREAST) * (16 * PARTS) + (lane >> 2))
                else:
                    column = int32(share * N)
                    head = int32(16 * warp + (lane >> 2))
                odd = int32(0)  # rows with keys so far, modulo 2: each has passed the barrier below
                for row in range(opaque(row0), rows, every):
                    owner, start, window_keys, entries, window_tiles, tiles = row_of(
                        row, sequence, first, last, chosen, topk
                    )
                    if share == SHARES - 1 and tiles > 0:
                        phases = uint32(sm + ROOM.phase + odd * (8 * ROOM.half))
                        keep_phases(ROOM, phases, int32(opaque(tid) & 127), position, row, table)
                        sync_named(uint32(3), uint32(128))
                    odd = int32(odd ^ (1 if tiles > 0 else 0))
                    o = regs(PARTS)
                    for part in unroll(PARTS):
                        o[part] = no_out()
                    inverse0 = 0.0
                    inverse1 = 0.0
                    for tile in range(tiles):
                        mbarrier_wait(uint32(sm + ROOM.full + 8 * (turn % STAGES)), uint32(turn // STAGES & 1))
                        mbarrier_wait(uint32(sm + ROOM.given + 8 * (turn % STAGES)), uint32(turn // STAGES & 1))
                        at_factor = uint32(sm + ROOM.factors + (turn % STAGES) * (8 * HEADS) + head * 4)
                        at_p = uint32(sm + ROOM.p + (turn % STAGES) * PANEL)
                        at_v = uint32(sm + ROOM.keys + (turn % STAGES) * ROOM.stage + (column >> 6) * PANEL)
                        if WARPS:
                            for part in unroll(PARTS):
                                of = uint32(at_factor + 64 * part)
                                o[part] = rescale(lds_f32(of), lds_f32(uint32(of + 32)), o[part])
                            at_heads = uint32(at_p + (head - (lane >> 2)) * 128)
                            add_values(o, PARTS, PART, at_heads, at_v, int32(column >> 3 & 7), lane)
                            sync_warp()
                            if lane == 0 and tile < tiles - 1:
                                mbarrier_arrive(uint32(sm + ROOM.taken + 8 * (turn % STAGES)))
                                mbarrier_arrive(uint32(sm + ROOM.free + 8 * (turn % STAGES)))
                        else:
                            down0 = lds_f32(at_factor)
                            down1 = lds_f32(uint32(at_factor + 32))
                            if tile == tiles - 1:
                                inverse0 = lds_f32(uint32(at_factor + 4 * HEADS))
                                inverse1 = lds_f32(uint32(at_factor + 4 * HEADS + 32))
                            for part in unroll(PARTS):
                                o[part] = rescale(down0, down1, o[part])
                            from_v = int64(TRANSPOSED) + (int64(at_v) >> 4)
                            from_p = int64(SWIZZLED_TILE) + (int64(at_p) >> 4)
                            wgmma_fence()
                            for k in unroll(4):
                                for part in unroll(PARTS):
                                    at_part = from_v + (part * (PART // 64) * (PANEL // 16) + k * 128)
                                    o[part] = values(from_p + 2 * k, at_part, int32(1), o[part])
                            wgmma_commit()
                            for part in unroll(PARTS):
                                o[part] = wait_out(o[part])
                            if tid & 127 == 0:
                                mbarrier_arrive(uint32(sm + ROOM.taken + 8 * (turn % STAGES)))
                                mbarrier_arrive(uint32(sm + ROOM.free + 8 * (turn % STAGES)))
                        turn = int32(turn + 1)
                    if tiles > 0:
                        if WARPS:
                            ended = int32((turn - 1) % STAGES)
                            for part in unroll(PARTS):
                                of = uint32(sm + ROOM.factors + ended * (8 * HEADS) + (head + HEADS + 16 * part) * 4)
                                o[part] = rescale(lds_f32(of), lds_f32(uint32(of + 32)), o[part])
                            sync_warp()
                            if lane == 0:
                                mbarrier_arrive(uint32(sm + ROOM.taken + 8 * ended))
                                mbarrier_arrive(uint32(sm + ROOM.free + 8 * ended))
                        else:
                            for part in unroll(PARTS):
                                o[part] = rescale(inverse0, inverse1, o[part])
                        # hidden from the compiler, which would keep every address from row to row
                        t_here = int32(opaque(t))
                        head_here = int32(opaque(head))
                        column_here = int32(opaque(column))
                        phases_here = uint32(sm + ROOM.phase + (odd ^ 1) * (8 * ROOM.half))
                        to = out + ((int64(row) * h + head_here) * d + column_here + 8 * t_here) * 2
                        for part in unroll(PARTS):
                            put_sums(
                                ROOM, h, o[part], PART, int32(column_here + part * BESIDE), FIRST + part * BESIDE,
                                int32(head_here + part * BELOW), t_here, phases_here,
                                to + part * (2 * BESIDE + 2 * d * BELOW),
                            )  # fmt: skip

    return attention


def entries(width: Width) -> list[Entry]:
    """One kernel for every layer of the backbone, in either prefill mode, and one for the heads of a rank."""
    spec, found = width.spec, []
    d, window, topk = spec.head_dim, spec.sliding_window, spec.index_topk
    for ending, h in width.heads.items():
        shape = {"h": h, "d": d, "rope": spec.qk_rope_head_dim}
        nbytes = 1024 * (window * (d + d // 32) + topk * (d // 2 + d // 16) + 4 * h * d)
        operations = 4 * 1024 * h * d * (window + topk)
        name = f"chunk.attend/{width.label}{ending}"
        found.append(Entry(name, make, shape, width.chips, attend, nbytes, operations))
    return found
