"""Dense FP8 projections of a decode step: wq_a + wkv, wq_b, wo_b, shared down, Engram wkv, main_proj; and grouped wo_a.

    y[r, n] = sum_k x[r, k] W[n, k],  W e4m3 with one ue8m0 per 32x32 (pack.pack_fp8)

x is quantised (codes e4m3 [rows, K], scales ue8m0 [rows, scale_stride(K)]) or, for wo_a, bf16 [rows, groups, K] with a
block-diagonal weight [groups * N, K]. y bf16 [rows, groups * N]. Buffers hold whole tiles of `rows` rows; the first
`live` of them are computed, and what the others get means nothing.

Reference: dsuf.ops.product.product and grouped_product on dequantised operands.
Bytes: groups N K (1 + 1/256) of weights a launch; x and y are under 2 % of it. Operations: 2 rows groups N K.

A block stages the activations it needs, then each warp walks its tiles alone. A `team` of warps shares a tile along K,
each taking every team-th chunk; their sums meet in shared memory in warp order, whatever the number of rows.

    hand-off            who writes      who waits         reused
    ring stage          bulk copy       its warp          once every lane of the warp has loaded it (sync_warp)
    partial sums [2]    warps of team   warp 0 of team    two tiles later, behind the next tile's team barrier
"""

from __future__ import annotations

from dataclasses import dataclass

from dsuf.errors import ConfigError
from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.pack import chunk_width, fp8_chunk_bytes
from dsuf.kernels.ptx.convert import bf16x2
from dsuf.kernels.ptx.copy import fence_async, mbarrier_init, mbarrier_wait, policy_evict_first
from dsuf.kernels.ptx.memory import lds_f32, shared_base, stg_u16, sts_f32
from dsuf.kernels.ptx.sync import (
    block_index,
    let_next_kernel_start,
    sync_named,
    sync_threads,
    sync_warp,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.stream import (
    clear_words,
    fetch,
    fp8_chunk,
    fp8_chunk_bf16,
    scale_stride,
    shared_stride,
    stage_rows,
    stage_words,
)
from dsuf.ops.product import grouped_product, product
from dsuf.spec import Spec

STAGED = 132 * 1024  # activations up to this size are copied to shared memory, larger ones are read through L1


@dataclass(frozen=True)
class Layout:
    """Shared memory of a block: activations, their scales, rings, barriers, partial sums; offsets in bytes."""

    staged: bool
    x_stride: int
    s_stride: int
    chunk: int
    sum: int  # bytes of a warp's partial sums
    scales: int
    ring: int
    barriers: int
    sums: int
    size: int

    @classmethod
    def of(cls, k: int, rows: int, kind: str, warps: int, team: int, stages: int) -> Layout:
        """Lay them one after the other."""
        x_stride = shared_stride(k * (2 if kind == "bf16" else 1))
        s_stride = 0 if kind == "bf16" else scale_stride(k)
        staged, chunk, partial = rows * x_stride <= STAGED, fp8_chunk_bytes(k), rows * 16 * 4
        scales = rows * x_stride if staged else 0
        ring = scales + rows * s_stride
        barriers = ring + warps * stages * chunk
        sums = barriers + warps * stages * 8
        size = sums + (2 * warps * partial if team > 1 else 0)
        return cls(staged, x_stride, s_stride, chunk, partial, scales, ring, barriers, sums, size)


def make(
    *, n: int, k: int, rows: int, kind: str, groups: int, warps: int, team: int, stages: int, blocks: int
) -> Kernel:  # fmt: skip
    """rows a multiple of 8 up to 48; kind "q8" or "bf16"; blocks a multiple of groups; warps a multiple of team."""
    WIDTH, GROUPS32 = chunk_width(k), chunk_width(k) // 32
    CHUNKS, TILES, COLUMNS = k // WIDTH, n // 16, rows // 8
    BF16 = kind == "bf16"
    LAYOUT = Layout.of(k, rows, kind, warps, team, stages)
    SIZE, SUM, XSTRIDE, SSTRIDE, STAGE_X = LAYOUT.chunk, LAYOUT.sum, LAYOUT.x_stride, LAYOUT.s_stride, LAYOUT.staged
    AT_S, AT_RING, AT_BAR, AT_SUM = LAYOUT.scales, LAYOUT.ring, LAYOUT.barriers, LAYOUT.sums
    THREADS, TEAMS = warps * 32, warps // team
    STEP = blocks // groups * TEAMS
    XBYTES = 2 if BF16 else 1
    XPITCH, NOUT = groups * k * XBYTES, groups * n

    @kernel(threads=THREADS, grid=(blocks,), shared=LAYOUT.size, name=f"project_{kind}_{groups}x{n}x{k}_r{rows}")
    def project(w: s64, x: s64, sx: s64, y: s64, live: s32) -> None:
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        g = int32(lane >> 2)
        t = int32(lane & 3)
        crew = int32(warp // team)
        part = int32(warp - crew * team)
        block = int32(block_index())
        group = int32(block % groups)
        sm = shared_base()
        bar = uint32(sm + AT_BAR + warp * (stages * 8))
        ring = uint32(sm + AT_RING + warp * (stages * SIZE))
        if lane == 0:
            for s in unroll(stages):
                mbarrier_init(uint32(bar + 8 * s), uint32(1))
            fence_async()
        sync_warp()
        # weights are asked for before the wait: they do not depend on the kernel before
        policy = policy_evict_first()
        weights = w + int64(group) * (TILES * CHUNKS * SIZE)
        tile = int32(block // groups * TEAMS + crew)
        ahead = tile  # tile and chunk that are fetched next
        chunk = part
        for s in unroll(stages):
            if ahead < TILES and lane == 0:
                fetch(ring, bar, s, SIZE, weights + (int64(ahead) * CHUNKS + chunk) * SIZE, policy)
            chunk = int32(chunk + team)
            if chunk >= CHUNKS:
                chunk = part
                ahead = int32(ahead + STEP)
        wait_for_previous_kernel()
        let_next_kernel_start()
        if STAGE_X:
            stage_rows(sm, x + int64(group) * (k * XBYTES), live, k * XBYTES, XPITCH, XSTRIDE, tid, THREADS)
            clear_words(int32(sm + live * XSTRIDE), int32(sm + rows * XSTRIDE), tid, THREADS)
        if not BF16:
            stage_words(sm + AT_S, sx, live * SSTRIDE, tid, THREADS)
            clear_words(int32(sm + AT_S + live * SSTRIDE), int32(sm + AT_S + rows * SSTRIDE), tid, THREADS)
        sync_threads()
        scales = uint32(sm + AT_S + 2 * t * SSTRIDE)
        stage = int32(0)
        phase = int32(0)
        turn = int32(0)
        while tile < TILES:
            acc = regs(COLUMNS, (0.0, 0.0, 0.0, 0.0))
            c = part
            while c < CHUNKS:
                mbarrier_wait(uint32(bar + 8 * stage), uint32(phase))
                at = uint32(ring + stage * SIZE)
                if STAGE_X:
                    xa = int64(sm + g * XSTRIDE + (t * 8 + c * WIDTH) * XBYTES)
                else:
                    xa = x + (int64(g) * XPITCH + (int64(group) * k + t * 8 + c * WIDTH) * XBYTES)
                if BF16:
                    fp8_chunk_bf16(acc, at, COLUMNS, GROUPS32, lane, xa, 8 * (XSTRIDE if STAGE_X else XPITCH), STAGE_X)
                else:
                    fp8_chunk(acc, at, COLUMNS, GROUPS32, lane, xa, 8 * (XSTRIDE if STAGE_X else XPITCH),
                              uint32(scales + c * GROUPS32), SSTRIDE, 8 * SSTRIDE, STAGE_X)  # fmt: skip
                sync_warp()
                if ahead < TILES and lane == 0:
                    fetch(ring, bar, stage, SIZE, weights + (int64(ahead) * CHUNKS + chunk) * SIZE, policy)
                chunk = int32(chunk + team)
                if chunk >= CHUNKS:
                    chunk = part
                    ahead = int32(ahead + STEP)
                stage = int32(stage + 1)
                if stage == stages:
                    stage = int32(0)
                    phase = int32(phase ^ 1)
                c = int32(c + team)
            if team > 1:
                sums = uint32(sm + AT_SUM + (turn * warps + crew * team) * SUM + lane * 4)
                if part > 0:
                    for i in unroll(COLUMNS):
                        for j in unroll(4):
                            sts_f32(uint32(sums + part * SUM + (4 * i + j) * 128), acc[i][j])
                sync_named(uint32(1 + crew), uint32(32 * team))
                if part == 0:
                    for p in unroll(1, team):
                        for i in unroll(COLUMNS):
                            acc[i] = (
                                acc[i][0] + lds_f32(uint32(sums + p * SUM + i * 512)),
                                acc[i][1] + lds_f32(uint32(sums + p * SUM + i * 512 + 128)),
                                acc[i][2] + lds_f32(uint32(sums + p * SUM + i * 512 + 256)),
                                acc[i][3] + lds_f32(uint32(sums + p * SUM + i * 512 + 384)),
                            )
                turn = int32(turn ^ 1)
            if part == 0:
                out = y + ((int64(2 * t) * NOUT + group * n) + tile * 16 + g) * 2
                for i in unroll(COLUMNS):
                    for j in unroll(4):
                        word = bf16x2(acc[i][j], acc[i][j])
                        stg_u16(out + ((8 * i + j % 2) * NOUT + 8 * (j // 2)) * 2, word)
            tile = int32(tile + STEP)

    return project


# By rule, unmeasured, one for all chips. `team` has as many warps a tile as it takes to occupy 132 SMs x 8 warps; it
# orders sums, so it follows from the weight's shape alone. The first of LAYOUTS (warps, stages) that fits is taken: two
# stages beat more in the fp4 probe, and accumulators of many rows need the registers of half as many warps.
SM_COUNT = 132
LAYOUTS = ((16, 2), (8, 4), (8, 3), (8, 2))
SHARED_LIMIT = 227 * 1024


def tuned(n: int, k: int, rows: int, kind: str, groups: int) -> dict[str, int]:
    """Warps, team, stages and blocks of a shape."""
    tiles, chunks = groups * n // 16, k // chunk_width(k)
    team = 1
    while tiles * team < SM_COUNT * 8 and 2 * team <= min(8, chunks):
        team *= 2
    for warps, stages in LAYOUTS:
        if warps == 16 and rows > 8:
            continue
        if Layout.of(k, rows, kind, warps, team, stages).size <= SHARED_LIMIT:
            blocks = min(SM_COUNT // groups * groups, -(-tiles * team // warps // groups) * groups)
            return {"warps": warps, "team": team, "stages": stages, "blocks": blocks}
    raise ConfigError(f"a projection of {rows} rows of {k} columns needs more than {SHARED_LIMIT} bytes of a block")


def projections(spec: Spec) -> dict[str, tuple[int, int, str, int]]:
    """(N, K, kind, groups) of each projection of a checkpoint."""
    heads, q = spec.num_attention_heads * spec.head_dim, spec.q_lora_rank
    d, inner, o = spec.hidden_size, spec.moe_intermediate_size, spec.o_groups * spec.o_lora_rank
    engram = spec.engram_columns * spec.engram_head_dim
    return {
        "wq_a_wkv": (q + spec.head_dim, d, "q8", 1),
        "wq_b": (heads, q, "q8", 1),
        "index_wq_b": (spec.index_n_heads * spec.index_head_dim, q, "q8", 1),
        "wo_a": (spec.o_lora_rank, heads // spec.o_groups, "bf16", spec.o_groups),
        "wo_b": (d, o, "q8", 1),
        "shared_down": (d, inner, "q8", 1),
        "engram_wkv": ((spec.hc_mult + 1) * d, engram, "q8", 1),
        "main_proj": (d, len(spec.dspark_target_layer_ids) * d, "q8", 1),
    }


def entries(width: Width) -> list[Entry]:
    """Catalogue entries of a checkpoint's projections."""
    found = []
    for name, (n, k, kind, groups) in projections(width.spec).items():
        for rows in width.row_tiles:
            shape = {"n": n, "k": k, "rows": rows, "kind": kind, "groups": groups, **tuned(n, k, rows, kind, groups)}
            reference = grouped_product if groups > 1 else product
            nbytes = groups * n * k + groups * n * k // 1024 + rows * groups * (k + 2 * n)
            label = f"project.{name}/{width.label}/r{rows}"
            found.append(Entry(label, make, shape, width.chips, reference, nbytes, 2 * rows * groups * n * k))
    return found
