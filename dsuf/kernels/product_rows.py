"""Activations into product order (gemm.py), where no kernel before writes them so: decoded Q8 rows.

    out[r, 32 g + 16 m + 8 h + 2 t + j] = x[r, 32 g + 8 t + 4 m + 2 h + j]

codes e4m3 [rows, K] with scales ue8m0 [rows, scale_stride(K)]; out bf16 [rows, K]. K a multiple of 32. A thread makes
16 bytes. Any grid will do. Reference: dsuf.ops.qdq.q8_decode. Bytes: 3 K a row.
"""

from __future__ import annotations

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.ptx.convert import bf16x2, e4m3x4_f16, f16_high, f16_low, ue8m0
from dsuf.kernels.ptx.memory import ldg_u8, ldg_u16, stg_u32x4
from dsuf.kernels.ptx.op import ALL_CHIPS
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    let_next_kernel_start,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.ops.qdq import q8_decode

THREADS = 256
BLOCKS = 132 * 8


def make_q8() -> Kernel:
    """From codes and scales."""

    @kernel(threads=THREADS, grid=(BLOCKS,), name="expand_q8")
    def expand(codes: s64, scales: s64, out: s64, rows: s32, k: s32) -> None:
        tid = int32(thread_index())
        wait_for_previous_kernel()
        let_next_kernel_start()
        stride = int32(((k >> 5) + 3) & ~3)
        for row in range(block_index(), rows, block_count()):
            line = codes + int64(row) * k
            for piece in range(tid, k >> 3, THREADS):
                at = line + ((piece >> 2) * 32 + (piece & 3) * 2)
                scale = ue8m0[0](ldg_u8(scales + (int64(row) * stride + (piece >> 2))))
                pair = regs(4)
                for t in unroll(4):
                    pair[t] = ldg_u16(at + 8 * t)
                low = e4m3x4_f16(uint32(pair[0] | (pair[1] << 16)))
                high = e4m3x4_f16(uint32(pair[2] | (pair[3] << 16)))
                stg_u32x4(
                    out + (int64(row) * k + piece * 8) * 2,
                    (
                        bf16x2(f16_high(low[0]) * scale, f16_low(low[0]) * scale),
                        bf16x2(f16_high(low[1]) * scale, f16_low(low[1]) * scale),
                        bf16x2(f16_high(high[0]) * scale, f16_low(high[0]) * scale),
                        bf16x2(f16_high(high[1]) * scale, f16_low(high[1]) * scale),
                    ),
                )

    return expand


def entries(width: Width) -> list[Entry]:
    """One kernel for all widths; the floor is that of 4,096 rows of wo_b's input."""
    if width.label != "v41":
        return []
    size = 4096 * width.spec.o_groups * width.spec.o_lora_rank
    return [Entry("dense.expand_q8", make_q8, {}, ALL_CHIPS, q8_decode, 3 * size + size // 32, 4 * size)]
