"""Index scores of a chunk's rows against ops.index in float64: partial tiles and row blocks."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import chunk_index as family
from dsuf.layout import PAGE_TOKENS
from dsuf.ops import qdq
from dsuf.ops.index import index_scores
from tests.kernels.helpers import assert_near, execute, made, values

WIDTHS = {"tiny": (16, 32), "many": (64, 64), "real": (32, 128)}  # heads, di
FORMS = ("sm_90a", "sm_103a")  # whose bodies differ; the second runs on the first chip too


class Case:
    """Index keys of one of two sequences in pages out of order, and queries at consecutive positions."""

    def __init__(self, rng: np.random.Generator, width: str, ratio: int, start: int, rows: int):
        self.heads, self.di = WIDTHS[width]
        self.ratio, self.position = ratio, np.arange(start, start + rows, dtype=np.int32)
        most, per_page = (start + rows) // PAGE_TOKENS + 1, PAGE_TOKENS // ratio
        self.pages = rng.permutation(2 * most).reshape(2, most).astype(np.uint32)
        self.codes, self.scales = qdq.q4p_encode(rng.standard_normal((2 * most, per_page, self.di)))
        self.q = formats.float32_to_bf16(qdq.q4p(rng.standard_normal((rows, self.heads, self.di))))
        self.weights = rng.standard_normal((rows, self.heads)).astype(np.float32)
        self.visible = (self.position + 1) // ratio
        self.capacity = -(-int(self.visible[-1]) // 64) * 64

    def expected(self) -> np.ndarray:
        pages = self.pages[1]
        keys = qdq.q4p_decode(self.codes[pages], self.scales[pages]).reshape(-1, self.di).astype(float)
        padded = np.zeros((self.capacity, self.di))
        padded[: min(len(keys), self.capacity)] = keys[: self.capacity]
        return index_scores(values(self.q), self.weights.astype(float) * (self.di * self.heads) ** -0.5, padded)

    def run(self, chip: str, *, segments: int = 2) -> np.ndarray:
        rows, n = len(self.position), len(self.codes)
        out = np.full((rows, self.capacity), np.nan, np.float32)
        page = np.ascontiguousarray(np.concatenate([self.codes.reshape(n, -1), self.scales.reshape(n, -1)], axis=1))
        scales = page.ctypes.data + self.codes[0].size
        kernel = made(family.make, heads=self.heads, di=self.di, chip=chip)
        execute(kernel, [self.q, self.weights, self.pages, self.pages.shape[1], page, scales, page.shape[1], 1,
                         self.position, self.ratio, out, self.capacity, rows],
                grid=(segments, -(-rows // family.rows_of_block(self.heads))))  # fmt: skip
        return out


@pytest.mark.parametrize("chip", FORMS)
@pytest.mark.parametrize(("width", "ratio", "start", "rows"), [
    ("tiny", 2, 0, 40), ("tiny", 1, 200, 35), ("tiny", 2, 300, 3), ("real", 2, 250, 18), ("real", 1, 100, 5),
    ("many", 1, 130, 9),
])  # fmt: skip
def test_scores_agree_with_the_op(width: str, ratio: int, start: int, rows: int, chip: str):
    case = Case(np.random.default_rng(ratio), width, ratio, start, rows)
    out = case.run(chip)
    want = case.expected()
    for row in range(rows):
        seen = int(case.visible[row])
        assert_near(out[row, :seen].astype(float), want[row, :seen], 1e-5, 1e-5)


@pytest.mark.parametrize("chip", FORMS)
def test_a_row_does_not_depend_on_the_chunk(chip: str):
    case = Case(np.random.default_rng(6), "tiny", 2, 64, 40)
    together = case.run(chip)
    for name in ("position", "q", "weights"):
        setattr(case, name, np.ascontiguousarray(getattr(case, name)[21:24]))
    alone = case.run(chip, segments=1)
    for row in range(3):
        seen = int(case.visible[21 + row])
        assert np.array_equal(alone[row, :seen], together[21 + row, :seen])
