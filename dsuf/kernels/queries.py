"""Queries of a layer from its latents, in one launch: norm, quantise, multiply, and the window rows beside that.

    c = q8(rms(y[:Q]; q_norm))            of every row, in every block (latents.py)
    q = bf16(c wq_b^T);  index_q = bf16(c index_wq_b^T), where the layer selects (index_n > 0)
    k = q8(rope(rms(y[Q:]; kv_norm)))     into its ring, by one more warp of a block

y bf16 [rows, Q + d]; q [rows, n] and index_q [rows, index_n] bf16 hold a whole tile of rows, the first `live` of which
are computed, the others get copies. wq_b and index_wq_b are pack_fp8 of [n, Q] and [index_n, Q], both multiples of 16
rows. Row table, rings and their reference: latents.py. Reference of the product: dsuf.ops.product.product.
Bytes: the weights, 42 MB; 3 Q a row from L2 for each block. Operations: 2 rows (n + index_n) Q.

The product is that of project_kernel.py without teams: K = Q is short, so a tile is one warp's, and q has tiles for
all. Tiles go round the blocks before they go round a block's warps, so that an uneven rest is spread over all SMs.

    hand-off            who writes      who waits         reused
    ring stage          bulk copy       its warp          once every lane of the warp has loaded it (sync_warp)
    codes, scales       product warps   product warps     never
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsuf.kernels.catalogue import Entry, Width, tile_of
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.latents import load_pieces, pieces, query_row, window_row
from dsuf.kernels.pack import FP8_SCALES, ROWS, chunk_width
from dsuf.kernels.ptx.convert import bf16x2
from dsuf.kernels.ptx.copy import fence_async, mbarrier_init, mbarrier_wait, policy_evict_first
from dsuf.kernels.ptx.memory import shared_base, stg_u16
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    let_next_kernel_start,
    sync_named,
    sync_warp,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.stream import fetch, fp8_chunk, scale_stride, shared_stride
from dsuf.ops.product import product
from dsuf.spec import Spec

SM_COUNT = 132


@dataclass(frozen=True)
class Layout:
    """Shared memory of a block: rings, barriers, scales and codes of the rows; offsets in bytes."""

    barriers: int
    scales: int
    codes: int
    size: int

    @classmethod
    def of(cls, q: int, rows: int, warps: int, stages: int) -> Layout:
        """Lay them one after the other; the ring of a warp begins at warp * stages * chunk bytes."""
        barriers = warps * stages * (chunk_width(q) * ROWS + FP8_SCALES)
        scales = barriers + -(-warps * stages * 8 // 16) * 16
        codes = scales + -(-rows * scale_stride(q) // 16) * 16
        return cls(barriers, scales, codes, codes + rows * shared_stride(q))


@inline
def ask(ring: Any, bar: Any, stage: Any, size: Any, weights: Any, own: Any, tile: Any, chunks: Any, chunk: Any,
        policy: Any) -> None:  # fmt: skip
    """Fetch a tile's chunk; tiles from `own` on are the second weight's (one lane)."""
    first = weights[0] if tile < own else weights[1]
    place = int64(tile if tile < own else tile - own) * chunks + chunk
    fetch(ring, bar, stage, size, first + place * size, policy)


def make(*, q: int, d: int, rope: int, eps: float, rows: int, warps: int, stages: int) -> Kernel:
    """rows a multiple of 8 up to 48; `warps` multiply, one more makes window rows. Any grid is right."""
    CHUNK, COLUMNS = chunk_width(q), rows // 8
    CHUNKS, GROUPS, SIZE = q // CHUNK, CHUNK // 32, CHUNK * ROWS + FP8_SCALES
    LAYOUT = Layout.of(q, rows, warps, stages)
    AT_BAR, AT_S, AT_X = LAYOUT.barriers, LAYOUT.scales, LAYOUT.codes
    STRIDE, SSTRIDE, PIECES = shared_stride(q), scale_stride(q), pieces(max(q, d))

    @kernel(threads=32 * (warps + 1), grid=(SM_COUNT,), shared=LAYOUT.size, name=f"queries_{q}_r{rows}")
    def queries(
        y: s64, q_norm: s64, kv_norm: s64, table: s64, sequence: s64, position: s64, windows: s64, pitch: s64,
        ring_slots: s32, w: s64, n: s32, out: s64, index_w: s64, index_n: s32, index_out: s64, live: s32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        sm = shared_base()
        if warp == warps:
            near = regs(4 * PIECES)
            load_pieces(near, kv_norm, d, lane)
            wait_for_previous_kernel()
            let_next_kernel_start()
            for r in range(int32(block_index()), live, int32(block_count())):
                row = int64(r)
                window_row(y + (row * (q + d) + q) * 2, kv_norm, table, sequence + row * 4, position + row * 4, windows,
                           pitch, ring_slots, d, rope, eps, lane)  # fmt: skip
        else:
            g = int32(lane >> 2)
            t = int32(lane & 3)
            bar = uint32(sm + AT_BAR + warp * (stages * 8))
            ring = uint32(sm + warp * (stages * SIZE))
            if lane == 0:
                for s in unroll(stages):
                    mbarrier_init(uint32(bar + 8 * s), uint32(1))
                fence_async()
            sync_warp()
            # weights are asked for before the wait: they do not depend on the kernel before
            policy = policy_evict_first()
            own = int32(n >> 4)  # tiles of wq_b, then those of index_wq_b
            tiles = int32(own + (index_n >> 4))
            step = int32(block_count() * warps)
            tile = int32(warp * block_count() + block_index())
            ahead = tile  # tile and chunk that are fetched next
            following = int32(0)
            for s in unroll(stages):
                if ahead < tiles and lane == 0:
                    ask(ring, bar, s, SIZE, (w, index_w), own, ahead, CHUNKS, following, policy)
                following = int32(following + 1)
                if following == CHUNKS:
                    following = int32(0)
                    ahead = int32(ahead + step)
            near = regs(4 * PIECES)  # asked for so that they are near when they are wanted
            load_pieces(near, q_norm, q, lane)
            wait_for_previous_kernel()
            let_next_kernel_start()
            for r in range(warp, live, warps):
                at_c, at_scales = uint32(sm + AT_X + r * STRIDE), uint32(sm + AT_S + r * SSTRIDE)
                query_row(y + int64(r) * (2 * (q + d)), q_norm, q, eps, at_c, at_scales, True, lane)
            xs = regs(COLUMNS)  # where row g of each column tile is for the lane; rows beyond the live repeat the last
            ss = regs(2 * COLUMNS)  # scales of rows 2t and 2t + 1
            for i in unroll(COLUMNS):
                xs[i] = uint32(sm + AT_X + min(8 * i + g, live - 1) * STRIDE + t * 8)
                for j in unroll(2):
                    ss[2 * i + j] = uint32(sm + AT_S + min(8 * i + 2 * t + j, live - 1) * SSTRIDE)
            sync_named(uint32(1), uint32(32 * warps))
            stage = int32(0)
            phase = int32(0)
            while tile < tiles:
                acc = regs(COLUMNS, (0.0, 0.0, 0.0, 0.0))
                for c in range(CHUNKS):
                    mbarrier_wait(uint32(bar + 8 * stage), uint32(phase))
                    at = uint32(ring + stage * SIZE)
                    fp8_chunk(acc, at, COLUMNS, GROUPS, lane, xs, int64(c * CHUNK), ss, c * GROUPS, True)
                    sync_warp()
                    if ahead < tiles and lane == 0:
                        ask(ring, bar, stage, SIZE, (w, index_w), own, ahead, CHUNKS, following, policy)
                    following = int32(following + 1)
                    if following == CHUNKS:
                        following = int32(0)
                        ahead = int32(ahead + step)
                    stage = int32(stage + 1)
                    if stage == stages:
                        stage = int32(0)
                        phase = int32(phase ^ 1)
                pitch_y = n if tile < own else index_n
                column = int32((tile if tile < own else tile - own) * 16 + g)
                to = (out if tile < own else index_out) + (2 * t * int64(pitch_y) + column) * 2
                for i in unroll(COLUMNS):
                    for j in unroll(4):
                        stg_u16(
                            to + ((8 * i + j % 2) * int64(pitch_y) + 8 * (j // 2)) * 2, bf16x2(acc[i][j], acc[i][j])
                        )
                tile = int32(tile + step)

    return queries


# (warps, stages) by rows, as project.TUNED; few rows' codes take little room, so rings may be deep.
TUNED = {8: (8, 4)}
MANY, SMALL = (8, 2), (4, 2)


def name_of(label: str, rows: int) -> str:
    """Catalogue name of the kernel that a step of so many rows runs on."""
    return f"queries/{label}/r{tile_of(label, rows)}"


def blocks(label: str, n: int) -> int:
    """Grid of a launch that makes n outputs."""
    return min(SM_COUNT, -(-n // ROWS // (SMALL if label == "small" else TUNED[8])[0]))


def widths(spec: Spec) -> tuple[int, int]:
    """Outputs of wq_b and of index_wq_b."""
    return spec.num_attention_heads * spec.head_dim, spec.index_n_heads * spec.index_head_dim


def entries(width: Width) -> list[Entry]:
    """One kernel a row tile, for layers with and without an index."""
    spec, found = width.spec, []
    n, q = sum(widths(spec)), spec.q_lora_rank
    for rows in width.row_tiles:
        warps, stages = SMALL if width.label == "small" else TUNED.get(rows, MANY)
        shape = {
            "q": q, "d": spec.head_dim, "rope": spec.qk_rope_head_dim, "eps": spec.rms_norm_eps, "rows": rows,
            "warps": warps, "stages": stages,
        }  # fmt: skip
        nbytes = n * q + n * q // 1024 + 2 * rows * n
        found.append(Entry(name_of(width.label, rows), make, shape, width.chips, product, nbytes, 2 * rows * n * q))
    return found
