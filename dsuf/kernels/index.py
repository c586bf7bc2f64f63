"""Indexer of a decode step: scores of all visible entries with the best of blocks and runs; queries by index_query.py.

    score_j = sum_h relu(qI_h . K_j) w_h,  w = y_w (di heads)^-1/2            -> float32 [rows, capacity]

Entries j < (position + 1) >> shift of the row's sequence; keys are e2m1 with ue8m0 per 32 in pages (layout.py).
candidates int32 [rows, kept] (ascending blocks of 1 << block_shift entries; address 0: all entries): only theirs, of
kept_of blocks a row, in their order. best float32 [rows, capacity >> block_shift] and best32 float32 [rows, capacity /
32] are the largest of each block and of each run of 32 scores, for the selection (select.py). Whatever of a run is not
visible gets -3e38. capacity is a multiple of 32.

Reference: dsuf.ops.index.index_scores, ops.qdq.q4p. Bytes: 68 an entry and sequence; operations 2 heads di an entry and
row.

Rows of one sequence that stand together share its keys: groups of at most 6, or of as few as give every warp of the
launch work where the caches are short. A block has the queries of a group in shared memory, as the products want them,
and a warp 32 keys in registers, dequantised once for the group (times 2^-64, so that every factor is a bf16 number).
Runs of all groups are dealt out evenly, one a warp, in order; the next keys and the pages after them are on their way
while a warp multiplies. Lane t of a quad holds columns di / 4 t .. of its keys and heads, so one load brings a lane's
codes of a key under one scale; step s of the product takes columns 4s .. 4s + 3 of every lane.

    hand-off               who writes   who waits    reused
    queries and weights    the block    the block    by the next group, after a barrier
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.index_query import make_query
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.latents import MOST_ROWS
from dsuf.kernels.ptx.convert import (
    as_float,
    count_leading_zeros,
    fma,
    fmax,
    fp4x8_bf16_scaled,
)
from dsuf.kernels.ptx.copy import async_commit, async_load16, async_wait
from dsuf.kernels.ptx.memory import (
    ldg_u8,
    ldg_u32,
    ldg_u32x4,
    lds_u32x2,
    lds_u32x4,
    shared_base,
    stg_f32,
)
from dsuf.kernels.ptx.mma import mma_bf16
from dsuf.kernels.ptx.op import BLACKWELL
from dsuf.kernels.ptx.sync import (
    ballot,
    block_count,
    block_index,
    let_next_kernel_start,
    shuffle_u32,
    shuffle_up_u32,
    shuffle_xor_f32,
    sync_threads,
    sync_warp,
    thread_index,
    wait_for_previous_kernel,
    warp_sum_u32,
)
from dsuf.kernels.quantise import max_over, sum_over
from dsuf.layout import PAGE_TOKENS
from dsuf.ops.index import index_scores
from dsuf.ops.qdq import q4p

RUN = 32  # keys of a warp, entries under one value of best32
LOWEST, NOWHERE = -3.0e38, 0x7FFFFFFF
QUAD = (1, 2)
MOST_GROUP = 6  # rows that share keys
PAGE_SHIFT = PAGE_TOKENS.bit_length() - 1
KEY_BIAS = 62  # keys stand in registers times 2^-64: 62 = 126 - 64


@inline
def ask_pages(
    entry: Any, page: Any, tile: Any, row: Any, owner: Any, seen: Any, used: Any, candidates: Any, kept: Any,
    block_shift: Any, shift: Any, pages: Any, most_pages: Any, g: Any,
) -> None:  # fmt: skip
    """Entries g + 8 i of a run of 32 and the pages that hold them; invisible ones take another's page."""
    for i in unroll(4):
        at = int32(tile * RUN + 8 * i + g)
        entry[i] = at
        if candidates != 0:
            held = int32(at >> block_shift)
            block = int32(ldg_u32(candidates + (int64(row) * kept + min(held, used - 1)) * 4))
            inside = int32((block << block_shift) + (at & (int32(1) << block_shift) - 1))
            entry[i] = int32(inside if held < used else NOWHERE)
        page[i] = ldg_u32(pages + (owner * most_pages + (min(entry[i], seen - 1) >> (PAGE_SHIFT - shift))) * 4)


@inline
def ask_keys(
    code: Any, exponent: Any, entry: Any, page: Any, seen: Any, shift: Any, key_codes: Any, key_scales: Any,
    page_bytes: Any, t: Any, di: Any,
) -> None:  # fmt: skip
    """A lane's codes and scales of those entries."""
    for i in unroll(4):
        slot = int64(min(entry[i], seen - 1) & (int32(1) << (PAGE_SHIFT - shift)) - 1)
        where = int64(page[i]) * page_bytes
        exponent[i] = ldg_u8(key_scales + where + (slot * (di // 32) + t // (128 // di)))
        from_k = key_codes + where + (slot * (di // 2) + t * (di // 8))
        if di == 128:
            code[4 * i : 4 * i + 4] = ldg_u32x4(from_k)
        else:
            for j in unroll(di // 32):
                code[di // 32 * i + j] = ldg_u32(from_k + 4 * j)


@inline
def of_quad(value: Any, t: Any) -> Any:
    """value[t]."""
    low = value[0] if t == 0 else value[1]
    high = value[2] if t == 2 else value[3]
    return low if t < 2 else high


@inline
def deal_out(opens: Any, owner: Any, most: Any, warps: Any, lane: Any) -> Any:
    """Runs of the group that a lane's row opens, and the pieces of them (from, to) that are this block's.

    The pieces of all groups stand in a row, and every block takes an equal stretch of it.
    """
    runs_of = int32((most + RUN - 1) // RUN if opens and owner >= 0 else 0)
    pieces = int32((runs_of + warps - 1) // warps)
    upto = uint32(pieces)
    for j in unroll(5):
        other = shuffle_up_u32(upto, uint32(1 << j))
        upto = uint32(upto + (other if lane >= 1 << j else 0))
    total = int64(shuffle_u32(upto, uint32(31)))
    before = int32(int32(upto) - pieces)
    from_piece = int32(max(int32(total * block_index() // block_count()) - before, 0))
    to_piece = int32(min(int32(total * (block_index() + 1) // block_count()) - before, pieces))
    return runs_of, from_piece, to_piece


@inline
def group_rows(owner: Any, most: Any, single: Any, rows_left: Any, warps: Any, lane: Any) -> Any:
    """Whether a lane's row opens a group of rows that share keys, and how many rows that has."""
    work = int32(warp_sum_u32(uint32((most + RUN - 1) // RUN)))
    share = int32((work + block_count() * warps - 1) // (block_count() * warps))
    group = int32(max(share, 1) if share <= MOST_GROUP // 2 else MOST_GROUP)
    group = int32(1 if single else group)
    lanes_upto = uint32(uint32(0xFFFFFFFF) >> (31 - lane))
    opens = lane == 0 or int32(shuffle_up_u32(uint32(owner), uint32(1))) != owner
    opened = ballot(uint32(1 if opens else 0))
    offset = int32(lane - 31 + int32(count_leading_zeros(uint32(opened & lanes_upto))))
    opens = offset % group == 0
    opened = ballot(uint32(1 if opens else 0))
    after = uint32(opened & (lanes_upto ^ 0xFFFFFFFF))
    count = int32(31 - int32(count_leading_zeros(uint32(after & (0 - after)))) if after != 0 else 32)
    return opens, int32(min(count, rows_left) - lane)


@inline
def load_group(
    q: Any, weights: Any, first: Any, rows: Any, sm: Any, at_weights: Any, tid: Any, threads: Any, heads: Any, di: Any
) -> None:
    """Queries of a group's rows, as the products want them, and weights, on their way to shared memory."""
    for i in range(tid, rows * (heads // 4), threads):
        async_load16(uint32(sm + at_weights + 16 * i), weights + (int64(first) * heads + 4 * i) * 4)
    for i in range(tid, rows * (heads * di // 8), threads):
        # 16 bytes of a row's head: columns di / 4 t + 8 pair .. of head 8 n + g
        r = int32(i // (heads * di // 8))
        head = int32(i % (heads * di // 8) // (di // 8))
        piece = int32(i % (di // 8))
        pair = int32(piece % (di // 32))
        lane_of = int32((head & 7) * 4 + piece // (di // 32))
        to = r * (heads * di * 2) + ((head >> 3) * (di // 32) + pair) * 512 + lane_of * 16
        async_load16(uint32(sm + to), q + (int64(first) * (heads * di * 2) + int64(i) * 16))
    async_commit()


@inline
def dequantise_keys(x: Any, code: Any, exponent: Any, words: Any) -> None:
    """x: (key 8 i + g, pairs of its columns) as bf16, times 2^-64."""
    for i in unroll(4):
        both = uint32(exponent[i] + KEY_BIAS << 7 | exponent[i] + KEY_BIAS << 23)
        for j in unroll(words):
            four = fp4x8_bf16_scaled(code[words * i + j], both)
            x[4 * (words * i + j) : 4 * (words * i + j) + 4] = four


@inline
def score_row(s: Any, x: Any, r: Any, sm: Any, at_weights: Any, t: Any, lane: Any, heads: Any, di: Any) -> None:
    """s: scores of keys 8 i + g for row r of the group, over the heads of a lane.

    Four products at a time do not wait for each other: two tiles of heads, two of keys.
    """
    b = regs(8)
    for n in range(0, heads // 8, 2):
        c = regs(4, (0.0, 0.0, 0.0, 0.0))
        for pair in unroll(di // 32):
            for tile2 in unroll(2):
                at_b = r * (heads * di * 2) + ((n + tile2) * (di // 32) + pair) * 512 + lane * 16
                b[4 * tile2 : 4 * tile2 + 4] = lds_u32x4(uint32(sm + at_b))
            for half in unroll(2):
                for tile2 in unroll(2):
                    for m in unroll(2):
                        c[2 * tile2 + m] = mma_bf16(
                            (x[di // 4 * m + 4 * pair + 2 * half],
                             x[di // 4 * m + di // 8 + 4 * pair + 2 * half],
                             x[di // 4 * m + 4 * pair + 2 * half + 1],
                             x[di // 4 * m + di // 8 + 4 * pair + 2 * half + 1]),
                            (b[4 * tile2 + 2 * half], b[4 * tile2 + 2 * half + 1]),
                            c[2 * tile2 + m],
                        )  # fmt: skip
        for tile2 in unroll(2):
            w = lds_u32x2(uint32(sm + at_weights + (r * heads + 8 * (n + tile2) + 2 * t) * 4))
            for i in unroll(4):
                two = c[2 * tile2 + i // 2]
                s[i] = fma(fmax(two[2 * (i % 2)], 0.0), as_float(w[0]), s[i])
                s[i] = fma(fmax(two[2 * (i % 2) + 1], 0.0), as_float(w[1]), s[i])


@inline
def write_run(
    v: Any, tile: Any, own_runs: Any, row: Any, out: Any, best: Any, best32: Any, capacity: Any, block_shift: Any,
    g: Any, t: Any, lane: Any,
) -> None:  # fmt: skip
    """A row's scores of a run (a lane's is of key 8 t + g) and the best of the run's blocks and of all of it."""
    four_best = max_over(v, (4, 8))
    eight_best = fmax(four_best, shuffle_xor_f32(four_best, uint32(16)))
    run_best = max_over(eight_best, QUAD)
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


def make_scores(*, heads: int, di: int, warps: int) -> Kernel:
    """heads a multiple of 16; di 32 or 128; as many warps as have registers for what they hold."""
    WARPS, THREADS = warps, 32 * warps
    WORDS = di // 32
    SCALE = (di * heads) ** -0.5 * 2.0**64
    Q_ROW = heads * di * 2  # bytes
    AT_WEIGHTS = MOST_GROUP * Q_ROW
    SHARED = AT_WEIGHTS + MOST_GROUP * heads * 4

    @kernel(
        threads=THREADS, grid=(132,), shared=SHARED, name=f"index_scores_{heads}x{di}"
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
        for base in range(0, rows, 32):
            # a lane a row: how many runs its group has, if it is the first of one, and which pieces of them are ours
            row_of_lane = int32(base + lane)
            owner = int32(-1)
            seen = int32(0)
            used = int32(1)
            if row_of_lane < rows:
                owner = int32(ldg_u32(sequence + int64(row_of_lane) * 4))
                seen = int32((int32(ldg_u32(position + int64(row_of_lane) * 4)) + 1) >> shift)
                if candidates != 0 and owner >= 0:
                    used = int32(ldg_u32(kept_of + int64(row_of_lane) * 4))
            sync_warp()
            seen = int32(seen if owner >= 0 else 0)
            most = int32((used << block_shift if seen > 0 else 0) if candidates != 0 else seen)
            opens, count = group_rows(owner, most, candidates != 0, int32(rows - base), WARPS, lane)
            seen_most = seen
            for j in unroll(1, MOST_GROUP):
                beside = int32(shuffle_u32(uint32(most), uint32(lane + j)))
                beside_seen = int32(shuffle_u32(uint32(seen), uint32(lane + j)))
                most = int32(max(most, beside) if j < count and opens else most)
                seen_most = int32(max(seen_most, beside_seen) if j < count else seen_most)
            runs_of, from_piece, to_piece = deal_out(opens, owner, most, WARPS, lane)
            todo = ballot(uint32(1 if from_piece < to_piece else 0))
            while todo != 0:
                chosen = uint32(31 - count_leading_zeros(uint32(todo & (0 - todo))))
                todo = uint32(todo & (todo - 1))
                first = int32(base + int32(chosen))
                runs = int32(shuffle_u32(uint32(runs_of), chosen))
                rows_here = int32(shuffle_u32(uint32(count), chosen))
                start = int32(shuffle_u32(uint32(from_piece), chosen))
                stop = int32(shuffle_u32(uint32(to_piece), chosen))
                slot = int64(shuffle_u32(uint32(owner), chosen))
                seen_here = int32(shuffle_u32(uint32(seen_most), chosen))
                used_here = int32(shuffle_u32(uint32(used), chosen))
                load_group(q, weights, first, rows_here, sm, AT_WEIGHTS, tid, THREADS, heads, di)
                entry = regs(4)
                page = regs(4)
                code = regs(4 * WORDS)
                exponent = regs(4)
                ask_pages(
                    entry, page, min(start * WARPS + warp, runs - 1), first, slot, seen_here, used_here, candidates,
                    kept, block_shift, shift, pages, most_pages, g,
                )  # fmt: skip
                ask_keys(code, exponent, entry, page, seen_here, shift, key_codes, key_scales, page_bytes, t, di)
                number = int32(of_quad(entry, t))  # lane (g, t) writes the score of key 8 t + g
                if start + 1 < stop:
                    ask_pages(
                        entry, page, min((start + 1) * WARPS + warp, runs - 1), first, slot, seen_here, used_here,
                        candidates, kept, block_shift, shift, pages, most_pages, g,
                    )  # fmt: skip
                async_wait[0]()
                sync_threads()
                for piece in range(start, stop):
                    tile = int32(piece * WARPS + warp)
                    x = regs(8 * WORDS * 2)
                    dequantise_keys(x, code, exponent, WORDS)
                    this = number
                    if piece + 1 < stop:
                        ask_keys(
                            code, exponent, entry, page, seen_here, shift, key_codes, key_scales, page_bytes, t, di
                        )
                        number = int32(of_quad(entry, t))
                        ask_pages(
                            entry, page, min((piece + 2) * WARPS + warp, runs - 1), first, slot, seen_here, used_here,
                            candidates, kept, block_shift, shift, pages, most_pages, g,
                        )  # fmt: skip
                    for r in range(rows_here):
                        s = regs(4, 0.0)
                        score_row(s, x, r, sm, AT_WEIGHTS, t, lane, heads, di)
                        for i in unroll(4):
                            s[i] = sum_over(s[i], QUAD)
                        row = int64(first + r)
                        own = int32(shuffle_u32(uint32(seen), uint32(int32(chosen) + r)))
                        v = of_quad(s, t) * SCALE
                        v = v if this < own else LOWEST
                        own_runs = int32(runs if candidates != 0 else (own + RUN - 1) // RUN)
                        write_run(v, tile, own_runs, row, out, best, best32, capacity, block_shift, g, t,
                                  lane)  # fmt: skip
                sync_threads()

    return scores


def make_scores_for(*, heads: int, di: int, chip: str) -> Kernel:
    """Twelve warps measured best on an H200; on Blackwell that many would spill, so eight with more registers each."""
    return make_scores(heads=heads, di=di, warps=8 if chip in BLACKWELL else 12)


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
        Entry(
            f"index.scores/{width.label}",
            make_scores_for,
            shape,
            width.chips,
            index_scores,
            nbytes,
            operations,
        ),
    ]
