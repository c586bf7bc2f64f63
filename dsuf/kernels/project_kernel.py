"""Dense projections of a decode step: FP8 (attention, shared expert, Engram, drafter), bf16 (router, head, compressor).

    y[r, n] = sum_k x[r, k] W[n, k]

    kind   W                                            x                                                   y
    q8     e4m3, ue8m0 per 32x32 (pack_fp8)             e4m3 [rows, K], ue8m0 [rows, scale_stride(K)]       bf16
    wo_a   the same, block-diagonal [groups * N, K]     f16 [rows, groups, K] of bf16 values (attend.py)    as x of q8
    bf16   bf16 [N, K] (pack_bf16)                      bf16 [rows, K]                                      float32

y [rows, groups * N] holds a whole tile of rows; the first `live` are read and computed, the others get copies. N, K,
groups and team are arguments, so a kind and a row tile is one kernel; project.py says how a weight is launched. wo_a
quantises what it computes, rounded to bf16 first, because wo_b alone reads it: codes, scales = q8(bf16(y)). `scales`
are those of x, for wo_a those of y.

Reference: dsuf.ops.product.product and grouped_product on dequantised operands, dsuf.ops.qdq.q8_encode.
Bytes: the weights, once a launch; x and y are under 2 % of them (but logits). Operations: 2 rows groups N K.

A block stages the activations it needs by a few bulk copies a row, so that a warp waits for its first columns only:
every block reads them from L2, 6 MB for 6 rows of 8 KB. Each warp walks its tiles alone. A `team` of warps shares a
tile along K, each taking every team-th chunk; their sums meet in shared memory in warp order, whatever the number of
rows.

    hand-off            who writes      who waits         reused
    ring stage          bulk copy       its warp          once every lane of the warp has loaded it (sync_warp)
    activations         bulk copies     all warps         never
    partial sums [2]    warps of team   warp 0 of team    two tiles later, behind the next tile's team barrier
    largest of 16 [2]   warp 0 of team  that of the team beside it (wo_a), in place of its own partial sums
"""

from __future__ import annotations

from dataclasses import dataclass

from dsuf.kernels.lang import Kernel, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.pack import FP8_SCALES, ROWS
from dsuf.kernels.ptx.convert import bf16x2, count_leading_zeros
from dsuf.kernels.ptx.copy import (
    bulk_load,
    fence_async,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    policy_evict_first,
)
from dsuf.kernels.ptx.memory import lds_f32, shared_base, stg_f32, stg_u16, sts_f32
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    let_next_kernel_start,
    sync_named,
    sync_threads,
    sync_warp,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.quantise import store_q8
from dsuf.kernels.stream import (
    bf16_chunk,
    fetch,
    fp8_chunk,
    fp8_chunk_f16,
    scale_stride,
    stage_words,
)

PIECES, LEAST_PIECE = 4, 2048  # of a row of activations; bytes of one


def row_stride(kind: str, k: int) -> int:
    """Bytes between activation rows in shared memory: what part of a warp reads at once fills all banks."""
    size, past = (k, 32) if kind == "q8" else (2 * k, 64)
    return size + (past - size) % 128


@dataclass(frozen=True)
class Layout:
    """Shared memory of a block: rings, barriers, partial sums, activation scales, activations; offsets in bytes."""

    barriers: int
    sums: int
    scales: int

    @classmethod
    def of(cls, rows: int, chunk_bytes: int, warps: int, stages: int) -> Layout:
        """Lay them one after the other; the ring of a warp begins at warp * stages * chunk_bytes."""
        barriers = warps * stages * chunk_bytes
        sums = barriers + warps * stages * 8 + 8 * PIECES
        return cls(barriers, sums, sums + 2 * warps * rows * 64)

    def activations(self, kind: str, k: int, rows: int) -> int:
        """Where the rows begin, after their scales."""
        return self.scales + (-(-rows * scale_stride(k) // 16) * 16 if kind == "q8" else 0)


def chunk_bytes_of(kind: str, chunk: int) -> int:
    """Bytes of a chunk of so many columns."""
    return chunk * ROWS * 2 if kind == "bf16" else chunk * ROWS + FP8_SCALES


def make(
    *, kind: str, rows: int, chunk: int, warps: int, stages: int, staged: bool, most_k: int, min_blocks: int = 1
) -> Kernel:
    """rows a multiple of 8 up to 48; chunk the columns of a chunk; K a multiple of it, up to most_k.

    The grid is a multiple of groups; team, a power of two, has no more warps than a tile has chunks and divides warps.
    For wo_a, N is a multiple of 32 and warps hold an even number of teams.
    """
    COLUMNS, GROUPS32 = rows // 8, chunk // 32
    WEIGHTS_BF16, Q8, GROUPED = kind == "bf16", kind == "q8", kind == "wo_a"  # grouped outputs leave as codes
    SIZE = chunk_bytes_of(kind, chunk)
    LAYOUT = Layout.of(rows, SIZE, warps, stages)
    AT_BAR, AT_SUM, AT_S, SUM = LAYOUT.barriers, LAYOUT.sums, LAYOUT.scales, rows * 64
    AT_XBAR = AT_BAR + warps * stages * 8
    THREADS = warps * 32
    XBYTES, YBYTES = 1 if Q8 else 2, 4 if WEIGHTS_BF16 else 2
    PAST = 32 if Q8 else 64
    SHARED = shared_of(kind, rows, chunk, warps, stages, staged, most_k)
    NAME = f"project_{kind}_r{rows}" if staged else f"project_{kind}_direct_r{rows}"

    @kernel(threads=THREADS, shared=SHARED, min_blocks=min_blocks, name=NAME)
    def project(w: s64, x: s64, scales: s64, y: s64, live: s32, n: s32, k: s32, groups: s32, team: s32) -> None:
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        g = int32(lane >> 2)
        t = int32(lane & 3)
        # a division of 64 bits costs 100 ns, and weights wait for these: a shift for teams, 32 bits for groups
        log_team = int32(31 - count_leading_zeros(uint32(team)))
        crew = int32(warp >> log_team)
        part = int32(warp & (team - 1))
        teams = int32(warps >> log_team)
        first = int32(block_index())  # of the blocks of a group
        apart = int32(block_count())
        group = int32(0)
        if GROUPED:
            block = first
            first = int32(uint32(block) // uint32(groups))
            apart = int32(uint32(apart) // uint32(groups))
            group = int32(block - first * groups)
        tiles = int32((n + 15) >> 4)
        chunks = int32(uint32(k) // chunk)
        outputs = int64(n) * groups
        step = int32(apart * teams)
        sm = shared_base()
        bar = uint32(sm + AT_BAR + warp * (stages * 8))
        ring = uint32(sm + warp * (stages * SIZE))
        if lane == 0:
            for s in unroll(stages):
                mbarrier_init(uint32(bar + 8 * s), uint32(1))
            if warp == 0:
                for s in unroll(PIECES):
                    mbarrier_init(uint32(sm + AT_XBAR + 8 * s), uint32(1))
            fence_async()
        sync_warp()
        # weights are asked for before the wait: they do not depend on the kernel before
        policy = policy_evict_first()
        weights = w + int64(group) * tiles * chunks * SIZE
        tile = int32(first * teams + crew)
        ahead = tile  # tile and chunk that are fetched next
        following = part
        for s in unroll(stages):
            if ahead < tiles and lane == 0:
                fetch(ring, bar, s, SIZE, weights + (int64(ahead) * chunks + following) * SIZE, policy)
            following = int32(following + team)
            if following >= chunks:
                following = part
                ahead = int32(ahead + step)
        width = int32(k * XBYTES)
        several = int32(0)
        piece = int32(team * (chunk * XBYTES))  # bytes of a row: 2^several chunks of each warp
        if staged:
            while piece < LEAST_PIECE or piece * PIECES < width:
                several = int32(several + 1)
                piece = int32(2 * piece)
            sync_threads()  # every warp asks for some of the activations
        wait_for_previous_kernel()
        let_next_kernel_start()
        pitch = int64(groups) * width
        own = x + int64(group) * width  # row 0 of my group
        sstride = int32((((k >> 5) + 3) >> 2) << 2)
        xs = regs(COLUMNS)  # where row g of each column tile is for the lane; rows beyond the live ones repeat the last
        ss = regs(2 * COLUMNS, uint32(0))  # scales of rows 2t and 2t + 1
        if staged:
            stride = int32(width + ((PAST - width) & 127))
            at_x = uint32(sm + AT_S)
            if Q8:
                at_x = uint32(at_x + ((rows * sstride + 15) & -16))
            for p in unroll(PIECES):
                size = int32(min(width - p * piece, piece))
                if lane == 0 and size > 0:
                    ready = uint32(sm + AT_XBAR + 8 * p)
                    if warp == 0:
                        mbarrier_expect(ready, uint32(live * size))
                    for j in unroll(-(-rows // warps)):
                        r = int32(warp + j * warps)
                        if r < live:
                            of_row = own + r * pitch
                            to = uint32(at_x + r * stride)
                            bulk_load(uint32(to + p * piece), of_row + p * piece, uint32(size), ready)
            for i in unroll(COLUMNS):
                xs[i] = uint32(at_x + min(8 * i + g, live - 1) * stride + t * (8 * XBYTES))
        else:
            for i in unroll(COLUMNS):
                xs[i] = int32(min(8 * i + g, live - 1) * pitch + t * (8 * XBYTES))  # from `own`: half a register pair
        if Q8:
            stage_words(sm + AT_S, scales, live * sstride, tid, THREADS)
            for i in unroll(COLUMNS):
                for j in unroll(2):
                    ss[2 * i + j] = uint32(sm + AT_S + min(8 * i + 2 * t + j, live - 1) * sstride)
        if Q8:
            sync_threads()
        stage = int32(0)
        phase = int32(0)
        turn = int32(0)
        while tile < tiles:
            acc = regs(COLUMNS, (0.0, 0.0, 0.0, 0.0))
            c = part
            nth = int32(0)
            while c < chunks:
                if staged:
                    mbarrier_wait(uint32(sm + AT_XBAR + 8 * (nth >> several)), uint32(0))
                    nth = int32(nth + 1)
                mbarrier_wait(uint32(bar + 8 * stage), uint32(phase))
                at = uint32(ring + stage * SIZE)
                x_at = int64(c * (chunk * XBYTES)) if staged else own + c * (chunk * XBYTES)
                if Q8:
                    fp8_chunk(acc, at, COLUMNS, GROUPS32, lane, xs, x_at, ss, c * GROUPS32, staged)
                elif WEIGHTS_BF16:
                    bf16_chunk(acc, at, COLUMNS, GROUPS32, lane, xs, x_at, staged)
                else:
                    fp8_chunk_f16(acc, at, COLUMNS, GROUPS32, lane, xs, x_at, staged)
                sync_warp()
                if ahead < tiles and lane == 0:
                    fetch(ring, bar, stage, SIZE, weights + (int64(ahead) * chunks + following) * SIZE, policy)
                following = int32(following + team)
                if following >= chunks:
                    following = part
                    ahead = int32(ahead + step)
                stage = int32(stage + 1)
                if stage == stages:
                    stage = int32(0)
                    phase = int32(phase ^ 1)
                c = int32(c + team)
            crew_sums = uint32(sm + AT_SUM + (turn * warps + crew * team) * SUM)
            if team > 1:
                sums = uint32(crew_sums + lane * 4)
                if part > 0:
                    for i in unroll(COLUMNS):
                        for j in unroll(4):
                            sts_f32(uint32(sums + part * SUM + (4 * i + j) * 128), acc[i][j])
                sync_named(uint32(1 + crew), uint32(32 * team))
                if part == 0:
                    for p in range(1, team):
                        for i in unroll(COLUMNS):
                            acc[i] = (
                                acc[i][0] + lds_f32(uint32(sums + p * SUM + i * 512)),
                                acc[i][1] + lds_f32(uint32(sums + p * SUM + i * 512 + 128)),
                                acc[i][2] + lds_f32(uint32(sums + p * SUM + i * 512 + 256)),
                                acc[i][3] + lds_f32(uint32(sums + p * SUM + i * 512 + 384)),
                            )
            turn = int32(turn ^ 1)
            if GROUPED:
                if part == 0:
                    other = uint32(sm + AT_SUM + ((turn ^ 1) * warps + (crew ^ 1) * team) * SUM)
                    store_q8(acc, COLUMNS, crew_sums, other, uint32(15 - (crew >> 1)), lane, y, scales,
                             int32(n * groups), int32(group * n + tile * 16))  # fmt: skip
            elif part == 0:
                out = y + (2 * t * outputs + group * n + tile * 16 + g) * YBYTES
                for j in unroll(4):
                    if tile * 16 + g + 8 * (j // 2) < n:
                        for i in unroll(COLUMNS):
                            to = out + ((8 * i + j % 2) * outputs + 8 * (j // 2)) * YBYTES
                            if WEIGHTS_BF16:
                                stg_f32(to, acc[i][j])
                            else:
                                stg_u16(to, bf16x2(acc[i][j], acc[i][j]))
            tile = int32(tile + step)
        if staged and warp == 0:  # no copy is on its way when the block ends
            for p in unroll(PIECES):
                if p * piece < width:
                    mbarrier_wait(uint32(sm + AT_XBAR + 8 * p), uint32(0))

    return project


def shared_of(kind: str, rows: int, chunk: int, warps: int, stages: int, staged: bool, k: int) -> int:
    """Shared memory of a block for weights of K columns."""
    at = Layout.of(rows, chunk_bytes_of(kind, chunk), warps, stages).activations(kind, k, rows)
    return at + (rows * row_stride(kind, k) if staged else 0)
