"""What a pass is expected to take, and the pieces that prompts are cut into by it."""

import itertools
import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from dsuf.engine.pace import Pace
from dsuf.engine.pieces import LEAST_ROWS, Piece, Pieces

FIXED_S, ROW_S, CONTEXT_S, TAIL_S = 0.050, 31e-6, 34e-12, 0.057
EVERY = 8192


def pass_s(rows, start):
    return FIXED_S + rows * (ROW_S + start * CONTEXT_S)


def pieces_of(*, most_rows=4096, tails=True):
    return Pieces(most_rows=most_rows, resume_every=EVERY, tails=tails)


def read(pieces, length, budget_s, cost=lambda piece: pass_s(piece.rows, piece.start) if piece.rows else TAIL_S):
    """The pieces of a prompt, chunk by chunk: (pieces, seconds) of each."""
    prefilled, rows_read, chunks = 0, 0, []
    while prefilled < length:
        used, took = [], 0.0
        while prefilled < length:
            piece = pieces.next(length, prefilled, rows_read, min(length - prefilled, EVERY), budget_s - took)
            if used and not pieces.worth(piece, budget_s - took):
                break
            seconds = cost(piece)
            pieces.took(piece, seconds)
            prefilled, rows_read, took = piece.prefilled, max(rows_read, piece.start + piece.rows), took + seconds
            used.append(piece)
        chunks.append((used, took))
    return chunks


class TestPace:
    def test_nothing_is_known_before_the_first_pass(self):
        assert (Pace().rows(1.0, 0), Pace().seconds(1000, 0)) == (0, 0.0)

    def test_a_few_passes_tell_what_is_fixed_from_what_rows_take(self):
        pace = Pace()
        for rows in (256, 512, 1024, 1500):
            pace.took(rows, 0, pass_s(rows, 0))
        assert pace.seconds(2000, 0) == pytest.approx(pass_s(2000, 0), rel=0.03)
        assert pass_s(pace.rows(0.1, 0), 0) == pytest.approx(0.1, rel=0.03)

    def test_passes_of_one_length_leave_the_split_as_it_was(self):
        pace, rng = Pace(), random.Random(4)
        for rows in (256, 512, 1024, *[1500] * 500):
            pace.took(rows, 0, pass_s(rows, 0) * rng.gauss(1, 0.03))
        assert pace.seconds(800, 0) == pytest.approx(pass_s(800, 0), rel=0.1)

    def test_prompts_that_take_turns_at_far_and_near_positions_are_told_apart(self):
        pace = Pace()
        for i in range(300):
            for start in (i * 3000, i * 50):
                pace.took(rows := min(max(pace.rows(0.12, start), 256), 4096), start, pass_s(rows, start))
        assert pace.seconds(1500, 900_000) == pytest.approx(pass_s(1500, 900_000), rel=0.05)
        assert pace.seconds(1500, 15_000) == pytest.approx(pass_s(1500, 15_000), rel=0.05)

    def test_it_follows_a_machine_that_gets_slower(self):
        pace = Pace()
        for slow in (1, 2):
            for _ in range(40):
                pace.took(rows := min(max(pace.rows(0.2, 0), 256), 4096), 0, slow * pass_s(rows, 0))
            assert pace.seconds(rows, 0) == pytest.approx(slow * pass_s(rows, 0), rel=0.05)

    def test_one_pass_that_was_held_up_changes_little(self):
        pace = Pace()
        for rows in (256, 512, 1024, *[1500] * 20):
            pace.took(rows, 0, pass_s(rows, 0))
        pace.took(1500, 0, 2.0)
        assert pace.seconds(1500, 0) < 1.2 * pass_s(1500, 0)

    def test_a_first_pass_that_also_warms_up_is_soon_forgotten(self):
        pace = Pace()
        for seconds in (2.0, *[pass_s(256, 0)] * 8):
            pace.took(256, 0, seconds)
        assert pace.seconds(256, 0) < 1.2 * pass_s(256, 0)

    def test_a_prompts_last_few_rows_leave_what_thousands_take_as_it_was(self):
        pace = Pace()
        for i in range(40):
            pace.took(1664, 1664 * i, pass_s(1664, 1664 * i))
        pace.took(3, 66_560, 0.95 * pass_s(3, 66_560))
        assert pace.seconds(4096, 0) == pytest.approx(pass_s(4096, 0), rel=0.1)

    def test_it_grows_by_no_more_than_twice_what_has_been_seen(self):
        pace = Pace()
        pace.took(256, 0, 1e-6)
        assert pace.rows(10.0, 0) == 512

    def test_time_that_passes_took_beyond_what_was_expected_is_kept_free_for_a_while(self):
        pace = Pace()
        for rows in (256, 512, 1024, *[1500] * 20):
            pace.took(rows, 0, pass_s(rows, 0))
        before = pace.rows(0.1, 0)
        pace.took(1500, 0, 1.1 * pass_s(1500, 0))
        assert pass_s(pace.rows(0.1, 0), 0) < 0.95 * pass_s(before, 0)
        for _ in range(200):
            pace.took(1500, 0, pass_s(1500, 0))
        assert pace.rows(0.1, 0) == pytest.approx(before, rel=0.03)

    @given(
        st.lists(
            st.tuples(st.integers(1, 4096), st.integers(0, 1 << 20), st.floats(1e-6, 100.0)), min_size=1, max_size=60
        )
    )
    @settings(deadline=None)
    def test_whatever_passes_take_what_is_expected_stays_a_time(self, passes):
        pace = Pace()
        for rows, start, seconds in passes:
            pace.took(rows, start, seconds)
            assert 0 <= pace.seconds(rows, start) < 1e4 and 0 <= pace.share(rows, start) <= 1
            assert 0 <= pace.rows(seconds, start) <= 8192


@pytest.mark.parametrize("most", [2, 100, 257, 300, 5000, 1 << 20])
@pytest.mark.parametrize("most_rows", [48, 4096])
def test_a_rehearsal_is_a_whole_prompt_that_fits(most, most_rows):
    rehearsal = pieces_of(most_rows=most_rows).rehearsal(most)
    assert [piece.start for piece in rehearsal] == [0, *(piece.start + piece.rows for piece in rehearsal[:-1])]
    assert all(0 < piece.rows <= most_rows for piece in rehearsal[:-1]) and rehearsal[-1].rows == 0
    assert rehearsal[-1].left == 0 and rehearsal[-1].prefilled == rehearsal[-1].start + 1 <= most


@pytest.mark.parametrize("budget_s", [0.12, 0.2])
def test_after_a_rehearsal_the_first_chunks_keep_to_their_budget_and_use_it(budget_s):
    pieces, rng = pieces_of(), random.Random(3)

    def cost(piece):
        return (stairs_s(piece.rows) if piece.rows else TAIL_S) * rng.gauss(1, 0.02)

    for piece in pieces.rehearsal(1 << 20):
        pieces.took(piece, cost(piece))
    times = [took for _, took in read(pieces, 60_000, budget_s, cost)]
    assert max(times) <= 1.1 * budget_s and sum(times[:3]) > 3 * 0.6 * budget_s


def stairs_s(rows):
    """128 experts with 6 rows of 128 take 128 rows at a time: a second tile of many begins at about 2,700 rows."""
    mean = 6 * rows / 128
    tiles = 1 + sum(math.erfc((128 * k - mean) / math.sqrt(2 * mean)) / 2 for k in (1, 2, 3))
    return 0.010 + 0.040 * tiles + rows * 24e-6


class TestPieces:
    @pytest.mark.parametrize("budget_s", [0.08, 0.1, 0.12, 0.15])
    def test_chunks_keep_to_their_budget_where_costs_are_no_straight_line(self, budget_s):
        rng = random.Random(2)
        times = sorted(
            took
            for _, took in read(
                pieces_of(),
                600_000,
                budget_s,
                lambda piece: (stairs_s(piece.rows) if piece.rows else TAIL_S) * rng.gauss(1, 0.03),
            )[4:]
        )
        assert times[int(0.99 * len(times))] <= 1.15 * budget_s and sum(times) / len(times) > 0.7 * budget_s

    @pytest.mark.parametrize("budget_s", [0.08, 0.1, 0.12, 0.15, 0.2])
    def test_chunks_keep_to_their_budget_and_use_it(self, budget_s):
        rng = random.Random(1)
        chunks = read(
            pieces_of(),
            400_000,
            budget_s,
            lambda piece: (pass_s(piece.rows, piece.start) if piece.rows else TAIL_S) * rng.gauss(1, 0.03),
        )
        times = sorted(took for _, took in chunks[4:])
        assert times[int(0.99 * len(times))] <= 1.05 * budget_s
        assert sum(times) / len(times) > 0.7 * budget_s

    def test_the_first_ones_feel_their_way(self):
        chunks = read(pieces_of(), 8000, 0.1)
        assert [piece.rows for used, _ in chunks for piece in used][:2] == [LEAST_ROWS, 2 * LEAST_ROWS]

    def test_a_budget_under_the_fixed_cost_still_gets_the_shortest_pass(self):
        rows = [piece.rows for used, _ in read(pieces_of(), 2000, 0.02) for piece in used]
        assert rows[:-2] == [LEAST_ROWS] * (len(rows) - 2) and rows[-1] == 0

    def test_without_anybody_waiting_passes_are_as_long_as_can_be(self):
        chunks = read(pieces_of(), 10_000, float("inf"))
        assert [piece.rows for piece in chunks[0][0]] == [4096, 4096, 0, 1807, 0]

    def test_short_passes_are_not_begun_in_the_rest_of_a_chunk_but_to_end_a_prompt(self):
        pieces = pieces_of()
        read(pieces, 50_000, 0.12)
        assert not pieces.worth(pieces.next(50_000, 0, 0, 8192, 0.07), 0.07), "600 rows for the price of 2,200"
        assert pieces.worth(pieces.next(600, 0, 0, 600, 0.07), 0.07)
        assert not pieces.worth(pieces.next(600, 0, 0, 600, 0.06), 0.06)

    def test_a_tail_and_a_first_token_count(self):
        pieces = pieces_of()
        read(pieces, 50_000, 0.12)
        pieces.first_took(0.006)
        tail = pieces.next(600, 599, 599, 1, 1.0)
        assert tail == Piece(599, 0, 600, 0) and pieces.seconds(tail) == pytest.approx(TAIL_S + 0.006)
        between = pieces.next(20_000, EVERY - 1, EVERY, 1, 1.0)
        assert between == Piece(EVERY, 0, EVERY, 20_000 - EVERY) and pieces.seconds(between) == pytest.approx(TAIL_S)


@given(
    length=st.integers(1, 30_000),
    hit=st.integers(0, 30_000),
    budget_s=st.sampled_from([0.01, 0.06, 0.12, 0.5, float("inf")]),
    tails=st.booleans(),
    most_rows=st.sampled_from([48, 64, 4096]),
    limits=st.lists(st.integers(1, 3000), min_size=1, max_size=5),
)
@settings(deadline=None)
def test_every_row_but_the_last_is_read_once_in_order(length, hit, budget_s, tails, most_rows, limits):
    pieces, prefilled = pieces_of(tails=tails, most_rows=most_rows), min(hit, length - 1)
    at, rows_read, limit = prefilled, 0, itertools.cycle(limits)
    while prefilled < length:
        rows = min(next(limit), length - prefilled, EVERY - prefilled % EVERY)
        piece = pieces.next(length, prefilled, rows_read, rows, budget_s)
        assert piece.start == at and piece.rows <= min(rows, most_rows)
        assert prefilled <= piece.prefilled <= prefilled + rows and piece.left == length - piece.prefilled
        assert piece.rows == 0 or piece.prefilled // EVERY == prefilled // EVERY or not tails, "a tail first"
        at, rows_read, prefilled = at + piece.rows, piece.start + piece.rows, piece.prefilled
        pieces.took(piece, pass_s(piece.rows, piece.start))
    assert at == length - 1


@pytest.mark.parametrize("seed", range(6))
def test_passes_do_not_stay_short_when_they_need_not(seed):
    """Streams wait, prompts come and go, passes are held up now and then: lengths come back to what fits."""
    pieces, rng = pieces_of(), random.Random(seed)

    def cost(piece):
        late = rng.choice([1.5, 3]) if rng.random() < 0.01 else rng.gauss(1, 0.03)
        return late * (stairs_s(piece.rows) if piece.rows else TAIL_S)

    for length in (100_000, 200, 900, 60_000, 3000, 150_000):
        chunks = read(pieces, length, 0.12, cost)
    rows = sorted(piece.rows for used, _ in chunks for piece in used if piece.rows)
    assert sum(rows) / len(rows) > 1400
