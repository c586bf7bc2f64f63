"""The toy on a GPU gives the tokens of its corpus: drafts, batches, chunks, going back, saving and coming back.

Needs a GPU, and kernels of its chip: DSUF_KERNELS (a folder of `dsuf build --out`) or the build cache.

    pytest -m gpu tests/gpu/test_engine.py
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dsuf.config import read_environment
from dsuf.engine.engine import Engine, open_engine
from dsuf.engine.gpu.open import open_backend
from dsuf.engine.messages import Request, Sampling, Tokens
from dsuf.engine.options import EngineOptions
from dsuf.engine.sequence import Trace
from dsuf.layout import pages_for
from dsuf.ops.sample import log_probabilities, top_logprobs
from recipes.toy.dataset import Example
from tests.toy.test_same_tokens import FEW, MANY, PAGE, answer_of, request_of, run

pytestmark = pytest.mark.gpu


def options_of(folder: Path, **options: Any) -> EngineOptions:
    environment = read_environment()
    given = {"gpus": (0,), "kernels": environment.kernels, "cache": environment.cache_dir, "max_context": 16384}
    return EngineOptions(folder, **{**given, "prefill_chunk": 512, **options})


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return open_engine(options_of(folder))


@pytest.mark.parametrize("drafting", [{"draft": False}, *({"verify": n} for n in range(1, 6)), {}], ids=str)
def test_drafts_and_verify_length_change_no_token(
    engine: Engine,
    examples: dict[str, Example],
    drafting: dict[str, Any],
) -> None:
    for name in (PAGE, *FEW):
        assert run(engine, [request_of(examples[name], **drafting)]) == {name: answer_of(examples[name])}


def test_accepted_lengths_are_those_of_the_cpu(engine: Engine, folder: Path, examples: dict[str, Example]) -> None:
    lengths = []
    for backend in (engine, open_engine(EngineOptions(folder))):
        trace = Trace()
        run(backend, [request_of(examples[PAGE], verify=5)], trace)
        lengths.append([step.accepted for step in trace.steps])
    assert lengths[0] == lengths[1]


def test_a_batch_of_every_way_is_the_single_runs(engine: Engine, examples: dict[str, Example]) -> None:
    sampled = [
        Request(
            f"hot-{i}", examples["event.1"].ids[:20], 30, Sampling(temperature=0.5 + i / 4, seed=i, top_p=0.9),
            verify=(None, 5, 2, 0)[i], draft=i != 3,
        )
        for i in range(4)
    ]  # fmt: skip
    requests = [*sampled, *(request_of(examples[name]) for name in MANY)]
    alone = {request.id: run(engine, [request])[request.id] for request in requests}
    assert run(engine, requests) == alone
    assert {name: alone[name] for name in MANY} == {name: answer_of(examples[name]) for name in MANY}


@pytest.mark.parametrize("prefill", ["exact", "truncated"])
@pytest.mark.parametrize("chunk", [1, 33, 48, 64, 500])
def test_chunks_of_the_prompt_change_no_token(
    folder: Path,
    examples: dict[str, Example],
    prefill: str,
    chunk: int,
) -> None:
    engine = open_engine(options_of(folder, prefill=prefill, prefill_chunk=chunk))
    page = examples[PAGE].ids
    long = Request("long", page[:1500], 100, Sampling(temperature=0))
    assert run(engine, [request_of(examples["event.1"]), long]) == {
        "event.1": answer_of(examples["event.1"]), "long": page[1500:1600],
    }  # fmt: skip


@pytest.mark.parametrize("graphs", [False, True])
def test_launches_and_graphs_are_the_same(folder: Path, examples: dict[str, Example], graphs: bool) -> None:
    options = options_of(folder)
    backend = open_backend(options, None, graphs=graphs)
    backend.load(lambda what, share: None)
    assert run(Engine(backend, options), [request_of(examples[PAGE])]) == {PAGE: answer_of(examples[PAGE])}


def taken(engine: Engine, sequence: Any, position: int) -> tuple[list[bytearray], list[bytearray]]:
    """Pages and snapshot at a position."""
    pages = [bytearray(engine.limits.page_bytes) for _ in range(pages_for(position))]
    state = [bytearray(engine.limits.snapshot_bytes)]
    number = engine.backend.snapshot(sequence, position, dict(enumerate(pages)), state)
    deadline = time.monotonic() + 5
    while engine.backend.copied() < number:
        assert time.monotonic() < deadline
    return pages, state


@pytest.mark.parametrize("back", [0, 10])
@pytest.mark.parametrize("name", [PAGE, "event.1"])
def test_a_stop_and_resume_changes_no_token(
    engine: Engine,
    examples: dict[str, Example],
    name: str,
    back: int,
) -> None:
    step, turn, emitted, stops = engine.limits.resume_step, 0, [], 0
    request = request_of(examples[name])
    engine.submit(request)
    sequence = engine._sequences[request.id]
    while not engine.idle:
        turn += 1
        position = (sequence.last_position - back) // step * step
        if len(sequence.emitted) > back + step and turn % 5 == 0 and position > sequence.prompt_len:
            saved = taken(engine, sequence, position)
            engine.backend.release(sequence)
            engine.backend.restore(sequence, position, *saved)
            assert taken(engine, sequence, position) == saved
            stops += 1
        emitted += [token for event in engine.step() if isinstance(event, Tokens) for token in event.ids]
    assert sequence.emitted == answer_of(examples[name]) and stops > 0


@pytest.mark.parametrize("back", [1, 7, 24])
def test_rewind_then_continue_is_never_having_gone_further(
    engine: Engine,
    examples: dict[str, Example],
    back: int,
) -> None:
    engine.submit(request_of(examples[PAGE]))
    sequence, done = engine._sequences[PAGE], False
    while not engine.idle:
        engine.step()
        if len(sequence.emitted) > 60 and not done and PAGE in engine._sequences:
            engine.backend.rewind(sequence, sequence.last_position - back)
            done = True
    assert done and sequence.emitted == answer_of(examples[PAGE])


def test_logprobs_are_those_of_the_row(engine: Engine, examples: dict[str, Example]) -> None:
    trace, told = Trace(keep_logits=True), []
    request = Request("a", examples["event.1"].ids[:20], 30, Sampling(temperature=0, logprobs=5))
    engine.submit(request, trace)
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Tokens):
                told += list(zip(event.ids, event.logprobs, strict=True))
    for (token, one), row in zip(told, trace.logits, strict=True):
        assert one.logprob == pytest.approx(float(log_probabilities(row)[token]), abs=1e-3)
        assert [best for best, _ in one.top] == [best for best, _ in top_logprobs(row, 5)]
