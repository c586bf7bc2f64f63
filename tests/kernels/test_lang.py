"""What `@kernel` expands to, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dsuf.kernels.lang import Kernel, float32, inline, int32, kernel, regs, s64, unroll
from dsuf.kernels.ptx.convert import fma, ue8m0
from dsuf.kernels.ptx.memory import ldg_f32, stg_f32
from dsuf.kernels.ptx.sync import thread_index


@dataclass(frozen=True)
class Shape:
    width: int


def test_unrolling_registers_and_static_branches():
    wide, shape = True, Shape(2)

    @kernel(threads=32)
    def body(x: s64) -> None:
        a = regs(shape.width, float32(0))
        for i in unroll(2):
            if wide:
                a[i] = ue8m0[i + 1](x)
            else:
                a[i] = 5
        a = ue8m0[0](a[0:2])

    lines = body.text.splitlines()
    assert lines[1:] == [
        "    a_0 = float32(0.0)",
        "    a_1 = float32(0.0)",
        "    a_0__v2 = ue8m0__1(x)",
        "    a_1__v2 = ue8m0__2(x)",
        "    a_0__v3, a_1__v3 = ue8m0__0((a_0__v2, a_1__v2))",
    ]
    assert set(body.ops) == {"ue8m0__0", "ue8m0__1", "ue8m0__2"}


def test_helpers_are_expanded_in_place_and_may_write_the_callers_registers():
    @inline
    def accumulate(acc, base, n):
        total = float32(0)
        for i in unroll(n):
            acc[i] = fma(base, float32(2), acc[i])
            total = total + acc[i]
        return total

    @kernel(threads=32)
    def body(x: s64) -> None:
        a = regs(2, float32(1))
        y = accumulate(a, ldg_f32(x), 2)
        stg_f32(x, y)

    text = body.text
    assert "accumulate1_base = ldg_f32(x)" in text
    assert "a_1__v2 = accumulate1_fma(accumulate1_base, float32(2.0), a_1)" in text
    assert text.splitlines()[-2:] == ["    y = accumulate1_total__v3", "    stg_f32(x, y)"]


def test_range_becomes_a_counted_int32_loop_and_floats_stay_float32():
    scale = 0.5

    @kernel(threads=32)
    def body(x: s64) -> None:
        for i in range(int32(thread_index()), 9, 2):
            stg_f32(x, scale * 1.5 + float32(i))

    assert body.text.splitlines()[1:] == [
        "    i = int32(int32(thread_index()))",
        "    while i < 9:",
        "        stg_f32(x, float32(0.75) + float32(i))",
        "        i = int32(i + 2)",
    ]


def test_names_are_kept_only_where_branches_and_loops_carry_them():
    @kernel(threads=32)
    def body(x: s64) -> None:
        a = ldg_f32(x)
        a = a + 1.0
        b = float32(0)
        if thread_index() < 3:
            c = a
            c = c + a
            b = c
        for i in range(4):
            d = b + float32(i)
            d = d * a
            b = d
        stg_f32(x, b if thread_index() == 0 and thread_index() < 9 else a)

    assert body.text.splitlines()[1:] == [
        "    a = ldg_f32(x)",
        "    a__v2 = a + float32(1.0)",
        "    b = float32(0.0)",
        "    if thread_index() < 3:",
        "        c = a__v2",
        "        c__v2 = c + a__v2",
        "        b = c__v2",
        "    i = int32(0)",
        "    while i < 4:",
        "        d = b + float32(i)",
        "        d__v2 = d * a__v2",
        "        b = d__v2",
        "        i = int32(i + 1)",
        "    stg_f32(x, select((thread_index() == 0) & (thread_index() < 9), b, a__v2))",
    ]


def make(n: int) -> Kernel:
    @kernel(threads=32)
    def body(x: s64) -> None:
        stg_f32(x, float32(n))

    return body


def test_identity_follows_constants_and_the_text_of_operations():
    assert make(1).identity != make(2).identity
    assert make(1).identity == make(1).identity
    assert stg_f32.text in make(1).identity


def test_what_the_language_lacks_is_refused_with_the_line():
    def dynamic_index(x: s64) -> None:
        a = regs(2, 0)
        a[thread_index()] = 1

    def dynamic_unroll(x: s64) -> None:
        for _ in unroll(thread_index()):
            stg_f32(x, 1)

    def with_break(x: s64) -> None:
        for _ in range(3):
            break

    def untyped(x) -> None:
        stg_f32(x, 1)

    for function, message in (
        (dynamic_index, "index into registers"),
        (dynamic_unroll, "bound of unroll"),
        (with_break, "break"),
        (untyped, "needs its type"),
    ):
        with pytest.raises(SyntaxError, match=message):
            kernel(threads=32)(function)
