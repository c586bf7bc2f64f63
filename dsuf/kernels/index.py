"""Indexer of a decode step: quantised queries, and scores of all visible entries with the best of blocks and runs.

    query   qI = q4p(rope(y)), y bf16 [rows, heads, di] from the indexer's wq_b       -> bf16 values, exact
    scores  score_j = sum_h relu(qI_h . K_j) w_h,  w = y_w (di heads)^-1/2            -> float32 [rows, capacity]

Entries j < (position + 1) >> shift of the row's sequence; keys are e2m1 with ue8m0 per 32 in pages (layout.py).
candidates int32 [rows, kept] (ascending blocks of 1 << block_shift entries; address 0: all entries): only theirs, of
kept_of blocks a row, in their order. best float32 [rows, capacity >> block_shift] and best32 float32 [rows, capacity /
32] are the largest of each block and of each run of 32 scores, for the selection (select.py). Whatever of a run is not
visible gets -3e38. capacity is a multiple of 32.

Reference: dsuf.ops.index.index_scores, ops.qdq.q4p. Bytes: 68 an entry and sequence; operations 2 heads di an entry and
row.

Rows of one sequence that stand together share its keys: groups of at most 6 (3 where the caches are short, so that two
groups make twice the work for the machine's many warps). A block has the queries of a group in shared memory, as the
products want them, and a warp 32 keys in registers, dequantised once for the group (times 2^-64, so that every factor
is a bf16 number). Runs of 384 keys of all groups are dealt out evenly, in order. Lane t of a quad holds columns
di / 4 t .. of its keys and heads, so one load brings a lane's codes of a key under one scale; step s of the product
takes columns 4s .. 4s + 3 of every lane.

    hand-off               who writes   who waits    reused
    groups of rows         the block    the block    never
    queries and weights    the block    the block    by the next group, after a barrier
"""

from __future__ import annotations

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.latents import MOST_ROWS
from dsuf.kernels.ptx.convert import (
    as_float,
    bf16_high,
    bf16_low,
    e2m1_code,
    fabs,
    fma,
    fmax,
    fp4x8_bf16,
    fp4x8_bf16_scaled,
    mul_bf16x2,
    round_bf16,
)
from dsuf.kernels.ptx.copy import async_commit, async_load16, async_wait
from dsuf.kernels.ptx.memory import (
    ldg_f32,
    ldg_u8,
    ldg_u32,
    ldg_u32x2,
    ldg_u32x4,
    lds_u32,
    lds_u32x2,
    lds_u32x4,
    shared_base,
    stg_f32,
    stg_u32x2,
    sts_f32,
    sts_u32,
)
from dsuf.kernels.ptx.mma import mma_bf16
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    let_next_kernel_start,
    shuffle_xor_f32,
    sync_threads,
    sync_warp,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.quantise import inverse_scale, max_over, q4p_exponent, sum_over
from dsuf.kernels.rope import phase, rotated
from dsuf.layout import PAGE_TOKENS
from dsuf.ops.index import index_scores
from dsuf.ops.qdq import q4p

RUN = 32  # keys of a warp, entries under one value of best32
BLOCK, TOP = 8, 3.0e38
LOWEST, NOWHERE = -3.0e38, 0x7FFFFFFF
QUERY_WARPS, WARPS = 8, 12  # 12: as many as have registers for what they hold
THREADS = 32 * WARPS
QUAD, GROUP_LANES = (1, 2), (1, 2, 4)
MOST_GROUP, LONG = 6, 32768  # rows that share keys; entries from which on they all do
PAGE_SHIFT = PAGE_TOKENS.bit_length() - 1
KEY_BIAS = 62  # keys stand in registers times 2^-64: 62 = 126 - 64


def make_query(*, heads: int, di: int, rope: int) -> Kernel:
    """A warp (or its first di / 4 lanes) a head: four neighbouring columns a lane."""
    HALF, TAIL, SETS = rope // 2, di - rope, -(-heads // QUERY_WARPS)

    @kernel(threads=QUERY_WARPS * 32, grid=(MOST_ROWS * SETS,), name=f"index_query_{heads}x{di}")
    def query(y: s64, sequence: s64, position: s64, table: s64, out: s64) -> None:
        lane = int32(thread_index() & 31)
        row = int64(block_index() // SETS)
        head = int32(block_index() % SETS * QUERY_WARPS + (thread_index() >> 5))
        wait_for_previous_kernel()
        let_next_kernel_start()
        at = ((row * heads + head) * di + 4 * lane) * 2
        inside = head < heads and 4 * lane < di and int32(ldg_u32(sequence + row * 4)) >= 0
        v = regs(4, 0.0)
        if inside:
            word = ldg_u32x2(y + at)
            for i in unroll(2):
                v[2 * i] = bf16_low(word[i])
                v[2 * i + 1] = bf16_high(word[i])
            if 4 * lane >= TAIL:
                place = int32(ldg_u32(position + row * 4))
                for i in unroll(2):
                    c, s = phase(table, place, int32(2 * lane - TAIL // 2 + i), HALF)
                    a, b = rotated(v[2 * i], v[2 * i + 1], c, s)
                    v[2 * i] = round_bf16(a)
                    v[2 * i + 1] = round_bf16(b)
        amax = max_over(fmax(fmax(fabs(v[0]), fabs(v[1])), fmax(fabs(v[2]), fabs(v[3]))), GROUP_LANES)
        e = q4p_exponent(amax)
        f = inverse_scale(e)
        codes = uint32(e2m1_code(v[0] * f) | e2m1_code(v[1] * f) << 4)
        codes = uint32(codes | e2m1_code(v[2] * f) << 8 | e2m1_code(v[3] * f) << 12)
        four = fp4x8_bf16(codes)
        both = uint32(e << 7 | e << 23)
        if inside:
            stg_u32x2(out + at, (mul_bf16x2(four[0], both), mul_bf16x2(four[1], both)))

    return query


def make_scores(*, heads: int, di: int) -> Kernel:
    """heads a multiple of 8; di 32 or 128."""
    STEPS, WORDS, TILES = di // 16, di // 32, heads // 8
    SCALE = (di * heads) ** -0.5 * 2.0**64
    Q_ROW = heads * di * 2  # bytes
    AT_WEIGHTS = MOST_GROUP * Q_ROW
    AT_SEQUENCE = AT_WEIGHTS + MOST_GROUP * heads * 4
    AT_SEEN, AT_RUNS, AT_COUNT = (AT_SEQUENCE + i * 4 * MOST_ROWS for i in (1, 2, 3))

    @kernel(
        threads=THREADS, grid=(132,), shared=AT_COUNT + 4 * MOST_ROWS, name=f"index_scores_{heads}x{di}"
    )  # fmt: skip
    def scores(
        q: s64, weights: s64, pages: s64, most_pages: s32, key_codes: s64, key_scales: s64, page_bytes: s64,
        sequence: s64, position: s64, shift: s32, candidates: s64, kept: s32, kept_of: s64, block_shift: s32, out: s64,
        best: s64, best32: s64, capacity: s64, rows: s32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        g = int32(lane >> 2)
        t = int32(lane & 3)
        sm = shared_base()
        wait_for_previous_kernel()
        let_next_kernel_start()
        # groups of rows: the first row of each knows its rows and its runs of 32 keys, others have none
        if tid < rows:
            owner = int32(ldg_u32(sequence + int64(tid) * 4))
            seen = int32((int32(ldg_u32(position + int64(tid) * 4)) + 1) >> shift)
            sts_u32(uint32(sm + AT_SEQUENCE + 4 * tid), uint32(owner))
            sts_u32(uint32(sm + AT_SEEN + 4 * tid), uint32(seen if owner >= 0 else 0))
        sync_threads()
        longest = int32(0)
        for r in range(rows):
            longest = int32(max(longest, int32(lds_u32(uint32(sm + AT_SEEN + 4 * r)))))
        group = int32(MOST_GROUP if longest > LONG else MOST_GROUP // 2)
        group = int32(1 if candidates != 0 else group)
        if tid < rows:
            owner = int32(lds_u32(uint32(sm + AT_SEQUENCE + 4 * tid)))
            most = int32(lds_u32(uint32(sm + AT_SEEN + 4 * tid)))
            before = int32(0)  # rows of this sequence that stand before it
            r = int32(tid - 1)
            while r >= 0:
                same = int32(lds_u32(uint32(sm + AT_SEQUENCE + 4 * r))) == owner
                before = int32(before + 1 if same else before)
                r = int32(r - 1 if same else -1)
            count = int32(1)
            r = int32(tid + 1)
            while r < min(tid + group, rows):
                same = int32(lds_u32(uint32(sm + AT_SEQUENCE + 4 * r))) == owner
                if same:
                    most = int32(max(most, int32(lds_u32(uint32(sm + AT_SEEN + 4 * r)))))
                    count = int32(count + 1)
                r = int32(r + 1 if same else rows)
            if candidates != 0:
                used = int32(0)
                if owner >= 0:
                    used = int32(ldg_u32(kept_of + int64(tid) * 4))
                most = int32(used << block_shift if most > 0 else 0)
            runs = int32((most + RUN - 1) // RUN if owner >= 0 and before % group == 0 else 0)
            sts_u32(uint32(sm + AT_RUNS + 4 * tid), uint32(runs))
            sts_u32(uint32(sm + AT_COUNT + 4 * tid), uint32(count))
        sync_threads()
        pieces = int32(0)  # of WARPS runs
        for r in range(rows):
            pieces = int32(pieces + (int32(lds_u32(uint32(sm + AT_RUNS + 4 * r))) + WARPS - 1) // WARPS)
        blocks = int64(block_count())
        mine = int32(int64(pieces) * block_index() // blocks)
        end = int32(int64(pieces) * (block_index() + 1) // blocks)
        done = int32(0)
        for first in range(rows):
            runs = int32(lds_u32(uint32(sm + AT_RUNS + 4 * first)))
            here = int32((runs + WARPS - 1) // WARPS)
            start = int32(max(mine - done, 0))
            stop = int32(min(end - done, here))
            done = int32(done + here)
            if start < stop:
                count = int32(lds_u32(uint32(sm + AT_COUNT + 4 * first)))
                owner = int64(int32(lds_u32(uint32(sm + AT_SEQUENCE + 4 * first))))
                for i in range(tid, count * (Q_ROW // 16), THREADS):
                    # 16 bytes of a row's head: columns di / 4 t + 8 pair .. of head 8 n + g
                    r = int32(i // (Q_ROW // 16))
                    head = int32(i % (Q_ROW // 16) // (di // 8))
                    piece = int32(i % (di // 8))
                    pair = int32(piece % (STEPS // 2))
                    to = (
                        r * Q_ROW
                        + ((head >> 3) * (STEPS // 2) + pair) * 512
                        + ((head & 7) * 4 + piece // (STEPS // 2)) * 16
                    )
                    async_load16(uint32(sm + to), q + (int64(first) * Q_ROW + int64(i) * 16))
                async_commit()
                for i in range(tid, count * heads, THREADS):
                    weight = ldg_f32(weights + (int64(first) * heads + i) * 4)
                    sts_f32(uint32(sm + AT_WEIGHTS + 4 * i), weight * SCALE)
                seen = int32(0)
                for r in range(first, first + count):
                    seen = int32(max(seen, int32(lds_u32(uint32(sm + AT_SEEN + 4 * r)))))
                used = int32(1)
                if candidates != 0:
                    used = int32(ldg_u32(kept_of + int64(first) * 4))
                for piece in range(start, stop):
                    tile = int32(piece * WARPS + warp)
                    # a lane's codes and scales of keys g + 8 i (invisible ones repeat another), and key 8 t + g's entry
                    number = int32(0)
                    code_at = regs(4)
                    scale_at = regs(4)
                    for i in unroll(4):
                        at = int32(min(tile, runs - 1) * RUN + 8 * i + g)
                        entry = at
                        if candidates != 0:
                            held = int32(at >> block_shift)
                            block = int32(ldg_u32(candidates + (int64(first) * kept + min(held, used - 1)) * 4))
                            inside = int32((block << block_shift) + (at & (int32(1) << block_shift) - 1))
                            entry = int32(inside if held < used else NOWHERE)
                        number = int32(entry if t == i else number)
                        safe = int32(min(entry, seen - 1))  # its page exists
                        page = int32(safe >> (PAGE_SHIFT - shift))
                        slot = int64(safe - (page << (PAGE_SHIFT - shift)))
                        where = int64(ldg_u32(pages + (owner * most_pages + page) * 4)) * page_bytes
                        code_at[i] = where + (slot * (di // 2) + t * (di // 8))
                        scale_at[i] = where + (slot * (di // 32) + t // (128 // di))
                    code = regs(4 * WORDS)
                    exponent = regs(4)
                    for i in unroll(4):
                        exponent[i] = ldg_u8(key_scales + scale_at[i])
                        if WORDS == 4:
                            code[4 * i : 4 * i + 4] = ldg_u32x4(key_codes + code_at[i])
                        else:
                            for j in unroll(WORDS):
                                code[WORDS * i + j] = ldg_u32(key_codes + code_at[i] + 4 * j)
                    if piece == start:
                        async_wait[0]()
                        sync_threads()
                    x = regs(8 * WORDS * 2)  # (key 8 i + g, pairs of its columns)
                    for i in unroll(4):
                        both = uint32(exponent[i] + KEY_BIAS << 7 | exponent[i] + KEY_BIAS << 23)
                        for j in unroll(WORDS):
                            four = fp4x8_bf16_scaled(code[WORDS * i + j], both)
                            x[4 * (WORDS * i + j) : 4 * (WORDS * i + j) + 4] = four
                    for r in range(count):
                        s = regs(4, 0.0)
                        for n in unroll(TILES):
                            low = (0.0, 0.0, 0.0, 0.0)
                            high = (0.0, 0.0, 0.0, 0.0)
                            for pair in unroll(STEPS // 2):
                                b = lds_u32x4(uint32(sm + r * Q_ROW + (n * (STEPS // 2) + pair) * 512 + lane * 16))
                                for half in unroll(2):
                                    b2 = (b[2 * half], b[2 * half + 1])
                                    low = mma_bf16(
                                        (x[4 * pair + 2 * half], x[2 * STEPS + 4 * pair + 2 * half],
                                         x[4 * pair + 2 * half + 1], x[2 * STEPS + 4 * pair + 2 * half + 1]), b2, low,
                                    )  # fmt: skip
                                    high = mma_bf16(
                                        (x[4 * STEPS + 4 * pair + 2 * half], x[6 * STEPS + 4 * pair + 2 * half],
                                         x[4 * STEPS + 4 * pair + 2 * half + 1],
                                         x[6 * STEPS + 4 * pair + 2 * half + 1]), b2, high,
                                    )  # fmt: skip
                            w = lds_u32x2(uint32(sm + AT_WEIGHTS + (r * heads + 8 * n + 2 * t) * 4))
                            for i in unroll(2):
                                s[i] = fma(fmax(low[2 * i], 0.0), as_float(w[0]), s[i])
                                s[i] = fma(fmax(low[2 * i + 1], 0.0), as_float(w[1]), s[i])
                                s[2 + i] = fma(fmax(high[2 * i], 0.0), as_float(w[0]), s[2 + i])
                                s[2 + i] = fma(fmax(high[2 * i + 1], 0.0), as_float(w[1]), s[2 + i])
                        for i in unroll(4):
                            s[i] = sum_over(s[i], QUAD)
                        # lane (g, t) writes key 8 t + g
                        row = int64(first + r)
                        own = int32(lds_u32(uint32(sm + AT_SEEN + 4 * (first + r))))
                        v = s[0] if t == 0 else s[1]
                        v = v if t < 2 else s[2] if t == 2 else s[3]
                        v = v if number < own else LOWEST
                        four_best = max_over(v, (4, 8))
                        eight_best = fmax(four_best, shuffle_xor_f32(four_best, uint32(16)))
                        run_best = max_over(eight_best, QUAD)
                        own_runs = int32(runs if candidates != 0 else (own + RUN - 1) // RUN)
                        if tile < own_runs:
                            stg_f32(out + (row * capacity + tile * RUN + 8 * t + g) * 4, v)
                            of_best = best + (row * (capacity >> block_shift)) * 4
                            if block_shift == 3 and g == 0:
                                stg_f32(of_best + (int64(tile) * 4 + t) * 4, eight_best)
                            if block_shift == 2 and g & 3 == 0:
                                stg_f32(of_best + (int64(tile) * 8 + 2 * t + (g >> 2)) * 4, four_best)
                            if lane == 0:
                                stg_f32(best32 + (row * (capacity // RUN) + tile) * 4, run_best)
                        sync_warp()
                sync_threads()

    return scores


def entries(width: Width) -> list[Entry]:
    """Queries, and scores of every kind of index source."""
    spec = width.spec
    heads, di = spec.index_n_heads, spec.index_head_dim
    ahead = 16384  # entries that the floor is stated for
    shape = {"heads": heads, "di": di}
    size = MOST_ROWS * heads * di
    nbytes, operations = ahead * (di // 2 + di // 32 + 4), 2 * ahead * heads * di
    query = {**shape, "rope": spec.qk_rope_head_dim}
    return [
        Entry(f"index.query/{width.label}", make_query, query, width.chips, q4p, 4 * size, 10 * size),
        Entry(f"index.scores/{width.label}", make_scores, shape, width.chips, index_scores, nbytes, operations),
    ]
