"""Number formats of the checkpoint and the caches: e4m3, e2m1, ue8m0, bf16; pack, unpack, quantise.

    e4m3   sign, 4 exponent bits (bias 7), 3 mantissa bits; OCP "fn": largest 448, no infinities; 8 bits
    e2m1   magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 as codes 0..7, bit 3 the sign; two codes a byte
    ue8m0  byte e means 2^(e - 127); only used as a scale
    bf16   the upper 16 bits of a float32

Every rounding is to nearest, ties to the even code. Arrays may have any leading shape `[...]` unless a shape is given.
Source: reference model.md 3.0 and 5 (formats), 12 (rules by which synthetic weights are quantised).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

SCALE_BLOCK = 32  # one weight scale covers 32 columns (and 32 rows in dense FP8 weights)
E4M3_MAX = 448.0
E2M1_MAX = 6.0
SMALLEST_AMAX = 1e-4  # keeps the scale of an all-zero block finite

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(_E4M3).astype(np.float32)
_E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_E2M1_PAIRS = np.stack([np.tile(_E2M1_VALUES, 16), np.repeat(_E2M1_VALUES, 16)], axis=1)  # [256, 2]: low nibble first


def ceil_log2_float32(x: np.ndarray) -> np.ndarray:
    """Smallest integer e with 2^e >= x, for positive normal x float32 [...] -> int32 [...].

    Read from the bits (exponent, plus one if the mantissa is not zero), since log2 in floating point is off by one
    near powers of two.
    """
    bits = np.ascontiguousarray(x, np.float32).view(np.int32)
    return ((bits + 0x7FFFFF) >> 23) - 127


def e4m3_encode(x: np.ndarray) -> np.ndarray:
    """x [...] with |x| <= 448, taken as float32 -> e4m3 codes uint8 [...]."""
    return np.asarray(x, np.float32).astype(_E4M3).view(np.uint8)


def e4m3_decode(codes: np.ndarray) -> np.ndarray:
    """e4m3 codes uint8 [...] -> float32 [...]; codes 0x7F and 0xFF are NaN."""
    return _E4M3_VALUES[codes]


def e2m1_encode(x: np.ndarray) -> np.ndarray:
    """x float32 [...] with |x| <= 6 -> codes uint8 0..15 [...], one code a byte."""
    return np.asarray(x, np.float32).astype(_E2M1).view(np.uint8)


def e2m1_decode(codes: np.ndarray) -> np.ndarray:
    """Codes uint8 0..15 [...] -> float32 [...]."""
    return _E2M1_VALUES[codes]


def ue8m0_decode(codes: np.ndarray) -> np.ndarray:
    """Scale bytes uint8 [...] -> float32 [...], 2^(e - 127)."""
    return np.ldexp(np.float32(1), np.asarray(codes).astype(np.int32) - 127).astype(np.float32)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes uint8 0..15 [..., n], n even -> bytes uint8 [..., n/2]; the even column in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """Bytes uint8 [..., n/2] -> codes uint8 0..15 [..., n]."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def e2m1_decode_packed(packed: np.ndarray) -> np.ndarray:
    """Bytes uint8 [..., n/2] of two e2m1 codes -> float32 [..., n]."""
    return _E2M1_PAIRS[packed].reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def round_bf16(x: np.ndarray) -> np.ndarray:
    """x [...] taken as float32 -> float32 [...] that lies on the bf16 grid."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)) & np.uint32(0xFFFF0000)).view(np.float32)


def bf16_to_float32(bits: np.ndarray) -> np.ndarray:
    """bf16 bit patterns uint16 [...] -> float32 [...]."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bf16(x: np.ndarray) -> np.ndarray:
    """x [...] taken as float32 -> bf16 bit patterns uint16 [...], nearest even."""
    return (round_bf16(x).view(np.uint32) >> 16).astype(np.uint16)


def _scale_exponent(amax: np.ndarray, largest: float) -> np.ndarray:
    """Exponent of the power-of-two scale that brings `amax` to at most `largest`; float32 division as the rules say."""
    return ceil_log2_float32(np.maximum(amax, np.float32(SMALLEST_AMAX)) / np.float32(largest))


def _ue8m0(exponent: np.ndarray) -> np.ndarray:
    return (exponent + 127).astype(np.uint8)


def quantise_fp8_blocks(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Dense FP8 weight: w float32 [N, K] -> e4m3 uint8 [N, K], ue8m0 uint8 [ceil N/32, ceil K/32]."""
    n, k = w.shape
    block_rows, block_columns = -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)
    padded = np.zeros((block_rows * SCALE_BLOCK, block_columns * SCALE_BLOCK), np.float32)
    padded[:n, :k] = w
    blocks = padded.reshape(block_rows, SCALE_BLOCK, block_columns, SCALE_BLOCK)
    exponent = _scale_exponent(np.abs(blocks).max(axis=(1, 3)), E4M3_MAX)
    codes = e4m3_encode(np.ldexp(blocks, -exponent[:, None, :, None]))
    return np.ascontiguousarray(codes.reshape(padded.shape)[:n, :k]), _ue8m0(exponent)


def dequantise_fp8_blocks(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """e4m3 uint8 [N, K], ue8m0 uint8 [ceil N/32, ceil K/32] -> float32 [N, K]."""
    n, k = weight.shape
    scales = np.repeat(ue8m0_decode(scale), SCALE_BLOCK, axis=1)[:, :k]
    out = e4m3_decode(weight)
    for row, block in enumerate(range(0, n, SCALE_BLOCK)):
        out[block : block + SCALE_BLOCK] *= scales[row]
    return out


def _rows_by_group(w: np.ndarray, largest: float) -> tuple[np.ndarray, np.ndarray]:
    """w [N, K] scaled into +-largest as [N, K/32, 32], and the exponents [N, K/32]."""
    n, k = w.shape
    groups = np.asarray(w, np.float32).reshape(n, k // SCALE_BLOCK, SCALE_BLOCK)
    exponent = _scale_exponent(np.abs(groups).max(axis=-1), largest)
    return np.ldexp(groups, -exponent[..., None]), exponent


def quantise_fp4_rows(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Expert weight: w float32 [N, K], K a multiple of 32 -> packed e2m1 uint8 [N, K/2], ue8m0 uint8 [N, K/32]."""
    scaled, exponent = _rows_by_group(w, E2M1_MAX)
    return pack_nibbles(e2m1_encode(scaled.reshape(w.shape))), _ue8m0(exponent)


def dequantise_fp4_rows(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Packed e2m1 uint8 [..., K/2], ue8m0 uint8 [..., K/32] -> float32 [..., K]."""
    groups = _E2M1_PAIRS[weight].reshape(*scale.shape, SCALE_BLOCK)
    groups *= ue8m0_decode(scale)[..., None]
    return groups.reshape(*weight.shape[:-1], 2 * weight.shape[-1])


def quantise_fp8_rows(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Engram table: w float32 [N, K], K a multiple of 32 -> e4m3 uint8 [N, K], ue8m0 uint8 [N, K/32]."""
    scaled, exponent = _rows_by_group(w, E4M3_MAX)
    return e4m3_encode(scaled).reshape(w.shape), _ue8m0(exponent)


def dequantise_fp8_rows(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """e4m3 uint8 [..., K], ue8m0 uint8 [..., K/32] -> float32 [..., K]."""
    groups = e4m3_decode(weight).reshape(*scale.shape, SCALE_BLOCK)
    groups *= ue8m0_decode(scale)[..., None]
    return groups.reshape(weight.shape)
