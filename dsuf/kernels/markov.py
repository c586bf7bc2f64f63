"""The drafter's Markov head: five slots one after the other, each adding a bias that the token before it decides.

    step i    t_i = y (i = 0) or the choice from slot i - 1;  e = embed[t_i];  logits[5 g + i] += head e;  its argmax
    finish    t_5, and confidence c_i = proj . [x_i ; e_i] of every slot

embed, head bf16 [V, rank] as in the checkpoint; logits float32 [5 groups, V] in place; x bf16 [5 groups, D]: the folded
streams before the norm; proj bf16 [D + rank]; drafts int32 and confidence float32 [MOST_ROWS] by draft row. A group is
a draft index of the batch, up to MOST_GROUPS. A greedy slot's choice comes from what each block left in parts uint32
[5, MOST_GROUPS, BLOCKS, 2] (key, token), a sampled one's from picked int32 [MOST_ROWS] (sample.py, between two steps).
EOS cannot be chosen while min_tokens wants more. Reference: dsuf.ops.product.row_product, numpy.argmax.

Bytes: head, once a step: 66 MB, which decides the time; logits 8 groups V. Each warp multiplies 16 rows of head at a
time with the e of eight groups, the sums of K = rank in the tensor core. Tiles of 16 rows are contiguous: one bulk copy
each, asked for before the wait for the kernel before.

    hand-off                who writes    who waits                reused
    ring stage              bulk copy     its warp                 once every lane has loaded it (sync_warp)
    e, tokens, EOS marks    the block     the block                never
    warp bests              each warp     warp 0 .. groups - 1     never
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.ptx.convert import bf16_high, bf16_low, fma
from dsuf.kernels.ptx.copy import fence_async, mbarrier_init, mbarrier_wait, policy_evict_first, policy_evict_last
from dsuf.kernels.ptx.memory import (
    ldg_f32,
    ldg_u32,
    ldg_u32x2,
    ldg_u32x4,
    lds_f32,
    lds_u32,
    lds_u32x4,
    ldw_u32x4,
    shared_base,
    stg_f32,
    stg_u32,
    stg_u32x2,
    sts_f32,
    sts_u32,
    sts_u32x4,
)
from dsuf.kernels.ptx.mma import mma_bf16
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    let_next_kernel_start,
    shuffle_xor_u32,
    sync_threads,
    sync_warp,
    thread_index,
    wait_for_previous_kernel,
    warp_max_u32,
    warp_min_u32,
)
from dsuf.kernels.quantise import sum_over
from dsuf.kernels.route import ordered
from dsuf.kernels.rows import get, word
from dsuf.kernels.slots import (
    MOST_DRAFTS,
    S_EMITTED,
    S_EOS,
    S_EOS_COUNT,
    S_MIN_TOKENS,
    S_TEMPERATURE,
    SLOT_BYTES,
    T_OFFSET,
    T_SEQUENCE,
    T_TOKEN,
)
from dsuf.kernels.stream import fetch
from dsuf.ops.product import row_product

BLOCKS = 132  # of a grid at most; parts of blocks that do not run stay zero, so they are zeroed once
# Measured on an H200, five slots of one group / of eight, in us: half of the head kept in L2 75 / 102, none 95 / 111,
# all 102 / 124; 6 warps leave room for the next slot's block beside this one and beat 4, 7, 8 and 12 with one group.
WARPS, STAGES, KEPT = 6, 2, 8
MOST_GROUPS = 8
NONE = 0x7FFFFFFF
WARP, COLUMN_LANES = (1, 2, 4, 8, 16), (4, 8, 16)


@inline
def choice(parts: Any, slot: Any, group: Any, lane: Any) -> Any:
    """The largest logit's token of a group after step `slot`, from the parts of all blocks (a warp)."""
    best = uint32(0)
    token = uint32(NONE)
    for b in range(lane, BLOCKS, 32):
        key, other = ldg_u32x2(parts + ((int64(slot) * MOST_GROUPS + group) * BLOCKS + b) * 8)
        better = key > best or (key == best and other < token)
        best = uint32(key if better else best)
        token = uint32(other if better else token)
    top = warp_max_u32(best)
    return int32(warp_min_u32(uint32(token if best == top else NONE)))


@inline
def token_before(
    token: Any, greedy: Any, parts: Any, picked: Any, group: Any, index: Any, block: Any, lane: Any
) -> Any:  # fmt: skip
    """t_index of a group whose block begins with `token` (a warp)."""
    if index > 0:
        if greedy == 1:
            token = choice(parts, int32(index - 1), group, lane)
        else:
            token = int32(ldg_u32(picked + (int64(group) * block + index - 1) * 4))
    return token


@inline
def is_greedy(slots: Any, slot: Any) -> Any:
    """1 if a slot (negative: none) takes the largest logit."""
    greedy = int32(1)
    if slot >= 0:
        greedy = int32(1 if ldg_f32(slots + int64(slot) * SLOT_BYTES + 4 * S_TEMPERATURE) == 0.0 else 0)
    return greedy


@inline
def load_tile(v: Any, at: Any, column: Any, live: Any, there: Any) -> None:
    """A lane's four logits of a tile; live: whether its two columns belong to anybody."""
    for j in unroll(2):
        if there and live[j] >= 0:
            v[j] = ldg_f32(at + j * column)
            v[2 + j] = ldg_f32(at + j * column + 32)
    sync_warp()  # products want whole warps


def make_step(*, rank: int, warps: int, stages: int, kept: int) -> Kernel:
    """rank a multiple of 32; a vocabulary is a multiple of 16; `kept` of 16 tiles stay in L2 for the next step."""
    SIZE, GROUPS32, PER_WARP = 32 * rank, rank // 32, -(-MOST_GROUPS // warps)
    PITCH = 2 * rank + 16  # of an e in shared memory: eight rows touch all banks
    AT_BAR = warps * stages * SIZE
    AT_E = AT_BAR + 8 * warps * stages
    AT_BEST = AT_E + MOST_GROUPS * PITCH
    AT_EOS = AT_BEST + 8 * warps * MOST_GROUPS  # how many EOS ids are impossible, for each group; then its slot
    PIECES = rank // 8

    @kernel(
        threads=32 * warps,
        grid=(BLOCKS,),
        shared=AT_EOS + 8 * MOST_GROUPS,
        name=f"markov_step_{rank}_{warps}x{stages}k{kept}",
    )
    def step(
        embed: s64, head: s64, logits: s64, slots: s64, table: s64, parts: s64, picked: s64, drafts: s64, groups: s32,
        index: s32, vocabulary: s32, block: s32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        g = int32(lane >> 2)
        t = int32(lane & 3)
        sm = shared_base()
        bar = uint32(sm + AT_BAR + warp * (8 * stages))
        ring = uint32(sm + warp * (stages * SIZE))
        tiles = int32(vocabulary >> 4)
        stride = int32(block_count() * warps)
        tile = int32(block_index() * warps + warp)
        if lane == 0:
            for s in unroll(stages):
                mbarrier_init(uint32(bar + 8 * s), uint32(1))
            fence_async()
        sync_warp()
        once = policy_evict_first()
        again = policy_evict_last()
        ahead = tile
        for s in unroll(stages):
            if ahead < tiles and lane == 0:
                fetch(ring, bar, s, SIZE, head + int64(ahead) * SIZE, again if ahead & 15 < kept else once)
            ahead = int32(ahead + stride)
        # warp w: for groups w, w + warps: the token before slot `index`, its e, how many EOS ids it may not choose.
        # Table and slots are older than the kernel before.
        slot = regs(PER_WARP, int32(-1))
        start = regs(PER_WARP, int32(0))
        greedy = regs(PER_WARP)
        barred = regs(PER_WARP, int32(0))
        for turn in unroll(PER_WARP):
            group = int32(warp + turn * warps)
            if group < groups:
                slot[turn] = get(table, T_SEQUENCE, int32(group * block))
                start[turn] = get(table, T_TOKEN, int32(group * block))
            greedy[turn] = is_greedy(slots, slot[turn])
            if slot[turn] >= 0:
                own = slots + int64(slot[turn]) * SLOT_BYTES
                early = int32(word(own, S_EMITTED) + index - word(own, S_MIN_TOKENS))
                count = word(own, S_EOS_COUNT)
                barred[turn] = int32(count if early < 0 else 0)
            if lane == 0 and group < MOST_GROUPS:
                sts_u32(uint32(sm + AT_EOS + 8 * group), uint32(barred[turn]))
                sts_u32(uint32(sm + AT_EOS + 8 * group + 4), uint32(slot[turn]))
        sync_threads()
        anywhere = int32(0)
        for w in unroll(MOST_GROUPS):
            anywhere = int32(anywhere + int32(lds_u32(uint32(sm + AT_EOS + 8 * w))))
        live = regs(2)  # of columns 2t and 2t + 1
        for j in unroll(2):
            live[j] = int32(lds_u32(uint32(sm + AT_EOS + 8 * (2 * t + j) + 4)))
        line = logits + ((int64(2 * t) * block + index) * vocabulary + g) * 4
        column = int64(block) * vocabulary * 4  # from one group to the next
        wait_for_previous_kernel()
        let_next_kernel_start()
        base = regs(4, 0.0)  # logits of the next tile, rows g and g + 8 of columns 2t, 2t + 1
        load_tile(base, line + int64(tile) * 64, column, live, tile < tiles)
        for turn in unroll(PER_WARP):
            group = int32(warp + turn * warps)
            if group < MOST_GROUPS:
                to_e = uint32(sm + AT_E + group * PITCH)
                if slot[turn] >= 0:
                    token = token_before(start[turn], greedy[turn], parts, picked, group, index, block, lane)
                    for i in range(lane, PIECES, 32):
                        sts_u32x4(uint32(to_e + 16 * i), ldw_u32x4(embed + (int64(token) * rank + 8 * i) * 2))
                    if lane == 0 and index > 0 and block_index() == 0:
                        stg_u32(drafts + (int64(group) * block + index - 1) * 4, uint32(token))
                else:
                    for i in range(lane, PIECES, 32):
                        sts_u32x4(uint32(to_e + 16 * i), (uint32(0), uint32(0), uint32(0), uint32(0)))
        sync_threads()
        b = regs(4 * GROUPS32)
        for q in unroll(GROUPS32):
            b[4 * q : 4 * q + 4] = lds_u32x4(uint32(sm + AT_E + g * PITCH + 64 * q + 16 * t))
        best = regs(2, uint32(0))
        word_of = regs(2, int32(NONE))
        stage = int32(0)
        phase = int32(0)
        while tile < tiles:
            at = line + int64(tile) * 64
            v = regs(4)
            for i in unroll(4):
                v[i] = base[i]
            load_tile(base, at + int64(stride) * 64, column, live, tile + stride < tiles)
            mbarrier_wait(uint32(bar + 8 * stage), uint32(phase))
            from_head = uint32(ring + stage * SIZE + g * (2 * rank) + 16 * t)
            acc = (0.0, 0.0, 0.0, 0.0)
            for q in unroll(GROUPS32):
                upper = lds_u32x4(uint32(from_head + 64 * q))
                lower = lds_u32x4(uint32(from_head + 16 * rank + 64 * q))
                acc = mma_bf16((upper[0], lower[0], upper[1], lower[1]), (b[4 * q], b[4 * q + 1]), acc)
                acc = mma_bf16((upper[2], lower[2], upper[3], lower[3]), (b[4 * q + 2], b[4 * q + 3]), acc)
            sync_warp()
            if ahead < tiles and lane == 0:
                fetch(ring, bar, stage, SIZE, head + int64(ahead) * SIZE, again if ahead & 15 < kept else once)
            ahead = int32(ahead + stride)
            stage = int32(stage + 1)
            if stage == stages:
                stage = int32(0)
                phase = int32(phase ^ 1)
            for j in unroll(2):
                if live[j] >= 0:
                    for half in unroll(2):
                        x = v[2 * half + j] + acc[2 * half + j]
                        stg_f32(at + j * column + 32 * half, x)
                        token = int32(tile * 16 + 8 * half + g)
                        key = ordered(x)
                        if anywhere > 0:
                            own = slots + int64(live[j]) * SLOT_BYTES
                            for i in range(int32(lds_u32(uint32(sm + AT_EOS + 8 * (2 * t + j))))):
                                key = uint32(0 if int32(ldg_u32(own + 4 * (S_EOS + i))) == token else key)
                        better = key > best[j]
                        best[j] = uint32(key if better else best[j])
                        word_of[j] = int32(token if better else word_of[j])
            tile = int32(tile + stride)
        # over the rows of a warp (lanes with one t), then over the warps
        for j in unroll(2):
            for m in unroll(len(COLUMN_LANES)):
                key = shuffle_xor_u32(best[j], uint32(COLUMN_LANES[m]))
                token = int32(shuffle_xor_u32(uint32(word_of[j]), uint32(COLUMN_LANES[m])))
                better = key > best[j] or (key == best[j] and token < word_of[j])
                best[j] = uint32(key if better else best[j])
                word_of[j] = int32(token if better else word_of[j])
            if g == 0:
                to = uint32(sm + AT_BEST + (warp * MOST_GROUPS + 2 * t + j) * 8)
                sts_u32(to, best[j])
                sts_u32(uint32(to + 4), uint32(word_of[j]))
        sync_threads()
        if tid < MOST_GROUPS:
            top = uint32(0)
            first = uint32(NONE)
            for w in range(warps):
                key = lds_u32(uint32(sm + AT_BEST + (w * MOST_GROUPS + tid) * 8))
                other = lds_u32(uint32(sm + AT_BEST + (w * MOST_GROUPS + tid) * 8 + 4))
                better = key > top or (key == top and other < first)
                top = uint32(key if better else top)
                first = uint32(other if better else first)
            stg_u32x2(parts + ((int64(index) * MOST_GROUPS + tid) * BLOCKS + block_index()) * 8, (top, first))

    return step


def make_finish(*, d: int, rank: int) -> Kernel:
    """A block a draft row."""
    THREADS, SPAN = 256, 8 * 256

    @kernel(threads=THREADS, grid=(MOST_DRAFTS * MOST_GROUPS,), shared=64, name=f"markov_finish_{d}_{rank}")
    def finish(
        embed: s64, proj: s64, x: s64, slots: s64, table: s64, parts: s64, picked: s64, drafts: s64, confidence: s64,
        block: s32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        row = int32(block_index())
        group = int32(row // block)
        sm = shared_base()
        wait_for_previous_kernel()
        let_next_kernel_start()
        slot = get(table, T_SEQUENCE, row)
        if slot >= 0:
            offset = get(table, T_OFFSET, row)
            greedy = is_greedy(slots, slot)
            first = get(table, T_TOKEN, int32(group * block))
            token = token_before(first, greedy, parts, picked, group, offset, block, lane)
            s = 0.0
            for c in range(8 * tid, d + rank, SPAN):
                if c < d:
                    v = ldg_u32x4(x + (int64(row) * d + c) * 2)
                else:
                    v = ldg_u32x4(embed + (int64(token) * rank + c - d) * 2)
                p = ldw_u32x4(proj + int64(c) * 2)
                for i in unroll(4):
                    s = fma(bf16_low(v[i]), bf16_low(p[i]), s)
                    s = fma(bf16_high(v[i]), bf16_high(p[i]), s)
            s = sum_over(s, WARP)
            if lane == 0:
                sts_f32(uint32(sm + 4 * (tid >> 5)), s)
        sync_threads()
        if slot >= 0 and tid < 32:
            offset = get(table, T_OFFSET, row)
            greedy = is_greedy(slots, slot)
            last = token_before(int32(0), greedy, parts, picked, group, int32(offset + 1), block, lane)
            if tid == 0:
                s = lds_f32(sm)
                for w in range(1, THREADS // 32):
                    s = s + lds_f32(uint32(sm + 4 * w))
                stg_f32(confidence + int64(row) * 4, s)
                stg_u32(drafts + int64(row) * 4, uint32(last))

    return finish


def entries(width: Width) -> list[Entry]:
    """A kernel a rank; the vocabulary is an argument."""
    spec = width.spec
    d, rank, v = spec.hidden_size, spec.dspark_markov_rank, spec.vocab_size
    size = 2 * v * rank + 8 * MOST_GROUPS * v
    row = 2 * MOST_DRAFTS * MOST_GROUPS * (d + rank)
    label, products = width.label, 2 * MOST_GROUPS * v * rank
    step, finish = {"rank": rank, "warps": WARPS, "stages": STAGES, "kept": KEPT}, {"d": d, "rank": rank}
    return [
        Entry(f"markov.step/{label}", make_step, step, width.chips, row_product, size, products),
        Entry(f"markov.finish/{label}", make_finish, finish, width.chips, row_product, row, row),
    ]
