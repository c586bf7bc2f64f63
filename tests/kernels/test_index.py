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
from tests.kernels.helpers import assert_near, bf16, execute, made, values

WIDTHS = {"tiny": (16, 32, 16), "real": (32, 128, 64)}  # heads, di, rope


@pytest.mark.parametrize("width", WIDTHS)
def test_queries_are_rotated_and_quantised(width: str):
    heads, di, turned = WIDTHS[width]
    rng = np.random.default_rng(1)
    rows, sequence, position = 3, np.array([1, -1, 0], np.int32), np.array([5, 9, 70000], np.int32)
    y, out = bf16(rng, rows, heads, di), np.full((rows, heads, di), 0x7FC0, np.uint16)
    w = 160000.0 ** (-np.arange(0, turned, 2) / turned)
    kernel = made(family.make_query, heads=heads, di=di, rope=turned)
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
        self.capacity = -(-most * self.per_page // 32) * 32

    def expected(self, row: int) -> np.ndarray:
        owner, seen = self.sequence[row], int(self.visible[row])
        pages = self.pages[owner]
        keys = qdq.q4p_decode(self.codes[pages], self.scales[pages]).reshape(-1, self.di)[:seen].astype(float)
        padded = np.zeros((-(-max(seen, 1) // 64) * 64, self.di))
        padded[:seen] = keys
        w = self.weights[row].astype(float) * (self.di * self.heads) ** -0.5
        return index_scores(values(self.q[row])[None], w[None], padded)[0, :seen]

    def run(self, *, block_shift: int = 3, candidates: np.ndarray | None = None, kept_of: list[int] | None = None):
        rows, mapped = len(self.position), candidates is not None
        sizes = (self.capacity, self.capacity >> block_shift, self.capacity // 32)
        outs = [np.full((rows, size), np.nan, np.float32) for size in sizes]
        flat = [a.reshape(len(a), -1) for a in (self.codes, self.scales)]
        page = np.ascontiguousarray(np.concatenate(flat, axis=1))
        kernel = made(family.make_scores, heads=self.heads, di=self.di, warps=4)
        execute(kernel, [self.q, self.weights, self.pages, self.pages.shape[1], page,
                         page.ctypes.data + flat[0].shape[1], page.shape[1], self.sequence, self.position,
                         self.ratio - 1, candidates if mapped else 0, candidates.shape[1] if mapped else 0,
                         np.array(kept_of, np.int32) if mapped else 0, block_shift, *outs, self.capacity, rows],
                grid=(3, 1))  # fmt: skip
        return outs


@pytest.mark.parametrize(("width", "ratio", "positions", "block_shift"), [
    ("tiny", 2, [0, 1, 2, 30, 300], 3), ("tiny", 1, [0, 7, 8, 130], 2), ("real", 2, [63, 300], 3),
])  # fmt: skip
def test_scores_agree_with_the_op(width: str, ratio: int, positions: list[int], block_shift: int):
    case = Case(np.random.default_rng(ratio), width, ratio, positions)
    case.sequence[0] = -1 if len(positions) > 3 else case.sequence[0]
    out, best, best32 = case.run(block_shift=block_shift)
    for row in range(len(positions)):
        seen = int(case.visible[row])
        if case.sequence[row] < 0 or seen == 0:
            assert np.isnan(out[row]).all() and np.isnan(best[row]).all() and np.isnan(best32[row]).all()
            continue
        want = case.expected(row)
        assert_near(out[row, :seen].astype(float), want, 1e-5, 1e-5)
        end = -(-seen // 32) * 32
        assert (out[row, seen:end] == np.float32(family.LOWEST)).all() and np.isnan(out[row, end:]).all()
        for tops, size in ((best, 1 << block_shift), (best32, 32)):
            assert np.array_equal(tops[row, : end // size], out[row, :end].reshape(-1, size).max(-1))
            assert np.isnan(tops[row, end // size :]).all()


@pytest.mark.parametrize("block", [8, 4])
def test_candidates_are_scored_in_their_order(block: int):
    case = Case(np.random.default_rng(3), "tiny", 1, [130, 60])
    full = case.run()[0]
    candidates = np.array([[0, 3, 130 // block, -1], [2, 7, -1, -1]], np.int32)
    out, best, best32 = case.run(block_shift=block.bit_length() - 1, candidates=candidates, kept_of=[3, 2])
    for row, blocks in enumerate(([0, 3, 130 // block], [2, 7])):
        want = [x for b in blocks for x in full[row, block * b : block * b + block]]
        assert np.array_equal(out[row, : len(want)], np.array(want, np.float32))
        assert (out[row, len(want) : 32] == np.float32(family.LOWEST)).all()
        assert np.array_equal(best[row, : 32 // block], out[row, :32].reshape(-1, block).max(-1))
        assert best32[row, 0] == max(want)


def test_rows_of_one_sequence_share_its_keys():
    case = Case(np.random.default_rng(6), "tiny", 2, [297, 298, 299, 300, 301, 302, 303, 150, 60])
    case.sequence[:] = [4, 4, 4, 4, 4, 4, 4, -1, 2]
    out = case.run()[0]
    for row in (0, 1, 2, 3, 4, 5, 6, 8):
        seen = int(case.visible[row])
        assert_near(out[row, :seen].astype(float), case.expected(row), 1e-5, 1e-5)
    assert np.isnan(out[7]).all()


@pytest.mark.parametrize("rows", [6, 16, 48])
def test_a_row_is_the_same_bits_in_any_launch(rows: int):
    rng = np.random.default_rng(rows)
    case = Case(rng, "tiny", 2, [300 + i % 6 for i in range(rows)])
    case.sequence[:] = [i // 6 for i in range(rows)]
    case.sequence[:2] = -1
    case.position[:2], case.q[:2], case.weights[:2] = 1 << 30, 0x7FC0, np.nan
    together = case.run()
    for row in (3, rows - 1):
        alone = Case.__new__(Case)
        alone.__dict__ = dict(case.__dict__)
        for name in ("position", "sequence", "q", "weights"):
            setattr(alone, name, np.ascontiguousarray(getattr(case, name)[row : row + 1]))
        for one, many in zip(alone.run(), together, strict=True):
            assert np.array_equal(one[0], many[row], equal_nan=True)
