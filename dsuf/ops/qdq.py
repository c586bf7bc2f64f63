"""Quantisation points: Q8 on inputs of FP8/FP4 weights and window latents, Q4e on entries, Q4p on index keys.

    name  group  scale s                                          values
    q8    32     2^ceil(log2(max(amax, 1e-4) * f32(1/448)))       e4m3(x / s)
    q4p   32     2^ceil(log2(max(amax, 6 * 2^-126) * f32(1/6)))   e2m1(x / s)
    q4e   16     e4m3(max(amax, 6 * 2^-9) / 6)                    e2m1(clamp(x / s, +-6))

Groups run along the last axis. Each point works on the value rounded to float32 and gives back the dtype it got.
`q8`, `q4p` give the quantised values at once; `*_encode` gives (codes, scales) as stored, `*_decode` their values.
With a power-of-two scale x / s cannot exceed the largest code: f32(1/448) and f32(1/6) lie above 1/448 and 1/6, so no
clamp is needed. Source: reference model.md 3.0.
"""

from __future__ import annotations

import numpy as np

from dsuf import formats
from dsuf.layout import LATENT_GROUP
from dsuf.spec import BLOCK

# Arrays without dimensions: as operands of small arrays they cost half of what NumPy scalars do.
_EXPONENT = np.array(0x7F800000, np.int32)
_MANTISSA = np.array(0x007FFFFF, np.int32)
_SMALLEST_Q8 = np.array(formats.SMALLEST_AMAX, np.float32)
_SMALLEST_Q4P = np.array(6 * 2.0**-126, np.float32)
_SMALLEST_Q4E = np.array(6 * 2.0**-9, np.float32)
_LARGEST_Q4E = np.array(6 * 448, np.float32)  # beyond this the scale saturates
_INVERSE_448 = np.array(1 / 448, np.float32)
_INVERSE_6 = np.array(1 / 6, np.float32)
_LOWEST_E4M3 = np.array(2.0**-6, np.float32)  # smallest normal e4m3
_SHIFT = {bits: np.array(1.5 * 2.0 ** (23 - bits), np.float32) for bits in (1, 3)}


def _groups(x: np.ndarray, group: int) -> np.ndarray:
    """x [..., K] -> float32 [..., K / group, group]."""
    return x.astype(np.float32).reshape(*x.shape[:-1], -1, group)


def _amax(groups: np.ndarray) -> np.ndarray:
    return np.maximum.reduce(np.abs(groups), axis=-1, keepdims=True)


def _power_of_two_scale(groups: np.ndarray, smallest: np.ndarray, inverse_top: np.ndarray) -> np.ndarray:
    """Scale of each group, float32 [..., 1]: the float32 bits rounded up to the next exponent."""
    scale = _amax(groups)
    np.maximum(scale, smallest, out=scale)
    scale *= inverse_top
    bits = scale.view(np.int32)
    bits += _MANTISSA
    bits &= _EXPONENT
    return scale


def _round_to_grid(x: np.ndarray, lowest: np.ndarray, mantissa_bits: int) -> np.ndarray:
    """x float32 rounded to `mantissa_bits` bits after the leading one, nearest even; below `lowest` the step stays.

    With 2^e the power of two under |x|, adding and subtracting 1.5 * 2^(e + 23 - mantissa_bits) makes the float32 adder
    do the rounding.
    """
    shifter = (x.view(np.int32) & _EXPONENT).view(np.float32)
    np.maximum(shifter, lowest, out=shifter)
    shifter *= _SHIFT[mantissa_bits]
    rounded = x + shifter
    rounded -= shifter
    return rounded


def q8(x: np.ndarray) -> np.ndarray:
    """x [..., K], K a multiple of 32 -> its e4m3-with-power-of-two-scale values, same shape and dtype."""
    groups = _groups(x, BLOCK)
    lowest = _power_of_two_scale(groups, _SMALLEST_Q8, _INVERSE_448)
    lowest *= _LOWEST_E4M3
    return _round_to_grid(groups, lowest, mantissa_bits=3).astype(x.dtype, copy=False).reshape(x.shape)


def q8_encode(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [..., K] -> e4m3 codes uint8 [..., K], ue8m0 scales uint8 [..., K / 32]."""
    groups = _groups(x, BLOCK)
    scale = _power_of_two_scale(groups, _SMALLEST_Q8, _INVERSE_448)
    return formats.e4m3_encode(groups / scale).reshape(x.shape), _ue8m0(scale)


def q8_decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """e4m3 codes uint8 [..., K], ue8m0 uint8 [..., K / 32] -> float32 [..., K]."""
    return formats.dequantise_fp8_rows(codes, scales)


def q4p(x: np.ndarray) -> np.ndarray:
    """x [..., K], K a multiple of 32 -> its e2m1-with-power-of-two-scale values, same shape and dtype."""
    groups = _groups(x, BLOCK)
    scale = _power_of_two_scale(groups, _SMALLEST_Q4P, _INVERSE_6)
    return _round_to_grid(groups, scale, mantissa_bits=1).astype(x.dtype, copy=False).reshape(x.shape)


def q4p_encode(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [..., K] -> packed e2m1 uint8 [..., K / 2], ue8m0 scales uint8 [..., K / 32]."""
    groups = _groups(x, BLOCK)
    scale = _power_of_two_scale(groups, _SMALLEST_Q4P, _INVERSE_6)
    return formats.pack_nibbles(formats.e2m1_encode(groups / scale).reshape(x.shape)), _ue8m0(scale)


def q4p_decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Packed e2m1 uint8 [..., K / 2], ue8m0 uint8 [..., K / 32] -> float32 [..., K]."""
    return formats.dequantise_fp4_rows(codes, scales)


def q4e_encode(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [..., K], K a multiple of 16 -> packed e2m1 uint8 [..., K / 2], e4m3 scales uint8 [..., K / 16]."""
    groups = _groups(x, LATENT_GROUP)
    amax = np.clip(_amax(groups), _SMALLEST_Q4E, _LARGEST_Q4E)
    scale_codes = formats.e4m3_encode(amax / np.float32(formats.E2M1_MAX))
    scaled = groups / formats.e4m3_decode(scale_codes)
    np.clip(scaled, -formats.E2M1_MAX, formats.E2M1_MAX, out=scaled)  # the scale itself may have been rounded down
    return formats.pack_nibbles(formats.e2m1_encode(scaled).reshape(x.shape)), scale_codes[..., 0]


def q4e_decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Packed e2m1 uint8 [..., K / 2], e4m3 uint8 [..., K / 16] -> float32 [..., K]."""
    values = formats.e2m1_decode_packed(codes)
    groups = values.reshape(*scales.shape, LATENT_GROUP)
    groups *= formats.e4m3_decode(scales)[..., None]
    return values


def _ue8m0(scale: np.ndarray) -> np.ndarray:
    """Power-of-two scales float32 [..., 1] -> ue8m0 uint8 [...]."""
    return (scale.view(np.int32) >> 23).astype(np.uint8)[..., 0]
