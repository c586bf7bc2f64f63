"""Packed weights (dsuf/kernels/pack.py) to bf16 fragments of the tensor core's A operand, scales folded in; exact.

Sixteen codes of a lane become the eight registers of two products of 16 columns. The bits of a code are placed in the
fields of bf16, where they mean the value times 2^-120 (e4m3) or 2^-126 (e2m1), and one multiplication by a pair of bf16
powers of two gives the weight: `(e + 120) * PAIR` or `(e + 126) * PAIR` for a scale of exponent byte e. That is exact
up to e = 134 and 128: fp8 scales up to 2^7, fp4 scales up to 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsuf.kernels.ptx.convert import E2M1, E4M3, bf16_bits, float_of
from dsuf.kernels.ptx.op import BLACKWELL, Op, ptx, u32

FP8_SHIFT, FP4_SHIFT = 120, 126
PAIR = 0x00800080  # an exponent in both halves


def _multiplier(name: str, shift: int) -> Op:
    def twin(exponent: Any) -> Any:
        return (np.asarray(exponent, np.int64) + shift) * PAIR

    twin.__name__ = name
    return ptx("u32 = u32", f"mad.lo.u32 <d>, <0>, {PAIR}, {shift * PAIR};", pure=True)(twin)


fp8_multiplier = _multiplier("fp8_multiplier", FP8_SHIFT)  # an exponent byte to the multiplier of its weights
fp4_multiplier = _multiplier("fp4_multiplier", FP4_SHIFT)


def _factor(multiplier: Any, shift: int) -> np.ndarray:
    return float_of(u32(multiplier) << np.uint32(16)).astype(np.float64) * 2.0**-shift


def _pairs(low: np.ndarray, high: np.ndarray, factor: np.ndarray) -> np.ndarray:
    scaled = [bf16_bits((v.astype(np.float64) * factor).astype(np.float32)) for v in (low, high)]
    return scaled[0] | scaled[1] << 16


_FP8 = "".join(
    f" prmt.b32 a, <0.{word}>, 0, {select}; shr.u32 s, a, 4; and.b32 a, a, 0x80008000;"
    f" lop3.b32 a, s, 0x07F007F0, a, 0xEA; mul.rn.bf16x2 <d.{4 * (word // 2) + word % 2 + 2 * pair}>, a, <1>;"
    for word in range(4)
    for pair, select in ((0, "0x1404"), (1, "0x3424"))
)


@ptx("u32*8 = u32*4, u32", f"{{.reg .b32 a, s;{_FP8}}}", pure=True)
def fp8x16_bf16(codes: Any, multiplier: Any) -> Any:
    """16 e4m3 codes, words of rows (g, g+8, g, g+8) and columns (0..3, 0..3, 4..7, 4..7), to two A fragments"""
    out, factor = [], _factor(multiplier, FP8_SHIFT)
    for register in range(8):
        word, pair = 2 * (register // 4) + register % 2, register // 2 % 2
        value = [E4M3[u32(codes[word]) >> np.uint32(16 * pair + 8 * i) & np.uint32(255)] for i in range(2)]
        out.append(_pairs(value[0], value[1], factor))
    return tuple(out)


# where pack_fp4 puts sign and magnitude of registers a0 .. a3 (of the even column; the odd one is 16 bits higher)
SIGN_AT, MAGNITUDE_AT = (15, 7, 8, 0), (9, 1, 12, 4)


def _move(register: int, word: int) -> str:
    left = 6 - MAGNITUDE_AT[register]
    magnitude = f"shl.b32 t, <0.{word}>, {left};" if left > 0 else f"shr.u32 t, <0.{word}>, {-left};"
    sign = f"shl.b32 s, <0.{word}>, {15 - SIGN_AT[register]};" if register else f"mov.b32 s, <0.{word}>;"
    return (
        f" {magnitude} {sign} and.b32 t, t, 0x01C001C0; lop3.b32 t, s, 0x80008000, t, 0xEA;"
        f" mul.rn.bf16x2 <d.{4 * word + register}>, t, <{1 + register % 2}>;"
    )


_FP4 = "".join(_move(register, word) for word in range(2) for register in range(4))


@ptx("u32*8 = u32*2, u32, u32", f"{{.reg .b32 t, s;{_FP4}}}", pure=True)
def fp4x16_bf16(packed: Any, even: Any, odd: Any) -> Any:
    """16 e2m1 codes as pack_fp4 has them for sm_90a to two A fragments; multipliers of rows g and of rows g + 8"""
    out = []
    for word in range(2):
        for register in range(4):
            value = []
            for column in range(2):
                held = u32(packed[word]) >> np.uint32(16 * column)
                sign = held >> np.uint32(SIGN_AT[register]) & np.uint32(1)
                value.append(E2M1[sign << np.uint32(3) | held >> np.uint32(MAGNITUDE_AT[register]) & np.uint32(7)])
            out.append(_pairs(value[0], value[1], _factor((even, odd)[register % 2], FP4_SHIFT)))
    return tuple(out)


# nibble order: byte r of a word holds both columns of register r; spread to bits 0..3 of each half, then to the fields
_NIBBLES = "".join(
    f" shr.u32 t, <0.{word}>, {8 * register}; and.b32 t, t, 0xFF; shl.b32 s, t, 12; or.b32 t, t, s; shl.b32 s, t, 12;"
    f" shl.b32 t, t, 6; and.b32 t, t, 0x01C001C0; lop3.b32 t, s, 0x80008000, t, 0xEA;"
    f" mul.rn.bf16x2 <d.{4 * word + register}>, t, <{1 + register % 2}>;"
    for word in range(2)
    for register in range(4)
)


@ptx("u32*8 = u32*2, u32, u32", f"{{.reg .b32 t, s;{_NIBBLES}}}", pure=True, chips=BLACKWELL)
def fp4x16_bf16_nibbles(packed: Any, even: Any, odd: Any) -> Any:
    """The same for codes in nibble order (pack_fp4 for Blackwell)"""
    out = []
    for word in range(2):
        for register in range(4):
            value = [E2M1[u32(packed[word]) >> np.uint32(8 * register + 4 * c) & np.uint32(15)] for c in range(2)]
            out.append(_pairs(value[0], value[1], _factor((even, odd)[register % 2], FP4_SHIFT)))
    return tuple(out)


@ptx("s64 = s64", "mov.b64 <d>, <0>;")
def opaque_address(address: Any) -> Any:
    """mov.b64 that the optimiser cannot see through: sums with it are not kept in registers from loop to loop"""
    return address


@ptx("s32 = s32, s32", "div.s32 <d>, <0>, <1>;", pure=True)
def quotient(a: Any, b: Any) -> Any:
    """div.s32 of numbers that are not negative: Numba's // divides 64 bits, in a subroutine"""
    return np.asarray(a, np.int64) // np.asarray(b, np.int64)
