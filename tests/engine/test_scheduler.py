"""The scheduler alone, then the engine over a scripted backend in any order of submit, cancel and step."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsuf.engine.messages import Admitted, Finished, Request, Sampling, Tokens
from dsuf.engine.scheduler import Scheduler
from dsuf.engine.sequence import Phase, Sequence
from tests.support.scripted import ScriptedBackend, VirtualClock, scripted_engine, token_at


def sequence(id, prompt_len=4):
    return Sequence(Request(id, [1] * prompt_len, 8), budget=8, draft=False, verify=None, trace=None)


def test_first_come_first_served_one_prompt_at_a_time():
    scheduler = Scheduler(max_sequences=4)
    a, b = sequence("a"), sequence("b")
    scheduler.add(a, 1.0)
    scheduler.add(b, 2.0)
    turn = scheduler.plan(3.0)
    assert (turn.prefill, turn.decode, turn.started) == (a, (), True)
    assert scheduler.plan(4.0).prefill is a and not scheduler.plan(4.0).started
    scheduler.prefilled(a)
    turn = scheduler.plan(5.0)
    assert (turn.prefill, turn.decode, turn.started) == (b, (a,), True)
    assert (a.submitted_s, a.started_s, b.submitted_s, b.started_s) == (1.0, 3.0, 2.0, 5.0)


def test_everybody_who_decodes_is_in_every_turn():
    scheduler = Scheduler(max_sequences=3)
    everybody = [sequence(str(i)) for i in range(3)]
    for one in everybody:
        scheduler.add(one, 0.0)
        scheduler.plan(0.0)
        scheduler.prefilled(one)
    assert scheduler.plan(0.0).decode == tuple(everybody)


def test_a_full_engine_takes_nobody_until_a_place_is_free():
    scheduler = Scheduler(max_sequences=1)
    a, b = sequence("a"), sequence("b")
    scheduler.add(a, 0.0)
    scheduler.add(b, 0.0)
    scheduler.plan(0.0)
    scheduler.prefilled(a)
    assert scheduler.plan(0.0).prefill is None and b.phase is Phase.WAITING
    scheduler.remove(a)
    assert scheduler.plan(0.0).prefill is b


def test_remove_works_in_every_phase():
    scheduler = Scheduler(max_sequences=4)
    decoding, prefilling, waiting = sequence("d"), sequence("p"), sequence("w")
    for one in (decoding, prefilling, waiting):
        scheduler.add(one, 0.0)
    scheduler.plan(0.0)
    scheduler.prefilled(decoding)
    scheduler.plan(0.0)
    assert scheduler.sequences() == [decoding, prefilling, waiting]
    assert (scheduler.running, scheduler.waiting) == (2, 1)
    for one in (waiting, decoding, prefilling):
        scheduler.remove(one)
        assert one.phase is Phase.DONE
    assert scheduler.idle and scheduler.sequences() == []


class AnyOrder(RuleBasedStateMachine):
    """Whatever the order: every request gets its events in order and one Finished, and nobody is left out of a turn."""

    MAX_SEQUENCES = 3

    def __init__(self):
        super().__init__()
        self.clock = VirtualClock()
        self.said = {}  # id -> its events
        self.requests, self.cancelled, self.next_id = {}, set(), 0

    @rule(ahead=st.integers(0, 2), rate=st.integers(1, 6))
    @precondition(lambda self: not hasattr(self, "engine"))
    def start(self, ahead, rate):
        self.backend = ScriptedBackend(
            ahead=ahead,
            tokens_a_step=lambda sequence: 1 + (len(sequence.emitted) * 7 + len(sequence.id)) % rate,
            chunk_s=0.5,
            step_s=0.125,  # a power of two, so that virtual time adds up exactly
            sleep=self.clock.sleep,
        )
        self.engine = scripted_engine(self.backend, self.clock, max_sequences=self.MAX_SEQUENCES)

    def started(self):
        return hasattr(self, "engine")

    @rule(prompt_len=st.integers(1, 60), max_tokens=st.integers(1, 20), eos_at=st.none() | st.integers(0, 20))
    @precondition(started)
    def submit(self, prompt_len, max_tokens, eos_at):
        id = f"r{self.next_id}"
        self.next_id += 1
        request = Request(id, [self.next_id] * prompt_len, max_tokens, Sampling(temperature=0))
        if eos_at is not None:
            request = Request(id, request.prompt_ids, max_tokens, eos_ids=[token_at(request, eos_at, 1000)])
        self.engine.submit(request)
        self.requests[id], self.said[id] = request, []

    @rule(data=st.data())
    @precondition(lambda self: self.started() and self.requests)
    def cancel(self, data):
        id = data.draw(st.sampled_from(sorted(self.requests)))
        if not any(isinstance(event, Finished) for event in self.said[id]):
            self.cancelled.add(id)
        self.engine.cancel(id)

    @rule(times=st.integers(1, 4))
    @precondition(started)
    def step(self, times):
        for _ in range(times):
            due = {one.id for one in self.engine._scheduler.sequences() if one.phase is Phase.DECODE}
            steps = len(self.backend.batches)
            events = self.engine.step()
            if due:
                assert len(self.backend.batches) == steps + 1 and set(self.backend.batches[-1]) == due
            assert len({event.id for event in events if isinstance(event, Tokens)}) == sum(
                isinstance(event, Tokens) for event in events
            )
            for event in events:
                self.said[event.id].append(event)

    @invariant()
    def places_are_kept(self):
        if self.started():
            status = self.engine.status()
            assert status.running <= self.MAX_SEQUENCES
            assert len(self.backend.live) <= self.MAX_SEQUENCES

    def teardown(self):
        if not self.started():
            return
        # each turn prefills a chunk of 16 or decodes everybody: the work left bounds the turns left
        bound = sum(len(r.prompt_ids) // 16 + 2 + r.max_tokens for r in self.requests.values()) + 10
        for _ in range(bound):
            if self.engine.idle:
                break
            self.step(1)
        assert self.engine.idle and self.engine.step() == []
        status = self.engine.status()
        assert (status.running, status.waiting, status.waiting_tokens, status.context_tokens) == (0, 0, 0, 0)
        assert self.backend.live == {}
        for id, request in self.requests.items():
            self.check_events(request, self.said[id], id in self.cancelled)
        admitted = [id for id in self.requests if self.said[id] and isinstance(self.said[id][0], Admitted)]
        first_chunks = list(dict.fromkeys(self.backend.chunks))
        assert first_chunks == admitted, "first come, first served"

    def check_events(self, request, events, cancelled):
        finished = [event for event in events if isinstance(event, Finished)]
        assert len(finished) == 1 and events[-1] is finished[0]
        ids = [token for event in events if isinstance(event, Tokens) for token in event.ids]
        assert all(event.ids for event in events if isinstance(event, Tokens))
        assert ids == [token_at(request, i, 1000) for i in range(len(ids))]
        end = finished[0]
        assert end.stats.completion_tokens >= len(ids)
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
