"""Conversions between storage types, bit work, and the fast arithmetic that Python has no operator for.

Formats are those of dsuf/formats.py: e4m3 (OCP fn), e2m1 (codes 0..15), ue8m0 (exponent byte), bf16, f16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsuf.kernels.ptx.op import BLACKWELL, Op, bits_of, float_of, ptx, u32, word

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _e4m3_values() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value = np.where(code & 127 == 127, np.nan, value)
    return np.where(code >> 7 == 1, -value, value).astype(np.float32)


E4M3 = _e4m3_values()
_E4M3_POSITIVE = E4M3[:127].astype(np.float64)


def e4m3_code(value: np.ndarray) -> np.ndarray:
    """Nearest e4m3 code, ties to even, saturating at 448: what cvt.rn.satfinite does."""
    magnitude = np.minimum(np.abs(value.astype(np.float64)), 448.0)
    above = np.searchsorted(_E4M3_POSITIVE, magnitude, side="left").clip(1, 126)
    below = above - 1
    low, high = magnitude - _E4M3_POSITIVE[below], _E4M3_POSITIVE[above] - magnitude
    code = np.where((low < high) | ((low == high) & (below % 2 == 0)), below, above)
    return word(code | np.where(np.signbit(value), 128, 0))


def bf16_bits(value: Any) -> np.ndarray:
    """Nearest bf16, ties to even, as 16-bit lane integers."""
    bits = bits_of(value)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _f16_pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    half = [np.asarray(x, np.float32).astype(np.float16).view(np.uint16).astype(np.int64) for x in (low, high)]
    return half[0] | half[1] << 16


def _f16(word_: Any, shift: int) -> np.ndarray:
    return (u32(word_) >> np.uint32(shift)).astype(np.uint16).view(np.float16).astype(np.float32)


@ptx("u32 = f32, f32", "cvt.rn.bf16x2.f32 <d>, <0>, <1>;", pure=True)
def bf16x2(high: Any, low: Any) -> Any:
    """cvt.rn.bf16x2.f32: the first argument becomes the high half"""
    return bf16_bits(high) << 16 | bf16_bits(low)


@ptx("f32 = f32", "{.reg .b16 t; cvt.rn.bf16.f32 t, <0>; mov.b32 <d>, {0, t};}", pure=True)
def round_bf16(value: Any) -> Any:
    """cvt.rn.bf16.f32 and back: a float32 rounded to bf16"""
    return float_of(bf16_bits(value) << 16)


@ptx("f32 = u32", "shl.b32 <d>, <0>, 16;", pure=True)
def bf16_low(pair: Any) -> Any:
    """The low bf16 of a pair, as float32 (shl.b32)"""
    return float_of(u32(pair) << np.uint32(16))


@ptx("f32 = u32", "and.b32 <d>, <0>, 0xFFFF0000;", pure=True)
def bf16_high(pair: Any) -> Any:
    """The high bf16 of a pair, as float32 (and.b32)"""
    return float_of(u32(pair) & np.uint32(0xFFFF0000))


@ptx("u32 = f32, f32", "cvt.rn.f16x2.f32 <d>, <0>, <1>;", pure=True)
def f16x2(high: Any, low: Any) -> Any:
    """cvt.rn.f16x2.f32: the first argument becomes the high half"""
    return _f16_pair(low, high)


@ptx("f32 = u32", "{.reg .b16 l, h; mov.b32 {l, h}, <0>; cvt.f32.f16 <d>, l;}", pure=True)
def f16_low(pair: Any) -> Any:
    """cvt.f32.f16 of the low half"""
    return _f16(pair, 0)


@ptx("f32 = u32", "{.reg .b16 l, h; mov.b32 {l, h}, <0>; cvt.f32.f16 <d>, h;}", pure=True)
def f16_high(pair: Any) -> Any:
    """cvt.f32.f16 of the high half"""
    return _f16(pair, 16)


@ptx(
    "u32*2 = u32",
    "{.reg .b16 l, h; mov.b32 {l, h}, <0>; cvt.rn.f16x2.e4m3x2 <d.0>, l; cvt.rn.f16x2.e4m3x2 <d.1>, h;}",
    pure=True,
)
def e4m3x4_f16(codes: Any) -> Any:
    """cvt.rn.f16x2.e4m3x2 twice: four codes to two f16 pairs, exact"""
    value = [E4M3[u32(codes) >> np.uint32(8 * i) & np.uint32(255)] for i in range(4)]
    return _f16_pair(value[0], value[1]), _f16_pair(value[2], value[3])


@ptx("u32 = f32, f32", "{.reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, <0>, <1>; cvt.u32.u16 <d>, t;}", pure=True)
def e4m3x2(high: Any, low: Any) -> Any:
    """cvt.rn.satfinite.e4m3x2.f32: two codes in the low 16 bits, the second argument in the low byte"""
    return e4m3_code(np.asarray(high, np.float32)) << 8 | e4m3_code(np.asarray(low, np.float32))


# a magnitude passes a boundary if it is above it, or on it where the code above is even
_E2M1_EDGES = ((0.25, "gt"), (0.75, "ge"), (1.25, "gt"), (1.75, "ge"), (2.5, "gt"), (3.5, "ge"), (5.0, "gt"))
_E2M1_COUNT = "".join(
    f" setp.{compare}.u32 p, m, 0x{np.float32(edge).view(np.uint32):08X}; @p add.u32 c, c, 1;"
    for edge, compare in _E2M1_EDGES
)


@ptx(
    "u32 = f32",
    "{.reg .b32 b, m, s, c; .reg .pred p; mov.b32 b, <0>; and.b32 m, b, 0x7FFFFFFF; shr.u32 s, b, 28; and.b32 s, s, 8;"
    f" mov.b32 c, 0;{_E2M1_COUNT} or.b32 <d>, c, s;}}",
    pure=True,
)
def e2m1_code(value: Any) -> Any:
    """Nearest e2m1 code, ties to the even code: counts the boundaries below |value| (all chips; exact)"""
    magnitude = np.abs(np.asarray(value, np.float32))
    code = sum((magnitude > edge).astype(np.int64) for edge in (0.25, 1.25, 2.5, 5.0))
    code = code + sum((magnitude >= edge).astype(np.int64) for edge in (0.75, 1.75, 3.5))
    return code | bits_of(value) >> 28 & 8


# e2m1 -> f16 at 2^-14 of the value, for sm_90a: the packing in dsuf/kernels/pack.py puts each code's sign and magnitude
# bits where one mask brings them into the f16 fields, after a swap of bytes or a product that moves sign and magnitude
# by 15 and 5 places. 7 instructions of the logic pipe, which bounds these products, and 2 others for 8 weights.
@ptx(
    "u32*4 = u32",
    "{.reg .b32 s, a, b; and.b32 <d.0>, <0>, 0x8E008E00; prmt.b32 s, <0>, 0, 0x2301; and.b32 <d.1>, s, 0x8E008E00;"
    " and.b32 a, s, 0x00710071; mul.lo.u32 a, a, 0x8020; and.b32 <d.2>, a, 0x8E008E00;"
    " and.b32 b, <0>, 0x00710071; mul.lo.u32 b, b, 0x8020; and.b32 <d.3>, b, 0x8E008E00;}",
    pure=True,
)
def fp4x8_f16_bits(packed: Any) -> Any:
    """Eight packed e2m1 codes to the four f16 pairs of an A fragment, times 2^-14"""
    w, fields, moved, places = u32(packed), np.uint32(0x8E008E00), np.uint32(0x00710071), np.uint32(0x8020)
    swapped = w >> np.uint32(8) & np.uint32(0x00FF00FF) | w << np.uint32(8) & np.uint32(0xFF00FF00)
    with np.errstate(over="ignore"):
        parts = (w, swapped, (swapped & moved) * places, (w & moved) * places)
    return tuple(word(part & fields) for part in parts)


@ptx(
    "u32*4 = u32",
    "{.reg .b8 a, b, c, e; mov.b32 {a, b, c, e}, <0>; cvt.rn.f16x2.e2m1x2 <d.0>, a; cvt.rn.f16x2.e2m1x2 <d.1>, b;"
    " cvt.rn.f16x2.e2m1x2 <d.2>, c; cvt.rn.f16x2.e2m1x2 <d.3>, e;}",
    pure=True,
    chips=BLACKWELL,
)
def fp4x8_f16_cvt(packed: Any) -> Any:
    """cvt.rn.f16x2.e2m1x2 four times: eight codes in nibble order to four f16 pairs, exact"""
    code = [u32(packed) >> np.uint32(4 * i) & np.uint32(15) for i in range(8)]
    return tuple(_f16_pair(E2M1[code[2 * i]], E2M1[code[2 * i + 1]]) for i in range(4))


# e4m3 -> bf16, exact, all chips: place sign and the seven magnitude bits, then multiply by 2^120
@ptx(
    "u32*2 = u32",
    "{.reg .b32 a, s, k; mov.b32 k, 0x7B807B80; prmt.b32 a, <0>, 0, 0x1404; shr.u32 s, a, 4; and.b32 a, a, 0x80008000;"
    " lop3.b32 a, s, 0x07F007F0, a, 0xEA; mul.rn.bf16x2 <d.0>, a, k;"
    " prmt.b32 a, <0>, 0, 0x3424; shr.u32 s, a, 4; and.b32 a, a, 0x80008000;"
    " lop3.b32 a, s, 0x07F007F0, a, 0xEA; mul.rn.bf16x2 <d.1>, a, k;}",
    pure=True,
)
def e4m3x4_bf16(codes: Any) -> Any:
    """Four e4m3 codes to two bf16 pairs, exact (NaN codes are not expected in weights)"""
    bits = [bf16_bits(E4M3[u32(codes) >> np.uint32(8 * i) & np.uint32(255)]) for i in range(4)]
    return bits[0] | bits[1] << 16, bits[2] | bits[3] << 16


# e2m1 -> bf16, exact, all chips: sign and magnitude bits into the fields of bf16, then multiply by 2^126
@ptx(
    "u32*4 = u32",
    "{.reg .b32 t, x, s, k; mov.b32 k, 0x7E807E80;"
    + "".join(
        f" shr.u32 t, <0>, {8 * i}; and.b32 t, t, 0xFF; shl.b32 x, t, 12; or.b32 t, t, x; shl.b32 x, t, 6;"
        f" and.b32 x, x, 0x01C001C0; shl.b32 s, t, 12; and.b32 s, s, 0x80008000; or.b32 x, x, s;"
        f" mul.rn.bf16x2 <d.{i}>, x, k;"
        for i in range(4)
    )
    + "}",
    pure=True,
)
def fp4x8_bf16(packed: Any) -> Any:
    """Eight e2m1 codes, even column in the low nibble, to four bf16 pairs, exact"""
    code = [u32(packed) >> np.uint32(4 * i) & np.uint32(15) for i in range(8)]
    bits = [bf16_bits(E2M1[c]) for c in code]
    return tuple(bits[2 * i] | bits[2 * i + 1] << 16 for i in range(4))


# the same with the multiplication by a scale in it: the codes' bits stand for 2^-126 (2^-120) of their values, so a
# factor of scale * 2^118 (2^112) leaves scale / 256 of them. Pairs (i, i + 4) are made at once and sorted at the end.
@ptx(
    "u32*4 = u32, u32",
    "{.reg .b32 m, s, x0, x1, x2, x3;"
    + "".join(
        f" {move}.b32 m, <0>, {abs(6 - 4 * i)}; and.b32 m, m, 0x01C001C0; shl.b32 s, <0>, {12 - 4 * i};"
        f" lop3.b32 m, s, 0x80008000, m, 0xEA; mul.rn.bf16x2 x{i}, m, <1>;"
        for i, move in enumerate(("shl", "shl", "shr", "shr"))
    )
    + " prmt.b32 <d.0>, x0, x1, 0x5410; prmt.b32 <d.1>, x2, x3, 0x5410; prmt.b32 <d.2>, x0, x1, 0x7632;"
    " prmt.b32 <d.3>, x2, x3, 0x7632;}",
    pure=True,
)
def fp4x8_bf16_scaled(packed: Any, factor: Any) -> Any:
    """Eight e2m1 codes, even column in the low nibble, times 2^-126 and a bf16 factor (the same in both halves)"""
    times = float_of(u32(factor) & np.uint32(0xFFFF0000)).astype(np.float64) * 2.0**-126
    bits = [bf16_bits(E2M1[u32(packed) >> np.uint32(4 * i) & np.uint32(15)] * times) for i in range(8)]
    return tuple(bits[2 * i] | bits[2 * i + 1] << 16 for i in range(4))


@ptx(
    "u32*2 = u32, u32",
    "{.reg .b32 a, s; prmt.b32 a, <0>, 0, 0x1404; shr.u32 s, a, 4; and.b32 a, a, 0x80008000;"
    " lop3.b32 a, s, 0x07F007F0, a, 0xEA; mul.rn.bf16x2 <d.0>, a, <1>;"
    " prmt.b32 a, <0>, 0, 0x3424; shr.u32 s, a, 4; and.b32 a, a, 0x80008000;"
    " lop3.b32 a, s, 0x07F007F0, a, 0xEA; mul.rn.bf16x2 <d.1>, a, <1>;}",
    pure=True,
)
def e4m3x4_bf16_scaled(codes: Any, factor: Any) -> Any:
    """Four e4m3 codes times 2^-120 and a bf16 factor (the same in both halves)"""
    times = float_of(u32(factor) & np.uint32(0xFFFF0000)).astype(np.float64) * 2.0**-120
    bits = [bf16_bits(E4M3[u32(codes) >> np.uint32(8 * i) & np.uint32(255)] * times) for i in range(4)]
    return bits[0] | bits[1] << 16, bits[2] | bits[3] << 16


@ptx("u32 = u32, u32", "mul.rn.f16x2 <d>, <0>, <1>;", pure=True)
def mul_f16x2(a: Any, b: Any) -> Any:
    """mul.rn.f16x2: products of two pairs"""
    with np.errstate(all="ignore"):
        return _f16_pair(_f16(a, 0) * _f16(b, 0), _f16(a, 16) * _f16(b, 16))


@ptx("u32 = u32, u32", "mul.rn.bf16x2 <d>, <0>, <1>;", pure=True)
def mul_bf16x2(a: Any, b: Any) -> Any:
    """mul.rn.bf16x2: products of two pairs"""
    with np.errstate(all="ignore"):
        low = float_of(u32(a) << np.uint32(16)) * float_of(u32(b) << np.uint32(16))
        high = float_of(u32(a) & np.uint32(0xFFFF0000)) * float_of(u32(b) & np.uint32(0xFFFF0000))
    return bf16_bits(high) << 16 | bf16_bits(low)


def _exponent(i: int) -> Op:
    move = f"shl.b32 s, <0>, {23 - 8 * i};" if i < 3 else "shr.u32 s, <0>, 1;"

    def twin(exponents: Any) -> Any:
        return float_of((u32(exponents) >> np.uint32(8 * i) & np.uint32(255)).astype(np.int64) << 23)

    twin.__name__ = f"ue8m0_{i}"
    return ptx("f32 = u32", f"{{.reg .b32 s; {move} and.b32 s, s, 0x7F800000; mov.b32 <d>, s;}}", pure=True)(twin)


ue8m0 = tuple(_exponent(i) for i in range(4))  # byte i of a word of ue8m0 exponents, as float32 (byte 0: 0)


@ptx("f32 = u32", "mov.b32 <d>, <0>;", pure=True)
def as_float(bits: Any) -> Any:
    """mov.b32"""
    return float_of(bits)


@ptx("u32 = f32", "mov.b32 <d>, <0>;", pure=True)
def as_bits(value: Any) -> Any:
    """mov.b32"""
    return bits_of(value)


@ptx("u32 = u32, u32, u32", "prmt.b32 <d>, <0>, <1>, <2>;", pure=True)
def prmt(low: Any, high: Any, selector: Any) -> Any:
    """prmt.b32: byte i of the result is the byte of {high, low} that nibble i of the selector names"""
    both = u32(low).astype(np.uint64) | u32(high).astype(np.uint64) << np.uint64(32)
    picked = [u32(selector) >> np.uint32(4 * i) & np.uint32(7) for i in range(4)]
    parts = [(both >> (p.astype(np.uint64) * np.uint64(8)) & np.uint64(255)).astype(np.int64) for p in picked]
    return parts[0] | parts[1] << 8 | parts[2] << 16 | parts[3] << 24


@ptx("f32 = f32, f32, f32", "fma.rn.f32 <d>, <0>, <1>, <2>;", pure=True)
def fma(a: Any, b: Any, c: Any) -> Any:
    """fma.rn.f32, one rounding"""
    exact = np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64)
    return exact.astype(np.float32)


@ptx(
    "f32*4 = f32*4, f32*4, f32, f32, f32, f32",
    "{.reg .f32 s; mul.rn.f32 s, <2>, <4>; fma.rn.f32 <d.0>, <1.0>, s, <0.0>; mul.rn.f32 s, <2>, <5>;"
    " fma.rn.f32 <d.1>, <1.1>, s, <0.1>; mul.rn.f32 s, <3>, <4>; fma.rn.f32 <d.2>, <1.2>, s, <0.2>;"
    " mul.rn.f32 s, <3>, <5>; fma.rn.f32 <d.3>, <1.3>, s, <0.3>;}",
    pure=True,
)
def add_scaled(acc: Any, p: Any, row0: Any, row1: Any, column0: Any, column1: Any) -> Any:
    """mul and fma of a product tile: acc + p * (scale of its row * scale of its column); rows g, g, g+8, g+8"""
    scales = ((row0, column0), (row0, column1), (row1, column0), (row1, column1))
    with np.errstate(all="ignore"):
        factors = [np.asarray(r, np.float32) * np.asarray(c, np.float32) for r, c in scales]
        return tuple(fma.twin(p[i], factors[i], acc[i]) for i in range(4))


@ptx(
    "f32*4 = f32*4, f32*4, f32, f32",
    "fma.rn.f32 <d.0>, <1.0>, <2>, <0.0>; fma.rn.f32 <d.1>, <1.1>, <2>, <0.1>;"
    " fma.rn.f32 <d.2>, <1.2>, <3>, <0.2>; fma.rn.f32 <d.3>, <1.3>, <3>, <0.3>;",
    pure=True,
)
def add_rows(acc: Any, p: Any, row0: Any, row1: Any) -> Any:
    """fma of a product tile: acc + p * scale of its row; rows g, g, g+8, g+8"""
    return tuple(fma.twin(p[i], (row0, row0, row1, row1)[i], acc[i]) for i in range(4))


def _unary(name: str, text: str, function: Any) -> Op:
    def twin(value: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(np.asarray(value, np.float64)).astype(np.float32)

    twin.__name__ = name
    return ptx("f32 = f32", f"{text} <d>, <0>;", pure=True)(twin)


exp2_approx = _unary("exp2_approx", "ex2.approx.ftz.f32", np.exp2)
log2_approx = _unary("log2_approx", "lg2.approx.ftz.f32", np.log2)
rcp_approx = _unary("rcp_approx", "rcp.approx.ftz.f32", lambda x: 1 / x)
rcp = _unary("rcp", "rcp.rn.f32", lambda x: 1 / x)
sqrt = _unary("sqrt", "sqrt.rn.f32", np.sqrt)
rsqrt_approx = _unary("rsqrt_approx", "rsqrt.approx.f32", lambda x: 1 / np.sqrt(x))


@ptx("f32 = f32, f32", "div.rn.f32 <d>, <0>, <1>;", pure=True)
def div(a: Any, b: Any) -> Any:
    """div.rn.f32"""
    with np.errstate(all="ignore"):
        return (np.asarray(a, np.float32) / np.asarray(b, np.float32)).astype(np.float32)


@ptx("f32 = f32, f32", "max.f32 <d>, <0>, <1>;", pure=True)
def fmax(a: Any, b: Any) -> Any:
    """max.f32"""
    return np.fmax(np.asarray(a, np.float32), np.asarray(b, np.float32))


@ptx("f32 = f32, f32", "min.f32 <d>, <0>, <1>;", pure=True)
def fmin(a: Any, b: Any) -> Any:
    """min.f32"""
    return np.fmin(np.asarray(a, np.float32), np.asarray(b, np.float32))


@ptx("f32 = f32", "abs.f32 <d>, <0>;", pure=True)
def fabs(a: Any) -> Any:
    """abs.f32"""
    return np.abs(np.asarray(a, np.float32))


@ptx("u32 = u32, u32", "mul.hi.u32 <d>, <0>, <1>;", pure=True)
def mul_hi(a: Any, b: Any) -> Any:
    """mul.hi.u32: the high word of the product (Philox)"""
    return ((u32(a).astype(np.uint64) * u32(b).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


@ptx("u32 = u32", "clz.b32 <d>, <0>;", pure=True)
def count_leading_zeros(value: Any) -> Any:
    """clz.b32: 32 for 0"""
    return np.asarray([32 - int(x).bit_length() for x in np.atleast_1d(u32(value))], np.int64).reshape(np.shape(value))


@ptx("u32 = u32", "popc.b32 <d>, <0>;", pure=True)
def popc(value: Any) -> Any:
    """popc.b32"""
    return word(np.bitwise_count(u32(value)))


@ptx("s32 = s32", "mov.b32 <d>, <0>;")
def opaque(value: Any) -> Any:
    """mov.b32 that the optimiser cannot see through: keeps libnvvm from unrolling a loop with a constant bound"""
    return value
