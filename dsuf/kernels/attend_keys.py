"""Keys of attention on their way to shared memory: codes of a window's ring (e4m3, ue8m0 per 32) or of a page's entry
(e2m1, e4m3 per 16) asked for, then expanded to bf16, exact, divided by 256.

In shared memory: rows of d bf16 in chunks of 16 bytes, chunk c of key n at c ^ swizzle(n), where the products with q
(8 keys, neighbouring chunks) and the transposed loads for the values (8 keys, one chunk) touch all banks once. A thread
has 16 columns, a piece, of several keys, the i-th of them in pass i. Places of the window stand in the first passes,
entries in the last: a pass has the code for the one, the other or both.
"""

from __future__ import annotations

from dataclasses import dataclass
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

CLUSTER = 8  # blocks that share the keys of a row: the portable most
ALONE = 114 * 1024  # bytes of shared memory of which an SM has not twice as many
PAGE_SHIFT = PAGE_TOKENS.bit_length() - 1
UNIT = 256.0  # keys stand in shared memory in this unit, so that the factors of their codes are bf16 numbers
RING_BIAS, PAGE_BIAS = 112, 0x7A807A80  # of the exponent of a ring's scale; 2^118 twice, for a page's scale


def heads_of_block(h: int) -> int:
    """Heads of a cluster: whole product tiles, 32 at most."""
    return min(32, -(-h // 16) * 16)


def most_dealt(n: int) -> int:
    """How many of n keys a block has at most: sixteen of every 128, so that a short row stays in one block."""
    return n // 128 * 16 + min(n % 128, 16)


def most_keys(window: int, block: int, topk: int) -> int:
    """Keys of a row that a kernel is made for, in whole shares of at least 32 keys a block; block: of drafted rows."""
    share = max(most_dealt(window) + most_dealt(topk), most_dealt(window + block))
    return CLUSTER * max(32, -(-share // 16) * 16)


@dataclass(frozen=True)
class Room:
    """Shared memory of a block, as offsets; what is used one after the other shares a place.

    Keys, then the parts of heads that leave (at 0) and those that came (`parts`); largest scores and sums of weights;
    the barrier; keys' addresses, then the scores of sixteen keys by parts of the columns; q's turned tails, then
    summed scores and probabilities in lines of `line` bytes, eight of which meet all banks.
    """

    parts: int
    stats: int
    barrier: int
    partial: int
    scores: int
    line: int
    size: int

    @classmethod
    def of(cls, h: int, d: int, share: int) -> Room:
        """For h heads of d columns and `share` keys."""
        heads = heads_of_block(h)
        stats = max(share * 2 * d, 2 * heads * 2 * d)
        barrier = stats + 16 * heads
        scores = barrier + 16 + min(8, d // 32) * heads * 64
        line = 4 * (share + 4)
        return cls(heads * 2 * d, stats, barrier, barrier + 16, scores, line, scores + heads * line)


def alone(size: int) -> int:
    """So much shared memory that an SM has one such block, where it would have two; small ones stay as they are."""
    return max(size, ALONE) if 2 * size > ALONE else size


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
def find_place(words: Any, live: Any, window: Any, place: Any, row_bytes: Any, d: Any) -> None:
    """words = the addresses of codes and scales of a place of the ring; 0 where it is not live."""
    code = int64(0)
    scale = int64(0)
    if live:
        code = window + int64(place) * row_bytes
        scale = code + d
    put_addresses(words, code, scale)


@inline
def find_entry(
    words: Any, live: Any, entry: Any, shift: Any, pages: Any, page_codes: Any, page_scales: Any, page_bytes: Any,
    d: Any,
) -> None:  # fmt: skip
    """The same of an entry, from its page's place in `pages`."""
    code = int64(0)
    scale = int64(0)
    if live:
        page = int64(entry >> uint32(PAGE_SHIFT - shift))
        slot = int64(entry & uint32((PAGE_TOKENS >> shift) - 1))
        where = int64(ldg_u32(pages + page * 4)) * page_bytes
        code = page_codes + where + slot * (d // 2)
        scale = page_scales + where + slot * (d // 16)
    put_addresses(words, code, scale)


@inline
def put_addresses(words: Any, code: Any, scale: Any) -> None:
    """Two addresses as four words."""
    words[0] = uint32(code)
    words[1] = uint32(code >> 32)
    words[2] = uint32(scale)
    words[3] = uint32(scale >> 32)


@inline
def ask_place(codes: Any, factor: Any, alive: Any, i: Any, at: Any, wanted: Any, piece: Any) -> None:
    """Load a thread's piece of a place, whose two addresses stand in shared memory (0: there is none)."""
    w = regs(4)
    w = lds_u32x4(at)
    alive[i] = uint32(w[0] | w[1]) if wanted else uint32(0)
    if alive[i] != 0:
        codes[4 * i : 4 * i + 4] = ldg_u32x4(whole(w[0], w[1]) + piece * 16)
        factor[i] = ldg_u8(whole(w[2], w[3]) + (piece >> 1))


@inline
def ask_entry(codes: Any, factor: Any, alive: Any, i: Any, at: Any, wanted: Any, piece: Any) -> None:
    """The same of an entry."""
    w = regs(4)
    w = lds_u32x4(at)
    alive[i] = uint32(w[0] | w[1]) if wanted else uint32(0)
    if alive[i] != 0:
        codes[2 * i : 2 * i + 2] = ldg_u32x2(whole(w[0], w[1]) + piece * 8)
        factor[i] = ldg_u8(whole(w[2], w[3]) + piece)


@inline
def expand_place(v: Any, codes: Any, factor: Any) -> None:
    """v = the sixteen columns of a piece of a place, bf16 pairs."""
    both = uint32(factor + RING_BIAS << 7 | factor + RING_BIAS << 23)
    for j in unroll(4):
        v[2 * j : 2 * j + 2] = e4m3x4_bf16_scaled(codes[j], both)


@inline
def expand_entry(v: Any, low: Any, high: Any, factor: Any) -> None:
    """v = the sixteen columns of a piece of an entry."""
    scale = mul_bf16x2(prmt(e4m3x4_bf16(factor)[0], uint32(0), uint32(0x1010)), uint32(PAGE_BIAS))
    v[0:4] = fp4x8_bf16_scaled(low, scale)
    v[4:8] = fp4x8_bf16_scaled(high, scale)
