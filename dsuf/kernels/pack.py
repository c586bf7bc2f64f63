"""Repacks weights, once at load, into the order in which a warp's tensor core instructions want them.

A weight [N, K] becomes tiles of 16 rows; a tile is a run of chunks of `chunk_width(K)` columns; a chunk is contiguous:
first the codes, in order of (32 or 64 columns, lane, 16 bytes), then its scales. So one bulk copy brings a chunk, and a
lane's 16 bytes are its registers of one or two products.

Inside a group of 32 columns lane t of a quad takes columns 8t .. 8t+7, so activations stay in natural order: eight
consecutive bytes are a lane's share. (A tensor core sums over k in any order, as long as both operands agree.)

    fp8   codes [K/32][32 lanes][4 words]: rows (g, g+8, g, g+8), columns 8t + (0..3, 0..3, 4..7, 4..7)
          scales ue8m0 [K/32] of the tile's 32 rows, padded to 16 bytes
    fp4   codes [K/64][32 lanes][2 groups][2 words]: eight codes of rows g and g+8, columns 8t + 4m .. 8t + 4m + 3
          scales ue8m0 [8 g][row g, row g+8][K/32]
    bf16  [K/32][2 m][32 lanes][4 words]: columns 8t + 4m + (0..1, 0..1, 2..3, 2..3) of rows (g, g+8, g, g+8)

Runs in NumPy; at 9 MB in 0.2 s a loader of 100 GB wants it on the device.
"""

from __future__ import annotations

import numpy as np

from dsuf.errors import ConfigError
from dsuf.kernels.ptx.op import BLACKWELL

ROWS = 16  # of a tile
GROUP = 32  # columns of one scale
FP8_CHUNK = 256  # columns of a chunk at most: 4 KB
BF16_CHUNK = 128
SMALL_CHUNK, WIDE_K = 64, 1024  # K from WIDE_K on has full chunks
FP8_SCALES = 16  # bytes of scales of an fp8 chunk, padded


def chunk_width(k: int, most: int = FP8_CHUNK) -> int:
    """Columns of a chunk: `most` for real widths, 64 for small ones, so that one kernel serves every K of a width.

    Raises ConfigError if it does not divide K.
    """
    width = most if k >= WIDE_K else SMALL_CHUNK
    if k % width:
        raise ConfigError(f"K is {k}; the kernels need a multiple of {width} columns.")
    return width


def fp8_chunk_bytes(k: int) -> int:
    """Bytes of one chunk of an fp8 weight with K columns."""
    return chunk_width(k) * ROWS + FP8_SCALES


def fp4_chunk_bytes(k: int, most: int = FP8_CHUNK) -> int:
    """Bytes of one chunk of an fp4 weight with K columns."""
    width = chunk_width(k, most)
    return width * ROWS // 2 + width // GROUP * ROWS


def bf16_chunk_bytes(k: int) -> int:
    """Bytes of one chunk of a bf16 weight with K columns."""
    return chunk_width(k, BF16_CHUNK) * ROWS * 2


def pack_fp8(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """e4m3 [N, K] and ue8m0 [ceil N/32, K/32] -> uint8 [N/16, K/chunk, chunk bytes]. N a multiple of 16."""
    n, k = codes.shape
    width, groups = chunk_width(k), k // GROUP
    # tile, half, g, group, t, half of its columns, 4 -> tile, group, g, t, half of its columns, half, 4
    lanes = codes.reshape(n // ROWS, 2, 8, groups, 4, 2, 4).transpose(0, 3, 2, 4, 5, 1, 6)
    body = lanes.reshape(n // ROWS, k // width, width * ROWS)
    tail = np.zeros((n // ROWS, k // width, FP8_SCALES), np.uint8)
    per_tile = scales[np.arange(n // ROWS) * ROWS // GROUP]
    tail[:, :, : width // GROUP] = per_tile.reshape(n // ROWS, k // width, width // GROUP)
    return np.ascontiguousarray(np.concatenate([body, tail], axis=2))


def pack_fp4(packed: np.ndarray, scales: np.ndarray, chip: str, most: int = FP8_CHUNK) -> np.ndarray:
    """e2m1 pairs [N, K/2] and ue8m0 [N, K/32] -> uint8 [N/16, K/chunk, chunk bytes]. N a multiple of 16.

    Where the chip converts e2m1 itself a word holds codes in nibble order; for sm_90a the bits of each code stand where
    fp4x8_f16_bits can mask them into place.
    """
    n, k = packed.shape[0], packed.shape[1] * 2
    width = chunk_width(k, most)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(n, k).astype(np.uint32)
    # tile, half, g, group, t, m (4 columns), pair, column of the pair -> tile, group, g, t, m, pair, half, column
    parts = codes.reshape(n // ROWS, 2, 8, k // GROUP, 4, 2, 2, 2).transpose(0, 3, 2, 4, 5, 6, 1, 7)
    parts = parts.reshape(*parts.shape[:5], 4, 2)  # registers a0 .. a3 of a product: (pair, half)
    words = np.zeros(parts.shape[:5], np.uint32)
    for register in range(4):
        for column in range(2):
            code = parts[..., register, column]
            if chip in BLACKWELL:
                words |= code << np.uint32(8 * register + 4 * column)
            else:
                sign, magnitude = (15, 7, 8, 0)[register], (9, 1, 12, 4)[register]
                words |= (code >> np.uint32(3)) << np.uint32(sign + 16 * column)
                words |= (code & np.uint32(7)) << np.uint32(magnitude + 16 * column)
    pairs = words.reshape(n // ROWS, k // 64, 2, 32, 2).transpose(0, 1, 3, 2, 4)  # two groups beside each other
    body = np.ascontiguousarray(pairs).view(np.uint8).reshape(n // ROWS, k // width, width * ROWS // 2)
    by_lane = scales.reshape(n // ROWS, 2, 8, k // width, width // GROUP).transpose(0, 3, 2, 1, 4)
    tail = by_lane.reshape(n // ROWS, k // width, width // GROUP * ROWS)
    return np.ascontiguousarray(np.concatenate([body, tail], axis=2))


def pack_bf16(bits: np.ndarray) -> np.ndarray:
    """bf16 bits uint16 [N, K] -> uint8 [ceil N/16, K/chunk, chunk bytes]; missing rows are zero."""
    n, k = bits.shape
    tiles, width = -(-n // ROWS), chunk_width(k, BF16_CHUNK)
    padded = np.zeros((tiles * ROWS, k), np.uint16)
    padded[:n] = bits
    # tile, half, g, group, t, m, pair, column -> tile, group, m, g, t, pair, half, column
    parts = padded.reshape(tiles, 2, 8, k // GROUP, 4, 2, 2, 2).transpose(0, 3, 5, 2, 4, 6, 1, 7)
    return np.ascontiguousarray(parts).view(np.uint8).reshape(tiles, k // width, bf16_chunk_bytes(k))


def interleave(first: np.ndarray, second: np.ndarray, tiles: int) -> np.ndarray:
    """Gate and up weights [N/16, chunks, bytes] -> [N/16/tiles, chunks, 2 * tiles, bytes].

    One run of 2 * tiles chunks holds the same columns of `tiles` gate tiles and then of the `tiles` up tiles, so that
    one bulk copy feeds a warp that makes 16 * tiles finished channels.
    """
    n, chunks, size = first.shape
    both = np.stack([w.reshape(n // tiles, tiles, chunks, size) for w in (first, second)], axis=1)
    return np.ascontiguousarray(both.transpose(0, 3, 1, 2, 4)).reshape(n // tiles, chunks, 2 * tiles, size)
