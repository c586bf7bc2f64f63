"""Drafts of a benchmark: a recorded continuation, each token kept with a given probability, in place of the model's.

A checkpoint with random weights accepts next to nothing. To measure steps at an acceptance of real text the drafts of
a row at position p become recorded[p + 1], or another token with probability 1 - keep (Philox at the position under
`seed`); everything else of the step runs as it is.

recorded int32 [slots, pitch], index 0 the token at position `first` of its sequence; drafts int32 by draft row; keep as
the largest 32-bit word that keeps. Positions outside the recording stay as the model drafted them. Reference: none, it
is no part of the model. A thread a row.
"""

from __future__ import annotations

import numpy as np

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.draw import philox
from dsuf.kernels.lang import Kernel, int32, int64, kernel, s32, s64, u32, uint32
from dsuf.kernels.ptx.memory import ldg_u32, stg_u32
from dsuf.kernels.ptx.sync import let_next_kernel_start, thread_index, wait_for_previous_kernel
from dsuf.kernels.rows import get
from dsuf.kernels.slots import MOST_ROWS, T_POSITION, T_SEQUENCE


def make() -> Kernel:
    """One block of 64 threads."""

    @kernel(threads=64, name="inject")
    def inject(
        table: s64, drafts: s64, recorded: s64, pitch: s32, first: s32, length: s32, seed: s32, keep: u32,
        vocabulary: s32,
    ) -> None:  # fmt: skip
        row = int32(thread_index())
        wait_for_previous_kernel()
        let_next_kernel_start()
        if row < MOST_ROWS:
            slot = get(table, T_SEQUENCE, row)
            place = int32(get(table, T_POSITION, row) + 1)
            at = int32(place - first)
            if slot >= 0 and at >= 0 and at < length:
                token = int32(ldg_u32(recorded + (int64(slot) * pitch + at) * 4))
                word = philox(uint32(seed), uint32(slot), uint32(place), uint32(0))
                other = int32(token + 1 if token + 1 < vocabulary else 0)
                stg_u32(drafts + int64(row) * 4, uint32(token if word <= keep else other))

    return inject


def entries(width: Width) -> list[Entry]:
    """One kernel, without a width."""
    if width.label != "v41":
        return []
    return [Entry("inject", make, {}, width.chips, np.take, 12 * MOST_ROWS, 0)]
