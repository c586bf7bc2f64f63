"""The engine over a cache tier: what is saved and where, what a hit changes (time) and what it does not (tokens)."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.engine.engine import Engine, EngineOptions, open_engine
from dsuf.engine.messages import Admitted, Finished, Request, Sampling, Tokens
from dsuf.engine.sequence import Trace
from dsuf.engine.tier import Hit
from dsuf.model.synthetic import write_checkpoint
from tests.model.micro import micro_config
from tests.support.hash_model import VOCAB, hash_engine, run, text
from tests.support.memory_tier import MemoryTier

GREEDY = Sampling(temperature=0)


def tier_engine(delay=0, **options):
    engine = hash_engine(tier=functools.partial(MemoryTier, delay=delay), **options)
    return engine, engine._saver.tier


def cached(events):
    (admitted,) = [event for event in events if isinstance(event, Admitted)]
    assert events[-1].stats.cached_tokens == admitted.cached_tokens
    assert admitted.source == ("local" if admitted.cached_tokens else "none")
    return admitted.cached_tokens


def prompt_of(length, seed=0):
    return [(7 * i * i + 3 * i + seed) % VOCAB for i in range(length)]


@pytest.mark.parametrize("length", [1, 2, 3, 127, 128, 129, 300])
@pytest.mark.parametrize("reply", [1, 2, 40])
def test_the_next_turn_finds_all_of_the_one_before_but_three_tokens(length, reply):
    engine, tier = tier_engine()
    first = text(run(engine, Request("a", prompt_of(length), reply, GREEDY))["a"])
    prompt = [*prompt_of(length), *first, 5, 6, 7]
    said = run(engine, Request("b", prompt, 20, GREEDY))["b"]
    assert cached(said) >= length + reply - 3
    assert text(said) == text(run(hash_engine(), Request("b", prompt, 20, GREEDY))["b"])
    tier.check_idle()


def test_the_same_prompt_again_finds_all_of_it_but_two_tokens():
    engine, _ = tier_engine()
    for round_number in range(3):
        assert cached(run(engine, Request("a", prompt_of(101), 5, GREEDY))["a"]) == (100 if round_number else 0)


def test_long_prompts_and_replies_are_saved_on_the_way():
    engine, tier = tier_engine(resume_every=128, verify=3)
    run(engine, Request("a", prompt_of(300), 101, GREEDY))
    positions = sorted((len(ids), entry.periodic) for ids, entry in tier.entries.items())
    assert positions == [(128, True), (256, True), (298, False), (384, True), (400, False)]
    assert tier.written_pages == 3 + 2, "three full pages, and the partial one of each entry that ends in one"
    edited = [*prompt_of(290), 1, 2, 3]
    assert cached(run(engine, Request("b", edited, 5, GREEDY))["b"]) == 256


def test_nothing_is_saved_where_there_is_no_room_and_the_next_point_is_tried_again():
    engine, tier = tier_engine(resume_every=128, verify=3)
    tier.full = True
    engine.submit(Request("a", prompt_of(300), 200, GREEDY))
    while len(engine._sequences["a"].emitted) < 110:
        engine.step()
    tier.full = False
    while not engine.idle:
        engine.step()
    assert sorted(map(len, tier.entries)) == [498]
    tier.check_idle()


def test_a_look_up_that_takes_long_holds_up_nobody_else():
    engine, tier = tier_engine(delay=7)
    run(engine, Request("a", prompt_of(100), 5, GREEDY))
    assert tier.waits >= 5
    tier.delay = 0
    engine.submit(Request("stream", prompt_of(40), 60, GREEDY))
    events = engine.step()
    tier.delay = 20
    engine.submit(Request("b", prompt_of(100), 5, GREEDY))
    while "b" not in {event.id for event in events}:
        more = engine.step()
        assert any(event.id in ("stream", "b") for event in more)
        events += more
    assert tier.live["b"] == 21 and cached(rest(engine, events, "b")) == 98


def rest(engine, events, id):
    while not engine.idle:
        events += engine.step()
    return [event for event in events if event.id == id]


def test_cancel_while_it_is_looked_up_lets_go_of_it():
    engine, tier = tier_engine(delay=5)
    engine.submit(Request("a", prompt_of(9), 5))
    assert engine.step() == [] and not engine.idle
    engine.cancel("a")
    (end,) = engine.step()
    assert isinstance(end, Finished) and end.reason == "cancelled" and engine.idle
    tier.check_idle()


@pytest.mark.parametrize(("keep", "saved"), [(None, 120), (20, 120), (17, 118), (10, 110), (3, 104), (0, 100)])
def test_a_stop_string_seen_late_is_saved_where_the_text_ends(keep, saved):
    engine, tier = tier_engine(verify=0)
    engine.submit(Request("a", prompt_of(101), 60, GREEDY))
    while len(engine._sequences["a"].emitted) < 20:
        engine.step()
    engine.cancel("a", keep)
    (end,) = engine.step()
    assert end.reason == "cancelled" and end.stats.completion_tokens == 20
    assert max(map(len, tier.entries)) == saved


def test_more_than_24_tokens_too_late_saves_the_prompt_only():
    engine, tier = tier_engine(verify=0)
    engine.submit(Request("a", prompt_of(101), 60, GREEDY))
    while len(engine._sequences["a"].emitted) < 40:
        engine.step()
    engine.cancel("a", keep=14)
    engine.step()
    assert sorted(map(len, tier.entries)) == [100]


def test_an_entry_is_ready_and_a_hit_is_let_go_only_when_the_copy_has_ended(monkeypatch):
    # LMCache 2181: bytes were sent on before the copy out of the device had finished
    engine, tier = tier_engine()
    ended = 0
    monkeypatch.setattr(engine.backend, "copied", lambda: ended)
    engine.submit(Request("a", prompt_of(101), 5, GREEDY))
    events = []
    while not any(isinstance(event, Finished) for event in events):
        events += engine.step()
    assert len(tier.writing) == 2 and not tier.entries and "a" in tier.live
    assert engine.step() == [] and not engine.idle, "it waits for the copies"
    ended = 1
    engine.step()
    assert sorted(map(len, tier.entries)) == [100] and "a" in tier.live
    ended = 2
    engine.step()
    assert sorted(map(len, tier.entries)) == [100, 104] and engine.idle
    engine.submit(Request("b", prompt_of(101), 5, GREEDY))
    while len(engine._sequences["b"].emitted) < 3:
        engine.step()
    assert tier.leased == {"b"}
    ended = 3
    engine.step()
    assert tier.leased == set()


def test_the_next_request_may_come_while_the_bytes_of_the_one_before_are_copied(monkeypatch):
    engine, tier = tier_engine()
    ended = 0
    monkeypatch.setattr(engine.backend, "copied", lambda: ended)
    first = next(
        event for event in engine.generate(Request("a", prompt_of(101), 5, GREEDY)) if isinstance(event, Finished)
    )
    assert first.reason == "length" and not engine.idle and "a" in tier.live
    events = []
    for event in engine.generate(Request("b", prompt_of(101), 5, GREEDY)):
        events.append(event)
        ended += isinstance(event, Finished) and 4
    assert [type(event) for event in events].count(Finished) == 1 and cached(events) == 0
    assert engine.idle and sorted(map(len, tier.entries)) == [100, 104]
    tier.check_idle()


def test_bytes_that_make_no_sense_are_no_hit():
    engine, tier = tier_engine()
    run(engine, Request("a", prompt_of(50), 5, GREEDY))
    for entry in tier.entries.values():
        entry.state[0][0] ^= 0xFF
    said = run(engine, Request("a", prompt_of(50), 5, GREEDY))["a"]
    assert cached(said) == 0 and len(text(said)) == 5
    tier.check_idle()


@pytest.mark.parametrize("position", [0, -2, 3, 50, 52])
def test_a_hit_that_cannot_be_used_is_none(position, monkeypatch):
    engine, tier = tier_engine()
    monkeypatch.setattr(tier, "found", lambda key: Hit(position, "local", [bytearray(128)], [bytearray(8)]))
    assert cached(run(engine, Request("a", prompt_of(50), 5, GREEDY))["a"]) == 0


def test_exact32_has_no_tier(tmp_path):
    write_checkpoint(micro_config(), tmp_path / "ckpt")
    engine = open_engine(EngineOptions(ckpt=tmp_path / "ckpt", numerics="exact32"))
    assert Engine(engine.backend, engine.options, tier=MemoryTier(engine.limits))._saver is None


turns = st.tuples(
    st.integers(0, 2),  # conversation
    st.integers(1, 200),  # further prompt tokens
    st.integers(1, 40),  # reply
    st.sampled_from([GREEDY, Sampling(seed=3), Sampling(temperature=0.5, seed=4)]),
)


@given(
    st.lists(turns, min_size=1, max_size=6),
    st.sampled_from([dict(draft=False), dict(verify=5), dict(verify="auto")]),
    st.integers(0, 3),
    st.sampled_from([None, 640, 900]),
)
@settings(max_examples=25, deadline=None)
def test_no_hit_no_parking_and_no_company_changes_a_token(wanted, drafting, delay, cache_tokens):
    engine, tier = tier_engine(delay, cache_tokens=cache_tokens, resume_every=128, prefill_chunk=50, **drafting)
    plain = hash_engine(cache_tokens=cache_tokens, **drafting)
    known = {number: [number] for number in range(3)}
    requests = []
    for number, (conversation, length, reply, sampling) in enumerate(wanted):
        prompt = (known[conversation] + prompt_of(length, number))[: 480 if cache_tokens is None else 400]
        requests.append(Request(str(number), prompt, min(reply, 500 - len(prompt)), sampling))
        known[conversation] = prompt + text(run(plain, requests[-1])[str(number)])
    alone = {request.id: text(run(plain, request)[request.id]) for request in requests}
    for request in requests:
        assert text(run(engine, request)[request.id]) == alone[request.id]
    assert {id: text(events) for id, events in run(engine, *requests).items()} == alone
    tier.check_idle()
    assert engine.ledger()["caches"] == 0 and engine._parking.nbytes == 0


@pytest.mark.parametrize("prefill", ["exact", "truncated"])
def test_a_conversation_over_a_model_goes_on_as_if_it_had_stayed(tmp_path, prefill):
    """In exact mode as a cold run; a truncated hit is nearer to exact than that (tests/model/reference compares it)."""
    write_checkpoint(micro_config(), tmp_path / "ckpt")
    options = EngineOptions(ckpt=tmp_path / "ckpt", prefill=prefill, verify=5, resume_every=128)
    cold = open_engine(options)
    engine = open_engine(options)
    engine = Engine(engine.backend, options, tier=(tier := MemoryTier(engine.limits)))
    prompt = [int(t) for t in np.random.default_rng(1).integers(3, 60, 140)]
    for turn in range(3):
        request, trace, other = Request(f"t{turn}", prompt, 15, GREEDY), Trace(), Trace()
        expected = [
            token for event in cold.generate(request, other) if isinstance(event, Tokens) for token in event.ids
        ]
        events = list(engine.generate(request, trace))
        assert cached(events) >= (len(prompt) - 3 - 9 if turn else 0)
        if prefill == "exact" or not turn:
            assert text(events) == expected and trace.steps == other.steps
        prompt = [*prompt, *text(events), *range(3, 11)]
    tier.check_idle()


def test_the_backend_hears_where_the_bytes_lie_at_the_start_and_when_that_changes(monkeypatch):
    told = []
    monkeypatch.setattr("dsuf.engine.cpu.CpuBackend.share", lambda self, memory: told.append(memory))
    engine, tier = tier_engine()
    assert told == []
    for memory in (memoryview(b"one"), memoryview(b"two"), None):
        tier.memory = memory
        run(engine, Request("a", prompt_of(5), 3, GREEDY))
    assert [None if memory is None else bytes(memory) for memory in told] == [b"one", b"two", None]
