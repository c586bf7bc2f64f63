"""Row tables on the interpreter: verify lengths, budgets, windows, left-out entries, and the host's rewind."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.kernels import rows, slots
from dsuf.ops.accept import verify_length
from tests.kernels.helpers import execute, made

WINDOW, NOISE = 12, 99
POISON = -77


def table_of(*records: np.ndarray) -> np.ndarray:
    return np.concatenate(records)


def batch(*entries: tuple[int, int, int, int]) -> np.ndarray:
    table = np.full((slots.MOST_ROWS, 4), -1, np.int32)
    table[: len(entries)] = entries
    return table


def empty_table() -> np.ndarray:
    return np.full((slots.FIELDS, slots.MOST_ROWS), POISON, np.int32)


def draft_table(state: np.ndarray, entries: np.ndarray, capacity: int) -> np.ndarray:
    table = empty_table()
    execute(made(rows.make_draft), [state, entries, len(entries), table, capacity, WINDOW, NOISE, 5])
    return table


def verify_table(state, entries, drafted, drafts, confidence, capacity):
    table, counters = empty_table(), np.zeros(16, np.uint32)
    arguments = [state, entries, len(entries), drafted, drafts, confidence, table, counters, capacity, WINDOW]
    execute(made(rows.make_verify), arguments)
    return table, counters


def test_draft_rows_hold_the_token_and_noise_and_see_the_window_and_the_block():
    state = table_of(
        slots.slot_record(token=7, position=40, emitted=3, budget=20),
        slots.slot_record(token=8, position=5, emitted=0, budget=9, active=False),
        slots.slot_record(token=9, position=6, emitted=0, budget=9, decoder_start=2),
        slots.slot_record(token=3, position=6, emitted=0, budget=9, drafts=False),
    )
    table = draft_table(state, batch((2, 0, 6, 1), (0, 6, 6, 0), (1, 12, 6, 2), (3, 18, 1, -1), (2, 0, 6, 9)), 48)
    assert table[slots.T_SEQUENCE, :20].tolist() == [0] * 5 + [2] * 5 + [-1] * 10
    assert (table[slots.T_SEQUENCE, 10:] == -1).all()
    assert table[slots.T_TOKEN, :10].tolist() == [7, 99, 99, 99, 99, 9, 99, 99, 99, 99]
    assert table[slots.T_POSITION, :10].tolist() == [*range(40, 45), *range(6, 11)]
    assert table[slots.T_FIRST, :10].tolist() == [28] * 5 + [2] * 5
    assert (table[slots.T_FIRST_DECODER] == table[slots.T_FIRST]).all()
    assert table[slots.T_LAST, :10].tolist() == [44] * 5 + [10] * 5
    assert table[slots.T_OFFSET, :5].tolist() == [0, 1, 2, 3, 4]
    assert table[slots.T_MEMBER, :10].tolist() == [1] * 5 + [0] * 5
    assert table[slots.T_START, :4].tolist() == [5, 0, 0, 0] and table[slots.T_ROWS, :5].tolist() == [5, 5, 0, 0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_verify_rows_follow_fixed_and_confident_lengths_and_the_budget(seed: int):
    rng = np.random.default_rng(seed)
    confidence = rng.normal(1.0, 1.5, slots.MOST_ROWS).astype(np.float32)
    drafts = rng.integers(100, 1000, slots.MOST_ROWS).astype(np.int32)
    wanted = [(-1, 0.4, 50), (3, 0, 50), (-1, 0.1, 2), (5, 0, 3), (0, 0, 9), (5, 0, 1), (-1, 1e-6, 50)]
    state = table_of(*[
        slots.slot_record(token=i, position=10 * i, emitted=0, budget=left, verify=verify, threshold=threshold)
        for i, (verify, threshold, left) in enumerate(wanted)
    ])  # fmt: skip
    entries = batch(*[(i, 6 * i, 6, i) for i in range(7)])
    drafted = draft_table(state, entries, 40)
    table, counters = verify_table(state, entries, drafted, drafts, confidence, 48)
    total = 0
    for i, (verify, threshold, left) in enumerate(wanted):
        count = verify_length(confidence[5 * i : 5 * i + 5], threshold) if verify < 0 else verify
        judged = min(count, 5, left)
        live = min(judged + 1, left)
        total += live
        assert table[slots.T_JUDGED, i] == judged and table[slots.T_ROWS, i] == live, i
        assert table[slots.T_START, i] == 6 * i
        row = slice(6 * i, 6 * i + 6)
        assert table[slots.T_SEQUENCE, row].tolist() == [i] * live + [-1] * (6 - live)
        assert table[slots.T_TOKEN, row].tolist()[:live] == [i, *drafts[5 * i : 5 * i + live - 1]]
        place = 10 * i + np.arange(live)
        assert table[slots.T_POSITION, row].tolist()[:live] == place.tolist()
        assert table[slots.T_FIRST, row].tolist()[:live] == np.maximum(place - WINDOW + 1, 0).tolist()
        assert table[slots.T_LAST, row].tolist()[:live] == place.tolist()
    assert (table[slots.T_IMAGE] == 0).all()
    assert counters[slots.C_STEP] == 1 and counters[slots.C_ROWS] == total and counters[slots.C_TOTAL_SLOTS] == 35


def test_entries_that_do_not_fit_have_ended_or_are_none_get_no_rows():
    state = table_of(*[slots.slot_record(token=i, position=4, emitted=0, budget=9, decoder_start=3) for i in range(3)])
    state = table_of(state, slots.slot_record(token=3, position=4, emitted=9, budget=9))
    entries = batch((0, 0, 1, -1), (-1, 1, 1, -1), (1, 2, 6, -1), (2, 7, 6, -1), (3, 3, 1, -1))
    table, counters = verify_table(state, entries, 0, 0, 0, 12)
    assert table[slots.T_SEQUENCE, :13].tolist() == [0, -1, 1, *[-1] * 10]
    assert table[slots.T_FIRST_DECODER, [0, 2]].tolist() == [3, 3] and table[slots.T_FIRST, 0] == 0
    assert table[slots.T_ROWS, :5].tolist() == [1, 0, 1, 0, 0]
    assert counters[slots.C_ROWS] == 2 and counters[slots.C_TOTAL_SLOTS] == 0


def test_the_rows_of_an_entry_limit_its_judged_drafts():
    state = table_of(*[slots.slot_record(token=1, position=4, emitted=0, budget=90, verify=5) for _ in range(2)])
    entries = batch((0, 0, 6, 0), (1, 6, 3, 1))
    drafts = np.arange(slots.MOST_ROWS, dtype=np.int32)
    drafted = draft_table(state, entries, 40)
    table, _ = verify_table(state, entries, drafted, drafts, np.zeros(48, np.float32), 48)
    assert table[slots.T_ROWS, :2].tolist() == [6, 3] and table[slots.T_JUDGED, :2].tolist() == [5, 2]


def test_the_host_rewinds_and_releases():
    state = table_of(*[slots.slot_record(token=5, position=30, emitted=12, budget=40) for _ in range(2)])
    execute(made(rows.make_set), [state, 1, 21, 8, 1])
    words = state.view(np.int32).reshape(2, -1)
    assert words[1, :4].tolist() == [1, 8, 21, 3] and words[0, :4].tolist() == [1, 5, 30, 12]
    execute(made(rows.make_set), [state, 0, -1, 0, 0])
    assert words[0, :4].tolist() == [0, 5, 30, 12]
