"""Dense projections of a decode step: FP8 (attention, shared expert, Engram, drafter), bf16 (router, head, compressor).

    y[r, n] = sum_k x[r, k] W[n, k]

    kind   W                                            x                                                   y
    q8     e4m3, ue8m0 per 32x32 (pack_fp8)             e4m3 [rows, K], ue8m0 [rows, scale_stride(K)]       bf16
    wo_a   the same, block-diagonal [groups * N, K]     bf16 [rows, groups, K]                              bf16
    bf16   bf16 [N, K] (pack_bf16)                      bf16 [rows, K]                                      float32

y [rows, groups * N]. Buffers hold whole tiles of `rows` rows; the first `live` of them are computed, and what the
others get means nothing.

Reference: dsuf.ops.product.product and grouped_product on dequantised operands.
Bytes: the weights, once a launch; x and y are under 2 % of them (but logits). Operations: 2 rows groups N K.

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
from dsuf.kernels.pack import BF16_CHUNK, bf16_chunk_bytes, chunk_width, fp8_chunk_bytes
from dsuf.kernels.ptx.convert import bf16x2
from dsuf.kernels.ptx.copy import fence_async, mbarrier_init, mbarrier_wait, policy_evict_first
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
from dsuf.kernels.stream import (
    bf16_chunk,
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
        x_stride = shared_stride(k if kind == "q8" else 2 * k)
        s_stride = scale_stride(k) if kind == "q8" else 0
        chunk = bf16_chunk_bytes(k) if kind == "bf16" else fp8_chunk_bytes(k)
        staged, partial = rows * x_stride <= STAGED, rows * 16 * 4
        scales = rows * x_stride if staged else 0
        ring = scales + rows * s_stride
        barriers = ring + warps * stages * chunk
        sums = barriers + warps * stages * 8
        size = sums + (2 * warps * partial if team > 1 else 0)
        return cls(staged, x_stride, s_stride, chunk, partial, scales, ring, barriers, sums, size)


def make(*, k: int, rows: int, kind: str, groups: int, warps: int, team: int, stages: int) -> Kernel:
    """rows a multiple of 8 up to 48; warps a multiple of team, which has no more warps than a tile has chunks.

    N is an argument, so that weights of one K share a kernel; the grid must be a multiple of groups.
    """
    WIDTH = chunk_width(k, BF16_CHUNK if kind == "bf16" else 256)
    CHUNKS, COLUMNS, GROUPS32 = k // WIDTH, rows // 8, WIDTH // 32
    WEIGHTS_BF16, Q8 = kind == "bf16", kind == "q8"
    LAYOUT = Layout.of(k, rows, kind, warps, team, stages)
    SIZE, SUM, XSTRIDE, SSTRIDE, STAGE_X = LAYOUT.chunk, LAYOUT.sum, LAYOUT.x_stride, LAYOUT.s_stride, LAYOUT.staged
    AT_S, AT_RING, AT_BAR, AT_SUM = LAYOUT.scales, LAYOUT.ring, LAYOUT.barriers, LAYOUT.sums
    THREADS, TEAMS = warps * 32, warps // team
    XBYTES, YBYTES = 1 if Q8 else 2, 4 if WEIGHTS_BF16 else 2
    XPITCH = groups * k * XBYTES
    XSTEP = 8 * (XSTRIDE if STAGE_X else XPITCH)

    @kernel(threads=THREADS, grid=(groups,), shared=LAYOUT.size, name=f"project_{kind}_{groups}x{k}_t{team}_r{rows}")
    def project(w: s64, x: s64, sx: s64, y: s64, live: s32, n: s32) -> None:
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        g = int32(lane >> 2)
        t = int32(lane & 3)
        crew = int32(warp // team)
        part = int32(warp - crew * team)
        block = int32(block_index())
        group = int32(block % groups)
        tiles = int32((n + 15) >> 4)
        outputs = int64(n) * groups
        step = int32(block_count() // groups * TEAMS)
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
        weights = w + int64(group) * tiles * (CHUNKS * SIZE)
        tile = int32(block // groups * TEAMS + crew)
        ahead = tile  # tile and chunk that are fetched next
        chunk = part
        for s in unroll(stages):
            if ahead < tiles and lane == 0:
                fetch(ring, bar, s, SIZE, weights + (int64(ahead) * CHUNKS + chunk) * SIZE, policy)
            chunk = int32(chunk + team)
            if chunk >= CHUNKS:
                chunk = part
                ahead = int32(ahead + step)
        wait_for_previous_kernel()
        let_next_kernel_start()
        if STAGE_X:
            stage_rows(sm, x + int64(group) * (k * XBYTES), live, k * XBYTES, XPITCH, XSTRIDE, tid, THREADS)
            clear_words(int32(sm + live * XSTRIDE), int32(sm + rows * XSTRIDE), tid, THREADS)
        if Q8:
            stage_words(sm + AT_S, sx, live * SSTRIDE, tid, THREADS)
            clear_words(int32(sm + AT_S + live * SSTRIDE), int32(sm + AT_S + rows * SSTRIDE), tid, THREADS)
        sync_threads()
        scales = uint32(sm + AT_S + 2 * t * SSTRIDE)
        stage = int32(0)
        phase = int32(0)
        turn = int32(0)
        while tile < tiles:
            acc = regs(COLUMNS, (0.0, 0.0, 0.0, 0.0))
            c = part
            while c < CHUNKS:
                mbarrier_wait(uint32(bar + 8 * stage), uint32(phase))
                at = uint32(ring + stage * SIZE)
                if STAGE_X:
                    xa = int64(sm + g * XSTRIDE + (t * 8 + c * WIDTH) * XBYTES)
                else:
                    xa = x + (int64(g) * XPITCH + (int64(group) * k + t * 8 + c * WIDTH) * XBYTES)
                if Q8:
                    fp8_chunk(acc, at, COLUMNS, GROUPS32, lane, xa, XSTEP, uint32(scales + c * GROUPS32), SSTRIDE,
                              8 * SSTRIDE, STAGE_X)  # fmt: skip
                elif WEIGHTS_BF16:
                    bf16_chunk(acc, at, COLUMNS, GROUPS32, lane, xa, XSTEP, STAGE_X)
                else:
                    fp8_chunk_bf16(acc, at, COLUMNS, GROUPS32, lane, xa, XSTEP, STAGE_X)
                sync_warp()
                if ahead < tiles and lane == 0:
                    fetch(ring, bar, stage, SIZE, weights + (int64(ahead) * CHUNKS + chunk) * SIZE, policy)
                chunk = int32(chunk + team)
                if chunk >= CHUNKS:
                    chunk = part
                    ahead = int32(ahead + step)
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

    return project


# By rule, unmeasured, one for all chips. `team` has as many warps a tile as it takes to occupy 132 SMs x 8 warps with
# the narrowest weight of a K, two chunks a warp at least; it orders sums, so it must not follow from rows. The head,
# with 8,080 tiles, does not share a kernel with the router. The first of LAYOUTS (warps, stages) that fits is taken:
# two stages beat more in the fp4 probe, and accumulators of many rows need the registers of half as many warps.
SM_COUNT = 132
LAYOUTS = ((16, 2), (8, 4), (8, 3), (8, 2))
SHARED_LIMIT = 227 * 1024
WIDE_TILES = 4096


@dataclass(frozen=True)
class Projection:
    """A weight of the model: [groups * n, k] of a kind."""

    n: int
    k: int
    kind: str
    groups: int = 1

    @property
    def tiles(self) -> int:
        """Tiles of 16 rows, all groups."""
        return self.groups * -(-self.n // 16)

    @property
    def wanted_team(self) -> int:
        """Warps that share a tile, so that the weight alone occupies the machine."""
        chunks = self.k // chunk_width(self.k, BF16_CHUNK if self.kind == "bf16" else 256)
        team = 1
        while self.tiles * team < SM_COUNT * 8 and team < 8 and chunks >= 2 * 2 * team:  # two chunks a warp at least
            team *= 2
        return team

    @property
    def kernel(self) -> str:
        """Name of the kernel that computes it, without width and rows."""
        return f"project.{self.kind}_{self.k}" + ("_wide" if self.tiles >= WIDE_TILES else "")

    def blocks(self, warps: int, team: int) -> int:
        """Grid of a launch of a kernel with so many warps a block and a team."""
        return min(SM_COUNT // self.groups, max(1, -(-self.tiles * team // warps // self.groups))) * self.groups

    def floor(self, rows: int) -> tuple[int, int]:
        """Bytes and operations of a launch."""
        weight = self.groups * self.n * self.k
        weight = weight * 2 if self.kind == "bf16" else weight + weight // 1024
        return weight + rows * self.groups * (self.k + 2 * self.n), 2 * rows * self.groups * self.n * self.k


def layout_for(k: int, rows: int, kind: str, team: int) -> dict[str, int]:
    """Warps and stages of a kernel."""
    for warps, stages in LAYOUTS:
        if (warps < 16 or rows <= 8) and Layout.of(k, rows, kind, warps, team, stages).size <= SHARED_LIMIT:
            return {"warps": warps, "stages": stages}
    raise ConfigError(f"a projection of {rows} rows of {k} columns needs more than {SHARED_LIMIT} bytes of a block")


def projections(spec: Spec) -> dict[str, Projection]:
    """The projections of a checkpoint's decode step."""
    heads, q, d = spec.num_attention_heads * spec.head_dim, spec.q_lora_rank, spec.hidden_size
    engram = spec.engram_columns * spec.engram_head_dim
    return {
        "wq_a_wkv": Projection(q + spec.head_dim, d, "q8"),
        "wq_b": Projection(heads, q, "q8"),
        "index_wq_b": Projection(spec.index_n_heads * spec.index_head_dim, q, "q8"),
        "wo_a": Projection(spec.o_lora_rank, heads // spec.o_groups, "wo_a", spec.o_groups),
        "wo_b": Projection(d, spec.o_groups * spec.o_lora_rank, "q8"),
        "shared_gate_up": Projection(2 * spec.moe_intermediate_size, d, "q8"),
        "shared_down": Projection(d, spec.moe_intermediate_size, "q8"),
        "engram_wkv": Projection((spec.hc_mult + 1) * d, engram, "q8"),
        "main_proj": Projection(d, len(spec.dspark_target_layer_ids) * d, "q8"),
        "gate": Projection(spec.n_routed_experts, d, "bf16"),
        "compressor": Projection(spec.head_dim, d, "bf16"),
        "compressor_gated": Projection(2 * spec.head_dim, d, "bf16"),
        "index_weights": Projection(spec.index_n_heads, d, "bf16"),
        "head": Projection(spec.vocab_size, d, "bf16"),
    }


def entries(width: Width) -> list[Entry]:
    """One kernel for each kind and K (and the head's) and row tile; its floor is that of its largest weight."""
    uses: dict[str, list[Projection]] = {}
    for one in projections(width.spec).values():
        uses.setdefault(one.kernel, []).append(one)
    found = []
    for name, weights in uses.items():
        one = max(weights, key=lambda w: w.n)
        team = max(w.wanted_team for w in weights)
        for rows in width.row_tiles:
            shape = {"k": one.k, "rows": rows, "kind": one.kind, "groups": one.groups, "team": team}
            shape |= layout_for(one.k, rows, one.kind, team)
            reference = grouped_product if one.groups > 1 else product
            label = f"{name}/{width.label}/r{rows}"
            found.append(Entry(label, make, shape, width.chips, reference, *one.floor(rows)))
    return found
