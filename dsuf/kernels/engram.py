"""Start of a step and Engram: embeddings into the streams, n-gram rows gathered and quantised, the gate.

    embed   X_j = table[token], j = 0..3;  history[position mod slots] = class of the token
    gather  t_s = class at position - s (the pad class before the start, and from a blocked token backwards);
            h = t_0 m_0, h ^= t_i m_i, row = h mod prime + offset;  codes, scales = q8(the row's values)
    gate    dot_j = sum_d X_jd qk_jd key_jd / (rms(X_j) rms(key_j) sqrt(D))
            X_j += sigmoid(sign(dot_j) sqrt(max(|dot_j|, 1e-6))) val, bf16

token, sequence, position int32 [rows] (sequence negative: inactive, nothing is written); embedding bf16 [V, D]; X bf16
[rows, 4, D]; class_map int32 [V]; history int32 [sequences, slots], -1 blocks, slots a power of two. constants int64
[ngram + 2 columns]: multipliers, then primes, then offsets of the columns. Engram table: e4m3 [table rows, width] and
ue8m0 [table rows, width / 32], on the device or in mapped host memory; codes e4m3 [rows, columns width], scales ue8m0
[rows, scale_stride]. kv bf16 [rows, 5 D] (four keys, then the value), qk float32 [4, D].

Reference: dsuf.ops.engram.ngram_classes, table_rows, gate; ops.qdq.q8_encode. Bytes: 2 D a row for embed; 264 a column
and row for gather, at random; 26 D a row for the gate. Latency decides all three.
"""

from __future__ import annotations

import numpy as np

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, float32, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.latents import MOST_ROWS
from dsuf.kernels.mixes import sigmoid
from dsuf.kernels.ptx.convert import (
    as_bits,
    as_float,
    bf16_high,
    bf16_low,
    bf16x2,
    div,
    e4m3x2,
    e4m3x4_bf16,
    fabs,
    fma,
    fmax,
    rcp,
    sqrt,
    ue8m0,
)
from dsuf.kernels.ptx.memory import (
    ldg_u32,
    ldg_u32x4,
    lds_f32,
    ldw_s64,
    ldw_u8,
    ldw_u32,
    ldw_u32x2,
    ldw_u32x4,
    shared_base,
    stg_u8,
    stg_u32,
    stg_u32x2,
    stg_u32x4,
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
from dsuf.ops.engram import EngramHash, gate, table_rows

EMBED_SPAN = 2048  # columns of a block
HISTORY = 64  # slots of a decoding sequence: n-grams, a block and a rewind
STREAMS = 4
WARP, SCALE_LANES = (1, 2, 4, 8, 16), (1, 2)


def constants(one: EngramHash) -> np.ndarray:
    """A layer's hash constants as the kernel reads them: int64 [ngram + 2 columns]."""
    return np.concatenate([one.multipliers, one.primes.ravel(), one.offsets.ravel()]).astype(np.int64)


def make_embed() -> Kernel:
    """A thread eight columns of one row; grid (ceil D / EMBED_SPAN, rows)."""

    @kernel(threads=EMBED_SPAN // 8, grid=(1, MOST_ROWS), name="embed")
    def embed(
        token: s64, sequence: s64, position: s64, embedding: s64, streams: s64, class_map: s64, history: s64,
        slots: s32, d: s32,
    ) -> None:  # fmt: skip
        column = int64(block_index() * EMBED_SPAN + 8 * thread_index())
        row = int64(block_index_y())
        wait_for_previous_kernel()
        let_next_kernel_start()
        owner = int64(int32(ldg_u32(sequence + row * 4)))
        if owner >= 0:
            word = int64(ldg_u32(token + row * 4))
            if column == 0:
                place = int64(ldg_u32(position + row * 4))
                stg_u32(history + (owner * slots + (place & (slots - 1))) * 4, ldw_u32(class_map + word * 4))
            if column < d:
                piece = ldw_u32x4(embedding + (word * d + column) * 2)
                for j in unroll(STREAMS):
                    stg_u32x4(streams + ((row * STREAMS + j) * d + column) * 2, piece)

    return embed


def make_gather(*, ngram: int, ranks: bool = False) -> Kernel:
    """A warp a column of one row: it hashes, fetches the table row, eight values a lane, and quantises.

    grid ((ngram - 1) heads, rows); heads, width (up to 256) and the pad class are arguments. ranks: `table` is int64
    [ranks, 2], addresses of every rank's rows and their scales, and table_scales how many rows a rank has.
    """

    @kernel(threads=32, grid=(1, MOST_ROWS), name=f"engram_gather_{ngram}" + ("_ranks" if ranks else ""))
    def gather(
        history: s64, slots: s32, sequence: s64, position: s64, constant: s64, table: s64, table_scales: s64,
        codes: s64, scales: s64, heads: s32, width: s32, pad_class: s32,
    ) -> None:  # fmt: skip
        lane = int32(thread_index())
        column = int32(block_index())
        row = int64(block_index_y())
        wait_for_previous_kernel()
        let_next_kernel_start()
        owner = int64(int32(ldg_u32(sequence + row * 4)))
        if owner >= 0:
            place = int32(ldg_u32(position + row * 4))
            size = int32(column // heads + 2)  # of the n-gram
            columns = int32((ngram - 1) * heads)
            groups = int32(width >> 5)
            h = int64(0)
            blocked = int32(0)
            for back in unroll(ngram):
                seen = int32(-1)
                if back < size and place >= back:
                    at = int64((place - back) & (slots - 1))
                    seen = int32(ldg_u32(history + (owner * slots + at) * 4))
                blocked = int32(1 if seen < 0 else blocked)
                t = int64(pad_class if blocked == 1 else seen)
                t = int64(t if back < size else 0)  # 0 changes nothing
                h = int64(h ^ (t * ldw_s64(constant + 8 * back)))
            prime = ldw_s64(constant + 8 * (ngram + column))
            line = int64(h % prime + ldw_s64(constant + 8 * (ngram + columns + column)))
            rows = table
            rows_scales = table_scales
            if ranks:
                holder = int64(line // table_scales)
                rows = ldw_s64(table + holder * 16)
                rows_scales = ldw_s64(table + holder * 16 + 8)
                line = int64(line - holder * table_scales)
            v = regs(8, 0.0)
            if 8 * lane < width:
                code = ldw_u32x2(rows + line * width + 8 * lane)
                scale = ue8m0[0](ldw_u8(rows_scales + line * groups + (lane >> 2)))
                for i in unroll(2):
                    two = e4m3x4_bf16(code[i])
                    for j in unroll(2):
                        v[4 * i + 2 * j] = bf16_low(two[j]) * scale
                        v[4 * i + 2 * j + 1] = bf16_high(two[j]) * scale
            amax = 0.0
            for i in unroll(8):
                amax = fmax(amax, fabs(v[i]))
            e = q8_exponent(max_over(amax, SCALE_LANES))
            f = inverse_scale(e)
            if 8 * lane < width:
                word = regs(2)
                for i in unroll(2):
                    word[i] = uint32(
                        e4m3x2(v[4 * i + 1] * f, v[4 * i] * f) | e4m3x2(v[4 * i + 3] * f, v[4 * i + 2] * f) << 16
                    )
                stg_u32x2(codes + (row * columns + column) * width + 8 * lane, word)
                if lane & 3 == 0:
                    stg_u8(scales + row * ((columns * groups + 3) // 4 * 4) + column * groups + (lane >> 2), e)

    return gather


def make_gate(*, most_d: int, eps: float) -> Kernel:
    """A block a row, a thread eight columns of all streams, keys and the value; d up to most_d."""
    THREADS = -(-most_d // 256) * 32
    WARPS = THREADS // 32
    SUMS = 3 * STREAMS

    @kernel(threads=THREADS, grid=(MOST_ROWS,), shared=4 * SUMS * WARPS, name=f"engram_gate_{most_d}")
    def add_gated(streams: s64, kv: s64, qk: s64, sequence: s64, d: s32) -> None:
        tid = int32(thread_index())
        row = int64(block_index())
        sm = shared_base()
        wait_for_previous_kernel()
        let_next_kernel_start()
        column = int64(8 * tid)
        holds = 8 * tid < d and int32(ldg_u32(sequence + row * 4)) >= 0
        x = regs(4 * STREAMS, uint32(0))  # pairs
        s = regs(SUMS, 0.0)  # of stream j: 3j dot, 3j + 1 squares of X, 3j + 2 squares of the key
        if holds:
            for j in unroll(STREAMS):
                x[4 * j : 4 * j + 4] = ldg_u32x4(streams + ((row * STREAMS + j) * d + column) * 2)
                key = ldg_u32x4(kv + (row * (5 * d) + j * d + column) * 2)
                for half in unroll(2):
                    w = ldw_u32x4(qk + (j * d + column + 4 * half) * 4)
                    for i in unroll(2):
                        a = bf16_low(x[4 * j + 2 * half + i])
                        b = bf16_high(x[4 * j + 2 * half + i])
                        k0 = bf16_low(key[2 * half + i])
                        k1 = bf16_high(key[2 * half + i])
                        s[3 * j] = fma(a * as_float(w[2 * i]), k0, s[3 * j])
                        s[3 * j] = fma(b * as_float(w[2 * i + 1]), k1, s[3 * j])
                        s[3 * j + 1] = fma(b, b, fma(a, a, s[3 * j + 1]))
                        s[3 * j + 2] = fma(k1, k1, fma(k0, k0, s[3 * j + 2]))
        for i in unroll(SUMS):
            s[i] = sum_over(s[i], WARP)
        if tid & 31 == 0:
            for i in unroll(SUMS):
                sts_f32(uint32(sm + ((tid >> 5) * SUMS + i) * 4), s[i])
        sync_threads()
        for i in unroll(SUMS):
            s[i] = lds_f32(uint32(sm + 4 * i))
        for w in range(1, WARPS):
            for i in unroll(SUMS):
                s[i] = s[i] + lds_f32(uint32(sm + (w * SUMS + i) * 4))
        if holds:
            mean = rcp(float32(d))
            root_d = sqrt(float32(d))
            value = ldg_u32x4(kv + (row * (5 * d) + STREAMS * d + column) * 2)
            for j in unroll(STREAMS):
                norms = sqrt(s[3 * j + 1] * mean + eps) * sqrt(s[3 * j + 2] * mean + eps)
                dot = div(s[3 * j], norms * root_d)
                root = sqrt(fmax(fabs(dot), 1e-6))
                g = sigmoid(as_float(uint32(as_bits(root) | (as_bits(dot) & 0x80000000))))
                for i in unroll(4):
                    low = fma(g, bf16_low(value[i]), bf16_low(x[4 * j + i]))
                    high = fma(g, bf16_high(value[i]), bf16_high(x[4 * j + i]))
                    x[4 * j + i] = bf16x2(high, low)
                stg_u32x4(streams + ((row * STREAMS + j) * d + column) * 2, x[4 * j : 4 * j + 4])

    return add_gated


def entries(width: Width) -> list[Entry]:
    """Embedding, gather and gate; constants, tables and widths are arguments, so each is one kernel."""
    if width.label != "v41":
        return []
    spec = width.spec
    d, columns = spec.hidden_size, spec.engram_columns
    fetched = MOST_ROWS * columns * (spec.engram_head_dim + spec.engram_head_dim // 32)
    rows, gathers, gates = MOST_ROWS * d, {"ngram": spec.engram_max_ngram_size}, {"most_d": d, "eps": spec.rms_norm_eps}
    return [
        Entry("embed", make_embed, {}, width.chips, np.take, 10 * rows, 0),
        Entry("engram.gather", make_gather, gathers, width.chips, table_rows, 2 * fetched, 4 * fetched),
        Entry(
            "engram.gather_ranks",
            make_gather,
            {**gathers, "ranks": True},
            width.chips,
            table_rows,
            2 * fetched,
            4 * fetched,
        ),
        Entry("engram.gate", make_gate, gates, width.chips, gate, 26 * rows, 60 * rows),
    ]
