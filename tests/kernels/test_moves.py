"""Pieces moved by address on the interpreter: each to its place, whatever their number, lengths and order."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.kernels import moves
from tests.support.simt_device import SimtDevice

FULL = moves.THREADS * moves.UNROLL  # words that a block has under way


@pytest.mark.parametrize(
    ("count", "words", "blocks"),
    [(1, 1, 16), (5, 3, 2), (3, FULL, 2), (2, FULL + moves.THREADS + 7, 1), (4, FULL - 1, 16), (0, 9, 16)],
)
def test_every_piece_arrives_where_it_should_and_nothing_else_changes(count, words, blocks):
    device, rng, page = SimtDevice(), np.random.default_rng(count), 16 * words
    places = 2 * (count + 2)
    source = rng.integers(0, 256, (places, page), np.uint8)
    target = np.full_like(source, 0xAB)
    of, to = rng.permutation(places)[:count], rng.permutation(places)[:count]
    here, there = (device.allocate(source.nbytes, what) for what in ("source", "target"))
    device.upload(here, source)
    device.upload(there, target)
    lists = device.pinned(24 * (count + 3)).view(np.int64).reshape(3, -1)
    lists[:, :count] = there + page * to, here + page * of, rng.integers(max(1, words - 5), words + 1, count)
    device.launch("pieces.move", lists.ctypes.data, count + 3, count, grid=(blocks, 1))
    for one, other, many in zip(to, of, lists[2], strict=False):
        target[one, : 16 * many] = source[other, : 16 * many]
    np.testing.assert_array_equal(device.download(there, target.nbytes).reshape(target.shape), target)
