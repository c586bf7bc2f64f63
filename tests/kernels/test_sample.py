"""Filtering and drawing on the interpreter: kept sets, draws and masses against ops.sample, masks, ties, invariance."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.kernels import sample, slots
from dsuf.kernels.lang import Kernel
from dsuf.ops.philox import Purpose, uniform
from dsuf.ops.sample import filtered_probabilities, pick
from tests.kernels.helpers import execute, made

CLUSTER = 2
POISON = 0xCDCDCDCD


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return made(sample.make_filter, cluster=CLUSTER, threads=256, most=8192)


def table_of(rows: int, positions: list[int] | None = None) -> np.ndarray:
    """Row i belongs to slot i."""
    table = np.zeros((slots.FIELDS, slots.MOST_ROWS), np.int32)
    table[slots.T_SEQUENCE] = -1
    table[slots.T_SEQUENCE, :rows] = range(rows)
    table[slots.T_MEMBER, :rows] = range(rows)
    table[slots.T_POSITION, :rows] = positions or range(10, 10 + rows)
    return table


def state_of(*, rows: int = 1, **sampling) -> np.ndarray:
    """Slot i has seed i."""
    return np.concatenate([
        slots.slot_record(token=1, position=4, emitted=0, budget=99, seed=i, **sampling) for i in range(rows)
    ])  # fmt: skip


def run(kernel, logits, state, table, mask=0, picks=True, purpose=-1, first=0, stride=1, rows=None):
    records = np.full((slots.MOST_ROWS, 8), POISON, np.uint32)
    picked = np.full(slots.MOST_ROWS, -7, np.int32)
    rows = len(logits) if rows is None else rows
    arguments = [logits, table, state, mask, records, picked if picks else 0, logits.shape[1], first, stride, purpose]
    execute(kernel, arguments, grid=(CLUSTER * rows, 1))
    return records, picked


def key_of(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return np.where(bits >> 31 == 1, ~bits, bits | np.uint32(0x80000000))


def kept_of(record: np.ndarray, row: np.ndarray) -> np.ndarray:
    key, token = key_of(row), np.arange(row.size)
    threshold, cut = record[slots.F_THRESHOLD], record[slots.F_CUT]
    return (key > threshold) | ((key == threshold) & (token <= cut))


CASES = [(1.0, 1.0, 0), (0.7, 0.9, 0), (1.3, 1.0, 7), (1.0, 0.8, 20), (5.0, 0.99, 1), (0.2, 0.3, 5000)]


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), CASES)
@pytest.mark.parametrize("vocabulary", [37, 3001])
def test_kept_sets_masses_and_draws_are_those_of_the_op(kernel, vocabulary, temperature, top_p, top_k):
    rows = 2
    rng = np.random.default_rng(vocabulary + top_k)
    logits = (rng.standard_normal((rows, vocabulary)) * 3).astype(np.float32)
    state = state_of(rows=rows, temperature=temperature, top_p=top_p, top_k=top_k)
    positions = [20, 1000]
    records, picked = run(kernel, logits, state, table_of(rows, positions), purpose=int(Purpose.DRAFT))
    for i in range(rows):
        want = filtered_probabilities(logits[i], float(np.float32(temperature)), float(np.float32(top_p)), top_k)
        assert records[i, slots.F_TOKEN] == np.argmax(logits[i]) and records[i, slots.F_SAMPLED] == 1
        kept = kept_of(records[i], logits[i])
        assert (kept == (want > 0)).all()
        mass = int(records[i, slots.F_MASS]) + (int(records[i, slots.F_MASS_HIGH]) << 32)
        exact = np.exp((logits[i].astype(float) - logits[i].max()) / np.float32(temperature))[kept].sum()
        assert abs(mass * 2.0**-31 - exact) <= 2e-6 * exact + vocabulary * 2.0**-31
        u = float(uniform(i, positions[i] + 1, Purpose.DRAFT)[0])
        assert picked[i] == pick(want, u)
    assert (records[rows:] == POISON).all() and (picked[rows:] == -7).all()


def test_equal_logits_are_kept_from_the_lowest_token_on(kernel):
    logits = np.zeros((4, 301), np.float32)
    logits[1, ::3] = 2
    logits[2] = np.arange(301) % 5
    logits[3, 300] = 9
    state = np.concatenate([
        slots.slot_record(token=1, position=4, emitted=0, budget=9, temperature=1.0, **filters)
        for filters in ({"top_k": 10}, {"top_p": 0.25}, {"top_k": 100, "top_p": 0.5}, {"top_k": 3, "top_p": 0.999999})
    ])  # fmt: skip
    records, _ = run(kernel, logits, state, table_of(4))
    for i, (top_p, top_k) in enumerate(((1.0, 10), (0.25, 0), (0.5, 100), (0.999999, 3))):
        want = filtered_probabilities(logits[i], 1.0, float(np.float32(top_p)), top_k) > 0
        assert (kept_of(records[i], logits[i]) == want).all(), i


def test_unfiltered_draws_are_those_of_the_op_at_any_seed_and_position(kernel):
    rng = np.random.default_rng(5)
    rows, vocabulary = 16, 23
    logits = rng.standard_normal((rows, vocabulary)).astype(np.float32)
    seeds = [int(seed) for seed in rng.integers(0, 2**63, rows)]
    state = np.concatenate([
        slots.slot_record(token=1, position=4, emitted=0, budget=9, temperature=0.8, seed=seed) for seed in seeds
    ])  # fmt: skip
    positions = [int(p) for p in rng.integers(0, 1 << 20, rows)]
    _, picked = run(kernel, logits, state, table_of(rows, positions), purpose=3)
    for i in range(rows):
        want = filtered_probabilities(logits[i], float(np.float32(0.8)))
        assert picked[i] == pick(want, float(uniform(seeds[i], positions[i] + 1, Purpose.BONUS)[0]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_and_the_eos_of_min_tokens_make_tokens_impossible(kernel, temperature):
    rng = np.random.default_rng(9)
    rows, vocabulary = 5, 101
    logits = rng.standard_normal((rows, vocabulary)).astype(np.float32)
    logits[:, 7] = 30  # the EOS would win everywhere
    mask = np.full((6 * rows, 4), POISON, np.uint32)
    allowed = np.ones((rows, vocabulary), bool)
    allowed[1] = rng.random(vocabulary) < 0.2
    allowed[1, 7] = True
    allowed[2] = False
    allowed[2, [7, 9]] = True  # both are EOS ids: the mask leaves nothing else, so they come back
    allowed[4] = np.arange(vocabulary) == 50
    for i in range(rows):
        bits = np.zeros(128, np.uint8)
        bits[:vocabulary] = allowed[i]
        mask[6 * i + 1] = np.packbits(bits, bitorder="little").view(np.uint32)
    made = [
        slots.slot_record(token=1, position=4, emitted=3, budget=99, eos=[7, 9], min_tokens=least, masked=i != 3,
                          temperature=temperature, seed=i)
        for i, least in enumerate((5, 5, 5, 4, 0))
    ]  # fmt: skip
    table = table_of(rows)
    table[slots.T_OFFSET, :rows] = 1  # one more has been emitted by then
    records, picked = run(kernel, logits, np.concatenate(made), table, mask)
    for i in range(rows):
        row = np.where(allowed[i] if i != 3 else True, logits[i].astype(float), -np.inf)
        if i < 2:
            row[[7, 9]] = -np.inf
        assert records[i, slots.F_TOKEN] == np.argmax(row), i
        if temperature:
            want = filtered_probabilities(row, temperature)
            assert want[picked[i]] > 0 or picked[i] == np.argmax(want)
            mass = int(records[i, slots.F_MASS]) + (int(records[i, slots.F_MASS_HIGH]) << 32)
            assert abs(mass * 2.0**-31 * want.max() - 1) < 1e-5


def test_rows_do_not_know_of_each_other_and_inactive_ones_write_nothing(kernel):
    rng = np.random.default_rng(2)
    rows, vocabulary = 5, 777
    logits = rng.standard_normal((rows, vocabulary)).astype(np.float32)
    state = state_of(rows=rows, temperature=0.9, top_p=0.7)
    table = table_of(rows)
    table[slots.T_SEQUENCE, 2] = -1
    logits[2] = np.nan
    records, picked = run(kernel, logits, state, table, purpose=0)
    assert (records[2] == POISON).all() and picked[2] == -7
    alone, one = run(kernel, logits, state, table, purpose=0, first=3, rows=1)
    assert (alone[3] == records[3]).all() and one[3] == picked[3]
    strided, _ = run(kernel, logits, state, table, purpose=0, first=1, stride=3, rows=2)
    assert (strided[[1, 4]] == records[[1, 4]]).all() and (strided[[0, 2, 3]] == POISON).all()


def test_greedy_draft_rows_are_left_alone_and_the_real_geometry_agrees():
    kernel = made(sample.make_filter, cluster=8, threads=512, most=131072)
    logits = np.random.default_rng(0).standard_normal((1, 9001)).astype(np.float32)
    records, picked = np.full((slots.MOST_ROWS, 8), POISON, np.uint32), np.full(slots.MOST_ROWS, -7, np.int32)
    rest = [records, picked, logits.shape[1], 0, 1, 0]
    execute(kernel, [logits, table_of(1), state_of(temperature=0.0), 0, *rest], grid=(8, 1))
    assert (records == POISON).all() and (picked == -7).all()
    execute(kernel, [logits, table_of(1), state_of(temperature=1.0, top_p=0.4), 0, *rest], grid=(8, 1))
    want = filtered_probabilities(logits[0], 1.0, float(np.float32(0.4)))
    assert (kept_of(records[0], logits[0]) == (want > 0)).all()
    assert picked[0] == pick(want, float(uniform(0, 11, Purpose.DRAFT)[0]))
