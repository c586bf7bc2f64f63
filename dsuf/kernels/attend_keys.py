"""Keys of attention on their way to shared memory: codes of a window's ring (e4m3, ue8m0 per 32) or of a page's entry
(e2m1, e4m3 per 16) asked for, then expanded to bf16, exact, divided by 256.

In shared memory: rows of d bf16 in chunks of 16 bytes, chunk c of key n at c ^ swizzle(n), where the products with q
(8 keys, neighbouring chunks) and the transposed loads for the values (8 keys, one chunk) touch all banks once. A thread
has 16 columns, a piece, of several keys, the i-th of them in pass i. Places of the window stand in the first passes,
entries in the last: a pass has the code for the one, the other or both.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.lang import inline, int64, regs, uint32, unroll
from dsuf.kernels.ptx.convert import (
    bf16_high,
    bf16_low,
    bf16x2,
    e4m3x4_bf16,
    e4m3x4_bf16_scaled,
    fp4x8_bf16_scaled,
    mul_bf16x2,
    prmt,
)
from dsuf.kernels.ptx.memory import ldg_u8, ldg_u32, ldg_u32x2, ldg_u32x4, lds_u32x4
from dsuf.kernels.rope import rotated
from dsuf.layout import PAGE_TOKENS

PAGE_SHIFT = PAGE_TOKENS.bit_length() - 1
UNIT = 256.0  # keys stand in shared memory in this unit, so that the factors of their codes are bf16 numbers
RING_BIAS, PAGE_BIAS = 112, 0x7A807A80  # of the exponent of a ring's scale; 2^118 twice, for a page's scale


def heads_of_block(h: int) -> int:
    """Heads of a cluster: whole product tiles, 32 at most."""
    return min(32, -(-h // 16) * 16)


def most_dealt(n: int) -> int:
    """How many of n keys a block has at most: sixteen of every 128, so that a short row stays in one block."""
    return n // 128 * 16 + min(n % 128, 16)


@inline
def dealt(n: Any, rank: Any) -> Any:
    """How many of n keys a block has."""
    return (n >> 7 << 4) + max(min((n & 127) - rank * 16, 16), 0)


@inline
def chunk_address(base: Any, key: Any, chunk: Any, pitch: Any) -> Any:
    """Shared address of a 16-byte chunk of a key."""
    return uint32(base + key * pitch + (chunk ^ (((key & 1) << 2) | ((key >> 1) & 3))) * 16)


@inline
def turn(word: Any, c: Any, s: Any) -> Any:
    """A bf16 pair rotated by a phase."""
    a, b = rotated(bf16_low(word), bf16_high(word), c, s)
    return bf16x2(b, a)


@inline
def whole(low: Any, high: Any) -> Any:
    """An address from its two words."""
    return int64(low) | int64(high) << 32


@inline
def find_key(
    words: Any, is_place: Any, live: Any, window: Any, place: Any, row_bytes: Any, d: Any, entry: Any, shift: Any,
    pages: Any, page_codes: Any, page_scales: Any, page_bytes: Any,
) -> None:  # fmt: skip
    """words = the addresses of codes and scales of a place of the ring or of an entry; 0 where it is not live."""
    code = int64(0)
    scale = int64(0)
    if live and is_place:
        code = window + int64(place) * row_bytes
        scale = code + d
    if live and not is_place:
        page = int64(entry >> uint32(PAGE_SHIFT - shift))
        slot = int64(entry & uint32((PAGE_TOKENS >> shift) - 1))
        where = int64(ldg_u32(pages + page * 4)) * page_bytes
        code = page_codes + where + slot * (d // 2)
        scale = page_scales + where + slot * (d // 16)
    words[0] = uint32(code)
    words[1] = uint32(code >> 32)
    words[2] = uint32(scale)
    words[3] = uint32(scale >> 32)


@inline
def ask_key(
    codes: Any, factor: Any, alive: Any, i: Any, at: Any, is_place: Any, piece: Any, ring_passes: Any, page_pass: Any
) -> None:  # fmt: skip
    """Load a thread's piece of a key, whose two addresses stand in shared memory (0: there is none)."""
    w = regs(4)
    w = lds_u32x4(at)
    alive[i] = uint32(w[0] | w[1])
    if i < ring_passes:
        in_ring = alive[i] != 0 and is_place
        if in_ring:
            codes[4 * i : 4 * i + 4] = ldg_u32x4(whole(w[0], w[1]) + piece * 16)
            factor[i] = ldg_u8(whole(w[2], w[3]) + (piece >> 1))
    if i >= page_pass:
        in_page = alive[i] != 0 and not is_place
        if in_page:
            codes[4 * i : 4 * i + 2] = ldg_u32x2(whole(w[0], w[1]) + piece * 8)
            factor[i] = ldg_u8(whole(w[2], w[3]) + piece)


@inline
def expand_key(v: Any, codes: Any, factor: Any, i: Any, is_place: Any, ring_passes: Any, page_pass: Any) -> None:
    """v = the sixteen columns of a piece that is there, bf16 pairs."""
    if i < ring_passes:
        both = uint32(factor[i] + RING_BIAS << 7 | factor[i] + RING_BIAS << 23)
        if is_place:
            for j in unroll(4):
                v[2 * j : 2 * j + 2] = e4m3x4_bf16_scaled(codes[4 * i + j], both)
    if i >= page_pass:
        scale = mul_bf16x2(prmt(e4m3x4_bf16(factor[i])[0], uint32(0), uint32(0x1010)), uint32(PAGE_BIAS))
        if not is_place:
            v[0:4] = fp4x8_bf16_scaled(codes[4 * i], scale)
            v[4:8] = fp4x8_bf16_scaled(codes[4 * i + 1], scale)
