"""The CPU backend over real checkpoints: the tiny one against its golden, a still smaller one in every composition."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from dsuf.engine.engine import EngineOptions, open_engine
from dsuf.engine.messages import Finished, Request, Sampling, Status, Tokens
from dsuf.engine.sequence import Trace
from dsuf.errors import CheckpointError, ConfigError
from dsuf.model.reference.drafter import Draft
from dsuf.model.synthetic import write_checkpoint
from tests.model.micro import TINY, micro_config
from tests.support.engine_process import Peer

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/tiny.json").read_text())
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return _written(TINY, tmp_path_factory.mktemp("tiny") / "ckpt")


@pytest.fixture(scope="module")
def micro(tmp_path_factory):
    return _written(micro_config(), tmp_path_factory.mktemp("micro") / "ckpt")


def _written(config, folder):
    write_checkpoint(config, folder)
    return folder


def texts(engine, *requests):
    for request in requests:
        engine.submit(request)
    ids = {request.id: [] for request in requests}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Tokens):
                ids[event.id] += event.ids
    return ids


def text(ckpt, request, **options):
    return texts(open_engine(EngineOptions(ckpt=ckpt, **options)), request)[request.id]


@pytest.mark.parametrize("numerics", ["exact32", "qdq64"])
@pytest.mark.parametrize("draft", [False, True])
def test_the_tiny_checkpoint_gives_the_golden_tokens_drafts_and_logits(tiny, numerics, draft):
    golden, trace = GOLDEN[numerics], Trace(keep_logits=True, keep_prompt_argmax=True)
    engine = open_engine(EngineOptions(ckpt=tiny, numerics=numerics, prefill="exact", draft=draft, verify=5))
    events = list(engine.generate(Request("a", GOLDEN["prompt"], 17, GREEDY), trace))
    assert [token for event in events if isinstance(event, Tokens) for token in event.ids] == golden["greedy"]
    assert trace.prompt_argmax == golden["argmax_prompt"]
    tolerance = 1e-3 if numerics == "exact32" else 1e-5
    assert np.allclose(trace.logits[0], golden["logits_last_prompt"], rtol=0, atol=tolerance)
    assert np.allclose([row[:8] for row in trace.logits[1:]], golden["decode_logits_first8"], rtol=0, atol=tolerance)
    known = {entry["after"]: entry for entry in golden["drafts"]}
    compared = [step for step in trace.steps if step.after in known and draft]
    assert len(compared) == (15 if draft else 0)  # the golden starts one token later
    for step in compared:
        assert step.drafted == known[step.after]["tokens"]
        assert np.allclose(step.confidence, known[step.after]["confidence"], rtol=0, atol=tolerance)


def test_truncated_prefill_gives_the_golden_token(tiny):
    golden, trace = GOLDEN["qdq64"], Trace(keep_logits=True, keep_prompt_argmax=True)
    for chunk in (37, 5):
        engine = open_engine(EngineOptions(ckpt=tiny, prefill_chunk=chunk, prefill_budget_s=0.0))
        list(engine.generate(Request("a", GOLDEN["prompt"], 1, GREEDY), trace))
        assert np.allclose(trace.logits[-1], golden["logits_last_prompt_decoder_tail"], rtol=0, atol=1e-5)
    assert trace.prompt_argmax is None


@pytest.mark.parametrize("prefill", ["exact", "truncated"])
def test_one_seed_gives_one_text_in_any_batch_and_chunking(micro, prefill):
    rng = np.random.default_rng(5)
    requests = [
        Request(
            str(i),
            [int(token) for token in rng.integers(3, 60, length)],
            max_tokens=14,
            sampling=Sampling(temperature=(0.0, 1.0, 0.7)[i % 3], seed=i, top_p=(1.0, 0.9)[i % 2]),
            draft=i != 3,
            verify=(None, 5, 2, None, 0)[i],
        )
        for i, length in enumerate((1, 7, 8, 9, 33))
    ]
    alone = {request.id: text(micro, request, prefill=prefill) for request in requests}
    for chunk, places in ((1, 5), (7, 2), (128, 5)):
        options = EngineOptions(
            ckpt=micro, prefill=prefill, prefill_chunk=chunk, prefill_budget_s=0.0, max_sequences=places
        )
        assert texts(open_engine(options), *requests) == alone


@pytest.mark.parametrize("prefill", ["exact", "truncated"])
def test_streams_that_are_parked_in_between_say_the_same(micro, prefill):
    rng = np.random.default_rng(6)
    requests = [
        Request(
            str(i),
            [int(token) for token in rng.integers(3, 60, 100 + i)],
            max_tokens=40,
            sampling=Sampling(temperature=(0.0, 1.0)[i % 2], seed=i),
            verify=(5, None, 0, 3)[i],
        )
        for i in range(4)
    ]
    alone = {request.id: text(micro, request, prefill=prefill) for request in requests}
    engine = open_engine(EngineOptions(ckpt=micro, prefill=prefill, cache_tokens=5 * 128))
    assert engine.limits.max_context == 5 * 128 - 12
    parked, step = [], engine.step
    engine.step = lambda: parked.append(engine.status().parked) or step()
    assert texts(engine, *requests) == alone
    assert max(parked) >= 1 and engine.ledger() == {"weights": engine.ledger()["weights"], "caches": 0}


def test_accepted_drafts_change_nothing_but_the_number_of_steps(micro):
    """The drafter is told the greedy continuation, spoiled here and there, so that every accepted length occurs."""
    prompt, count = list(range(3, 24)), 60
    plain = text(micro, Request("a", prompt, count, GREEDY), draft=False)
    engine, trace = open_engine(EngineOptions(ckpt=micro, verify=5)), Trace()
    rng = np.random.default_rng(1)

    def draft(requests):
        (request,) = requests
        done = request.caches.length - len(prompt) + 1
        tokens = [t if rng.random() < 0.75 else (t + 1) % 64 for t in (plain[done : done + 5] + [9] * 5)[:5]]
        return [Draft(tokens, np.zeros(5), np.zeros((5, 64)))]

    engine.backend._model.draft = draft
    events = list(engine.generate(Request("a", prompt, count, GREEDY), trace))
    assert [token for event in events if isinstance(event, Tokens) for token in event.ids] == plain
    assert {step.accepted for step in trace.steps} == {0, 1, 2, 3, 4, 5}
    assert 2 < events[-1].stats.average_accept_length < 5


def test_cancel_during_prefill_frees_the_sequence(micro):
    engine = open_engine(EngineOptions(ckpt=micro, prefill_chunk=8, prefill_budget_s=0.0))
    engine.submit(Request("a", [5] * 200, 5))
    engine.step()
    assert engine.ledger()["caches"] > 0 and engine.status().waiting_tokens == 192
    engine.cancel("a")
    assert engine.ledger()["caches"] == 0
    (end,) = engine.step()
    assert isinstance(end, Finished) and end.reason == "cancelled" and engine.idle
    assert len(texts(engine, Request("a", [5] * 20, 5, GREEDY))["a"]) == 5


def test_what_cannot_be_opened_says_why(micro, tmp_path):
    with pytest.raises(CheckpointError):
        open_engine(EngineOptions(ckpt=tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="max_context is 5000, this checkpoint was made for 4096"):
        open_engine(EngineOptions(ckpt=micro, max_context=5000))


def test_engram_classes_come_from_the_folder_or_from_the_caller(tmp_path):
    folder = _written(micro_config(), tmp_path / "ckpt")
    expected = text(folder, Request("a", [5, 6, 7, 5], 8, GREEDY))
    classes = np.array(json.loads((folder / "engram_token_map.json").read_text()), np.int32)
    (folder / "engram_token_map.json").unlink()
    with pytest.raises(CheckpointError, match="class map"):
        open_engine(EngineOptions(ckpt=folder))
    said = []
    engine = open_engine(EngineOptions(ckpt=folder), lambda what, share: said.append((what, share)), lambda _: classes)
    assert texts(engine, Request("a", [5, 6, 7, 5], 8, GREEDY))["a"] == expected
    assert said[-1] == ("weights", 1.0)


def test_the_engine_process_serves_a_checkpoint(micro, tmp_path):
    request = Request("a", [5, 6, 7, 5], 8, GREEDY)
    peer = Peer(tmp_path, functools.partial(open_engine, EngineOptions(ckpt=micro)))
    try:
        assert peer.until(Status, ready=True)[-1].info["numerics"] == "qdq64"
        peer.send(request)
        seen = peer.until(Finished)
        ids = [token for event in seen if isinstance(event, Tokens) for token in event.ids]
        assert ids == text(micro, request)
    finally:
        peer.close()
