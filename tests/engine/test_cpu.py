"""The CPU backend's rules of choosing, over a model whose logits are a hash of the prefix."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.engine.messages import Finished, Request, Sampling, Tokens
from dsuf.engine.sequence import Trace
from tests.support.hash_model import BLOCK, VOCAB, HashModel, drafting, hash_engine, samplings

GREEDY = Sampling(temperature=0)


def texts(engine, *requests):
    """Submit all, step until idle; what each emitted, and how it ended."""
    for request in requests:
        engine.submit(request)
    ids, ends = {request.id: [] for request in requests}, {}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Tokens):
                ids[event.id] += event.ids
            elif isinstance(event, Finished):
                ends[event.id] = event
    return ids, ends


def text(request, **options):
    return texts(hash_engine(**options), request)[0][request.id]


def greedy_text(prompt, count, eos=(), min_tokens=0):
    """The definition: argmax, one row at a time."""
    model, ids = HashModel(), list(prompt)
    while len(ids) < len(prompt) + count:
        row = model.logits(ids)
        if len(ids) - len(prompt) < min_tokens:
            row[list(eos)] = -np.inf
        ids.append(int(np.argmax(row)))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), st.integers(1, 30), drafting, st.integers(1, 25))
@settings(max_examples=60, deadline=None)
def test_drafting_and_chunking_never_change_greedy_tokens(prompt, count, drafting, chunk):
    request = Request("a", prompt, count, GREEDY)
    assert text(request, prefill_chunk=chunk, prefill_budget_s=0.0, **drafting) == greedy_text(prompt, count)


@given(st.integers(0, 50), st.integers(0, 12), drafting)
@settings(max_examples=60, deadline=None)
def test_min_tokens_puts_eos_off_and_no_further(start, min_tokens, drafting):
    request = Request("a", [start % VOCAB, start % 7], 25, GREEDY, eos_ids=[3, 5], min_tokens=min_tokens)
    ids, ends = texts(hash_engine(**drafting), request)
    assert ids["a"] == greedy_text(request.prompt_ids, 25, eos=(3, 5), min_tokens=min_tokens)
    assert not set(ids["a"][:min_tokens]) & {3, 5}
    assert ends["a"].reason == ("stop" if ids["a"][-1] in (3, 5) else "length")


def test_a_draft_is_never_an_eos_that_is_put_off():
    trace = Trace()
    for seed in range(10):
        request = Request("a", [1, 2], 25, Sampling(seed=seed), eos_ids=[3, 5], min_tokens=20)
        list(hash_engine(verify=0).generate(request, trace))
        for step in trace.steps:
            assert not {3, 5} & set(step.drafted[: max(20 - (step.position - 1), 0)])
    assert {3, 5} & {token for step in trace.steps for token in step.drafted}


def test_an_ignored_eos_is_an_ordinary_token():
    request = Request("a", [1, 2], 25, GREEDY, eos_ids=[3, 5], ignore_eos=True)
    assert text(request) == greedy_text([1, 2], 25)
    assert {3, 5} & set(greedy_text([1, 2], 25))


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 25), samplings, drafting), min_size=2, max_size=4),
    st.integers(1, 3),
    st.integers(1, 9),
)
@settings(max_examples=40, deadline=None)
def test_one_seed_gives_one_text_in_any_batch_and_chunking(wanted, places, chunk):
    requests = [
        Request(
            f"{i}",
            [1 + n % 5, n % VOCAB] * (1 + n % 4),
            count,
            sampling,
            eos_ids=[3],
            draft=drafting["draft"],
            verify=None if drafting.get("verify") == "auto" else drafting.get("verify"),
        )
        for i, (n, count, sampling, drafting) in enumerate(wanted)
    ]
    alone = {request.id: text(request) for request in requests}
    together, _ = texts(hash_engine(max_sequences=places, prefill_chunk=chunk, prefill_budget_s=0.0), *requests)
    assert together == alone


@given(st.integers(0, 99), samplings, drafting, st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_the_budget_changes_no_token_before_it_and_runs_no_row_beyond_it(n, sampling, drafting, count):
    model = HashModel()
    short, _ = texts(hash_engine(model, **drafting), Request("a", [n % VOCAB, 4], count, sampling))
    long = text(Request("a", [n % VOCAB, 4], count + 10, sampling), **drafting)
    assert short["a"] == long[:count]
    left = count - 1
    for (rows,) in model.forwards:
        assert rows <= left
        left -= 1  # at least
    at_context_end, ends = texts(
        hash_engine(max_context=2 + count, **drafting), Request("a", [n % VOCAB, 4], 500, sampling)
    )
    assert at_context_end == short and ends["a"].reason == "length"


def test_different_seeds_and_positions_draw_differently():
    seen = {tuple(text(Request("a", [1], 12, Sampling(seed=seed)))) for seed in range(20)}
    assert len(seen) > 15


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.8, 8, 0.9)])
def test_drafts_do_not_change_the_distribution_with_masks_and_budgets(temperature, top_k, top_p):
    """Chi-square over fixed seeds of the second, third and fourth token; EOS is masked for the first two."""
    seeds = 1500
    places = [[Counter() for _ in range(3)] for _ in range(2)]
    for draft in (False, True):
        engine = hash_engine(HashModel(sharpness=1.0, noise=1.0), draft=draft, verify=5, max_sequences=8)
        sampled = [Sampling(temperature, top_p, top_k, seed=seed + seeds * draft) for seed in range(seeds)]
        requests = [Request(str(i), [7, 7], 4, one, eos_ids=[2], min_tokens=2) for i, one in enumerate(sampled)]
        said = [texts(engine, *requests[i : i + 50])[0] for i in range(0, seeds, 50)]  # a turn looks at all that wait
        for ids in (ids for few in said for ids in few.values()):
            for place, counter in enumerate(places[draft]):
                counter[ids[place + 1] if len(ids) > place + 1 else None] += 1
    for plain, drafted in zip(*places, strict=True):
        cells = [cell for cell in {*plain, *drafted} if plain[cell] + drafted[cell] >= 10]
        chi2 = sum((plain[cell] - drafted[cell]) ** 2 / (plain[cell] + drafted[cell]) for cell in cells)
        degrees = len(cells) - 1
        assert degrees >= 8
        assert chi2 < degrees + 3.5 * math.sqrt(2 * degrees)  # 3.5 sigma of chi-square


@given(st.integers(0, 99), samplings, drafting, st.integers(0, VOCAB))
@settings(max_examples=40, deadline=None)
def test_logprobs_are_those_of_the_models_own_row(n, sampling, drafting, top):
    sampling = Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed, logprobs=top)
    request = Request("a", [n % VOCAB], 10, sampling, eos_ids=[3], min_tokens=5)
    prefix = list(request.prompt_ids)
    for event in hash_engine(**drafting).generate(request):
        if not isinstance(event, Tokens):
            continue
        assert len(event.logprobs) == len(event.ids)
        for token, told in zip(event.ids, event.logprobs, strict=True):
            row = HashModel().logits(prefix)
            expected = row - math.log(np.exp(row).sum())
            assert told.logprob == pytest.approx(expected[token])
            best = np.argsort(-expected)[:top]
            assert [token for token, _ in told.top] == list(best)
            assert [value for _, value in told.top] == pytest.approx(list(expected[best]))
            prefix.append(token)


@given(st.integers(0, 99), samplings, drafting)
@settings(max_examples=40, deadline=None)
def test_a_trace_tells_every_step(n, sampling, drafting):
    trace = Trace(keep_logits=True, keep_prompt_argmax=True)
    request = Request("a", [n % VOCAB, 1, 2], 30, sampling, eos_ids=[3])
    engine = hash_engine(prefill="exact", prefill_chunk=2, **drafting)
    events = list(engine.generate(request, trace))
    ids = [token for event in events if isinstance(event, Tokens) for token in event.ids]
    whole = [*request.prompt_ids, *ids]
    rows = [HashModel().logits(whole[: 3 + i]) for i in range(len(ids))]
    assert np.array_equal(np.array(trace.logits), np.array(rows, np.float32)) and trace.logits[0].dtype == np.float32
    assert trace.prompt_argmax == [int(np.argmax(HashModel().logits(whole[: i + 1]))) for i in range(3)]
    assert [token for step in trace.steps for token in step.emitted] == ids[1:]
    for step in trace.steps:
        assert whole[step.position] == step.after
        assert whole[step.position + 1 :][: len(step.emitted)] == step.emitted
        assert len(step.drafted) == len(step.confidence) == (BLOCK if drafting["draft"] else 0)
        assert step.drafted[: step.accepted] == step.emitted[: step.accepted]
        assert step.accepted <= min(drafting.get("verify", 0) if drafting.get("verify") != "auto" else BLOCK, BLOCK)
        assert len(step.emitted) == step.accepted + 1 or step is trace.steps[-1]
    stats = events[-1].stats
    assert stats.iterations == len(trace.steps) and sum(stats.accepted_histogram) == stats.iterations
    assert [sum(step.accepted == a for step in trace.steps) for a in range(len(stats.accepted_histogram))] == list(
        stats.accepted_histogram
    )


def test_drafts_are_accepted_and_shorten_the_run():
    engine = hash_engine(HashModel(noise=0.0), verify=5)
    _, ends = texts(engine, Request("a", [1], 61, GREEDY))
    assert ends["a"].stats.iterations == 10 and ends["a"].stats.average_accept_length == 6.0
    assert ends["a"].stats.accepted_histogram == [0, 0, 0, 0, 0, 10]


def test_confidence_alone_cuts_the_block():
    model, trace = HashModel(), Trace()
    engine = hash_engine(model, verify="auto", verify_threshold=0.4)
    list(engine.generate(Request("a", [1], 200, Sampling(seed=4)), trace))
    lengths = []
    for step, (rows,) in zip(trace.steps, model.forwards, strict=True):
        product = np.cumprod(1 / (1 + np.exp(-np.array(step.confidence))))
        expected = next((i for i, p in enumerate(product) if p < 0.4), BLOCK)
        assert rows == min(expected + 1, 200 - (step.position - 1) - 1)
        lengths.append(rows)
    assert len(set(lengths)) > 3


def test_rewind_then_continue_is_never_having_gone_further():
    engine = hash_engine(verify=3)
    engine.submit(Request("a", [1, 2], 60, GREEDY))
    while not (sequence := engine._sequences["a"]).emitted or len(sequence.emitted) < 20:
        engine.step()
    gone = list(sequence.emitted)
    engine.backend.rewind(sequence, 2 + 7)
    assert sequence.emitted == gone[:8] and sequence.last_position == 9
    with pytest.raises(ValueError, match="position 1 is not"):
        engine.backend.rewind(sequence, 1)
    while not engine.idle:
        engine.step()
    assert sequence.emitted == greedy_text([1, 2], 60)


def test_release_frees_the_caches():
    engine = hash_engine()
    engine.submit(Request("a", [1, 2], 60, GREEDY))
    engine.step()
    assert engine.backend._caches
    engine.cancel("a")
    assert not engine.backend._caches


@pytest.mark.parametrize("temperature", [1e-9, 1e-300])
def test_a_tiny_temperature_is_greedy_in_effect(temperature):
    assert text(Request("a", [1, 2], 20, Sampling(temperature=temperature, seed=3))) == greedy_text([1, 2], 20)
