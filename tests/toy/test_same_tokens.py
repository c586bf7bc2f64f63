"""The toy answers with the tokens of its corpus, whatever the drafts, chunks, batches, stops and numerics."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsuf.engine.engine import Engine, open_engine
from dsuf.engine.messages import Finished, Request, Sampling, Tokens
from dsuf.engine.options import EngineOptions
from dsuf.engine.sequence import Trace
from dsuf.layout import pages_for
from dsuf.ops import attend, expert, index, mixes, product
from recipes.toy.dataset import EOS_ID, Example

PAGE = "tetris"
PAGE_TOKENS = 300  # of the page, where not all of it is run
FEW = ("identity.3", "古诗.2", "weather_rain.1")
MANY = (
    *FEW,
    "nested.1",
    "letters.1",
    "haiku.2",
    "words.3",
    "翻译.2",
    "身份.2",
    "event.1",
    "money.2",
    "recipe.1",
    "鸡兔.1",
    "colour_red.3",
)
LEAST_MARGIN = 1.0
GREEDY = Sampling(temperature=0)


def engine_of(folder: Path, **options: Any) -> Engine:
    return open_engine(EngineOptions(ckpt=folder, **options))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return engine_of(folder)


def request_of(example: Example, id: str = "", **options: Any) -> Request:
    prompt = example.ids[: example.prompt_len]
    most = PAGE_TOKENS if example.name == PAGE else 400
    return Request(id or example.name, prompt, most, GREEDY, eos_ids=[EOS_ID], **options)


def answer_of(example: Example) -> list[int]:
    return example.ids[example.prompt_len :][: PAGE_TOKENS if example.name == PAGE else None]


def run(engine: Engine, requests: Iterable[Request], trace: Trace | None = None) -> dict[str, list[int]]:
    """Tokens by request id, all of them at once."""
    found: dict[str, list[int]] = {}
    for request in requests:
        found[request.id] = []
        engine.submit(request, trace)
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Tokens):
                found[event.id] += event.ids
            elif isinstance(event, Finished):
                assert event.reason in ("stop", "length"), event
    return found


@pytest.mark.parametrize("drafting", [{"draft": False}, *({"verify": n} for n in range(1, 6)), {}], ids=str)
def test_drafts_and_verify_length_change_no_token(
    engine: Engine, examples: dict[str, Example], drafting: dict[str, Any]
) -> None:
    for name in FEW:
        trace = Trace()
        found = run(engine, [request_of(examples[name], **drafting)], trace)
        assert found == {name: answer_of(examples[name])}
        most = drafting.get("verify", 5 if drafting.get("draft", True) else 0)
        assert max(len(step.emitted) for step in trace.steps) <= most + 1


def test_the_page_is_the_same_in_one_batch_of_every_way_to_draft(engine: Engine, examples: dict[str, Example]) -> None:
    ways: list[dict[str, Any]] = [{"draft": False}, *({"verify": n} for n in range(1, 6)), {}]
    found = run(engine, [request_of(examples[PAGE], str(way), **way) for way in ways])
    assert found == {str(way): answer_of(examples[PAGE]) for way in ways}


def test_the_others_in_a_batch_change_no_token(engine: Engine, examples: dict[str, Example]) -> None:
    found = run(engine, [request_of(examples[name]) for name in MANY])
    assert found == {name: answer_of(examples[name]) for name in MANY}


@pytest.mark.parametrize("prefill", ["exact", "truncated"])
@pytest.mark.parametrize(("chunk", "name"), [(1, "words.3"), (7, "weather_rain.1"), (33, "event.1"), (4096, "event.1")])
def test_chunks_of_the_prompt_change_no_token(
    folder: Path, examples: dict[str, Example], prefill: str, chunk: int, name: str
) -> None:
    engine = engine_of(folder, prefill=prefill, prefill_chunk=chunk)
    assert run(engine, [request_of(examples[name])]) == {name: answer_of(examples[name])}


@pytest.mark.parametrize("name", [PAGE, "event.1", "古诗.2"])
def test_a_stop_and_resume_changes_no_token(engine: Engine, examples: dict[str, Example], name: str) -> None:
    """The sequence is taken out of the backend into bytes and put back before every third step."""
    backend, step, turn, stops = engine.backend, engine.limits.resume_step, 0, 0
    request, emitted = request_of(examples[name]), []
    engine.submit(request)
    sequence = engine._sequences[request.id]
    while not engine.idle:
        turn += 1
        if sequence.emitted and turn % 3 == 0:
            position = sequence.last_position // step * step
            pages = [bytearray(engine.limits.page_bytes) for _ in range(pages_for(position))]
            state = [bytearray(engine.limits.snapshot_bytes)]
            backend.snapshot(sequence, position, dict(enumerate(pages)), state)
            backend.release(sequence)
            backend.restore(sequence, position, pages, state)
            stops += 1
        emitted += [token for event in engine.step() if isinstance(event, Tokens) for token in event.ids]
    assert emitted == answer_of(examples[name])
    assert stops > 0


class ReversedSums:
    """NumPy whose `matmul` adds its K terms backwards."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        return np.matmul(np.ascontiguousarray(a[..., ::-1]), np.ascontiguousarray(b[..., ::-1, :]), out=out)


def margins(engine: Engine, examples: dict[str, Example]) -> tuple[dict[str, list[int]], list[np.ndarray], float]:
    """Tokens, the logits that chose them, and the smallest distance of the two largest, one exchange at a time."""
    found, rows = {}, []
    for name in (PAGE, *MANY):
        trace = Trace(keep_logits=True)
        found |= run(engine, [request_of(examples[name])], trace)
        rows += trace.logits
    top = np.sort(np.array(rows), axis=1)[:, -2:]
    return found, rows, float((top[:, 1] - top[:, 0]).min())


@pytest.fixture(scope="module")
def in_qdq64(engine: Engine, examples: dict[str, Example]) -> tuple[dict[str, list[int]], list[np.ndarray], float]:
    return margins(engine, examples)


@pytest.mark.parametrize("numerics", ["qdq64", "bf16", "qdq32 with K summed backwards"])
def test_every_numerics_gives_the_text_with_a_wide_margin(
    folder: Path,
    examples: dict[str, Example],
    in_qdq64: tuple[dict[str, list[int]], list[np.ndarray], float],
    numerics: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if numerics == "qdq64":
        found, rows, least = in_qdq64
    else:
        engine = engine_of(folder, numerics=numerics.partition(" ")[0])
        if "backwards" in numerics:
            straight = logits_of_one(engine, examples)
            for module in (attend, expert, index, mixes, product):
                if hasattr(module, "np"):
                    monkeypatch.setattr(module, "np", ReversedSums())
            assert not np.array_equal(logits_of_one(engine, examples), straight)  # other sums, other bits
        found, rows, least = margins(engine, examples)
    print(f"{numerics}: smallest top-2 margin {least:.2f} over {len(rows)} tokens")
    assert found == {name: answer_of(examples[name]) for name in (PAGE, *MANY)}
    assert least >= LEAST_MARGIN


def logits_of_one(engine: Engine, examples: dict[str, Example]) -> np.ndarray:
    trace = Trace(keep_logits=True)
    run(engine, [request_of(examples["翻译.2"])], trace)
    return np.array(trace.logits)
