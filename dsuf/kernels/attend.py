"""Attention of decode rows over window ring and selected entries; keys are values, one set for all heads.

    s_t = rope(q) . k_t / sqrt(d);  o = sum_t e^(s_t - M) k_t / (sum_t e^(s_t - M) + e^(sink - M)), inverse rope, bf16

q bf16 [rows, H, d] before rope; o f16 [rows, H, d] of the bf16 values, what wo_a multiplies (exact from 2^-14 on, a
mean of keys stays far below 65,504). The keys of a row are positions first .. last of its window ring
(rows of latents.window_row_bytes: e4m3, ue8m0 per 32), then `chosen` of selected int32 [rows, topk]: e2m1 with one
e4m3 scale per 16 in pages (layout.py), an entry's page is entry >> (7 - shift) with shift 1 for ratio 2. chosen 0 (the
address): window only. The drafter's block sees its own five latents: they stand in the ring at the block's positions,
with first and last the same for its five rows. Reference: dsuf.ops.attend.attend. Bytes: 528 a window key, 288 a
selected one, a row; latency decides.

A cluster of 8 blocks shares a row and up to 32 heads: block r gets sixteen of every 128 keys of the window, and of the
entries, so that a place of a list can be read before its length is known. It expands them (attend_keys.py), makes
scores, probabilities relative to its own largest score (rounded to bf16 as the official kernel rounds them), and the
mean of its keys. That goes as f16 to the block that adds up the head, in one copy a block (its own part it stores there
at once); largest score and sum of weights went before. (A release at cluster scope waits for all of a thread's stores,
MEMBAR.GPU; copies that count at an mbarrier do not.) Parts are added in the order of ranks; if one block has all keys,
its part is the result. In both products a warp owns d / 8 columns.

Two blocks fit on an SM. Up to 8 rows leave SMs idle, but blocks would begin in pairs on the first that are free: then
more shared memory is asked for (`shared_of`). `fresh` 0 says that neither the list of entries nor what their pages hold
comes from the kernel before: entries are fetched and expanded before its end. The row table is always older than that.

    hand-off                     who writes     who waits              reused
    addresses of keys            each warp      that warp              by scores of a warp's columns
    keys                         the block      the block              by parts, when no block of the cluster needs keys
    turned tails of q            the block      the block              by sums of scores
    scores of a warp's columns   each warp      the block              after a barrier, by the next sixteen keys
    sums, then probabilities     the block      the block              a head's by its own sixteen lanes
    parts, largest, sums         the block      the cluster (mbarrier) never; blocks leave when all have been served
"""

from __future__ import annotations

from dsuf.kernels.attend_heads import (
    LEAST,
    add_parts,
    part_address,
    probabilities,
    scale_part,
    store_part,
    store_scores,
    sum_scores,
    weight_of_part,
)
from dsuf.kernels.attend_keys import (  # fmt: skip
    CLUSTER,
    UNIT,
    Room,
    alone,
    ask_entry,
    ask_place,
    chunk_address,
    dealt,
    expand_entry,
    expand_place,
    find_entry,
    find_place,
    heads_of_block,
    most_dealt,
    most_keys,
    turn,
)
from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.latents import MOST_ROWS, window_row_bytes
from dsuf.kernels.ptx.convert import (
    as_bits,
    bf16_high,
    bf16_low,
    bf16x2,
    exp2_approx,
    f16x2,
    fmax,
    rcp_approx,
)
from dsuf.kernels.ptx.copy import (
    bulk_push,
    fence_async,
    fence_mbarrier_init,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    push_u32x2,
)
from dsuf.kernels.ptx.memory import (
    ldg_u32,
    ldg_u32x4,
    lds_f32,
    lds_u32x2,
    lds_u32x4,
    ldw_f32,
    shared_base,
    stg_u32x4,
    sts_f32,
    sts_u32x4,
)
from dsuf.kernels.ptx.mma import ldmatrix_x4, ldmatrix_x4_trans, mma_bf16
from dsuf.kernels.ptx.sync import (
    block_index,
    cluster_address,
    cluster_arrive_relaxed,
    cluster_rank,
    cluster_wait,
    let_next_kernel_start,
    sync_threads,
    sync_warp,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.rope import phase
from dsuf.ops.attend import attend

FEW = 8  # rows whose clusters all run at once with one block an SM, of 64 heads
LOG2_E = 1.4426950408889634
SMALLEST = 1.0e-30


def blocks(h: int) -> int:
    """Blocks of a row; the grid is that times the rows."""
    return CLUSTER * -(-h // heads_of_block(h))


def shared_of(width: Width, h: int, rows: int) -> int:
    """Dynamic shared memory of a block in a launch of so many rows, of h heads."""
    room = Room.of(h, width.spec.head_dim, most_of(width) // CLUSTER).size
    return alone(room) if rows <= FEW else room


def most_of(width: Width) -> int:
    """Keys of a row that the kernels of a width are made for."""
    return most_keys(width.spec.sliding_window, width.spec.dspark_block_size, width.spec.index_topk)


def make(*, h: int, d: int, rope: int, most: int, window: int, topk: int) -> Kernel:
    """h heads of d = 64, 128, 256 or 512 columns, rope the turned tail; most: keys of a row, a multiple of 128.

    window: places of a row's window at most, the drafted block included; topk: entries of a row at most. Of a row with
    both a block gets no more than most / 8.
    """
    HEADS, SHARE, ROW = heads_of_block(h), most // CLUSTER, window_row_bytes(d)
    SETS, M_TILES, ROOM = -(-h // HEADS), HEADS // 16, Room.of(h, d, SHARE)
    PARTS = min(8, d // 32)  # of the columns in the products with q
    WARPS, PITCH = PARTS, d * 2
    THREADS, COLUMNS = WARPS * 32, d // WARPS  # columns of a warp in the products with the values
    TILES = COLUMNS // 8
    GROUPS, PIECES = d // PARTS // 32, d // 16
    AT_ONCE = THREADS // PIECES  # keys that the block dequantises at once
    PER_WARP = 32 // PIECES  # of them a warp
    PASSES = -(-SHARE // AT_ONCE)
    LINE = ROOM.line // 4  # words of a line of scores, later of probabilities
    QUADS = -(-SHARE // 64)  # quads of neighbouring keys of a lane when probabilities are made
    OWN = HEADS // CLUSTER  # heads whose parts a block adds up
    OUT_LINE, OWN_BYTES = 2 * d, OWN * 2 * d  # bytes of a head's part; of those of a block's heads
    RING_PASSES = min(PASSES, -(-most_dealt(window) // AT_ONCE))  # the first ones; entries stand at the end
    PAGE_PASS = (SHARE - most_dealt(topk)) // AT_ONCE  # the first that may have an entry
    TURNED, TURNED_LINE = HEADS * rope // 8, 2 * rope + 16  # eight columns each of q's tails; bytes of a tail
    AT_PARTS, AT_STATS, AT_ALL_STATS, AT_BAR = ROOM.parts, ROOM.stats, ROOM.stats + 8 * HEADS, ROOM.barrier
    AT_PARTIAL, AT_ADDRESS, AT_SCORE, AT_TAIL = ROOM.partial, ROOM.partial, ROOM.scores, ROOM.scores
    HALF, TAIL, SCALE = rope // 2, d - rope, LOG2_E * UNIT * d**-0.5
    ITEMS = OWN * d // 8  # of eight columns of a head, no more than threads

    @kernel(
        threads=THREADS, grid=(CLUSTER * SETS * MOST_ROWS,), shared=alone(ROOM.size), cluster=CLUSTER, min_blocks=2,
        name=f"attend_{h}x{d}_{most}",
    )  # fmt: skip
    def attention(
        q: s64, windows: s64, pitch: s64, ring: s32, sequence: s64, position: s64, first: s64, last: s64, selected: s64,
        kept: s32, chosen: s64, pages: s64, most_pages: s32, page_codes: s64, page_scales: s64, page_bytes: s64,
        shift: s32, fresh: s32, table: s64, sink: s64, out: s64,
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
        bar = uint32(sm + AT_BAR)
        if tid == 0:
            mbarrier_init(bar, uint32(1))
            fence_mbarrier_init()
            mbarrier_expect(bar, uint32((HEADS - OWN) * OUT_LINE + HEADS * 8))
        sync_warp()  # barriers of the cluster want whole warps
        cluster_arrive_relaxed()
        # block r has sixteen of every 128 places of the window, then of the entries: known before the row's lengths are
        split = int32(SHARE - dealt(kept if chosen != 0 else 0, 0))
        key = int32(lane // PER_WARP * AT_ONCE + warp * PER_WARP + lane % PER_WARP)  # whose address a lane finds
        nth = int32(key if key < split else key - split)  # of this block's
        nth = int32((nth >> 4 << 7) + (rank << 4) + (nth & 15))
        of_q = q + ((row * h + heads + g) * d + warp * COLUMNS + 8 * t) * 2
        if fresh != 0:
            wait_for_previous_kernel()
        owner = int64(int32(ldg_u32(sequence + row * 4)))
        place = int32(ldg_u32(position + row * 4))
        start = int32(ldg_u32(first + row * 4))
        end = int32(ldg_u32(last + row * 4))
        count = uint32(0)
        entry = uint32(0)
        if chosen != 0:
            count = ldg_u32(chosen + row * 4)
            entry = ldg_u32(selected + (row * kept + min(nth, kept - 1)) * 4)
        from_ring = int32(dealt(int32(end + 1 - start if owner >= 0 else 0), rank))
        mine = int32(from_ring + dealt(int32(int32(count) if owner >= 0 else 0), rank))
        alone = owner >= 0 and mine == int32(end + 1 - start) + int32(count)  # no other block has keys of this row
        padded = int32((mine + 15) & -16)
        if lane < PER_WARP * PASSES:
            words = regs(4, uint32(0))
            if key < split:
                find_place(words, key < from_ring, windows + owner * pitch, uint32(start + nth) % uint32(ring), ROW, d)
            else:
                find_entry(words, key - split < mine - from_ring, entry, shift, pages + owner * most_pages * 4,
                           page_codes, page_scales, page_bytes, d)  # fmt: skip
            sts_u32x4(uint32(sm + AT_ADDRESS + 16 * key), words)
        sync_warp()
        # all loads are asked for, then dequantised: a thread has 16 columns of every AT_ONCE-th key
        piece = int32(tid % PIECES)
        first_key = int32(tid // PIECES)
        factor = regs(PASSES, uint32(0))
        alive = regs(PASSES)
        code2 = regs(2 * PASSES, uint32(0))
        for i in unroll(PAGE_PASS, PASSES):
            at = int32(first_key + i * AT_ONCE)
            ask_entry(code2, factor, alive, i, uint32(sm + AT_ADDRESS + 16 * at), at >= split, piece)
        # where keys stand, less i * AT_ONCE, a multiple of eight: the order of chunks is the same
        entry0 = chunk_address(sm, int32(first_key - split + from_ring), int32(2 * piece), PITCH)
        entry1 = chunk_address(sm, int32(first_key - split + from_ring), int32(2 * piece + 1), PITCH)
        for i in unroll(PAGE_PASS, PASSES):
            if alive[i] != 0:
                v = regs(8, uint32(0))
                expand_entry(v, code2[2 * i], code2[2 * i + 1], factor[i])
                sts_u32x4(uint32(entry0 + i * AT_ONCE * PITCH), v[0:4])
                sts_u32x4(uint32(entry1 + i * AT_ONCE * PITCH), v[4:8])
        sync_warp()
        wait_for_previous_kernel()
        let_next_kernel_start()
        code4 = regs(4 * RING_PASSES, uint32(0))
        for i in unroll(RING_PASSES):
            at = int32(first_key + i * AT_ONCE)
            ask_place(code4, factor, alive, i, uint32(sm + AT_ADDRESS + 16 * at), at < split, piece)
        # eight columns of a head's tail a thread, turned for whichever warps multiply them
        tail = regs(4, uint32(0))
        of_tail = int32(min(tid, TURNED - 1))
        tail_head = int32(of_tail // (rope // 8))
        tail_at = int32(of_tail % (rope // 8) * 8)
        tail[0:4] = ldg_u32x4(q + ((row * h + min(heads + tail_head, h - 1)) * d + TAIL + tail_at) * 2)
        # q of this warp's columns: (group, rows g and g + 8 of a product tile) -> four words
        a = regs(8 * GROUPS * M_TILES)
        for k in unroll(GROUPS):
            for m in unroll(2 * M_TILES):
                skipped = 0 if h % HEADS == 0 else max(heads + 8 * m + g - (h - 1), 0)  # no row beyond the last head
                word = ldg_u32x4(of_q + (8 * m * d + 32 * k) * 2 - int64(skipped) * (2 * d))
                a[8 * M_TILES * k + 4 * m : 8 * M_TILES * k + 4 * m + 4] = word
        sync_warp()
        cluster_wait()  # all blocks run, since long
        place0 = chunk_address(sm, first_key, int32(2 * piece), PITCH)
        place1 = chunk_address(sm, first_key, int32(2 * piece + 1), PITCH)
        for i in unroll(RING_PASSES):
            if alive[i] != 0:
                v = regs(8, uint32(0))
                expand_place(v, code4[4 * i : 4 * i + 4], factor[i])
                sts_u32x4(uint32(place0 + i * AT_ONCE * PITCH), v[0:4])
                sts_u32x4(uint32(place1 + i * AT_ONCE * PITCH), v[4:8])
        if owner >= 0 and tid < TURNED:
            for j in unroll(4):
                c, s = phase(table, place, int32(tail_at // 2 + j), HALF)
                tail[j] = turn(tail[j], c, s)
        if tid < TURNED:
            sts_u32x4(uint32(sm + AT_TAIL + tail_head * TURNED_LINE + tail_at * 2), tail[0:4])
        for i in unroll(-(-15 // AT_ONCE)):
            at = int32(mine + first_key + i * AT_ONCE)
            if at < padded:  # at most fifteen
                for j in unroll(2):
                    to = chunk_address(sm, at, int32(2 * piece + j), PITCH)
                    sts_u32x4(to, (uint32(0), uint32(0), uint32(0), uint32(0)))
        sync_threads()
        for k in unroll(GROUPS):
            column = int32((warp * GROUPS + k) * 32 + 8 * t)
            if column >= TAIL:
                for m in unroll(2 * M_TILES):
                    word = lds_u32x4(uint32(sm + AT_TAIL + (8 * m + g) * TURNED_LINE + (column - TAIL) * 2))
                    a[8 * M_TILES * k + 4 * m : 8 * M_TILES * k + 4 * m + 4] = word
        # scores of sixteen keys at a time: this warp's columns of all heads, then the sums of all warps
        for key0 in range(0, padded, 16):
            acc = regs(2 * M_TILES, (0.0, 0.0, 0.0, 0.0))
            for k in unroll(GROUPS):
                for half in unroll(2):
                    chunk = int32((warp * GROUPS + k) * 4 + t)
                    b = lds_u32x4(chunk_address(sm, int32(key0 + 8 * half + g), chunk, PITCH))
                    for m in unroll(M_TILES):
                        x = regs(8)
                        x = a[8 * (M_TILES * k + m) : 8 * (M_TILES * k + m) + 8]
                        low = mma_bf16((x[0], x[4], x[1], x[5]), (b[0], b[1]), acc[2 * m + half])
                        acc[2 * m + half] = mma_bf16((x[2], x[6], x[3], x[7]), (b[2], b[3]), low)
            store_scores(acc, M_TILES, sm + AT_PARTIAL + warp * (64 * HEADS), g, t)
            sync_threads()
            sum_scores(sm + AT_PARTIAL, PARTS, HEADS, uint32(sm + AT_SCORE + key0 * 4), 4 * LINE, tid, THREADS)
            sync_threads()
        # probabilities: sixteen lanes a head, quads of keys
        for one in range(warp * 2 + (lane >> 4), HEADS, 2 * WARPS):
            top, weight = probabilities(uint32(sm + AT_SCORE + one * (4 * LINE)), QUADS, SCALE, padded, mine, lane)
            if lane & 15 == 0:
                owner_rank = uint32(one // OWN)
                if alone:  # the part is the result: it weighs all
                    weight = weight + exp2_approx(ldw_f32(sink + int64(min(heads + one, h - 1)) * 4) * LOG2_E - top)
                sts_f32(uint32(sm + AT_STATS + 8 * one), weight)
                if alone:
                    top = -LEAST
                    weight = 1.0
                to = uint32(sm + AT_ALL_STATS + 8 * (rank * OWN + one % OWN))
                both_bits = (as_bits(top), as_bits(weight))
                push_u32x2(cluster_address(to, owner_rank), both_bits, cluster_address(bar, owner_rank))
        sync_threads()
        # this warp's columns of the sum
        o = regs(TILES * M_TILES, (0.0, 0.0, 0.0, 0.0))
        for key0 in range(0, padded, 16):
            p = regs(4 * M_TILES)
            for m in unroll(M_TILES):
                line = (16 * m + (lane & 15)) * (2 * LINE) + key0 + (lane >> 4) * 8
                p[4 * m : 4 * m + 4] = ldmatrix_x4(uint32(sm + AT_SCORE + line * 2))
            for c in unroll(COLUMNS // 16):
                chunk = int32(warp * (TILES) + 2 * c + (lane >> 4))
                b = ldmatrix_x4_trans(chunk_address(sm, int32(key0 + (lane & 15)), chunk, PITCH))
                for m in unroll(M_TILES):
                    o[TILES * m + 2 * c] = mma_bf16(p[4 * m : 4 * m + 4], (b[0], b[1]), o[TILES * m + 2 * c])
                    o[TILES * m + 2 * c + 1] = mma_bf16(p[4 * m : 4 * m + 4], (b[2], b[3]), o[TILES * m + 2 * c + 1])
        sync_threads()
        cluster_arrive_relaxed()  # this block needs its keys no more
        # a part is a mean of this block's keys, f16: eleven bits of each, where the result keeps eight
        for m in unroll(M_TILES):
            sums = uint32(sm + AT_STATS + 8 * (16 * m + g))
            f0 = UNIT * rcp_approx(fmax(lds_f32(sums), SMALLEST))
            f1 = UNIT * rcp_approx(fmax(lds_f32(uint32(sums + 64)), SMALLEST))
            scale_part(o, TILES * m, TILES, f0, f1, alone)
            at_g = sm + (AT_PARTS if (16 * m + g) // OWN == rank else 0)
            at_g8 = sm + (AT_PARTS if (16 * m + g + 8) // OWN == rank else 0)
            line = int32((16 * m + g) * OUT_LINE + 4 * t)
            store_part(o, TILES * m, TILES, at_g, at_g8, line, int32(warp * TILES), g, OUT_LINE)
        fence_async()
        sync_threads()
        cluster_wait()  # nor does any other
        for i in unroll(-(-CLUSTER // WARPS)):
            to_rank = int32(warp + i * WARPS)
            if lane == 0 and to_rank < CLUSTER and to_rank != rank:
                to = cluster_address(uint32(sm + AT_PARTS + rank * OWN_BYTES), uint32(to_rank))
                source = uint32(sm + to_rank * OWN_BYTES)
                bulk_push(to, source, uint32(OWN_BYTES), cluster_address(bar, uint32(to_rank)))
        sync_warp()
        # eight columns of a head a thread: their phases are on their way while parts are
        one = int32(min(tid, ITEMS - 1) // (d // 8))
        column = int32(min(tid, ITEMS - 1) % (d // 8) * 8)
        head = int32(heads + rank * OWN + one)
        logit = ldw_f32(sink + int64(min(head, h - 1)) * 4) * LOG2_E
        cos = regs(4, 1.0)
        sin = regs(4, 0.0)
        if owner >= 0 and column >= TAIL:
            for j in unroll(4):
                cos[j], sin[j] = phase(table, place, int32((column - TAIL) // 2 + j), HALF)
        mbarrier_wait(bar, uint32(0))
        sync_warp()
        cluster_arrive_relaxed()  # what this block was sent has arrived
        # lane r of eight: what a part of block r weighs in the sum of this head
        stats = lds_u32x2(uint32(sm + AT_ALL_STATS + 8 * ((lane & 7) * OWN + one)))
        amount = weight_of_part(stats, logit)
        v = regs(8, 0.0)
        landed = part_address(sm + AT_PARTS - rank * OWN_BYTES, int32(rank * OWN + one), column, OUT_LINE)
        add_parts(v, landed, OWN_BYTES, CLUSTER, amount, lane)
        if owner >= 0 and tid < ITEMS and head < h:
            word = regs(4)
            for j in unroll(4):
                word[j] = bf16x2(v[2 * j + 1], v[2 * j])
                if column >= TAIL:
                    word[j] = turn(word[j], cos[j], -sin[j])
                word[j] = f16x2(bf16_high(word[j]), bf16_low(word[j]))
            stg_u32x4(out + ((row * h + head) * d + column) * 2, word)
        sync_warp()
        cluster_wait()  # what it sent has been read

    return attention


def entries(width: Width) -> list[Entry]:
    """One kernel for every layer and the drafter, and one for the heads of a rank."""
    spec, found = width.spec, []
    d, window, topk = spec.head_dim, spec.sliding_window, spec.index_topk
    sizes = {"most": most_of(width), "window": window + spec.dspark_block_size, "topk": topk}
    for ending, h in width.heads.items():
        shape = {"h": h, "d": d, "rope": spec.qk_rope_head_dim, **sizes}
        nbytes = MOST_ROWS * (window * (d + d // 32) + topk * (d // 2 + d // 16) + 4 * h * d)
        work = nbytes, 4 * MOST_ROWS * h * d * (window + topk)
        found.append(Entry(f"attend/{width.label}{ending}", make, shape, width.chips, attend, *work))
    return found
