"""The GPU backend's rules over a played device: running ahead, ends, going back, masks, faults."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.engine.engine import Engine
from dsuf.engine.messages import Finished, Request, Sampling, Tokens
from dsuf.engine.sequence import Trace
from dsuf.errors import DeviceError
from tests.engine.gpu.played import PlayedSteps, played_engine, text

GREEDY = Sampling(temperature=0)
drafting = st.sampled_from([dict(draft=False)] + [dict(draft=True, verify=v) for v in ("auto", *range(6))])


def run(engine, *requests, traces=None):
    for request in requests:
        engine.submit(request, (traces or {}).get(request.id))
    ids, ends = {request.id: [] for request in requests}, {}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Tokens):
                ids[event.id] += event.ids
            elif isinstance(event, Finished):
                ends[event.id] = event
    return ids, ends


def expected(request):
    return text(request.prompt_ids[-1], len(request.prompt_ids) - 1, request.max_tokens)


@given(st.integers(1, 60), st.integers(1, 40), drafting, st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_tokens_are_the_same_however_far_the_host_runs_ahead(length, count, drafting, delay):
    request = Request("a", [(3 * i) % 60 for i in range(length)], count, GREEDY)
    engine, trace = played_engine(delay=delay, **drafting), Trace()
    ids, ends = run(engine, request, traces={"a": trace})
    assert ids["a"] == expected(request) and ends["a"].reason == "length"
    assert [token for step in trace.steps for token in step.emitted] == ids["a"][1:]
    assert engine.backend.all_steps.deepest <= 2
    assert all(len(step.drafted) == (5 if drafting["draft"] else 0) for step in trace.steps)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 25), drafting), min_size=2, max_size=14))
@settings(max_examples=40, deadline=None)
def test_any_batch_gives_each_its_own_text_and_every_step_fits(wanted):
    requests = [
        Request(
            str(i), [(i + 5 * j) % 60 for j in range(length)], count, GREEDY, draft=own["draft"],
            verify=None if own.get("verify") == "auto" else own.get("verify"),
        )
        for i, (length, count, own) in enumerate(wanted)
    ]  # fmt: skip
    engine = played_engine()
    ids, _ = run(engine, *requests)
    assert ids == {request.id: expected(request) for request in requests}
    assert all(sum(rows) <= 48 for rows in engine.backend.all_steps.rows_run)
    assert not engine.backend._pages.held


def test_an_eos_ends_it_and_steps_queued_beyond_say_nothing():
    request = Request("a", [7, 9], 40, GREEDY)
    whole = expected(request)
    stop = Request("a", [7, 9], 40, GREEDY, eos_ids=[whole[11]])
    ids, ends = run(played_engine(delay=5), stop)
    assert ids["a"] == whole[: whole.index(whole[11]) + 1] and ends["a"].reason == "stop"


def test_a_slot_is_used_again_while_a_step_of_its_last_owner_is_under_way():
    engine = played_engine(delay=4, slots=1)
    requests = [Request(str(i), [i + 1, 9], 6, GREEDY) for i in range(5)]
    ids, _ = run(engine, *requests)
    assert ids == {request.id: expected(request) for request in requests}


def test_cancel_in_the_middle_leaves_nothing_behind():
    engine = played_engine(delay=3)
    engine.submit(Request("a", [5] * 20, 400, GREEDY))
    engine.submit(Request("b", [6] * 20, 30, GREEDY))
    for _ in range(24):
        engine.step()
    engine.cancel("a")
    run(engine)
    assert not engine.backend._pages.held and engine.idle


def test_rewind_then_continue_is_never_having_gone_further():
    engine, request = played_engine(delay=3, verify=3), Request("a", [1, 2], 60, GREEDY)
    engine.submit(request)
    while not (sequence := engine._sequences["a"]).emitted or len(sequence.emitted) < 20:
        engine.step()
    gone = list(sequence.emitted)
    engine.backend.rewind(sequence, 2 + 7)
    assert sequence.emitted == gone[:8] and sequence.last_position == 9
    with pytest.raises(ValueError, match="position 1 is not"):
        engine.backend.rewind(sequence, 1)
    while not engine.idle:
        engine.step()
    assert sequence.emitted == expected(request)


class Even:
    """Only even tokens."""

    def __init__(self):
        self.seen = []

    def advance(self, ids):
        self.seen += ids

    def fill(self, masks, drafts):
        masks[:] = 0x55555555
        return next((i for i, draft in enumerate(drafts) if draft % 2), len(drafts))


@pytest.mark.parametrize("draft", [False, True])
def test_a_constraint_holds_and_is_told_every_token(draft):
    made = []
    plain = played_engine(draft=draft, verify=5)
    engine = Engine(plain.backend, plain.options, constraints=lambda source: made.append(Even()) or made[-1])
    free, bound = Request("a", [1, 2], 30, GREEDY), Request("b", [1, 2], 30, GREEDY, constraint="even")
    ids, _ = run(engine, free, bound)
    assert ids["a"] == expected(free) and len(ids["b"]) == 30
    assert not any(token % 2 for token in ids["b"])
    assert made[0].seen == ids["b"][:-1] or made[0].seen == ids["b"][: len(made[0].seen)]


def test_a_lost_device_ends_every_request_once():
    engine = played_engine(delay=10**6)
    for name in "ab":
        engine.submit(Request(name, [5] * 4, 40, GREEDY))
    engine.backend._ranks.broken = DeviceError("GPU 0 (played) failed with CUDA_ERROR_ILLEGAL_ADDRESS at a step.")
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        for _ in range(20):
            engine.step()
    ends = [event for event in engine.abort("the GPU failed") if isinstance(event, Finished)]
    assert sorted(event.id for event in ends) == ["a", "b"] and all(event.reason == "error" for event in ends)
    assert engine.idle


def test_a_step_without_a_result_is_a_fault_and_no_endless_wait():
    engine = played_engine(delay=10**6)
    engine.backend._ranks.silent = True
    engine.submit(Request("a", [5] * 4, 40, GREEDY))
    with pytest.raises(DeviceError, match="left no result"):
        for _ in range(20):
            engine.step()


class Timeline(PlayedSteps):
    """A device and a host with a clock: draft, score and choose take their time, a mask and a look at the ring too."""

    DRAFT_S, SCORE_S, CHOOSE_S, MASK_S, LOOK_S = 3e-3, 9e-3, 1e-3, 0.8e-3, 0.2e-3

    def begin(self):
        self.now = self.busy_until = self.known = 0.0
        self.idle_s, self.ends = [], {}
        return self

    def _queue(self, seconds):
        self.idle_s.append(max(self.now - self.busy_until, 0.0))
        self.busy_until = max(self.now, self.busy_until) + seconds

    def draft(self, bucket, entries):
        super().draft(bucket, entries)
        self._queue(self.DRAFT_S if bucket.groups else 0.0)
        self.known = self.busy_until

    def score(self, bucket):
        super().score(bucket)
        self._queue(self.SCORE_S)

    def drafts(self, entries):
        self.now = max(self.now, self.known)
        return super().drafts(entries)

    def verify(self, bucket):
        self._queue(self.CHOOSE_S if bucket.masked else self.SCORE_S + self.CHOOSE_S)
        number = super().verify(bucket)
        self.ends[number] = self.busy_until
        return number

    def result(self, number):
        self.now += self.LOOK_S
        return super().result(number) if self.now >= self.ends[number] else None


@pytest.mark.parametrize("draft", [False, True])
def test_masks_are_made_while_the_step_scores_and_the_device_never_waits(draft):
    def step_s(*requests):
        plain = played_engine(draft=draft, verify=5, delay=0)
        steps = plain.backend.all_steps
        steps.__class__ = Timeline
        steps.begin()

        class Slow(Even):
            def fill(self, masks, drafts):
                steps.now += Timeline.MASK_S * (len(drafts) + 1)
                return super().fill(masks, drafts)

        engine = Engine(plain.backend, plain.options, constraints=lambda source: Slow())
        ids, _ = run(engine, *requests)
        assert all(len(ids[request.id]) == request.max_tokens for request in requests)
        middle = steps.idle_s[len(steps.idle_s) // 4 : len(steps.idle_s) // 2]
        assert len(middle) > 10 and max(middle) == 0.0
        ends = sorted(steps.ends.values())
        return (ends[len(ends) // 2] - ends[len(ends) // 4]) / (len(ends) // 2 - len(ends) // 4)

    free = [Request(name, [1, 2], 150, GREEDY) for name in "abc"]
    bound, loose = (Request("d", [1, 2], 150, GREEDY, constraint=grammar) for grammar in ("even", None))
    assert step_s(*free, bound) == pytest.approx(step_s(*free, loose), rel=1e-3)


def test_one_whose_grammar_fails_ends_alone_and_says_nothing_more():
    class Broken(Even):
        def fill(self, masks, drafts):
            if len(self.seen) > 9:
                raise RuntimeError("no more")
            return super().fill(masks, drafts)

    plain = played_engine(verify=5)
    engine = Engine(plain.backend, plain.options, constraints=lambda source: Broken())
    free, bound = Request("a", [1, 2], 40, GREEDY), Request("b", [1, 2], 40, GREEDY, constraint="even")
    ids, ends = run(engine, free, bound)
    assert ids["a"] == expected(free) and ends["a"].reason == "length"
    assert ends["b"].reason == "error" and "no more" in ends["b"].message
    assert 9 < len(ids["b"]) < 40 and not any(token % 2 for token in ids["b"])


def test_a_warm_backend_has_nothing_left_of_it_and_knows_what_passes_take():
    engine = played_engine(delay=0)
    backend, times = engine.backend, iter(range(10**6))
    backend._clock = lambda: float(next(times))
    backend.warm_up()
    assert not backend._pages.held and not backend._held and backend.poll() == [] and engine.idle
    pieces = backend._prefilling.pieces
    assert pieces.seconds(pieces.next(5, 0, 0, 5, 10.0)) > 0
    assert run(engine, request := Request("a", [1, 2], 30, GREEDY))[0]["a"] == expected(request)
