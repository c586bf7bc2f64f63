"""Sparse attention on the interpreter against ops.attend in float64: short windows, few entries, pages out of order."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import attend as family
from dsuf.kernels import catalogue, rope
from dsuf.kernels.latents import window_row_bytes
from dsuf.layout import PAGE_TOKENS
from dsuf.ops import qdq
from dsuf.ops.attend import attend
from dsuf.ops.numerics import NUMERICS
from tests.kernels.helpers import assert_near, bf16, execute, made, values

WIDTHS = {
    "tiny": (4, 64, 16, 8, 8), "wide": (20, 128, 32, 72, 96), "real": (64, 512, 64, 128, 512)
}  # heads, d, rope, window, topk  # fmt: skip


def turned(x: np.ndarray, position: np.ndarray, w: np.ndarray, sign: int) -> np.ndarray:
    """x [rows, H, d] float64 rotated, rounded to bf16 as the kernel stores it."""
    out, n = x.copy(), x.shape[-1] - 2 * len(w)
    pairs = (out[..., n::2] + 1j * out[..., n + 1 :: 2]) * np.exp(sign * 1j * np.multiply.outer(position, w))[:, None]
    out[..., n::2], out[..., n + 1 :: 2] = pairs.real, pairs.imag
    return formats.round_bf16(out).astype(np.float64)


class Case:
    """Caches of several sequences and one step of rows over them."""

    def __init__(self, rng: np.random.Generator, width: str, ratio: int, positions: list[int], inactive: int = -1):
        self.h, self.d, self.rope, self.window, topk = WIDTHS[width]
        self.width = width
        self.topk, self.ratio, self.ring = topk if ratio else 0, ratio, self.window + 24
        rows, d = len(positions), self.d
        self.position = np.array(positions, np.int32)
        self.sequence = rng.permutation(rows).astype(np.int32)
        if inactive >= 0:
            self.sequence[inactive] = -1
        self.first, self.last = np.maximum(self.position - self.window + 1, 0).astype(np.int32), self.position.copy()
        self.q = bf16(rng, rows, self.h, d)
        self.ring_codes, self.ring_scales = qdq.q8_encode(rng.standard_normal((rows, self.ring, d)))
        self.windows = np.zeros((rows, self.ring, window_row_bytes(d)), np.uint8)
        self.windows[..., :d], self.windows[..., d : d + d // 32] = self.ring_codes, self.ring_scales
        most = max(positions) // PAGE_TOKENS + 1
        self.pages = rng.permutation(rows * most).reshape(rows, most).astype(np.uint32)
        per_page = PAGE_TOKENS // max(ratio, 1)
        self.codes, self.scales = qdq.q4e_encode(rng.standard_normal((rows * most, per_page, d)))
        visible = (self.position + 1) // max(ratio, 1)
        self.chosen = np.minimum(visible, self.topk).astype(np.int32)
        self.selected = np.full((rows, max(self.topk, 1)), -1, np.int32)
        for row in range(rows):
            picked = rng.permutation(visible[row])[: self.chosen[row]]
            self.selected[row, : self.chosen[row]] = np.sort(picked)
        self.sink = rng.standard_normal(self.h).astype(np.float32)
        self.w = 10000.0 ** (-np.arange(0, self.rope, 2) / self.rope)
        self.per_page = per_page

    def run(self) -> np.ndarray:
        rows, out = len(self.position), np.full(self.q.shape, np.nan, np.float16)
        page = np.concatenate([a.reshape(len(a), -1) for a in (self.codes, self.scales)], axis=1)
        pages = np.ascontiguousarray(page)
        topk = WIDTHS[self.width][4]
        most = family.most_keys(self.window, 5, topk)
        kernel = made(family.make, h=self.h, d=self.d, rope=self.rope, most=most, window=self.window + 5, topk=topk)
        sparse = self.ratio > 0
        args = [self.q, self.windows, self.windows[0].nbytes, self.ring, self.sequence, self.position, self.first,
                self.last, self.selected if sparse else 0, self.selected.shape[1], self.chosen if sparse else 0,
                self.pages if sparse else 0, self.pages.shape[1], pages if sparse else 0,
                pages.ctypes.data + self.per_page * self.d // 2, pages.shape[1], int(self.ratio == 2), int(sparse),
                rope.tables(self.w, 4096), self.sink, out]  # fmt: skip
        execute(kernel, args, grid=(family.blocks(self.h) * rows, 1))
        return out

    def expected(self, row: int) -> np.ndarray:
        owner, keys = self.sequence[row], []
        for place in range(self.first[row], self.last[row] + 1):
            at = owner, place % self.ring
            keys.append(qdq.q8_decode(self.ring_codes[at], self.ring_scales[at]))
        for entry in self.selected[row, : self.chosen[row]]:
            at = self.pages[owner, entry // self.per_page], entry % self.per_page
            keys.append(qdq.q4e_decode(self.codes[at], self.scales[at]))
        keys = np.array(keys, np.float64)[None]
        place = self.position[row : row + 1].astype(float)
        q = turned(values(self.q[row : row + 1]), place, self.w, 1)
        o = attend(q, keys, np.zeros(keys.shape[:2]), self.sink.astype(np.float64), NUMERICS["qdq64"])
        return turned(formats.round_bf16(o).astype(float), place, self.w, -1)[0]


@pytest.mark.parametrize(("width", "ratio"), [("tiny", 0), ("tiny", 2), ("tiny", 1), ("wide", 2), ("real", 1)])
def test_attention_agrees_with_the_op(width: str, ratio: int):
    positions = {"tiny": [0, 1, 5, 7, 9, 300, 301], "wide": [3, 130, 700], "real": [600]}[width]
    case = Case(np.random.default_rng(ratio), width, ratio, positions, inactive=1 if width != "real" else -1)
    out = case.run()
    for row in range(len(positions)):
        if case.sequence[row] < 0:
            assert np.isnan(out[row]).all()
            continue
        want = case.expected(row)
        # probabilities are rounded to bf16, then the result twice
        assert_near(out[row].astype(float), want, 2.0**-7, 2.0**-7 * np.abs(want).max())


def test_rows_of_a_drafted_block_see_all_of_it():
    case = Case(np.random.default_rng(3), "tiny", 0, [50, 51, 52, 53, 54])
    case.sequence[:] = 2
    case.first[:], case.last[:] = 43, 54
    out = case.run()
    for row in range(5):
        want = case.expected(row)
        assert_near(out[row].astype(float), want, 2.0**-7, 2.0**-7 * np.abs(want).max())


def test_a_row_without_keys_is_zero():
    case = Case(np.random.default_rng(3), "tiny", 0, [50])
    case.first[:], case.last[:] = 51, 50
    assert not case.run().any()


@pytest.mark.parametrize("rows", [6, 16, 48])
def test_a_row_is_the_same_bits_in_any_launch(rows: int):
    rng = np.random.default_rng(rows)
    case = Case(rng, "tiny", 2, [int(p) for p in rng.integers(0, 400, rows)])
    case.sequence[:3] = -1
    case.q[:3] = 0x7FC0
    for name in ("position", "first", "last", "chosen", "selected"):
        getattr(case, name)[:3] = 1 << 30
    together = case.run()
    for row in (3, rows - 1):
        alone = Case.__new__(Case)
        alone.__dict__ = dict(case.__dict__)
        for name in ("position", "sequence", "first", "last", "q", "chosen", "selected"):
            setattr(alone, name, np.ascontiguousarray(getattr(case, name)[row : row + 1]))
        assert np.array_equal(alone.run()[0], together[row])


@pytest.mark.parametrize("h", [64, 32, 16])
def test_an_sm_has_one_block_of_few_rows_and_two_of_more(h: int):
    width = next(width for width in catalogue.widths() if width.label == "v41")
    entry = next(e for e in family.entries(width) if e.shape["h"] == h)
    few, many = (family.shared_of(width, h, rows) + 1024 for rows in (8, 9))  # a block's own and the system's
    assert entry.make(**entry.shape).shared == few - 1024
    assert 2 * many <= 228 * 1024 < 2 * few
