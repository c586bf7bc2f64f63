"""Indexer of a decode step: quantised queries, scores of all visible entries, and the largest 512 (or the best blocks).

    query   qI = q4p(rope(y)), y bf16 [rows, heads, di] from the indexer's wq_b       -> bf16 values, exact
    scores  score_j = sum_h relu(qI_h . K_j) w_h,  w = y_w (di heads)^-1/2            -> float32 [rows, capacity]

Entries j < (position + 1) / ratio of the row's sequence; keys are e2m1 with ue8m0 per 32 in pages (layout.py). `blocks`
also writes the largest score of each 8 entries, the newest visible block as +3e38 (the candidate source). `mapped`
scores only the entries of `candidates` int32 [rows, kept] (ascending blocks), `kept_of` of them a row, in their order;
the last block may reach past the visible entries, which get -3e38. Selection itself is select.py.

Reference: dsuf.ops.index.index_scores, ops.qdq.q4p. Bytes: 68 an entry and row; operations 2 heads di an entry and row.

Lane t of a quad holds columns 32t .. 32t + 31 of its key and of its heads, so one 16-byte load brings a lane's codes of
a key under one scale; step s of the product takes columns 4s .. 4s + 3 of every lane.
"""

from __future__ import annotations

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.latents import MOST_ROWS
from dsuf.kernels.ptx.convert import (
    bf16_high,
    bf16_low,
    e2m1_code,
    fabs,
    fma,
    fmax,
    fp4x8_bf16,
    mul_bf16x2,
    round_bf16,
)
from dsuf.kernels.ptx.memory import ldg_f32, ldg_u8, ldg_u32, ldg_u32x2, ldg_u32x4, stg_f32, stg_u32x2
from dsuf.kernels.ptx.mma import mma_bf16
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    let_next_kernel_start,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.quantise import inverse_scale, max_over, q4p_exponent, sum_over
from dsuf.kernels.rope import phase, rotated
from dsuf.layout import PAGE_TOKENS
from dsuf.ops.index import index_scores
from dsuf.ops.qdq import q4p

BLOCK = 8  # entries of a candidate block and of a product's key tile
TOP, LOWEST = 3.0e38, -3.0e38
QUERY_WARPS, SCORE_WARPS = 8, 8
KEY_LANES, GROUP_LANES = (4, 8, 16), (1, 2, 4)


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


def make_scores(*, heads: int, di: int, ratio: int, blocks: bool, mapped: bool) -> Kernel:
    """Every warp keeps the heads of a row in registers and walks key tiles of 8; grid as wide as the machine."""
    STEPS, WORDS, SPAN, SETS = di // 16, di // 32, di // 4, -(-heads // 16)  # columns of a lane: SPAN = 4 STEPS
    ROWS_OF_PAGE, SCALE, GROUPS = PAGE_TOKENS // ratio, (di * heads) ** -0.5, di // 32
    PER_GROUP = 4 // GROUPS  # lanes of a quad under one scale
    name = f"index_scores_{heads}x{di}_ratio{ratio}" + ("_blocks" if blocks else "") + ("_mapped" if mapped else "")

    @kernel(threads=SCORE_WARPS * 32, grid=(264,), name=name)
    def scores(
        q: s64, weights: s64, pages: s64, most_pages: s32, key_codes: s64, key_scales: s64, page_bytes: s64,
        sequence: s64, position: s64, candidates: s64, kept: s32, kept_of: s64, out: s64, capacity: s64, best: s64,
        rows: s32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        g = int32(lane >> 2)
        t = int32(lane & 3)
        crew = int32(block_index() * SCORE_WARPS + (tid >> 5))
        step = int32(block_count() * SCORE_WARPS)
        wait_for_previous_kernel()
        let_next_kernel_start()
        for row in range(rows):
            owner = int64(int32(ldg_u32(sequence + int64(row) * 4)))
            visible = int32((int32(ldg_u32(position + int64(row) * 4)) + 1) // ratio)
            count = int32((visible + BLOCK - 1) // BLOCK)
            if mapped:
                count = int32(ldg_u32(kept_of + int64(row) * 4))
            count = int32(count if owner >= 0 else 0)
            if crew < count:
                a = regs(4 * SETS * STEPS, uint32(0))
                w = regs(2 * SETS, 0.0)
                for m in unroll(SETS):
                    for half in unroll(2):
                        head = int32(16 * m + 8 * half + g)
                        if head < heads:
                            w[2 * m + half] = ldg_f32(weights + (int64(row) * heads + head) * 4) * SCALE
                            from_q = q + ((int64(row) * heads + head) * di + t * SPAN) * 2
                            for i in unroll(STEPS):
                                pair = ldg_u32x2(from_q + 8 * i)
                                a[4 * (m * STEPS + i) + half] = pair[0]
                                a[4 * (m * STEPS + i) + half + 2] = pair[1]
                for tile in range(crew, count, step):
                    block = tile
                    if mapped:
                        block = int32(ldg_u32(candidates + (int64(row) * kept + tile) * 4))
                    entry = int32(block * BLOCK + g)
                    safe = int32(entry if entry < visible else visible - 1)  # its page exists
                    page = int32(safe // ROWS_OF_PAGE)
                    slot = int64(safe - page * ROWS_OF_PAGE)
                    where = int64(ldg_u32(pages + (owner * most_pages + page) * 4)) * page_bytes
                    exponent = ldg_u8(key_scales + where + (slot * GROUPS + t // PER_GROUP))
                    both = uint32(exponent << 7 | exponent << 23)
                    from_k = key_codes + where + (slot * (di // 2) + t * (SPAN // 2))
                    b = regs(2 * STEPS)
                    code = regs(WORDS)
                    if WORDS == 4:
                        code = ldg_u32x4(from_k)
                    else:
                        for i in unroll(WORDS):
                            code[i] = ldg_u32(from_k + 4 * i)
                    for i in unroll(WORDS):
                        four = fp4x8_bf16(code[i])
                        for j in unroll(4):
                            b[4 * i + j] = mul_bf16x2(four[j], both)
                    s0 = 0.0
                    s1 = 0.0
                    for m in unroll(SETS):
                        c = (0.0, 0.0, 0.0, 0.0)
                        for i in unroll(STEPS):
                            f = a[4 * (m * STEPS + i) : 4 * (m * STEPS + i) + 4]
                            c = mma_bf16(f, (b[2 * i], b[2 * i + 1]), c)
                        s0 = fma(fmax(c[0], 0.0), w[2 * m], s0)
                        s1 = fma(fmax(c[1], 0.0), w[2 * m], s1)
                        s0 = fma(fmax(c[2], 0.0), w[2 * m + 1], s0)
                        s1 = fma(fmax(c[3], 0.0), w[2 * m + 1], s1)
                    s0 = sum_over(s0, KEY_LANES)
                    s1 = sum_over(s1, KEY_LANES)
                    s0 = s0 if block * BLOCK + 2 * t < visible else LOWEST
                    s1 = s1 if block * BLOCK + 2 * t + 1 < visible else LOWEST
                    if g == 0:
                        to = out + (int64(row) * capacity + tile * BLOCK + 2 * t) * 4
                        stg_f32(to, s0)
                        stg_f32(to + 4, s1)
                    if blocks:
                        top = max_over(fmax(s0, s1), (1, 2))
                        if lane == 0:
                            newest = block == (visible - 1) // BLOCK
                            stg_f32(best + (int64(row) * (capacity // BLOCK) + block) * 4, TOP if newest else top)

    return scores


def entries(width: Width) -> list[Entry]:
    """Queries and scores of every kind of index source."""
    spec = width.spec
    heads, di = spec.index_n_heads, spec.index_head_dim
    ahead = 16384  # entries that the floor is stated for
    shape = {"heads": heads, "di": di, "rope": spec.qk_rope_head_dim}
    size = MOST_ROWS * heads * di
    found = [Entry(f"index.query/{width.label}", make_query, shape, width.chips, q4p, 4 * size, 10 * size)]
    kinds = {
        (role.ratio, role.is_candidate_source, role.uses_candidates) for role in spec.layers if role.is_index_source
    }
    for ratio, blocks, mapped in sorted(kinds):
        shape = {"heads": heads, "di": di, "ratio": ratio, "blocks": blocks, "mapped": mapped}
        name = f"ratio{ratio}" + ("_blocks" if blocks else "") + ("_mapped" if mapped else "")
        nbytes, operations = ahead * (di // 2 + di // 32 + 4), 2 * ahead * heads * di
        label = f"index.scores_{name}/{width.label}"
        found.append(Entry(label, make_scores, shape, width.chips, index_scores, nbytes, operations))
    return found
