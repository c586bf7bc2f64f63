"""Query and window latents of a layer, from one projection wq_a + wkv: norm, rope, quantise, insert into the window.

    c = rms(y[:Q]; q_norm)                       codes, scales = q8(c)         input of wq_b and of the indexer's wq_b
    k = rope(rms(y[Q:]; kv_norm), position)      row = q8(k)                   into slot position mod ring of the window

y bf16 [rows, Q + d]. A window row is d e4m3 codes, then d / 32 ue8m0 scales, as in a snapshot (layout.py), padded to 16
bytes (the real 528 need none); the ring of a layer starts at windows + sequence * pitch. Row table: sequence int32
[rows] (negative: inactive, writes no window row), position int32 [rows].
Reference: dsuf.ops.norm.rms_norm, ops.rope.rotate, ops.qdq.q8_encode. Bytes: 2 (Q + d) + Q + d a row: latency decides.

grid (rows, 2): block y = 0 makes c, 1 makes k. A thread holds four neighbouring values, eight threads a scale.
"""

from __future__ import annotations

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.ptx.convert import bf16_high, bf16_low, e4m3x2, fabs, fma, fmax, round_bf16, rsqrt_approx
from dsuf.kernels.ptx.memory import (
    ldg_u32,
    ldg_u32x2,
    lds_f32,
    shared_base,
    stg_u8,
    stg_u32,
    sts_f32,
)
from dsuf.kernels.ptx.sync import (
    block_index,
    block_index_y,
    let_next_kernel_start,
    sync_threads,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.quantise import inverse_scale, max_over, q8_exponent, sum_over
from dsuf.kernels.rope import phase, rotated
from dsuf.kernels.stream import scale_stride
from dsuf.ops.qdq import q8_encode

WARP, SCALE_LANES = (1, 2, 4, 8, 16), (1, 2, 4)
MOST_ROWS = 48


def window_row_bytes(d: int) -> int:
    """Bytes between window rows on the device."""
    return -(-(d + d // 32) // 16) * 16


def make(*, q: int, d: int, rope: int, eps: float) -> Kernel:
    """q and d multiples of 32; rope the rotated tail of d; the slots of a window are an argument, `ring`."""
    THREADS = -(-max(q, d) // 128) * 32
    WARPS, HALF, SSTRIDE, ROW = THREADS // 32, rope // 2, scale_stride(q), window_row_bytes(d)

    @kernel(threads=THREADS, grid=(MOST_ROWS, 2), shared=4 * WARPS, name=f"latents_{q}_{d}")
    def latents(
        y: s64, q_norm: s64, kv_norm: s64, table: s64, sequence: s64, position: s64, codes: s64, scales: s64,
        windows: s64, pitch: s64, ring: s32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        row = int64(block_index())
        window = int32(block_index_y())  # 1: the window latent
        sm = shared_base()
        width = int32(d if window == 1 else q)
        weight = kv_norm if window == 1 else q_norm
        g = regs(2, uint32(0))
        if 4 * tid < width:
            g = ldg_u32x2(weight + 8 * int64(tid))  # a pure load would sink behind the wait
        wait_for_previous_kernel()
        let_next_kernel_start()
        owner = int32(ldg_u32(sequence + row * 4))
        place = int32(ldg_u32(position + row * 4))
        place = int32(place if owner >= 0 else 0)
        v = regs(4, 0.0)
        if 4 * tid < width:
            word = ldg_u32x2(y + (row * (q + d) + window * q + 4 * tid) * 2)
            for i in unroll(2):
                v[2 * i] = bf16_low(word[i])
                v[2 * i + 1] = bf16_high(word[i])
        s = fma(v[3], v[3], fma(v[2], v[2], fma(v[1], v[1], v[0] * v[0])))
        s = sum_over(s, WARP)
        if tid & 31 == 0:
            sts_f32(uint32(sm + (tid >> 5) * 4), s)
        sync_threads()
        s = lds_f32(sm)
        for i in unroll(1, WARPS):
            s = s + lds_f32(uint32(sm + 4 * i))
        inverse = rsqrt_approx(s * (1.0 / d if window == 1 else 1.0 / q) + eps)
        if 4 * tid < width:
            for i in unroll(2):
                v[2 * i] = round_bf16(v[2 * i] * inverse * bf16_low(g[i]))
                v[2 * i + 1] = round_bf16(v[2 * i + 1] * inverse * bf16_high(g[i]))
            if window == 1 and 4 * tid >= d - rope:
                for i in unroll(2):
                    c, sn = phase(table, place, int32(2 * tid - (d - rope) // 2 + i), HALF)
                    a, b = rotated(v[2 * i], v[2 * i + 1], c, sn)
                    v[2 * i] = round_bf16(a)
                    v[2 * i + 1] = round_bf16(b)
        amax = fmax(fmax(fabs(v[0]), fabs(v[1])), fmax(fabs(v[2]), fabs(v[3])))
        amax = max_over(amax, SCALE_LANES)
        e = q8_exponent(amax)
        f = inverse_scale(e)
        if 4 * tid < width and (window == 0 or owner >= 0):
            word32 = uint32(e4m3x2(v[1] * f, v[0] * f) | (e4m3x2(v[3] * f, v[2] * f) << 16))
            slot = windows + int64(owner) * pitch + int64(place % ring) * ROW
            code = slot if window == 1 else codes + row * q
            scale = slot + d if window == 1 else scales + row * SSTRIDE
            stg_u32(code + 4 * int64(tid), word32)
            if tid & 7 == 0:
                stg_u8(scale + (tid >> 3), e)

    return latents


RING_EXTRA = 64  # slots beyond sliding_window: a rewind, a step that is queued behind it, and a block


def entries(width: Width) -> list[Entry]:
    """One kernel for the backbone and the drafter (their tables differ, not their shapes)."""
    spec = width.spec
    shape = {"q": spec.q_lora_rank, "d": spec.head_dim, "rope": spec.qk_rope_head_dim, "eps": spec.rms_norm_eps}
    values = spec.q_lora_rank + spec.head_dim
    label = f"latents/{width.label}"
    return [Entry(label, make, shape, width.chips, q8_encode, MOST_ROWS * 3 * values, MOST_ROWS * 8 * values)]
