"""Embedding, n-gram gather and gate on the interpreter against ops.engram: sequence starts, blocked tokens."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import engram as family
from dsuf.kernels.catalogue import CONFIGS
from dsuf.kernels.stream import scale_stride
from dsuf.layout import BLOCKED
from dsuf.ops import engram as op
from dsuf.ops import qdq
from dsuf.spec import Spec
from tests.kernels.helpers import assert_near, bf16, execute, made, values

D, V, EPS = 128, 50, 1e-20
TINY = Spec.load(CONFIGS / "tiny.json")


def test_embedding_fills_four_streams_and_the_history():
    rng = np.random.default_rng(0)
    table, streams = bf16(rng, V, D), np.zeros((3, 4, D), np.uint16)
    class_map = rng.integers(0, 30, V).astype(np.int32)
    history = np.full((2, family.HISTORY), -5, np.int32)
    token, sequence, position = (np.array(v, np.int32) for v in ([7, 8, 49], [1, -1, 0], [3, 4, 131]))
    operands = [token, sequence, position, table, streams, class_map, history, family.HISTORY, D]
    execute(made(family.make_embed), operands, grid=(1, 3))
    assert (streams[0] == table[7]).all() and (streams[2] == table[49]).all() and not streams[1].any()
    assert history[1, 3] == class_map[7] and history[0, 131 % family.HISTORY] == class_map[49]
    assert (history == -5).sum() == history.size - 2


@pytest.mark.parametrize("layer", [0, 1])
def test_rows_are_hashed_fetched_and_quantised(layer: int):
    rng, constants = np.random.default_rng(layer), op.hashes(TINY)[layer]
    rows_of_table, width, pad = TINY.engram_num_embeddings[layer], TINY.engram_head_dim, TINY.engram_pad_token_id
    columns, ngram = TINY.engram_columns, TINY.engram_max_ngram_size
    table, table_scales = formats.quantise_fp8_rows(rng.standard_normal((rows_of_table, width)).astype(np.float32))
    classes = rng.integers(0, 700, 80)
    classes[70] = BLOCKED
    position, sequence = np.array([0, 1, 2, 3, 40, 71, 72, 75, 9], np.int32), np.zeros(9, np.int32)
    sequence[-1] = -1
    history = np.full((1, family.HISTORY), 12345, np.int32)
    codes = np.zeros((9, columns * width), np.uint8)
    scales = np.zeros((9, scale_stride(columns * width)), np.uint8)
    kernel = made(family.make_gather, ngram=ngram)
    for row in range(9):  # each row with the history as it stands then
        seen = np.arange(max(position[row] - family.HISTORY + 1, 0), position[row] + 1)
        history[0, seen % family.HISTORY] = classes[seen]
        out = [codes[row : row + 1], scales[row : row + 1]]
        execute(kernel, [history, family.HISTORY, sequence[row : row + 1].copy(), position[row : row + 1].copy(),
                         family.constants(constants), table, table_scales, *out, TINY.engram_n_heads, width, pad],
                grid=(columns, 1))  # fmt: skip
    for row in range(8):
        before = [classes[p] if p >= 0 else BLOCKED for p in range(position[row] - ngram + 1, position[row] + 1)]
        t = op.ngram_classes(np.array(before), ngram, pad)
        lines = op.table_rows(t, constants)[0]
        exact = formats.dequantise_fp8_rows(table[lines], table_scales[lines]).reshape(-1)
        want_codes, want_scales = qdq.q8_encode(exact)
        assert np.array_equal(codes[row], want_codes), row
        assert np.array_equal(scales[row, : columns * width // 32], want_scales)
    assert not codes[8].any()


def test_gate_agrees_with_the_op():
    rng, rows = np.random.default_rng(3), 3
    streams, kv = bf16(rng, rows, 4, D), bf16(rng, rows, 5 * D)
    qk = rng.standard_normal((4, D)).astype(np.float32)
    before = values(streams)
    kernel = made(family.make_gate, most_d=256, eps=EPS)
    execute(kernel, [streams, kv, qk, np.array([0, -1, 2], np.int32), D], grid=(rows, 1))
    keys, value = values(kv[:, : 4 * D]).reshape(rows, 4, D), values(kv[:, 4 * D :])
    want = before + op.gate(before, keys, qk.astype(float), EPS) * value[:, None]
    want[1] = before[1]
    assert_near(values(streams), want, 2.0**-8, 1e-5)
