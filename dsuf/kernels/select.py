"""The largest k of each row's scores, exactly, lowest index among equals, as ascending indices.

    k largest of scores[row, 0 .. n)           n = what the row has of entries, blocks or mapped entries
    out int32 [rows, k], ascending; number int32 [rows] = min(k, n)

Radix selection: four passes over eight bits each find the k-th largest score, bit for bit, and how many equal to it are
taken; a last pass writes indices in order. Scores are compared as the unsigned numbers of the same order. `kind`:

    entries   n = (position + 1) / ratio                      indices are entries
    blocks    n = blocks of 8 that hold them                  indices are blocks (the candidate source's best blocks)
    mapped    n = 8 number_in, less what the last block       scores in the order of candidates int32 [rows, kept], of
              has past the visible entries                    which number_in are used; indices are mapped to entries

Reference: dsuf.ops.index.largest. Bytes: five readings of n scores, from L2 but for the first. One block a row: enough
for 20,000 scores; a million want several blocks a row and a histogram in global memory.

    hand-off                 who writes        who waits        reused
    histogram, warp counts   the block         the block        next pass or round, after its barrier
"""

from __future__ import annotations

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.index import BLOCK
from dsuf.kernels.lang import Kernel, int32, int64, kernel, s32, s64, uint32, unroll
from dsuf.kernels.latents import MOST_ROWS
from dsuf.kernels.ptx.convert import popc
from dsuf.kernels.ptx.memory import (
    atom_add_shared,
    ldg_f32,
    ldg_u32,
    lds_u32,
    shared_base,
    stg_u32,
    sts_u32,
)
from dsuf.kernels.ptx.sync import (
    ballot,
    block_index,
    let_next_kernel_start,
    shuffle_up_u32,
    sync_threads,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.route import ordered
from dsuf.ops.index import largest

BINS, WARPS = 256, 32
THREADS = 32 * WARPS
AT_SUMS, AT_FOUND, AT_COUNT = 4 * BINS, 4 * BINS + 4 * WARPS, 4 * BINS + 4 * WARPS + 16
SHARED = AT_COUNT + 8 * WARPS


def make(*, kind: str) -> Kernel:
    """kind: entries, blocks or mapped. k and the ratio are arguments, so one kernel serves every width."""
    MAPPED, BLOCKS = kind == "mapped", kind == "blocks"

    @kernel(threads=THREADS, grid=(MOST_ROWS,), shared=SHARED, name=f"select_{kind}")
    def select(
        scores: s64, pitch: s64, sequence: s64, position: s64, candidates: s64, kept: s32, number_in: s64, out: s64,
        number: s64, k: s32, ratio: s32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        row = int64(block_index())
        sm = shared_base()
        wait_for_previous_kernel()
        let_next_kernel_start()
        active = int32(ldg_u32(sequence + row * 4)) >= 0
        n = int32((int32(ldg_u32(position + row * 4)) + 1) // ratio)
        if BLOCKS:
            n = int32((n + BLOCK - 1) // BLOCK)
        if MAPPED:
            used = int32(ldg_u32(number_in + row * 4))
            newest = int32(ldg_u32(candidates + (row * kept + max(used - 1, 0)) * 4))
            n = int32(max(used - 1, 0) * BLOCK + min(n - newest * BLOCK, BLOCK) * min(used, 1))
        n = int32(n if active else 0)
        line = scores + row * pitch * 4
        threshold = uint32(0)  # the k-th largest, found byte by byte
        wanted = int32(min(k, n))  # of those that share the bytes found so far
        if n > k:
            for shift in unroll(24, -8, -8):
                if tid < BINS:
                    sts_u32(uint32(sm + 4 * tid), uint32(0))
                sync_threads()
                for i in range(tid, n, THREADS):
                    key = ordered(ldg_f32(line + int64(i) * 4))
                    if shift == 24:
                        atom_add_shared(uint32(sm + (key >> 24) * 4), uint32(1))
                    else:
                        if (key >> (shift + 8)) == (threshold >> (shift + 8)):
                            atom_add_shared(uint32(sm + ((key >> shift) & 255) * 4), uint32(1))
                sync_threads()
                # bins from the top down: thread b holds bin 255 - b; above = how many stand in higher bins
                mine = uint32(0)
                if tid < BINS:
                    mine = lds_u32(uint32(sm + 4 * (BINS - 1 - tid)))
                total = mine
                for j in unroll(5):
                    other = shuffle_up_u32(total, uint32(1 << j))
                    total = uint32(total + (other if lane >= 1 << j else 0))
                if lane == 31:
                    sts_u32(uint32(sm + AT_SUMS + 4 * warp), total)
                sync_threads()
                above = int32(total - mine)
                for w in range(warp):
                    above = int32(above + int32(lds_u32(uint32(sm + AT_SUMS + 4 * w))))
                if tid < BINS and above < wanted and above + int32(mine) >= wanted:
                    sts_u32(uint32(sm + AT_FOUND), uint32(BINS - 1 - tid))
                    sts_u32(uint32(sm + AT_FOUND + 4), uint32(wanted - above))
                sync_threads()
                threshold = uint32(threshold | lds_u32(uint32(sm + AT_FOUND)) << shift)
                wanted = int32(lds_u32(uint32(sm + AT_FOUND + 4)))
        # indices in order: all above the threshold, and the first `wanted` that equal it
        greater_before = int32(0)
        equal_before = int32(0)
        for start in range(0, n, THREADS):
            i = int32(start + tid)
            key = uint32(0)
            if i < n:
                key = ordered(ldg_f32(line + int64(i) * 4))
            greater = i < n and (n <= k or key > threshold)
            equal = i < n and n > k and key == threshold
            greater_votes = ballot(uint32(1 if greater else 0))
            equal_votes = ballot(uint32(1 if equal else 0))
            sync_threads()
            if lane == 0:
                sts_u32(uint32(sm + AT_COUNT + 8 * warp), popc(greater_votes))
                sts_u32(uint32(sm + AT_COUNT + 8 * warp + 4), popc(equal_votes))
            sync_threads()
            below = uint32((uint32(1) << lane) - 1)
            mine_greater = int32(greater_before + int32(popc(greater_votes & below)))
            mine_equal = int32(equal_before + int32(popc(equal_votes & below)))
            for w in range(WARPS):
                g = int32(lds_u32(uint32(sm + AT_COUNT + 8 * w)))
                e = int32(lds_u32(uint32(sm + AT_COUNT + 8 * w + 4)))
                mine_greater = int32(mine_greater + (g if w < warp else 0))
                mine_equal = int32(mine_equal + (e if w < warp else 0))
                greater_before = int32(greater_before + g)
                equal_before = int32(equal_before + e)
            if greater or (equal and mine_equal < wanted):
                index = i
                if MAPPED:
                    block = int32(ldg_u32(candidates + (row * kept + i // BLOCK) * 4))
                    index = int32(block * BLOCK + i % BLOCK)
                place = int32(mine_greater + (min(mine_equal, wanted) if n > k else 0))
                stg_u32(out + (row * k + place) * 4, uint32(index))
        if tid == 0:
            stg_u32(number + row * 4, uint32(min(n, k)))

    return select


def entries(width: Width) -> list[Entry]:
    """Selections of entries, candidate blocks, and entries inside candidates; none of them has a width."""
    if width.label != "v41":
        return []
    ahead = 16384  # scores that the floor is stated for
    kinds = ("entries", "blocks", "mapped")
    return [Entry(f"select.{k}", make, {"kind": k}, width.chips, largest, 4 * ahead, 5 * ahead) for k in kinds]
