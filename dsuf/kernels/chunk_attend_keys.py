"""Keys of chunk_attend.py: which ones a row has, where they lie, and their way as bf16 into shared memory.

A row's keys are positions first .. last of its window, in slots position mod ring, then `chosen` entries in pages
(layout.py); each part in tiles of 64 from its own start. One warpgroup lists the addresses of a row's keys, then its
warps expand 16 keys of a tile each: e4m3 under ue8m0 scales (window), e2m1 under e4m3 scales (entries), to bf16 times
2^-8, which saves a multiplication. A tile lies as [d / 64][key][128 bytes] with the 128-byte swizzle: K-major for the
scores, and the same bytes are the transposed operand for the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsuf.kernels.lang import inline, int32, int64, regs, uint32, unroll
from dsuf.kernels.latents import window_row_bytes
from dsuf.kernels.ptx.convert import e4m3x4_bf16_scaled, fp4x8_bf16_scaled, mul_bf16x2, opaque, prmt
from dsuf.kernels.ptx.copy import mbarrier_wait
from dsuf.kernels.ptx.memory import ldg_u8, ldg_u16, ldg_u32, ldg_u32x4, lds_u32x4, sts_u32x4
from dsuf.layout import PAGE_TOKENS

TILE = 64  # keys
MOST_KEYS = 640  # of a row: window and selection, each rounded up to tiles
HEADS, STAGES, PANEL = 64, 2, 8192  # a panel: 64 rows of 128 bytes
SHRINK = 256.0  # keys are held divided by it
FP4_SHIFT, FP8_SHIFT = 0x3B003B00, 112  # 2^118 as an addend of bf16 exponents; the exponent of 2^112


@dataclass(frozen=True)
class Room:
    """Offsets in a block's shared memory (Q at 0), and how a warp takes its 16 keys of a tile apart."""

    d: int
    half: int  # pairs that are rotated
    keys: int  # STAGES tiles
    p: int  # probabilities, STAGES tiles
    factors: int
    places: int  # addresses of the keys
    phase: int
    bars: int
    per_step: int  # pieces of 32 columns of a key that a warp takes at once; its other lanes take further keys

    @classmethod
    def of(cls, d: int, rope: int) -> Room:
        """For d columns, the last `rope` of them rotated."""
        keys = d // 64 * PANEL
        p = keys + STAGES * keys
        factors = p + STAGES * PANEL
        places = factors + STAGES * 8 * HEADS
        phase = places + 16 * MOST_KEYS
        return cls(d, rope // 2, keys, p, factors, places, phase, phase + STAGES * 4 * rope, min(4, d // 32))

    @property
    def stage(self) -> int:
        """Bytes of Q, and of a tile of keys."""
        return self.d // 64 * PANEL

    @property
    def window_row(self) -> int:
        """Bytes of a window key."""
        return window_row_bytes(self.d)

    @property
    def full(self) -> int:
        """Barriers of the stages: keys are there; then free, given (probabilities), taken."""
        return self.bars

    @property
    def free(self) -> int:
        return self.bars + 8 * STAGES

    @property
    def given(self) -> int:
        return self.bars + 16 * STAGES

    @property
    def taken(self) -> int:
        return self.bars + 24 * STAGES

    @property
    def size(self) -> int:
        return self.bars + 32 * STAGES

    @property
    def keys_a_step(self) -> int:
        return 8 * (4 // self.per_step)

    @property
    def steps(self) -> int:
        """In which a key's columns are taken."""
        return self.d // 32 // self.per_step

    @property
    def spread(self) -> int:
        """Bit of a lane's number from which on it says the key."""
        return 3 + self.per_step.bit_length() - 1

    @property
    def groups(self) -> int:
        return 16 // self.keys_a_step

    @property
    def ahead(self) -> int:
        """Pieces on their way while one is expanded."""
        return min(4, self.groups * self.steps)


@inline
def put_chunk(base: Any, row: Any, chunk: Any, value: Any) -> None:
    """Store 16 bytes, chunk `chunk` of row `row`, into panels of 64 rows with the 128-byte swizzle."""
    sts_u32x4(uint32(base + (chunk >> 3) * PANEL + row * 128 + ((chunk ^ row) & 7) * 16), value)


@inline
def row_of(row: Any, sequence: Any, first: Any, last: Any, chosen: Any, topk: Any) -> Any:
    """A row's slot, first window position, window keys, entries, tiles of the window, tiles (0: inactive)."""
    owner = int64(int32(ldg_u32(sequence + int64(row) * 4)))
    start = int32(ldg_u32(first + int64(row) * 4))
    window_keys = int32(int32(ldg_u32(last + int64(row) * 4)) + 1 - start)
    entries = int32(0)
    if topk > 0:
        entries = int32(ldg_u32(chosen + int64(row) * 4))
    window_tiles = int32((window_keys + TILE - 1) // TILE)
    tiles = int32(window_tiles + (entries + TILE - 1) // TILE)
    tiles = int32(tiles if owner >= 0 else 0)
    return owner, start, window_keys, entries, window_tiles, tiles


@inline
def key_address(codes: Any, scales: Any, place: Any) -> None:
    """Keep where a key's codes and scales lie."""
    sts_u32x4(place, (uint32(codes), uint32(codes >> 32), uint32(scales), uint32(scales >> 32)))


@inline
def pairs_of(at: Any) -> Any:
    """The two addresses that `key_address` kept, as a tuple."""
    word = lds_u32x4(at)
    return int64(word[0]) | int64(word[1]) << 32, int64(word[2]) | int64(word[3]) << 32


@inline
def list_keys(
    room: Any, sm: Any, tid: Any, tiles: Any, window_tiles: Any, windows: Any, start: Any, window_keys: Any, ring: Any,
    selected: Any, entries: Any, pages: Any, page_codes: Any, page_scales: Any, page_bytes: Any, ratio: Any,
) -> None:  # fmt: skip
    """Addresses of all keys of a row: 128 threads. windows, selected, pages: of this row and its sequence."""
    for i in range(tid, tiles * TILE, 128):
        at = uint32(sm + room.places + i * 16)
        if i < window_tiles * TILE:
            # a tile's keys beyond the last are copies of it: finite, and masked in the scores
            slot = int32((start + min(i, window_keys - 1)) % ring)
            line = windows + int64(slot) * room.window_row
            key_address(line, line + room.d, at)
        else:
            held = int32(min(i - window_tiles * TILE, entries - 1))
            entry = int32(ldg_u32(selected + int64(held) * 4))
            page = int32(entry * ratio // PAGE_TOKENS)
            where = int64(ldg_u32(pages + int64(page) * 4)) * page_bytes
            slot64 = int64(entry - page * PAGE_TOKENS // ratio)
            key_address(page_codes + where + slot64 * (room.d // 2), page_scales + where + slot64 * (room.d // 16), at)


@inline
def expand_selected(stage: Any, key: Any, chunk: Any, word: Any, scale: Any) -> None:
    """32 e2m1 codes in four words, two e4m3 scales in one, to bf16 in shared memory from 16-byte chunk `chunk` on."""
    two = uint32(prmt(scale, uint32(0), uint32(0x4140)) << 4)
    two = uint32(mul_bf16x2(two, uint32(0x7B807B80)) + FP4_SHIFT)
    first = prmt(two, two, uint32(0x1010))
    second = prmt(two, two, uint32(0x3232))
    for j in unroll(4):
        put_chunk(stage, key, int32(chunk + j), fp4x8_bf16_scaled(word[j], first if j < 2 else second))


@inline
def expand_window(stage: Any, key: Any, chunk: Any, word: Any, exponent: Any) -> None:
    """32 e4m3 codes in eight words under one ue8m0 scale."""
    factor = uint32((exponent + FP8_SHIFT) << 7 | (exponent + FP8_SHIFT) << 23)
    for j in unroll(4):
        a = e4m3x4_bf16_scaled(word[2 * j], factor)
        b = e4m3x4_bf16_scaled(word[2 * j + 1], factor)
        put_chunk(stage, key, int32(chunk + j), (a[0], a[1], b[0], b[1]))


@inline
def expand_tile(room: Any, sm: Any, lane: Any, warp: Any, tile: Any, window_tiles: Any, turn: Any) -> None:
    """This warp's 16 keys of a tile into stage `turn` modulo STAGES, once it is free."""
    stage = uint32(sm + room.keys + (turn % STAGES) * room.stage)
    free = uint32(sm + room.free + 8 * (turn % STAGES))
    parity = uint32((turn // STAGES & 1) ^ 1)
    lane_here = int32(opaque(lane))
    key = int32(16 * warp + (lane_here & 7) + 8 * (lane_here >> room.spread))
    piece = int32(lane_here >> 3 & (room.per_step - 1))
    at = uint32(sm + room.places + (tile * TILE + key) * 16)
    if tile >= window_tiles:
        # `ahead` pieces are on their way while one is expanded
        word = regs(4 * (room.ahead + 1))
        scale = regs(room.ahead + 1)
        for i in unroll(room.groups * room.steps + room.ahead):
            if i < room.groups * room.steps:
                codes, scales = pairs_of(uint32(at + i // room.steps * (room.keys_a_step * 16)))
                n = int64(piece + room.per_step * (i % room.steps))
                word[i % (room.ahead + 1) * 4 : i % (room.ahead + 1) * 4 + 4] = ldg_u32x4(codes + n * 16)
                scale[i % (room.ahead + 1)] = ldg_u16(scales + n * 2)
            if i == room.ahead - 1:
                mbarrier_wait(free, parity)
            if i >= room.ahead:
                expand_selected(
                    stage, int32(key + (i - room.ahead) // room.steps * room.keys_a_step),
                    int32((piece + room.per_step * ((i - room.ahead) % room.steps)) * 4),
                    word[(i - room.ahead) % (room.ahead + 1) * 4 : (i - room.ahead) % (room.ahead + 1) * 4 + 4],
                    scale[(i - room.ahead) % (room.ahead + 1)],
                )  # fmt: skip
    else:
        mbarrier_wait(free, parity)
        for g in unroll(room.groups):
            codes, scales = pairs_of(uint32(at + g * room.keys_a_step * 16))
            eight = regs(8 * room.steps)
            exponent = regs(room.steps)
            for i in unroll(room.steps):
                n = int64(piece + room.per_step * i)
                eight[8 * i : 8 * i + 4] = ldg_u32x4(codes + n * 32)
                eight[8 * i + 4 : 8 * i + 8] = ldg_u32x4(codes + n * 32 + 16)
                exponent[i] = ldg_u8(scales + n)
            for i in unroll(room.steps):
                chunk = int32((piece + room.per_step * i) * 4)
                expand_window(stage, int32(key + g * room.keys_a_step), chunk, eight[8 * i : 8 * i + 8], exponent[i])
