"""Weights into the L2 ahead of the kernel that reads them, while kernels run that leave the memory idle.

A decode layer has stretches of microseconds in which nothing is read: attention, the router, the seams. This kernel
asks for a weight before it waits for its predecessor, in pieces of PIECE bytes, a thread each, and is over at once;
what it asked for arrives while the next kernels run. Results do not depend on it. Bytes: none of its own. Reference:
none, nothing is computed.
"""

from __future__ import annotations

import numpy as np

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, int64, kernel, s64, uint32
from dsuf.kernels.ptx.copy import bulk_prefetch
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    let_next_kernel_start,
    thread_index,
    wait_for_previous_kernel,
)

PIECE = 16384
BLOCKS, THREADS = 32, 32


def make() -> Kernel:
    """`size` bytes from `address`, both multiples of 16."""

    @kernel(threads=THREADS, grid=(BLOCKS,), name="prefetch")
    def prefetch(address: s64, size: s64) -> None:
        at = int64(block_index() * THREADS + thread_index()) * PIECE
        while at < size:
            rest = int64(size - at)
            bulk_prefetch(address + at, uint32(rest if rest < PIECE else PIECE))
            at = at + int64(block_count()) * (THREADS * PIECE)
        wait_for_previous_kernel()
        let_next_kernel_start()

    return prefetch


def entries(width: Width) -> list[Entry]:
    """One kernel, for the real chips."""
    if width.label != "v41":
        return []
    return [Entry("prefetch", make, {}, width.chips, np.array, 0, 0)]
