"""Indexer scores on the interpreter against ops.index in float64: partial blocks, several sequences, candidates."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import index as family
from dsuf.kernels import rope
from dsuf.layout import PAGE_TOKENS
from dsuf.ops import qdq
from dsuf.ops.index import index_scores
from tests.kernels.helpers import assert_near, bf16, execute, values

WIDTHS = {"tiny": (16, 32, 16), "real": (32, 128, 64)}  # heads, di, rope


@pytest.mark.parametrize("width", WIDTHS)
def test_queries_are_rotated_and_quantised(width: str):
    heads, di, turned = WIDTHS[width]
    rng = np.random.default_rng(1)
    rows, sequence, position = 3, np.array([1, -1, 0], np.int32), np.array([5, 9, 70000], np.int32)
    y, out = bf16(rng, rows, heads, di), np.full((rows, heads, di), 0x7FC0, np.uint16)
    w = 160000.0 ** (-np.arange(0, turned, 2) / turned)
    kernel = family.make_query(heads=heads, di=di, rope=turned)
    execute(kernel, [y, sequence, position, rope.tables(w, 1 << 17), out], grid=(rows * -(-heads // 8), 1))
    for row in (0, 2):
        x = values(y[row])
        pairs = (x[:, di - turned :: 2] + 1j * x[:, di - turned + 1 :: 2]) * np.exp(1j * position[row] * w)
        x[:, di - turned :: 2], x[:, di - turned + 1 :: 2] = pairs.real, pairs.imag
        want, got = qdq.q4p(formats.round_bf16(x).astype(float)), values(out[row])
        assert (got == want).mean() > 0.97  # a bf16 step before quantisation may fall either way
        assert (np.abs(got - want) <= 0.5 * np.abs(want) + 0.26 * np.abs(want).max()).all()
    assert (out[1] == 0x7FC0).all()


class Case:
    """Index keys of several sequences in pages out of order, and a row of queries each."""

    def __init__(self, rng: np.random.Generator, width: str, ratio: int, positions: list[int]):
        self.heads, self.di, _ = WIDTHS[width]
        self.ratio, self.position = ratio, np.array(positions, np.int32)
        rows, self.per_page = len(positions), PAGE_TOKENS // ratio
        self.sequence = rng.permutation(rows).astype(np.int32)
        most = max(positions) // PAGE_TOKENS + 1
        self.pages = rng.permutation(rows * most).reshape(rows, most).astype(np.uint32)
        keys = rng.standard_normal((rows * most, self.per_page, self.di))
        self.codes, self.scales = qdq.q4p_encode(keys)
        self.q = formats.float32_to_bf16(qdq.q4p(rng.standard_normal((rows, self.heads, self.di))))
        self.weights = rng.standard_normal((rows, self.heads)).astype(np.float32)
        self.visible = (self.position + 1) // ratio
        self.capacity = -(-most * self.per_page // 8) * 8

    def expected(self, row: int) -> np.ndarray:
        owner, seen = self.sequence[row], int(self.visible[row])
        pages = self.pages[owner]
        keys = qdq.q4p_decode(self.codes[pages], self.scales[pages]).reshape(-1, self.di)[:seen].astype(float)
        padded = np.zeros((-(-max(seen, 1) // 64) * 64, self.di))
        padded[:seen] = keys
        w = self.weights[row].astype(float) * (self.di * self.heads) ** -0.5
        return index_scores(values(self.q[row])[None], w[None], padded)[0, :seen]

    def run(self, *, blocks: bool = False, candidates: np.ndarray | None = None, kept_of: np.ndarray | None = None):
        rows = len(self.position)
        out = np.full((rows, self.capacity), np.nan, np.float32)
        best = np.full((rows, self.capacity // 8), np.nan, np.float32)
        flat = [a.reshape(len(a), -1) for a in (self.codes, self.scales)]
        page = np.ascontiguousarray(np.concatenate(flat, axis=1))
        mapped = candidates is not None
        kernel = family.make_scores(heads=self.heads, di=self.di, ratio=self.ratio, blocks=blocks, mapped=mapped)
        kept = candidates if mapped else np.zeros((rows, 1), np.int32)
        execute(kernel, [self.q, self.weights, self.pages, self.pages.shape[1], page,
                         page.ctypes.data + flat[0].shape[1], page.shape[1], self.sequence, self.position, kept,
                         kept.shape[1], kept_of if mapped else self.position, out, self.capacity, best, rows],
                grid=(2, 1))  # fmt: skip
        return out, best


@pytest.mark.parametrize(("width", "ratio", "positions"), [
    ("tiny", 2, [0, 1, 2, 30, 300]), ("tiny", 1, [0, 7, 8, 130]), ("real", 2, [63, 300]),
])  # fmt: skip
def test_scores_agree_with_the_op(width: str, ratio: int, positions: list[int]):
    case = Case(np.random.default_rng(ratio), width, ratio, positions)
    case.sequence[0] = -1 if len(positions) > 3 else case.sequence[0]
    out, best = case.run(blocks=True)
    for row in range(len(positions)):
        seen = int(case.visible[row])
        if case.sequence[row] < 0 or seen == 0:
            assert np.isnan(out[row]).all()
            continue
        want = case.expected(row)
        assert_near(out[row, :seen].astype(float), want, 1e-5, 1e-5)
        assert (out[row, seen : -(-seen // 8) * 8] == np.float32(family.LOWEST)).all()
        blocks = [out[row, at : min(at + 8, seen)].max() for at in range(0, seen, 8)]
        blocks[-1] = np.float32(family.TOP)
        assert np.array_equal(best[row, : len(blocks)], blocks)


def test_candidates_are_scored_in_their_order():
    case = Case(np.random.default_rng(3), "tiny", 1, [130, 60])
    full, _ = case.run()
    candidates = np.array([[0, 3, 16, -1], [2, 7, -1, -1]], np.int32)
    out, _ = case.run(candidates=candidates, kept_of=np.array([3, 2], np.int32))
    for row, blocks in enumerate(([0, 3, 16], [2, 7])):
        for i, block in enumerate(blocks):
            assert np.array_equal(out[row, 8 * i : 8 * i + 8], full[row, 8 * block : 8 * block + 8])
