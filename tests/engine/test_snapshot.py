"""Snapshot and restore at the backend: a sequence taken out and put back, any number of times, is one that stayed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.engine.engine import EngineOptions, open_engine
from dsuf.engine.messages import Request, Sampling
from dsuf.engine.sequence import Trace
from dsuf.layout import pages_for
from dsuf.model.reference.drafter import Draft
from dsuf.model.synthetic import write_checkpoint
from tests.model.micro import micro_config
from tests.support.hash_model import hash_engine


@pytest.fixture(scope="module")
def micro(tmp_path_factory):
    folder = tmp_path_factory.mktemp("micro") / "ckpt"
    write_checkpoint(micro_config(), folder)
    return folder


def taken(backend, sequence, position):
    """All pages and the snapshot at `position`."""
    pages = [bytearray(backend.limits.page_bytes) for _ in range(pages_for(position))]
    state = [bytearray(backend.limits.snapshot_bytes)]
    number = backend.snapshot(sequence, position, dict(enumerate(pages)), state)
    assert backend.copied() >= number
    return pages, state


def last_point(backend, sequence):
    return sequence.last_position // backend.limits.resume_step * backend.limits.resume_step


def out_and_in(backend, sequence, steps_back=0):
    """Take the sequence out of the backend and put it back."""
    position = last_point(backend, sequence) - steps_back * backend.limits.resume_step
    saved = taken(backend, sequence, position)
    backend.release(sequence)
    backend.restore(sequence, position, *saved)


def run(engine, request, breaks=(), steps_back=0):
    """(sequence, trace, last pages and snapshot) of a run that is taken out and put back before the given turns."""
    trace, turn, last = Trace(), 0, None
    engine.submit(request, trace)
    sequence = engine._sequences[request.id]
    while not engine.idle:
        if turn in breaks and sequence.emitted and last_point(engine.backend, sequence):
            back = steps_back if sequence.last_position - 2 * steps_back > sequence.prompt_len else 0
            out_and_in(engine.backend, sequence, back if turn == min(breaks) else 0)
        if sequence.emitted and sequence.last_position >= 2:
            last = taken(engine.backend, sequence, last_point(engine.backend, sequence))
        engine.step()
        turn += 1
    return sequence, trace, last


def assert_same_run(engine, request, breaks, steps_back):
    stayed, trace, saved = run(engine, request)
    left, other, again = run(engine, request, breaks, steps_back)
    assert left.emitted == stayed.emitted
    assert other.steps == trace.steps  # drafts, confidences, accepted lengths
    assert again == saved  # every byte of every page, and of the snapshot


breaks = st.sets(st.integers(1, 12), min_size=1, max_size=4)
samplings = st.builds(Sampling, temperature=st.sampled_from([0, 1.0]), seed=st.integers(0, 99))
drafting = st.sampled_from([dict(draft=False), dict(verify=5), dict(verify="auto"), dict(verify=2)])


@given(st.integers(1, 300), st.integers(1, 40), samplings, drafting, breaks, st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_a_sequence_put_back_is_the_one_that_stayed(length, count, sampling, drafting, breaks, steps_back):
    prompt = [(7 * i * i + length) % 12 for i in range(length)]
    assert_same_run(hash_engine(**drafting), Request("a", prompt, count, sampling), breaks, steps_back)


@pytest.mark.parametrize("prefill", ["exact", "truncated"])
@given(
    length=st.sampled_from([1, 2, 9, 16, 17, 127, 128, 129]),
    count=st.integers(2, 30),
    sampling=samplings,
    drafting=drafting,
    breaks=breaks,
)
@settings(max_examples=8, deadline=None)
def test_so_it_is_with_a_model(micro, prefill, length, count, sampling, drafting, breaks):
    """A greedy sequence's drafter is told the continuation, spoiled here and there, so that drafts are accepted."""
    engine = open_engine(EngineOptions(ckpt=micro, prefill=prefill, **drafting))
    prompt = [int(t) for t in np.random.default_rng(length).integers(3, 60, length)]
    request = Request("a", prompt, count, sampling)
    if sampling.temperature == 0:
        plain, _, _ = run(engine, Request("a", prompt, count, sampling, draft=False))
        engine.backend._model.draft = told(plain.emitted, length)
    assert_same_run(engine, request, breaks, 0)


def told(text, length):
    """A drafter that offers `text` but for every fourth token or so."""

    def draft(requests):
        (request,) = requests
        done = request.caches.length - length + 1
        tokens = [t if (done + i) % 4 else (t + 1) % 64 for i, t in enumerate((text[done:] + [9] * 5)[:5])]
        return [Draft(tokens, np.full(5, 2.0), np.zeros((5, 64)))]

    return draft


def test_a_hit_is_prefilled_from_where_it_ends(micro):
    prompt = [int(t) for t in np.random.default_rng(3).integers(3, 60, 200)]
    engine = open_engine(EngineOptions(ckpt=micro, prefill="exact"))
    stayed, trace, _ = run(engine, Request("a", prompt, 12, Sampling(temperature=0)))
    engine.submit(Request("first", prompt[:151], 3, Sampling(temperature=0)))
    while not (first := engine._sequences["first"]).emitted:
        engine.step()
    entry = taken(engine.backend, first, 150)
    engine.cancel("first")
    engine.step()
    other = Trace()
    engine.submit(Request("b", prompt, 12, Sampling(temperature=0)), other)
    sequence = engine._sequences["b"]
    engine.backend.restore(sequence, 150, *entry)
    assert sequence.prefilled == 150
    while not engine.idle:
        engine.step()
    assert sequence.emitted == stayed.emitted and other.steps == trace.steps


@pytest.mark.parametrize("length", [250, 256, 258, 264, 265, 300])
def test_truncated_prefill_is_the_same_from_its_last_periodic_point(micro, length):
    """The tail is run at every multiple of resume_every, whoever stays or comes back there, in any chunks."""
    prompt = [int(t) for t in np.random.default_rng(4).integers(3, 60, length)]
    traces = []
    for chunk in (64, 37):
        options = EngineOptions(ckpt=micro, resume_every=128, prefill_chunk=chunk, prefill_budget_s=0.0)
        engine = open_engine(options)
        engine.submit(Request("a", prompt, 8, Sampling(temperature=0)), trace := Trace(keep_logits=True))
        sequence, entry = engine._sequences["a"], None
        while not engine.idle:
            engine.step()
            if sequence.prefilled == 128 and entry is None:
                entry = taken(engine.backend, sequence, 128)
        traces.append(trace)
        again = open_engine(options)
        again.submit(Request("a", prompt, 8, Sampling(temperature=0)), trace := Trace(keep_logits=True))
        again.backend.restore(again._sequences["a"], 128, *entry)
        while not again.idle:
            again.step()
        traces.append(trace)
    for trace in traces[1:]:
        assert trace.steps == traces[0].steps and np.array_equal(trace.logits, traces[0].logits)


def test_exact32_has_nothing_to_save(micro):
    limits = open_engine(EngineOptions(ckpt=micro, numerics="exact32")).limits
    assert (limits.page_bytes, limits.snapshot_bytes) == (0, 0)
