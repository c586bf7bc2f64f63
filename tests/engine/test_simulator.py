"""The mixes in virtual time, with the costs of an H200: prompts a thousand times longer beside running streams."""

import itertools
import json
import random
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.engine.messages import Request
from dsuf.engine.options import EngineOptions
from dsuf.engine.scheduler import PATIENCE_S, Scheduler
from dsuf.engine.simulator import Costs, run, simulated_engine

COSTS = Costs()
BUDGET_S, PASS_ROWS = 0.12, 4096  # as on a GPU
CHUNK_S = BUDGET_S
SHORT, LONG = 100, 100_000
ALONE_S = COSTS.pass_s(SHORT, 0) + COSTS.tail_s + COSTS.step_s(1)  # a short prompt
LONGEST_S = COSTS.pass_s(PASS_ROWS, LONG)  # a pass while no stream waits
ROOT = Path(__file__).parents[2]


def engine_of(scheduler=None, accept=2.5, **options):
    settings = dict(prefill_chunk=PASS_ROWS, prefill_budget_s=BUDGET_S, max_sequences=16) | options
    engine = simulated_engine(EngineOptions(ckpt=Path("simulated"), **settings), COSTS, accept=accept)
    if scheduler is not None:
        engine._scheduler.__class__ = scheduler
    return engine


def streams(count, tokens=100_000, at=0.0, **fields):
    return [(at, Request(f"stream{i}", [1] * SHORT, tokens, **fields)) for i in range(count)]


def percentile(values, share):
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def gaps_between(course, start, end):
    times = [time for time, _ in course.tokens if start <= time <= end]
    return [after - before for before, after in itertools.pairwise(times)]


class FirstCome(Scheduler):
    """Prompts strictly in the order of arrival, one after the other."""

    def _choose(self, now, refused):
        candidates = [*self._prefilling.values(), *self._startable(now, refused)]
        return candidates[0] if candidates else None


class PromptsFirst(FirstCome):
    """The same, and nobody decodes while a prompt can be worked on."""

    def _decode(self, stalled):
        busy = self._prefilling or (self._waiting and self.running < self.max_sequences)
        return [] if busy else super()._decode(stalled)


def result(name):
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())["metrics"]


def test_the_costs_are_those_that_were_measured():
    for rows in (1, 6, 12, 24, 48):
        assert COSTS.step_s(rows) * 1e3 == pytest.approx(result(f"h200-decode-rows{rows}-1k")["step_ms"], rel=0.01)
    prefill = result("prefill-chunks-h200")
    for start in (0, 4096, 126_976, 524_288, 1_044_480):
        us = prefill[f"chunk_of_4096_at_{start}_us_a_token"]
        assert COSTS.pass_s(4096, start) * 1e6 == pytest.approx(4096 * us, rel=0.05)
    pace = result("pace-h200")
    assert COSTS.tail_s * 1e3 == pytest.approx(pace["learnt_tail_ms"], rel=0.02)
    for rows, start in ((256, 0), (1024, 256), (4096, 1280)):
        assert COSTS.pass_s(rows, start) * 1e3 == pytest.approx(pace[f"pass_of_{rows}_rows_ms"], rel=0.02)


class TestRunningStreams:
    @pytest.mark.parametrize("count", [1, 4, 8])
    def test_their_gaps_stay_within_three_idle_gaps_and_a_chunk_under_back_to_back_long_prompts(self, count):
        arrivals = streams(count) + [(3.0, Request(f"long{i}", [1] * LONG, 1)) for i in range(4)]
        courses = run(engine_of(), arrivals, until_s=100)
        busy = (3.2, courses["long3"].ended_s)
        for i in range(count):
            idle = percentile(gaps_between(courses[f"stream{i}"], 2.0, 3.0), 0.99)
            gaps = gaps_between(courses[f"stream{i}"], *busy)
            assert len(gaps) > 200
            assert percentile(gaps, 0.99) <= 3 * idle + CHUNK_S and max(gaps) <= 3 * idle + CHUNK_S
            assert percentile(gaps, 0.5) > 3 * idle, "or there was no load"

    def test_a_prompt_of_a_million_tokens_costs_them_a_chunk_a_step_and_no_more(self):
        arrivals = [*streams(4), (1.0, Request("million", [1] * 1_000_000, 1))]
        courses = run(engine_of(), arrivals, until_s=200)
        gaps = gaps_between(courses["stream0"], 1.0, courses["million"].ended_s)
        assert len(gaps) > 500 and max(gaps) <= COSTS.step_s(24) + 1.1 * CHUNK_S

    @pytest.mark.parametrize("delay", [i * 0.0037 for i in range(12)])
    def test_steps_that_were_queued_before_a_prompt_came_do_not_wait_for_it(self, delay):
        courses = run(engine_of(), [*streams(4), (1.0 + delay, Request("long", [1] * LONG, 1))], until_s=3)
        assert max(gaps_between(courses["stream0"], 0.9, 3)) <= COSTS.step_s(24) + 1.02 * CHUNK_S

    def test_more_streams_than_a_step_has_rows_for_share_the_steps_evenly(self):
        courses = run(engine_of(max_sequences=64), streams(30), until_s=20)
        step = COSTS.step_s(48)
        counts = []
        for course in courses.values():
            gaps = gaps_between(course, 10, 20)
            assert max(gaps) <= 4.01 * step  # 30 x 6 rows in steps of 48
            counts.append(len(gaps))
        assert max(counts) - min(counts) <= 2


def recipe_load(long_len=None):
    """recipes/mix.toml: its streams, its prompts, its times."""
    args = tomllib.loads((ROOT / "recipes" / "mix.toml").read_text())["args"]
    begin, end = args["mix_alone"], args["mix_alone"] + args["mix_mixed"]
    count = int(args["mix_mixed"] * args["mix_short_rate"])
    short = args["mix_short_len"]
    arrivals = [(0.0, Request(f"stream{i}", [1] * short, 100_000, verify=1)) for i in range(args["mix_streams"])]
    arrivals += [(begin + i / args["mix_short_rate"], Request(f"short{i}", [1] * short, 16)) for i in range(count)]
    arrivals += [(begin, Request(f"long{i}", [1] * (long_len or args["mix_long_len"]), 1)) for i in range(12)]
    return arrivals, begin, end


@pytest.mark.parametrize("budget_s", [0.08, BUDGET_S, 0.2])
def test_the_recipe_keeps_gaps_within_three_steps_and_a_chunk(budget_s):
    arrivals, begin, end = recipe_load()
    engine = engine_of(prefill_budget_s=budget_s, max_sequences=8, accept=0)
    courses = run(engine, arrivals, until_s=end)
    gaps = [gap for i in range(4) for gap in gaps_between(courses[f"stream{i}"], begin, end)]
    step = percentile(gaps_between(courses["stream0"], begin / 2, begin), 0.5)
    assert percentile(gaps, 0.99) <= 3 * step + budget_s and percentile(gaps, 0.5) > 0.6 * budget_s
    firsts = [courses[f"short{i}"].first_s for i in range(55)]
    assert percentile(firsts, 0.99) <= 2 * (max(budget_s, ALONE_S) + COSTS.step_s(30))
    rows = engine.backend.prefilled_rows / (end - begin)
    print(f"chunks of {budget_s * 1e3:.0f} ms: gap p50/p99 {percentile(gaps, 0.5) * 1e3:.0f}/", end="")
    print(f"{percentile(gaps, 0.99) * 1e3:.0f} ms, short prompts {percentile(firsts, 0.5) * 1e3:.0f}/", end="")
    print(f"{percentile(firsts, 0.99) * 1e3:.0f} ms, {rows:,.0f} prompt rows/s")
    assert rows >= {0.08: 6400, BUDGET_S: 11_000, 0.2: 14_500}[budget_s]


# Steps as they were measured once: what is spare hangs on when the late passes come, by other draws 4.8 to 14 ms.
STEPS = ((1, 5.06e-3), (6, 10.06e-3), (12, 15.7e-3), (24, 24.6e-3), (48, 36.5e-3))


class Unkind(Costs):
    """Passes that take 4 % more or less than they should, and one in twenty 15 ms longer: something held it up."""

    def pass_s(self, rows, start):
        rng = self.__dict__.setdefault("rng", random.Random(7))
        late_s = 0.015 if rng.random() < 0.05 else 0.0
        return super().pass_s(rows, start) * rng.gauss(1, 0.04) + late_s


@pytest.mark.parametrize("length", [65_536, 65_540])  # that one ends in a pass of three rows
@pytest.mark.parametrize("budget_s", [BUDGET_S, 0.2])
def test_no_gap_passes_three_steps_and_a_chunk_where_costs_are_unkind(budget_s, length):
    arrivals, begin, _ = recipe_load(length)
    options = EngineOptions(ckpt=Path("simulated"), prefill_chunk=PASS_ROWS, prefill_budget_s=budget_s, max_sequences=8)
    courses = run(simulated_engine(options, Unkind(steps=STEPS), accept=0), arrivals, until_s=begin + 25)
    step = percentile(gaps_between(courses["stream0"], begin / 2, begin), 0.5)
    gaps = [gap for i in range(4) for gap in gaps_between(courses[f"stream{i}"], begin, begin + 25)]
    assert courses["long2"].ended_s is not None and max(gaps) <= 3 * step + budget_s - 0.005


class TestShortPrompts:
    @pytest.mark.parametrize("ahead", [1, 5, 40])
    def test_one_behind_long_ones_has_its_first_token_within_two_chunks(self, ahead):
        for delay in [1.0 + i * 0.031 for i in range(6)]:
            arrivals = [(0.0, Request(f"long{i}", [1] * LONG, 1)) for i in range(ahead)]
            courses = run(engine_of(), [*arrivals, (delay, Request("short", [1] * SHORT, 1))], until_s=3)
            assert courses["short"].first_s <= LONGEST_S + ALONE_S <= 2 * LONGEST_S

    def test_so_it_is_beside_running_streams_with_a_step_more_for_each_chunk(self):
        shorts = [(2.0 + 0.487 * i, Request(f"short{i}", [1] * SHORT, 1)) for i in range(20)]
        arrivals = streams(4) + [(1.0, Request(f"long{i}", [1] * LONG, 1)) for i in range(5)] + shorts
        courses = run(engine_of(), arrivals, until_s=13)
        for _, request in shorts:
            assert courses[request.id].first_s <= 2 * (CHUNK_S + COSTS.step_s(30))

    def test_a_hundred_at_once_keep_their_order_and_take_half_of_the_time(self):
        shorts = [(1.0, Request(f"short{i}", [1] * SHORT, 1)) for i in range(100)]
        courses = run(engine_of(max_sequences=64), [(0.0, Request("long", [1] * LONG, 1)), *shorts])
        firsts = [courses[f"short{i}"].tokens[0][0] for i in range(100)]
        assert firsts == sorted(firsts)
        assert firsts[-1] - 1.0 <= 2 * 100 * ALONE_S + 2 * LONGEST_S

    def test_tiny_requests_with_priority_pass_a_queue_of_short_ones(self):
        shorts = [(1.0, Request(f"short{i}", [1] * 1000, 5)) for i in range(60)]
        titles = [(1.2 + i / 10, Request(f"title{i}", [1] * 50, 5, priority=5)) for i in range(5)]
        long = [(0.0, Request("long", [1] * LONG, 1))]
        courses = run(engine_of(max_sequences=80), [*long, *shorts, *titles])
        for i in range(5):
            assert courses[f"title{i}"].first_s <= LONGEST_S + ALONE_S + 2 * COSTS.step_s(48)
        assert max(courses[f"short{i}"].first_s for i in range(60)) > 3


class TestLongPrompts:
    def test_sustained_short_ones_take_half_of_the_prefill_time_at_most(self):
        """Offered 1.5 times what there is."""
        alone = run(engine_of(), [(0.0, Request("long", [1] * 50_000, 1))])["long"].ended_s
        shorts = [(i * ALONE_S / 1.5, Request(f"short{i}", [1] * SHORT, 1)) for i in range(100)]
        long = run(engine_of(), [(0.0, Request("long", [1] * 50_000, 1)), *shorts], until_s=7)["long"]
        assert 1.5 * alone < long.ended_s <= 2.2 * alone

    def test_the_longest_is_not_starved_by_long_ones(self):
        """Prompts of 50,000 tokens come faster than they can be served, for ever."""
        alone = run(engine_of(), [(0.0, Request("million", [1] * 500_000, 1))])["million"].ended_s
        others = [(i * 1.2, Request(f"long{i}", [1] * 50_000, 1)) for i in range(100)]
        courses = run(engine_of(), [(0.0, Request("million", [1] * 500_000, 1)), *others], until_s=100)
        assert courses["million"].ended_s <= 2.2 * alone
        ended = [i for i in range(80) if (course := courses.get(f"long{i}")) and course.ended_s is not None]
        assert len(ended) >= 20 and ended == list(range(len(ended)))

    def test_one_behind_a_longer_one_does_not_wait_for_its_end(self):
        arrivals = [(0.0, Request("million", [1] * 1_000_000, 1)), (1.0, Request("long", [1] * 20_000, 1))]
        courses = run(engine_of(), arrivals)
        alone = run(engine_of(), arrivals[1:])["long"].first_s
        assert courses["long"].first_s <= 2.3 * alone + LONGEST_S


def mixes():
    rng = random.Random(5)
    long = streams(4, 2000) + [(0.5, Request(f"long{i}", [1] * LONG, 100)) for i in range(8)]
    many = [(i * 0.3, Request(f"s{i}", [1] * rng.randint(50, 500), 300)) for i in range(80)]
    both = many + [(1.0 + 2 * i, Request(f"long{i}", [1] * LONG, 300)) for i in range(5)]
    chats = [(i * 0.2, Request(f"c{i}", [1] * int(10 ** rng.uniform(1.5, 4.5)), 400)) for i in range(100)]
    return {"long": long, "both": both, "chats": chats}


@pytest.mark.parametrize("policy", [FirstCome, PromptsFirst])
@pytest.mark.parametrize("mix", ["long", "both", "chats"])
def test_total_throughput_is_within_a_tenth_of_first_come_first_served(policy, mix):
    ours, theirs = (run(engine_of(scheduler), mixes()[mix]) for scheduler in (None, policy))
    makespan = [max(course.ended_s for course in courses.values()) for courses in (ours, theirs)]
    print(f"{mix}: {makespan[0]:.2f} s, {policy.__name__} {makespan[1]:.2f} s")
    assert makespan[0] <= 1.1 * makespan[1]


class TestRoom:
    def test_streams_that_outgrow_the_caches_are_parked_and_all_end(self):
        engine = engine_of(cache_tokens=1 << 20, park_bytes=1 << 40)
        arrivals = [(i * 0.1, Request(f"r{i}", [1] * 60_000, 20_000)) for i in range(24)]
        parked = 0
        step = engine.step

        def counted():
            nonlocal parked
            parked = max(parked, engine.status().parked)
            return step()

        engine.step = counted
        courses = run(engine, arrivals)
        assert all(sum(count for _, count in course.tokens) == 20_000 for course in courses.values())
        assert parked >= 2 and engine._scheduler.ledger.pages == 0 and engine._parking.nbytes == 0

    def test_one_that_needs_most_of_the_caches_is_not_starved_by_small_ones(self):
        engine = engine_of(cache_tokens=(1 << 20) + PASS_ROWS)
        small = [(i * 0.05, Request(f"small{i}", [1] * 30_000, 400)) for i in range(200)]
        big = (1.0, Request("big", [1] * 900_000, 100))
        ahead, alone = (run(engine_of(), [one])[one[1].id].first_s for one in (small[0], big))
        assert run(engine, [*small, big], until_s=300)["big"].first_s <= PATIENCE_S + 21 * ahead + 4 * alone


requests = st.tuples(
    st.floats(0, 20),
    st.sampled_from([30, SHORT, 700, 5_000, 30_000, LONG]),
    st.sampled_from([1, 20, 300]),
    st.sampled_from([0, 0, 0, 1, 9]),
    st.none() | st.floats(0, 5),  # cancelled after
)


@given(st.lists(requests, min_size=1, max_size=40), st.sampled_from([4, 16, 40]), st.sampled_from([None, 1 << 20]))
@settings(max_examples=40, deadline=None)
def test_every_request_ends_and_no_short_one_waits_for_more_than_the_short_ones_about(wanted, places, cache_tokens):
    engine = engine_of(max_sequences=places, cache_tokens=cache_tokens)
    arrivals = [
        (at, Request(str(i), [1] * length, tokens, priority=priority))
        for i, (at, length, tokens, priority, _) in enumerate(wanted)
    ]
    cancels = sorted((at + after, str(i)) for i, (at, _, _, _, after) in enumerate(wanted) if after is not None)
    step = engine.step

    def step_and_cancel():
        while cancels and cancels[0][0] <= engine.backend.now:
            engine.cancel(cancels.pop(0)[1])
        return step()

    engine.step = step_and_cancel
    courses = run(engine, arrivals)
    assert all(course.ended_s is not None for course in courses.values()) and len(courses) == len(wanted)
    status = engine.status()
    assert (status.running, status.waiting, status.parked) == (0, 0, 0) and engine.backend.ledger() == {"caches": 0}
    assert (engine._scheduler.ledger.pages, engine._parking.nbytes) == (0, 0)
    if len(wanted) > places or cache_tokens is not None:
        return  # somebody may have waited for a place
    turn = LONGEST_S + COSTS.step_s(48)
    shorts = [course for course in courses.values() if course.tokens and len(course.request.prompt_ids) <= 700]
    for course in shorts:
        first = course.tokens[0][0]
        about = [o for o in courses.values() if o.arrived_s < first and o.tokens and o.tokens[0][0] > course.arrived_s]
        work = sum(5 if len(o.request.prompt_ids) > 700 else 1 for o in about if len(o.request.prompt_ids) <= 5000)
        assert course.first_s <= 2 * (work + 1) * turn


@given(st.lists(requests, min_size=1, max_size=20))
@settings(max_examples=25, deadline=None)
def test_a_running_stream_steps_after_every_chunk(wanted):
    """However many prompts begin, end and are cancelled: between two steps they never take more than one budget."""
    engine, spent, most = engine_of(), 0.0, 0.0
    backend = engine.backend
    enqueue, prefill = backend.enqueue, backend.prefill

    def step(batch):
        nonlocal spent
        spent = 0.0
        return enqueue(batch)

    def chunk(sequence, rows, budget_s):
        nonlocal spent, most
        backend._collect(ahead=0)  # what it would wait for is not its own
        begun = backend.now
        done = prefill(sequence, rows, budget_s)
        spent += backend.now - begun
        most = max(most, spent if "stream0" in backend._waiting else 0.0)
        return done

    arrivals = streams(1) + [
        (0.5 + at, Request(str(i), [1] * length, tokens, priority=priority))
        for i, (at, length, tokens, priority, _) in enumerate(wanted)
    ]
    cancels = sorted((0.5 + at + after, str(i)) for i, (at, _, _, _, after) in enumerate(wanted) if after is not None)
    turn = engine.step

    def turn_and_cancel():
        while cancels and cancels[0][0] <= backend.now:
            engine.cancel(cancels.pop(0)[1])
        return turn()

    backend.enqueue, backend.prefill, engine.step = step, chunk, turn_and_cancel
    courses = run(engine, arrivals, until_s=30)
    assert 0 < most <= 1.05 * BUDGET_S
    assert len(courses["stream0"].tokens) > 100
