"""Glue between the products of a prefill chunk: quantised rows in product order, the shared expert's activation, rings.

    q8        out = q8(x)                                                       input of wo_b
    swiglu    out = q8(bf16(silu(min(g, limit)) clamp(u, -limit, limit)))       input of the shared expert's w2
    move      rows of positions first .. first + count - 1 from one ring to another: slot = position mod slots

x bf16 [rows, K], y bf16 [rows, 2 I] = (g, u); out bf16, the codes' values in product order (gemm.py). Rings hold rows
of `halves` 16-bit words, `pitch` bytes apart: a window's latents, a history's class ids. A chunk works in private rings
that hold all of its rows and the window before them; these copies join them to the sequence's own.

Reference: dsuf.ops.qdq.q8, dsuf.ops.expert.swiglu. Bytes: 4 K, 6 I a row: memory decides. A thread makes eight columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.chunk_seam import put_product_order, q8_values
from dsuf.kernels.hidden import silu
from dsuf.kernels.lang import Kernel, f32, inline, int32, int64, kernel, regs, s32, s64, unroll
from dsuf.kernels.ptx.convert import bf16_high, bf16_low, fmax, fmin, round_bf16
from dsuf.kernels.ptx.memory import ldg_u16, ldg_u32x4, stg_u16
from dsuf.kernels.ptx.sync import (
    block_index,
    block_index_y,
    let_next_kernel_start,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.ops.expert import swiglu
from dsuf.ops.qdq import q8

THREADS = 256
SPAN = 8 * THREADS  # columns of a block: grid x is ceil(K / SPAN), grid y the rows


@inline
def gated(gate: Any, up: Any, limit: Any) -> Any:
    """One hidden value from its gate and up values, rounded to bf16."""
    return round_bf16(silu(fmin(gate, limit)) * fmax(fmin(up, limit), -limit))


def make_q8() -> Kernel:
    """K a multiple of 32."""

    @kernel(threads=THREADS, grid=(4, 4096), name="chunk_q8")
    def quantise(x: s64, out: s64, k: s32) -> None:
        column = int64(block_index() * SPAN + 8 * thread_index())
        row = int64(block_index_y())
        wait_for_previous_kernel()
        let_next_kernel_start()
        v = regs(8, 0.0)
        if column < k:
            w = ldg_u32x4(x + (row * k + column) * 2)
            for i in unroll(4):
                v[2 * i] = bf16_low(w[i])
                v[2 * i + 1] = bf16_high(w[i])
        word = regs(4)
        q8_values(v, word)
        if column < k:
            put_product_order(out + row * (2 * int64(k)), column, word)

    return quantise


def make_swiglu() -> Kernel:
    """I a multiple of 32."""

    @kernel(threads=THREADS, grid=(2, 4096), name="chunk_swiglu")
    def activate(y: s64, out: s64, i: s32, limit: f32) -> None:
        column = int64(block_index() * SPAN + 8 * thread_index())
        row = int64(block_index_y())
        wait_for_previous_kernel()
        let_next_kernel_start()
        v = regs(8, 0.0)
        if column < i:
            at = y + (row * (2 * int64(i)) + column) * 2
            g = ldg_u32x4(at)
            u = ldg_u32x4(at + 2 * int64(i))
            for j in unroll(4):
                v[2 * j] = gated(bf16_low(g[j]), bf16_low(u[j]), limit)
                v[2 * j + 1] = gated(bf16_high(g[j]), bf16_high(u[j]), limit)
        word = regs(4)
        q8_values(v, word)
        if column < i:
            put_product_order(out + row * (2 * int64(i)), column, word)

    return activate


def make_move() -> Kernel:
    """A block a position."""

    @kernel(threads=128, grid=(256,), name="chunk_move")
    def move(
        source: s64, source_slots: s32, target: s64, target_slots: s32, first: s32, pitch: s32, halves: s32
    ) -> None:
        position = int32(first + block_index())
        wait_for_previous_kernel()
        let_next_kernel_start()
        origin = source + int64(position % source_slots) * pitch
        goal = target + int64(position % target_slots) * pitch
        for i in range(thread_index(), halves, 128):
            stg_u16(goal + int64(i) * 2, ldg_u16(origin + int64(i) * 2))

    return move


def entries(width: Width) -> list[Entry]:
    """One of each for every width."""
    if width.label != "v41":
        return []
    spec, rows = width.spec, 1024  # that the floors are stated for
    k, i, ring = spec.o_groups * spec.o_lora_rank, spec.moe_intermediate_size, 2 * spec.sliding_window * spec.head_dim
    return [
        Entry("chunk.q8", make_q8, {}, width.chips, q8, 4 * rows * k, 0),
        Entry("chunk.swiglu", make_swiglu, {}, width.chips, swiglu, 6 * rows * i, 0),
        Entry("chunk.move", make_move, {}, width.chips, np.take, ring, 0),
    ]
