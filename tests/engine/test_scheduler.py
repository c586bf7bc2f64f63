"""The scheduler's policy, rule by rule; then the engine over a scripted backend, any order of submit, cancel, step."""

import math

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsuf.engine.backend import Limits
from dsuf.engine.ledger import Ledger
from dsuf.engine.messages import Admitted, Finished, Request, Tokens
from dsuf.engine.scheduler import PATIENCE_S, Scheduler
from dsuf.engine.sequence import Phase, Sequence
from dsuf.engine.tier import Hit
from tests.support.scripted import ScriptedBackend, VirtualClock, scripted_engine, token_at

PAGE = 128


def sequence(id, prompt_len=4, *, budget=8, priority=0, draft=False, verify=None, emitted=0):
    made = Sequence(Request(id, [1] * prompt_len, budget, priority=priority), budget, draft, verify, None)
    made.emitted = [1] * emitted
    return made


def scheduler_of(max_sequences=8, *, max_rows=48, pages=None, park_bytes=1 << 20):
    """Chunks of 0.1 s in which 64 rows are one pass; a page has 1 byte."""
    limits = Limits("test", 10, 4096, 5, max_rows, pages, page_bytes=1, snapshot_bytes=0, resume_step=2)
    return Scheduler(Ledger(limits, park_bytes), max_sequences=max_sequences, budget_s=0.1, pass_rows=64)


def run_prompts(scheduler, turns, seconds=0.1, rows=64, now=0.0):
    """Ids of the prompts that get the next chunks, each of which is worked off by `rows`."""
    served = []
    for turn in range(turns):
        chosen = scheduler.next_prompt(now + turn * seconds)
        if chosen is None:
            break
        served.append(chosen.id)
        short, done = scheduler.is_short(chosen), min(rows, chosen.prompt_left)
        chosen.prefilled += done
        scheduler.spent(chosen, done, seconds, short=short)
        if not chosen.prompt_left:
            chosen.emitted.append(1)
            scheduler.prefilled(chosen)
    return served


def streams(scheduler, *sequences):
    for one in sequences:
        scheduler.add(one, 0.0)
        assert scheduler.next_prompt(0.0) is one
        one.prefilled = one.prompt_len
        one.emitted = one.emitted or [1]
        scheduler.prefilled(one)


def ids(sequences):
    return [one.id for one in sequences]


class TestDecode:
    def test_everybody_who_decodes_is_in_every_turn_if_the_rows_fit(self):
        scheduler = scheduler_of()
        streams(scheduler, *(sequence(str(i), draft=True) for i in range(8)))
        for _ in range(3):
            assert ids(scheduler.plan().decode) == [str(i) for i in range(8)]

    def test_more_rows_than_a_step_takes_turns(self):
        scheduler = scheduler_of(9, max_rows=12)
        streams(scheduler, *(sequence(f"d{i}", draft=True) for i in range(3)))
        streams(scheduler, sequence("v", draft=True, verify=1), sequence("p"))
        turns = [ids(scheduler.plan().decode) for _ in range(4)]
        assert turns == [["d0", "d1"], ["d2", "v", "p"], ["d0", "d1"], ["d2", "v", "p"]]

    def test_a_newcomer_is_served_in_its_first_round(self):
        scheduler = scheduler_of(9, max_rows=6)
        streams(scheduler, sequence("a", draft=True), sequence("b", draft=True))
        assert ids(scheduler.plan().decode) == ["a"]
        streams(scheduler, sequence("c", draft=True))
        assert [ids(scheduler.plan().decode) for _ in range(3)] == [["b"], ["a"], ["c"]]


class TestPrompts:
    def test_short_ones_in_the_order_of_arrival(self):
        scheduler = scheduler_of()
        for id in "abc":
            scheduler.add(sequence(id, 50), 1.0)
        assert run_prompts(scheduler, 9, now=2.0) == ["a", "b", "c"]

    def test_times_are_taken_at_arrival_and_start(self):
        scheduler = scheduler_of()
        scheduler.add(one := sequence("a"), 1.0)
        scheduler.next_prompt(3.0)
        assert (one.submitted_s, one.started_s, one.phase) == (1.0, 3.0, Phase.PREFILL)

    def test_a_short_one_does_not_wait_for_a_long_one(self):
        scheduler = scheduler_of()
        scheduler.add(sequence("long", 64_000), 0.0)
        assert run_prompts(scheduler, 3) == ["long"] * 3
        scheduler.add(sequence("short", 60), 0.0)
        assert run_prompts(scheduler, 3) == ["short", "long", "long"]

    def test_short_and_long_ones_get_the_same_time_however_many_are_short(self):
        scheduler = scheduler_of(200)
        scheduler.add(sequence("long", 64_000), 0.0)
        for i in range(60):
            scheduler.add(sequence(f"s{i}", 60), 0.0)
        served = run_prompts(scheduler, 100, seconds=0.03)
        assert 0.4 < sum(id == "long" for id in served) / 100 < 0.6
        assert [id for id in served if id != "long"] == [f"s{i}" for i in range(100 - served.count("long"))]

    def test_a_cheap_short_one_never_waits_for_a_chunk_that_has_not_begun(self):
        scheduler = scheduler_of(200)
        scheduler.add(sequence("long", 64_000), 0.0)
        for i in range(20):
            assert run_prompts(scheduler, 2) == ["long", "long"]
            scheduler.add(sequence(f"s{i}", 60), 0.0)
            scheduler.add(sequence(f"t{i}", 60), 0.0)
            assert run_prompts(scheduler, 2, seconds=0.05) == [f"s{i}", f"t{i}"]

    def test_what_counts_as_short_follows_the_speed_of_prefill(self):
        scheduler = scheduler_of()
        one = sequence("a", 1000)
        assert not scheduler.is_short(one)
        scheduler.spent(one, 4000, 0.2, short=False)
        assert scheduler.chunk_rows == 2000 and scheduler.is_short(one)
        for _ in range(100):
            scheduler.spent(one, 400, 0.2, short=False)
        assert scheduler.chunk_rows < 300 and not scheduler.is_short(one)

    def test_a_prompt_counts_with_what_its_hit_leaves(self):
        scheduler = scheduler_of()
        scheduler.add(sequence("long", 64_000), 0.0)
        scheduler.add(follow := sequence("follow", 10_000), 0.0)
        follow.hit = Hit(9_990, "local", [], [])
        assert run_prompts(scheduler, 1) == ["follow"]

    def test_long_ones_take_turns_between_the_oldest_and_the_one_with_least_left(self):
        scheduler = scheduler_of()
        for id, length in (("huge", 64_000), ("big", 3200), ("mid", 640), ("late", 6400)):
            scheduler.add(sequence(id, length), 0.0)
        served = run_prompts(scheduler, 24)
        assert served == [*["huge", "mid"] * 10, *["huge", "big"] * 2]
        assert "late" not in served

    def test_long_ones_keep_their_turns_when_a_chosen_one_did_not_fit(self):
        scheduler = scheduler_of()
        for id, length in (("huge", 64_000), ("mid", 640)):
            scheduler.add(sequence(id, length), 0.0)
        assert [scheduler.next_prompt(0.0).id for _ in range(3)] == ["huge"] * 3
        assert run_prompts(scheduler, 3) == ["huge", "mid", "huge"]

    def test_it_is_known_whether_a_prompt_can_go_on_or_begin(self):
        scheduler = scheduler_of(1)
        assert not scheduler.prompts_due(0.0)
        scheduler.add(one := sequence("a"), 0.0)
        assert scheduler.prompts_due(0.0)
        assert scheduler.next_prompt(0.0) is one and scheduler.prompts_due(0.0)
        one.prefilled, one.emitted = one.prompt_len, [1]
        scheduler.prefilled(one)
        scheduler.add(sequence("b"), 0.0)
        assert not scheduler.prompts_due(0.0), "there is no place"

    def test_a_higher_priority_goes_first_among_short_ones(self):
        scheduler = scheduler_of()
        for id, priority in (("a", 0), ("b", 1), ("c", 9), ("d", 1)):
            scheduler.add(sequence(id, 60, priority=priority), 0.0)
        assert run_prompts(scheduler, 4) == ["c", "b", "d", "a"]

    def test_one_that_is_held_is_passed_over_and_starts_when_let_go(self):
        scheduler = scheduler_of()
        scheduler.add(held := sequence("held"), 0.0)
        scheduler.add(sequence("b"), 0.0)
        held.held = True
        assert run_prompts(scheduler, 9) == ["b"]
        held.held = False
        assert run_prompts(scheduler, 9) == ["held"]


class TestRoom:
    def test_a_full_engine_takes_nobody_until_a_place_is_free(self):
        scheduler = scheduler_of(1)
        streams(scheduler, one := sequence("a"))
        scheduler.add(other := sequence("b"), 0.0)
        assert scheduler.next_prompt(0.0) is None and other.phase is Phase.WAITING
        scheduler.remove(one)
        assert scheduler.next_prompt(0.0) is other

    def test_who_finds_no_pages_is_passed_for_a_while_and_then_by_nobody(self):
        scheduler = scheduler_of(pages=8, park_bytes=0)
        streams(scheduler, first := sequence("first", 3 * PAGE - 30))
        scheduler.add(large := sequence("large", 6 * PAGE - 30), 1.0)
        assert scheduler.next_prompt(1.0) is None
        scheduler.add(sequence("small", 10), 2.0)
        assert run_prompts(scheduler, 9, now=0.5 + PATIENCE_S) == ["small"]
        scheduler.add(late := sequence("late", 10), 3.0)
        assert scheduler.next_prompt(1.5 + PATIENCE_S) is None and late.phase is Phase.WAITING
        scheduler.remove(first)
        assert scheduler.next_prompt(20.0) is large

    def test_the_youngest_of_the_lowest_priority_is_parked_and_comes_back(self):
        scheduler = scheduler_of(pages=5)
        old, dear, young = (sequence(id, 100, budget=200, priority=p) for id, p in (("o", 0), ("d", 5), ("y", 0)))
        streams(scheduler, old, dear, young)
        assert ids(scheduler.plan().decode) == ["o", "d", "y"]
        for one in (old, dear, young):
            one.emitted = [1] * 30
        turn = scheduler.plan()
        assert (ids(turn.park), ids(turn.resume), ids(turn.decode)) == (["y"], [], ["o", "d"])
        assert young.phase is Phase.PARKED and (scheduler.parked, scheduler.running) == (1, 3)
        scheduler.add(sequence("new", 4), 0.0)
        assert scheduler.next_prompt(0.0) is None, "nobody starts before those who are parked are back"
        assert not scheduler.plan().resume
        scheduler.remove(old)
        turn = scheduler.plan()
        assert (ids(turn.park), ids(turn.resume), set(ids(turn.decode))) == ([], ["y"], {"d", "y"})
        assert scheduler.next_prompt(0.0).id == "new"

    def test_without_host_memory_only_so_many_start_as_can_all_end(self):
        scheduler = scheduler_of(pages=3, park_bytes=0)
        streams(scheduler, one := sequence("a", 100, budget=250))
        scheduler.add(sequence("b", 100, budget=250), 0.0)
        scheduler.add(sequence("c", 100, budget=10), 0.0)
        assert run_prompts(scheduler, 9) == ["c", "c"]
        one.emitted = [1] * 100
        turn = scheduler.plan()
        assert (turn.park, ids(turn.decode)) == ((), ["a", "c"])
        one.emitted = [1] * 200  # has all the pages there are but one, and waits for it
        assert ids(scheduler.plan().decode) == ["c"]
        scheduler.remove(scheduler.sequences()[-1])
        assert ids(scheduler.plan().decode) == ["a"]

    def test_remove_works_in_every_phase(self):
        scheduler = scheduler_of(pages=5)
        parked, decoding = sequence("k", 100, budget=200), sequence("d", 300, budget=200)
        streams(scheduler, decoding, parked)
        decoding.emitted = [1] * 80
        parked.emitted = [1] * 80
        assert ids(scheduler.plan().park) == ["k"]
        scheduler.add(waiting := sequence("w"), 0.0)
        assert scheduler.sequences() == [decoding, parked, waiting]
        for one in (waiting, decoding, parked):
            scheduler.remove(one)
            assert one.phase is Phase.DONE
        scheduler.add(prefilling := sequence("p"), 0.0)
        assert scheduler.next_prompt(0.0) is prefilling
        scheduler.remove(prefilling)
        assert scheduler.sequences() == [] and (scheduler.ledger.pages, scheduler.ledger.parked_bytes) == (0, 0)


class AnyOrder(RuleBasedStateMachine):
    """Whatever the order: every request gets its events in order and one Finished, and nobody is left out for long."""

    MAX_SEQUENCES = 5

    def __init__(self):
        super().__init__()
        self.clock = VirtualClock()
        self.said = {}  # id -> its events
        self.requests, self.cancelled, self.next_id = {}, set(), 0
        self.unserved = {}  # turns since its latest step, of a stream

    @rule(
        ahead=st.integers(0, 2),
        rate=st.integers(1, 6),
        max_rows=st.sampled_from([6, 13, 48]),
        pages=st.sampled_from([None, 3, 5, 9]),
        parked_pages=st.sampled_from([0, 2, 5, 100]),
    )
    @precondition(lambda self: not hasattr(self, "engine"))
    def start(self, ahead, rate, max_rows, pages, parked_pages):
        self.backend = ScriptedBackend(
            ahead=ahead,
            tokens_a_step=lambda sequence: 1 + (len(sequence.emitted) * 7 + len(sequence.id)) % rate,
            chunk=64,
            chunk_s=0.5,
            step_s=0.125,  # a power of two, so that virtual time adds up exactly
            sleep=self.clock.sleep,
            max_rows=max_rows,
            max_context=3 * PAGE - 12,
            cache_pages=pages,
        )
        page, snapshot = self.backend.limits.page_bytes, self.backend.limits.snapshot_bytes
        self.engine = scripted_engine(
            self.backend, self.clock, max_sequences=self.MAX_SEQUENCES, park_bytes=parked_pages * (page + snapshot)
        )

    def started(self):
        return hasattr(self, "engine")

    @rule(
        prompt_len=st.integers(1, 200),
        max_tokens=st.sampled_from([1, 2, 20, 150, 400]),
        eos_at=st.none() | st.integers(0, 60),
        priority=st.sampled_from([0, 0, 0, 1, 9]),
        verify=st.sampled_from([None, 0, 3]),
    )
    @precondition(started)
    def submit(self, prompt_len, max_tokens, eos_at, priority, verify):
        id = f"r{self.next_id}"
        self.next_id += 1
        prompt = [self.next_id] * prompt_len
        eos = [] if eos_at is None else [token_at(Request(id, prompt, 1), eos_at, 1000)]
        request = Request(id, prompt, max_tokens, eos_ids=eos, priority=priority, verify=verify)
        self.engine.submit(request)
        self.requests[id], self.said[id] = request, []

    @rule(data=st.data(), keep=st.none() | st.integers(0, 30))
    @precondition(lambda self: self.started() and self.requests)
    def cancel(self, data, keep):
        id = data.draw(st.sampled_from(sorted(self.requests)))
        if not any(isinstance(event, Finished) for event in self.said[id]):
            self.cancelled.add(id)
        self.engine.cancel(id, keep)

    @rule(times=st.integers(1, 8))
    @precondition(started)
    def step(self, times):
        for _ in range(times):
            self.one_step()

    def one_step(self):
        due = {one.id for one in self.engine._scheduler.sequences() if one.phase is Phase.DECODE}
        steps = len(self.backend.batches)
        events = self.engine.step()
        served = set(self.backend.batches[-1]) if len(self.backend.batches) > steps else set()
        assert len(self.backend.batches) <= steps + 1
        self.unserved = {id: 0 if id in served else self.unserved.get(id, 0) + 1 for id in due}
        if self.backend.limits.cache_pages is None:
            rounds = math.ceil(self.MAX_SEQUENCES * 6 / max(self.backend.limits.max_rows - 5, 6))
            assert all(turns <= 2 * rounds for turns in self.unserved.values()), "a chunk after each step"
        said = [event.id for event in events if isinstance(event, Tokens)]
        assert all(said.count(id) <= 1 + self.backend.ahead for id in said)
        for event in events:
            self.said[event.id].append(event)

    @invariant()
    def places_are_kept(self):
        if self.started():
            status = self.engine.status()
            assert status.running <= self.MAX_SEQUENCES
            assert len(self.backend.live) <= self.MAX_SEQUENCES
            assert self.engine._parking.nbytes <= self.engine.options.park_bytes

    def teardown(self):
        if not self.started():
            return
        # every turn runs a chunk of 64 rows or steps somebody: the work left bounds the turns left
        bound = sum(len(r.prompt_ids) // 64 + 2 + min(r.max_tokens, 372) for r in self.requests.values()) + 10
        for _ in range(bound):
            if self.engine.idle:
                break
            self.one_step()
        assert self.engine.idle and self.engine.step() == []
        status, ledger = self.engine.status(), self.engine._scheduler.ledger
        assert (status.running, status.waiting, status.waiting_tokens, status.context_tokens) == (0, 0, 0, 0)
        assert (self.backend.live, ledger.pages, ledger.parked_bytes, self.engine._parking.nbytes) == ({}, 0, 0, 0)
        for id, request in self.requests.items():
            self.check_events(request, self.said[id], id in self.cancelled)

    def check_events(self, request, events, cancelled):
        finished = [event for event in events if isinstance(event, Finished)]
        assert len(finished) == 1 and events[-1] is finished[0]
        ids = [token for event in events if isinstance(event, Tokens) for token in event.ids]
        assert all(event.ids for event in events if isinstance(event, Tokens))
        assert ids == [token_at(request, i, 1000) for i in range(len(ids))]
        end = finished[0]
        if cancelled:
            assert end.reason == "cancelled"
            return
        assert isinstance(events[0], Admitted) and sum(isinstance(event, Admitted) for event in events) == 1
        assert len(ids) == end.stats.completion_tokens <= request.max_tokens
        assert end.reason == ("stop" if ids[-1] in request.eos_ids else "length")
        assert not set(ids[:-1]) & set(request.eos_ids)
        assert sum(end.stats.accepted_histogram) == end.stats.iterations
        assert end.stats.ttft_s >= end.stats.prefill_s >= 0.5 and end.stats.queue_s >= 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
