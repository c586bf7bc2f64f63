"""Constraints under drafting: every token is allowed, the distribution is the target's, and nobody else notices."""

import math
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsuf.engine.constraint import Guard
from dsuf.engine.engine import EngineOptions, open_engine
from dsuf.engine.messages import Admitted, Finished, Rejected, Request, Sampling
from dsuf.errors import NotSupported, PromptError
from dsuf.model.synthetic import write_checkpoint
from tests.model.micro import micro_config
from tests.support.digits import EOS, InOrder, in_order
from tests.support.hash_model import BLOCK, VOCAB, HashModel, drafting, hash_engine, run, samplings, text

GREEDY = Sampling(temperature=0)


def engine_of(factory=lambda source: InOrder(), model=None, **options):
    return hash_engine(model, constraints=factory, **options)


def defined(prompt, count):
    """Greedy by definition: the first maximum among what is allowed."""
    model, constraint, ids = HashModel(), InOrder(), []
    while len(ids) < count and EOS not in ids:
        row = model.logits([*prompt, *ids])
        ids.append(max(sorted(constraint.allowed(len(ids))), key=lambda token: row[token]))
    return ids


@given(st.integers(0, 99), st.integers(1, 30), drafting)
@settings(max_examples=60, deadline=None)
def test_greedy_is_the_best_allowed_token_whatever_is_drafted(n, count, drafting):
    request = Request("a", [n % VOCAB, n % 7], count, GREEDY, eos_ids=[EOS], constraint="in order")
    said = run(engine_of(**drafting), request)["a"]
    assert text(said) == defined(request.prompt_ids, count)
    assert said[-1].reason == ("stop" if text(said)[-1] == EOS else "length")


@given(st.integers(0, 99), st.integers(1, 30), samplings, drafting)
@settings(max_examples=80, deadline=None)
def test_every_sampled_token_is_allowed(n, count, sampling, drafting):
    request = Request("a", [n % VOCAB, 1], count, sampling, eos_ids=[EOS], constraint="in order")
    assert in_order(text(run(engine_of(**drafting), request)["a"]))


@given(st.integers(0, 99), samplings, drafting)
@settings(max_examples=30, deadline=None)
def test_who_is_not_constrained_does_not_notice(n, sampling, drafting):
    free = Request("free", [n % VOCAB, 2], 25, sampling)
    bound = Request("bound", [n % VOCAB, 2], 25, sampling, eos_ids=[EOS], constraint="in order")
    alone = text(run(hash_engine(**drafting), free)["free"])
    said = run(engine_of(**drafting), bound, free)
    assert text(said["free"]) == alone
    assert text(said["bound"]) == text(run(engine_of(**drafting), bound)["bound"])


def test_no_row_is_run_after_a_forbidden_draft_and_that_one_is_judged():
    model = HashModel(noise=0.0)
    engine = engine_of(model=model, verify=5)
    engine.submit(Request("a", [1], 60, GREEDY, eos_ids=[EOS], constraint="in order"))
    while not engine.idle:
        sequence = engine._sequences["a"]
        done, before = len(sequence.emitted), len(model.forwards)
        engine.step()
        if len(model.forwards) > before and done > 1:
            (rows,) = model.forwards[-1]
            prefix, drafts = [1, *sequence.emitted[:done]], []
            for _ in range(BLOCK):
                drafts.append(int(np.argmax(model.logits([*prefix, *drafts]))))
            kept = next((i for i, token in enumerate(drafts) if token not in InOrder().allowed(done + i)), BLOCK)
            assert rows == min(kept + 1, 60 - done)


def test_drafts_do_not_change_the_distribution_under_a_constraint():
    """Chi-square over fixed seeds of the first four tokens, drawn with and without drafts."""
    seeds, places = 500, [[Counter() for _ in range(4)] for _ in range(2)]
    for draft in (False, True):
        engine = engine_of(model=HashModel(sharpness=1.0, noise=1.0), draft=draft, verify=5, max_sequences=8)
        requests = [
            Request(str(i), [7, 7], 4, Sampling(seed=i + seeds * draft), eos_ids=[EOS], constraint="in order")
            for i in range(seeds)
        ]
        for said in run(engine, *requests).values():
            for place, counter in enumerate(places[draft]):
                counter[(*text(said), None, None, None, None)[place]] += 1
    for plain, drafted in zip(*places, strict=True):
        cells = [cell for cell in {*plain, *drafted} if plain[cell] + drafted[cell] >= 10]
        chi2 = sum((plain[cell] - drafted[cell]) ** 2 / (plain[cell] + drafted[cell]) for cell in cells)
        assert len(cells) >= 3 and chi2 < len(cells) - 1 + 3.5 * math.sqrt(2 * (len(cells) - 1))


def test_min_tokens_puts_eos_off_but_not_where_nothing_else_is_allowed():
    class OnlyEnd(InOrder):
        def allowed(self, count):
            return {EOS} if count == 3 else super().allowed(count) - {EOS}

    request = Request("a", [5], 20, GREEDY, eos_ids=[EOS], min_tokens=9, constraint="x")
    assert len(text(run(engine_of(lambda source: OnlyEnd()), request)["a"])) == 4
    request = Request("a", [5], 20, Sampling(seed=1), eos_ids=[EOS], min_tokens=9, constraint="x")
    assert EOS not in text(run(engine_of(), request)["a"])[:9]


@pytest.mark.parametrize(
    ("make", "words", "tokens"),
    [
        (lambda source: InOrder(fail_at=7), "lost the thread", 7),
        (lambda source: InOrder(dead_at=6), "allows no token", 6),
        (lambda source: InOrder(dead_at=0), "allows no token", 0),
        (lambda source: object(), "has no attribute 'fill'", 0),
    ],
)
@pytest.mark.parametrize("verify", [0, 5])
def test_a_fault_ends_that_request_alone(make, words, tokens, verify):
    engine = engine_of(make, verify=verify)
    free = Request("free", [1, 2], 25, GREEDY)
    said = run(engine, Request("a", [1, 2], 25, GREEDY, eos_ids=[EOS], constraint="x"), free)
    end = said["a"][-1]
    assert (end.reason, words in end.message) == ("error", True)
    assert tokens <= len(text(said["a"])) <= tokens + verify
    assert text(said["free"]) == text(run(hash_engine(verify=verify), free)["free"])
    assert engine.ledger()["caches"] == 0


def test_one_that_does_not_compile_is_rejected_and_tells_why():
    def make(source):
        raise PromptError(f"cannot read {source}") if source == "bad" else RuntimeError("broken")

    said = run(
        engine_of(make),
        Request("bad", [1], 5, constraint="bad"),
        Request("worse", [1], 5, constraint="worse"),
        Request("free", [1], 5),
    )
    assert said["bad"] == [Rejected("bad", "PromptError", "cannot read bad")]
    (worse,) = said["worse"]
    assert (worse.kind, "cannot be read: broken" in worse.message) == ("UsageError", True)
    assert len(text(said["free"])) == 5


def test_one_that_compiles_long_holds_up_nobody_else_and_may_be_cancelled():
    go = threading.Event()

    def make(source):
        go.wait(10)
        return InOrder()

    engine = engine_of(make)
    for id in "ab":
        engine.submit(Request(id, [1], 9, GREEDY, eos_ids=[EOS], constraint="x"))
    engine.submit(Request("free", [1], 9, GREEDY))
    events = [event for _ in range(12) for event in engine.step()]
    assert {event.id for event in events} == {"free"} and isinstance(events[-1], Finished)
    engine.cancel("a")
    assert [event.id for event in engine.step()] == ["a"]
    go.set()
    events = []
    while not engine.idle:
        events += engine.step()
    assert isinstance(events[0], Admitted) and in_order(text(events)) and len(text(events)) > 3


def test_an_engine_without_a_factory_refuses():
    with pytest.raises(NotSupported, match="without output constraints"):
        hash_engine().submit(Request("a", [1], 5, constraint="x"))


def test_masks_may_have_any_width():
    for vocab_size in (12, 31, 32, 33, 64, 100):
        allowed = Guard(InOrder(vocab_size)).allowed([0, 1, 9], vocab_size)
        expected = [{t for t in range(vocab_size) if t % 3 == row and t != EOS} for row in range(3)]
        assert [set(np.flatnonzero(row)) for row in allowed] == expected


def test_a_checkpoint_gets_its_constraints_from_the_factory(tmp_path):
    write_checkpoint(micro_config(), tmp_path / "ckpt")
    seen = []
    engine = open_engine(
        EngineOptions(ckpt=tmp_path / "ckpt", verify=5),
        grammars=lambda checkpoint: seen.append(checkpoint.spec.vocab_size) or (lambda source: InOrder(64)),
    )
    request = Request("a", [5, 6, 7], 20, Sampling(seed=2), eos_ids=[EOS], constraint="x")
    said = run(engine, request, Request("b", [5, 6, 7], 9))
    assert seen == [64] and in_order(text(said["a"])) and len(text(said["a"])) > 5
