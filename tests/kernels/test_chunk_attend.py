"""Attention of a chunk's rows against ops.attend in float64: private ring, few and many entries, every chip's body."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import chunk_attend as family
from dsuf.kernels import rope
from dsuf.kernels.latents import window_row_bytes
from dsuf.layout import PAGE_TOKENS
from dsuf.ops import qdq
from dsuf.ops.attend import attend
from dsuf.ops.numerics import NUMERICS
from tests.kernels.helpers import assert_near, bf16, execute, made, values
from tests.kernels.test_attend import turned

WIDTHS = {  # heads, d, rope, window, topk
    "tiny": (4, 64, 16, 8, 8),
    "narrow": (24, 128, 64, 8, 8),
    "middle": (64, 256, 32, 8, 8),
    "real": (64, 512, 64, 128, 512),
}
FORMS = ("sm_90a", "sm_103a")  # whose bodies differ; the second runs on the first chip too


def natural(rows: np.ndarray) -> np.ndarray:
    """Columns in product order back to their own: 8t + 4m + 2h + j of every 32 stands at 16m + 8h + 2t + j."""
    groups = rows.reshape(*rows.shape[:-1], -1, 2, 2, 4, 2)
    return np.ascontiguousarray(np.moveaxis(groups, -2, -4)).reshape(rows.shape)


class Case:
    """Rows of one sequence at consecutive positions, its keys in a private ring and in pages."""

    def __init__(self, rng: np.random.Generator, width: str, ratio: int, start: int, rows: int, inactive: int = -1):
        self.h, self.d, self.rope, self.window, topk = WIDTHS[width]
        self.topk, self.ratio, self.ring = topk if ratio else 0, ratio, self.window + rows + 3
        d = self.d
        self.position = np.arange(start, start + rows, dtype=np.int32)
        self.sequence = np.ones(rows, np.int32)  # of two
        if inactive >= 0:
            self.sequence[inactive] = -1
        self.first, self.last = np.maximum(self.position - self.window + 1, 0).astype(np.int32), self.position.copy()
        self.q = bf16(rng, rows, self.h, d)
        self.ring_codes, self.ring_scales = qdq.q8_encode(rng.standard_normal((self.ring, d)) * 0.3)
        self.windows = np.zeros((self.ring, window_row_bytes(d)), np.uint8)
        self.windows[..., :d], self.windows[..., d : d + d // 32] = self.ring_codes, self.ring_scales
        most = (start + rows) // PAGE_TOKENS + 1
        self.pages = rng.permutation(2 * most).reshape(2, most).astype(np.uint32)
        self.per_page = PAGE_TOKENS // max(ratio, 1)
        scale = np.exp2(rng.integers(-7, 2, (2 * most, self.per_page, d // 32, 1))).repeat(32, -1)
        self.codes, self.scales = qdq.q4e_encode(
            rng.standard_normal((2 * most, self.per_page, d)) * scale.reshape(2 * most, self.per_page, d)
        )
        visible = (self.position + 1) // max(ratio, 1)
        self.chosen = np.minimum(visible, self.topk).astype(np.int32)
        self.selected = np.full((rows, max(self.topk, 1)), -1, np.int32)
        for row in range(rows):
            self.selected[row, : self.chosen[row]] = np.sort(rng.permutation(visible[row])[: self.chosen[row]])
        self.sink = rng.standard_normal(self.h).astype(np.float32)
        self.w = 10000.0 ** (-np.arange(0, self.rope, 2) / self.rope)

    def run(self, chip: str) -> np.ndarray:
        out, n = np.full(self.q.shape, 0x7FC0, np.uint16), len(self.codes)
        page = np.ascontiguousarray(np.concatenate([self.codes.reshape(n, -1), self.scales.reshape(n, -1)], axis=1))
        kernel = made(family.make, h=self.h, d=self.d, rope=self.rope, chip=chip)
        scales = page.ctypes.data + self.per_page * self.d // 2
        execute(kernel, [self.q, self.windows, 0, self.ring, self.selected, self.chosen, self.topk, self.pages,
                         self.pages.shape[1], page, scales, page.shape[1], max(self.ratio, 1), self.sequence,
                         self.position, self.first, self.last, rope.tables(self.w, 4096), self.sink, out,
                         len(self.position)], grid=(2, 1))  # fmt: skip
        return natural(out)

    def expected(self, row: int) -> np.ndarray:
        keys = []
        for place in range(self.first[row], self.last[row] + 1):
            keys.append(qdq.q8_decode(self.ring_codes[place % self.ring], self.ring_scales[place % self.ring]))
        for entry in self.selected[row, : self.chosen[row]]:
            at = self.pages[1, entry // self.per_page], entry % self.per_page
            keys.append(qdq.q4e_decode(self.codes[at], self.scales[at]))
        keys = np.array(keys, np.float64)[None]
        place = self.position[row : row + 1].astype(float)
        q = turned(values(self.q[row : row + 1]), place, self.w, 1)
        o = attend(q, keys, np.zeros(keys.shape[:2]), self.sink.astype(np.float64), NUMERICS["qdq64"])
        return turned(formats.round_bf16(o).astype(float), place, self.w, -1)[0]


@pytest.mark.parametrize("chip", FORMS)
@pytest.mark.parametrize(("width", "ratio", "start", "rows"), [
    ("tiny", 0, 0, 3), ("tiny", 0, 70, 3), ("tiny", 2, 0, 9), ("tiny", 1, 300, 4), ("real", 2, 0, 2),
    ("real", 1, 2000, 1), ("real", 2, 130, 1), ("real", 0, 127, 2), ("narrow", 1, 90, 2), ("middle", 2, 300, 2),
])  # fmt: skip
def test_attention_agrees_with_the_op(width: str, ratio: int, start: int, rows: int, chip: str):
    case = Case(np.random.default_rng(ratio), width, ratio, start, rows, inactive=1 if rows > 3 else -1)
    out = case.run(chip)
    for row in range(rows):
        if case.sequence[row] < 0:
            assert (out[row] == 0x7FC0).all()
            continue
        want = case.expected(row)
        # probabilities are rounded to bf16, then the result twice
        assert_near(values(out[row]), want, 2.0**-7, 2.0**-7 * np.abs(want).max())


@pytest.mark.parametrize("chip", FORMS)
def test_a_row_does_not_depend_on_its_neighbours(chip: str):
    case = Case(np.random.default_rng(5), "tiny", 2, 38, 4)
    together = case.run(chip)
    for name in ("position", "sequence", "first", "last", "q", "chosen", "selected"):
        setattr(case, name, np.ascontiguousarray(getattr(case, name)[2:3]))
    assert np.array_equal(case.run(chip)[0], together[2])
