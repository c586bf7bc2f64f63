"""A sequence's windows and Engram history as the bytes of a snapshot (layout.py), and back.

    save      row w of layer l in a snapshot = ring slot (position - W + w) mod ring, zero where no later token sees it:
              before position 0 and, from layer `decoder` on, before decoder_start
    restore   the same rows from a snapshot into their ring slots; rows that are not live are left alone

windows: the slot's first ring; a ring is `ring` rows of `pitch` bytes, of which the first `size` count. snapshot rows
[layers, W, size] one after the other. history int32 [kept], a power of two, of this slot; the snapshot holds the class
ids of the last `ids` tokens, oldest first, -1 before position 0. decoder_start is written by the host.

Reference: dsuf.layout.SnapshotLayout, as dsuf.model.reference.snapshot fills it. Bytes: 2 layers W size (5.8 MB at full
width). A warp a row, two bytes a lane, because a row of a small checkpoint is no multiple of four. grid (ceil(W / 4),
layers).
"""

from __future__ import annotations

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, int32, int64, kernel, s32, s64, uint32
from dsuf.kernels.ptx.memory import ldg_u16, ldg_u32, stg_u16, stg_u32
from dsuf.kernels.ptx.sync import (
    block_index,
    block_index_y,
    let_next_kernel_start,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.layout import BLOCKED, SnapshotLayout

ROWS = 4  # warps of a block


def make(*, save: bool) -> Kernel:
    """One kernel a direction; every size is an argument."""
    NOBODY = BLOCKED & 0xFFFFFFFF

    @kernel(threads=32 * ROWS, grid=(1,), name="state_save" if save else "state_restore")
    def move(
        windows: s64, ring: s32, pitch: s32, size: s32, rows: s32, position: s32, decoder: s32, decoder_start: s32,
        history: s64, kept: s32, ids: s32, snapshot: s64, snapshot_history: s64,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        layer = int32(block_index_y())
        row = int32(block_index() * ROWS + (tid >> 5))
        wait_for_previous_kernel()
        let_next_kernel_start()
        place = int32(position - rows + row)
        oldest = int32(decoder_start if layer >= decoder else 0)
        live = place >= 0 and place >= oldest
        if row < rows:
            there = snapshot + (int64(layer) * rows + row) * size
            here = windows + (int64(layer) * ring + (place + ring) % ring) * pitch
            at = int32(2 * lane)
            while at < size:
                if save:
                    value = uint32(0)
                    if live:
                        value = ldg_u16(here + at)
                    stg_u16(there + at, value)
                elif live:
                    stg_u16(here + at, ldg_u16(there + at))
                at = int32(at + 64)
        if block_index() == 0 and layer == 0 and tid < ids:
            token = int32(position - ids + tid)
            slot = history + int64(token & (kept - 1)) * 4
            if save:
                known = uint32(NOBODY)
                if token >= 0:
                    known = ldg_u32(slot)
                stg_u32(snapshot_history + 4 * tid, known)
            elif token >= 0:
                stg_u32(slot, ldg_u32(snapshot_history + 4 * tid))

    return move


def entries(width: Width) -> list[Entry]:
    """Both directions; neither has a width."""
    if width.label != "v41":
        return []
    spec = width.spec
    layers = spec.num_hidden_layers + spec.num_nextn_predict_layers
    nbytes = 2 * layers * spec.sliding_window * (spec.head_dim + spec.head_dim // 32)
    return [
        Entry(f"state.{name}", make, {"save": name == "save"}, width.chips, SnapshotLayout.of, nbytes, 0)
        for name in ("save", "restore")
    ]
