"""The read ceiling: what a kernel that only reads reaches on this card, in the run that measures the others.

Every thread walks the buffer in 16-byte loads, eight in flight, neighbours side by side; the exclusive-or of all words
is stored where it equals a number that random data does not give, so that no load can be dropped. Bytes: all of them.
"""

from __future__ import annotations

import numpy as np

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, int64, kernel, regs, s64, uint32, unroll
from dsuf.kernels.ptx.memory import ldw_u32x4, stg_u32
from dsuf.kernels.ptx.sync import block_count, block_index, thread_index

THREADS, IN_FLIGHT = 256, 8
PIECE = THREADS * IN_FLIGHT * 16  # bytes that a block reads at a time
NEVER = 0x5EED1234


def make() -> Kernel:
    """Reads `pieces` pieces of PIECE bytes."""

    @kernel(threads=THREADS, grid=(132 * 8,), name="read_ceiling")
    def read(source: s64, pieces: s64, out: s64) -> None:
        tid = thread_index()
        found = uint32(0)
        piece = int64(block_index())
        while piece < pieces:
            v = regs(IN_FLIGHT)
            for i in unroll(IN_FLIGHT):
                v[i] = ldw_u32x4(source + piece * PIECE + (i * THREADS + tid) * 16)
            for i in unroll(IN_FLIGHT):
                found = uint32(found ^ v[i][0] ^ v[i][1] ^ v[i][2] ^ v[i][3])
            piece = piece + block_count()
        if found == uint32(NEVER):
            stg_u32(out + int64(tid) * 4, found)

    return read


def entries(width: Width) -> list[Entry]:
    """One kernel, for the real chips."""
    if width.label != "v41":
        return []
    size = 1 << 30
    return [Entry("ceiling.read", make, {}, width.chips, np.bitwise_xor.reduce, size, size // 4)]
